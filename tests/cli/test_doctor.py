"""`klaxon doctor`: every finding provoked, without Kafka where that can be."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka.errors import TransactionalIdAuthorizationFailed
from click.testing import CliRunner

from agents.gateway.settings import GatewaySettings, PrivacySettings
from pipeline.cli.doctor import archive as doctor_archive
from pipeline.cli.doctor import broker as doctor_broker
from pipeline.cli.doctor import command as doctor_command
from pipeline.cli.doctor.archive import archive_findings
from pipeline.cli.doctor.broker import broker_findings, clock_finding, leader_findings, skew, topic_finding
from pipeline.cli.doctor.command import doctor
from pipeline.cli.doctor.configuration import configuration_findings, installation_findings
from pipeline.cli.doctor.findings import Finding, by_severity, exit_code
from pipeline.cli.doctor.security import SECRET_FILES, security_findings
from pipeline.cli.doctor.workers import (
    group_findings,
    lag_findings,
    lease_findings,
    letter_findings,
    router_findings,
    settings_findings,
    source_findings,
)
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.keys import keys
from pipeline.cli.standing import standings
from pipeline.cli.status import SourceStanding
from pipeline.config import (
    SECTIONS,
    ClickHouseConfig,
    Config,
    ContentConfig,
    GateConfig,
    KafkaConfig,
    MonitoringConfig,
    PolicyConfig,
    SignaturesConfig,
)
from pipeline.core.gate.state import PartitionMemory, encode_state
from pipeline.secret_key_file import DAY_US, KeyKind, SecretKey, create_secret_key_file
from pipeline.store.client import connect
from pipeline.store.errors import FolderInUseError
from pipeline.store.lag import Lag
from pipeline.store.migrate import load, migrate
from pipeline.workers.records import Partition, Record
from pipeline.workers.topics import _shape_problems, plan
from schemas.control import Applied, DeadLetter
from schemas.topics import Topic
from tests.core.gate.build import T0, Bench, healthy_pairs, us
from tests.kafka.broker import Broker


def codes(findings: Any) -> list[tuple[str, str]]:
    return [(one.severity, one.code) for one in findings]


def record(topic: Topic, value: bytes, append_us: int = 0, partition: int = 0) -> Record:
    return Record(topic, partition, 0, append_us, 1, {}, b"", value)


NOBODY = "127.0.0.1:1"
"""On no machine does anybody listen there."""


def told(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(doctor, [*arguments, "--json"], standalone_mode=False)
    return result.return_value, json.loads(result.stdout)


def test_the_worst_comes_first_and_decides_the_exit_code() -> None:
    def found(*made: tuple[str, str]) -> list[Finding]:
        return [
            Finding(severity=severity, code=code, what="", where="", remedy="")  # type: ignore[arg-type]
            for severity, code in made
        ]

    mixed = found(("note", "a"), ("error", "b"), ("warning", "c"), ("error", "d"))
    assert [one.code for one in by_severity(mixed)] == ["b", "d", "c", "a"]
    assert exit_code(mixed) is Exit.BAD
    assert exit_code(found(("warning", "c"), ("note", "a"))) is Exit.OK
    assert exit_code([*mixed, *found(("error", "kafka_unreachable"))]) is Exit.UNREACHABLE
    assert exit_code(found(("error", "kafka_unreachable"), ("error", "configuration"))) is Exit.USAGE


def test_a_configuration_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "klaxon.yaml"
    file.write_text("kafka:\n  bootstap: a:1\n")
    code, said = told("--config", str(file))
    assert code is Exit.USAGE
    (finding,) = said["findings"]
    assert finding["code"] == "configuration"
    assert f"{file}:2: unknown key kafka.bootstap" in finding["what"]


@pytest.mark.parametrize(
    ("gate", "where"),
    [
        (GateConfig(renew_s=10), "gate.renew_s"),
        (GateConfig(dead_man_s=10), "gate.dead_man_s"),
        (GateConfig(blind_after_s=17), "gate.blind_after_s"),
    ],
)
def test_times_that_do_not_fit(gate: GateConfig, where: str) -> None:
    (finding,) = configuration_findings(Config(gate=gate, content=ContentConfig(lateness_s=15)))
    assert (finding.code, finding.where) == ("configuration", where)


def test_the_defaults_fit() -> None:
    assert list(configuration_findings(Config())) == []


def test_an_installation_without_the_scoring_kernel_is_told() -> None:
    assert list(installation_findings("compiled/1")) == []
    (finding,) = installation_findings("numpy")
    assert (finding.severity, finding.code) == ("note", "no_kernel")


def test_a_policy_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrules: 3\n")
    (finding,) = configuration_findings(Config(policy=PolicyConfig(file=str(file))))
    assert (finding.where, finding.remedy) == ("policy.file", f"klaxon policy check {file}")


def test_no_transactions_configured() -> None:
    found = configuration_findings(Config(kafka=KafkaConfig(transactions=False)))
    assert codes(found) == [("note", "no_transactions")]


@pytest.mark.parametrize(
    ("bootstrap", "severity"),
    [
        ("127.0.0.1:9092", "note"),
        ("localhost:1,[::1]:2", "note"),
        ("kafka:9092", "warning"),
        ("10.0.0.1:1", "warning"),
    ],
)
def test_plaintext(bootstrap: str, severity: str) -> None:
    config = Config(kafka=KafkaConfig(bootstrap=bootstrap), signatures=SignaturesConfig(required=False))
    found = security_findings(config, 0)
    assert codes(found) == [(severity, "kafka_plaintext"), ("warning", "signatures_off")]


def keys_made(folder: Path, days: int) -> tuple[Config, int]:
    """Keys valid for so many days, and a time in µs when they were made."""
    made = CliRunner().invoke(keys, ["create", str(folder), "--days", str(days)], standalone_mode=False)
    assert made.exception is None
    settings = SignaturesConfig(
        trust_file=str(folder / "trust.yaml"),
        directive_key_file=str(folder / "directives.key"),
        command_key_file=str(folder / "commands.key"),
    )
    return Config(signatures=settings), time.time_ns() // 1000


def key_findings(config: Config, now_us: int) -> list[Finding]:
    return [one for one in security_findings(config, now_us) if one.code == "keys"]


def test_keys_that_are_missing_broken_or_end(tmp_path: Path) -> None:
    (nothing,) = key_findings(Config(), 0)
    assert (nothing.severity, nothing.where) == ("warning", "signatures.trust_file")
    config, now_us = keys_made(tmp_path / "keys", 30)
    day_us = 86_400_000_000
    assert key_findings(config, now_us) == []
    soon = key_findings(config, now_us + 17 * day_us)
    assert [(one.severity, "klaxon keys rotate" in one.remedy) for one in soon] == [("warning", True)] * 2
    assert [one.severity for one in key_findings(config, now_us + 31 * day_us)] == ["error"] * 2
    rotated = CliRunner().invoke(
        keys, ["rotate", "directives", str(tmp_path / "keys")], standalone_mode=False
    )
    assert rotated.exception is None
    (left,) = key_findings(config, now_us)
    assert (left.severity, left.where) == ("warning", "signatures.directive_key_file")
    (tmp_path / "keys" / "directives.key.next").rename(tmp_path / "keys" / "directives.key")
    assert key_findings(config, now_us) == []
    (tmp_path / "keys" / "commands.key").write_text("nonsense")
    (broken,) = key_findings(config, now_us)
    assert (broken.severity, broken.where) == ("error", "signatures.command_key_file")
    (tmp_path / "keys" / "trust.yaml").write_text("nonsense")
    assert {one.where for one in key_findings(config, now_us)} == {
        "signatures.command_key_file", "signatures.directive_key_file", "signatures.trust_file"
    }  # fmt: skip


def test_every_setting_that_names_a_secret_file_is_looked_at() -> None:
    named = {
        (section, key)
        for section, names in SECTIONS.items()
        for key in names
        if key.endswith("_file") and re.search("password|secret|key", key)
    }
    assert named == set(SECRET_FILES)


@pytest.mark.parametrize(("section", "key"), [*SECRET_FILES, ("kafka", "certificate_file")])
@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o600, None), (0o400, None), (0o640, "its group"), (0o604, "everybody on this machine")],
)
def test_secrets_that_others_may_read(
    tmp_path: Path, section: str, key: str, mode: int, who: str | None
) -> None:
    (file := tmp_path / "secret").write_text("x")
    file.chmod(mode)
    settings = msgspec.structs.replace(getattr(Config(), section), **{key: str(file)})
    config = msgspec.structs.replace(Config(), **{section: settings})
    found = [one for one in security_findings(config, 0) if one.code == "file_open"]
    assert [(one.where, one.remedy) for one in found] == [(f"{section}.{key}", f"chmod 600 {file}")] * bool(
        who
    )
    assert all(f"holds a secret and {who} may read it" in one.what for one in found)


@pytest.mark.parametrize(("mode", "open_"), [(0o644, False), (0o664, True), (0o646, True)])
def test_a_trust_file_that_others_may_write(tmp_path: Path, mode: int, open_: bool) -> None:
    config, now_us = keys_made(tmp_path / "keys", 30)
    (tmp_path / "keys" / "trust.yaml").chmod(mode)
    found = [one for one in security_findings(config, now_us) if one.code == "file_open"]
    assert [one.where for one in found] == ["signatures.trust_file"] * open_


@pytest.mark.parametrize(
    ("host", "open_"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("10.0.0.1", True),
        ("::", True),
    ],
)
def test_an_endpoint_that_a_network_reaches(host: str, open_: bool) -> None:
    found = security_findings(Config(monitoring=MonitoringConfig(host=host)), 0)
    assert [one.where for one in found if one.code == "monitoring_open"] == ["monitoring.host"] * open_


@pytest.mark.parametrize(
    "dsn", ["http://u:hunter/2@127.0.0.1:1", "http://u:hunter2@[::1", "http://u:hunter2@127.0.0.1:1"]
)
def test_an_address_never_shows_its_password(dsn: str) -> None:
    (away,) = archive_findings(Config(clickhouse=ClickHouseConfig(dsn=dsn)))
    assert "hunter" not in str(away)
    assert away.where.startswith("ClickHouse at http://u:***@")


def test_nothing_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLAXON_KAFKA_BOOTSTRAP", NOBODY)
    monkeypatch.setenv("KLAXON_KAFKA_CONNECT_TIMEOUT_S", "1")
    monkeypatch.setenv("KLAXON_CLICKHOUSE_DSN", f"http://{NOBODY}")
    code, said = told("--engine", f"http://{NOBODY}")
    assert code is Exit.UNREACHABLE
    assert not said["ok"]
    found = [(one["severity"], one["code"]) for one in said["findings"]]
    assert found == [
        ("error", "clickhouse_unreachable"),
        ("error", "kafka_unreachable"),
        ("error", "engine_unreachable"),
        ("warning", "keys"),
        ("note", "kafka_plaintext"),
    ]
    human = CliRunner().invoke(doctor, [], standalone_mode=False)
    assert human.return_value is Exit.UNREACHABLE
    assert "→ start the broker, or correct kafka.bootstrap" in human.stdout
    assert "2 errors, 2 other findings" in human.stdout


def test_a_schema_that_is_behind_or_differs(tmp_path: Path) -> None:
    config = Config(clickhouse=ClickHouseConfig(dsn=f"chdb://{tmp_path}/archive"))
    (nothing,) = archive_findings(config)
    assert nothing.code == "clickhouse_unreachable"
    assert "no such folder" in nothing.what
    store = connect(config.clickhouse.dsn, "klaxon", create_database=True)
    try:
        (empty,) = archive_findings(config)
        assert (empty.code, empty.remedy) == ("schema_behind", "klaxon migrate")
        migrate(store, now_us=1)
        assert archive_findings(config) == []
        newest = load()[-1]
        store.command(f"DELETE FROM schema_migrations WHERE number = {newest.number}")
        (behind,) = archive_findings(config)
        assert (behind.code, behind.what) == ("schema_behind", f"the schema lacks {newest.file}")
        store.command("ALTER TABLE schema_migrations UPDATE sha256 = 'x' WHERE 1 SETTINGS mutations_sync = 1")
        (differs,) = archive_findings(config)
        assert differs.code == "schema_differs"
        assert "was edited after it had been applied" in differs.what
    finally:
        store.close()


async def test_a_broker_without_transactions(embedded: Broker) -> None:
    wanting = msgspec.structs.replace(embedded.config, transactions=True)
    found = await broker_findings(wanting)
    assert ("error", "transactions_unavailable") in codes(found)
    assert ("error", "topic_absent") in codes(found)


@pytest.mark.parametrize(
    ("before", "after", "broker", "ahead"),
    [
        (5_000_000, 5_010_000, 5_005_000, 0),
        (5_000_400, 5_000_900, 5_000_000, 0),
        (9_000_000, 9_010_000, 5_000_000, 4_000_000),
        (5_000_000, 5_010_000, 9_000_000, -3_990_000),
    ],
)
def test_skew_is_what_cannot_be_explained_by_the_way(
    before: int, after: int, broker: int, ahead: int
) -> None:
    assert skew(before, after, broker) == ahead


@pytest.mark.parametrize(
    ("skew_us", "severity", "words"),
    [
        (1_000_000, None, ""),
        (1_000_001, "warning", "1.0 s ahead of"),
        (-5_000_000, "warning", "5.0 s behind"),
        (5_000_001, "error", "5.0 s ahead of"),
    ],
)
def test_clock_skew_by_its_size(skew_us: int, severity: str | None, words: str) -> None:
    finding = clock_finding(KafkaConfig(), skew_us)
    assert (None if finding is None else finding.severity) == severity
    assert finding is None or words in finding.what


def test_partitions_without_a_leader_or_a_replica() -> None:
    lost = [Partition("klaxon.pairs", 1), Partition("klaxon.logits", 3)]
    found = list(leader_findings(lost))
    assert codes(found) == [("error", "no_leader")] * 2
    assert [one.where for one in found] == ["klaxon.logits/3", "klaxon.pairs/1"]
    kafka = KafkaConfig(replication=3)
    (control,) = [item for item in plan(kafka) if item.topic is Topic.CONTROL]
    whole = {"replicas": [1, 2, 3], "isr": [1, 2, 3]}
    assert list(_shape_problems(control, [whole] * 4, kafka)) == []
    (lagging,) = _shape_problems(control, [whole, whole, whole, {**whole, "isr": [1, 3]}], kafka)
    assert str(lagging) == (
        "klaxon.control: 1 of 4 partitions lack an in-sync replica; start the brokers that hold the others"
    )
    assert (topic_finding(lagging).severity, topic_finding(lagging).code) == ("warning", "topic_replicas")


async def test_what_it_may_not_look_at_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        def __init__(self, **_: object) -> None:
            """Anybody may connect."""

        async def start(self) -> None:
            raise TransactionalIdAuthorizationFailed

        async def stop(self) -> None:
            """Nothing was opened."""

    def owned(*_: object) -> None:
        raise FolderInUseError("chdb:///x: another process owns this folder")

    monkeypatch.setattr(doctor_broker, "AIOKafkaProducer", Forbidden)
    found = [one async for one in doctor_broker._transactions(KafkaConfig())]
    assert codes(found) == [("note", "not_checked")]
    monkeypatch.setattr(doctor_archive, "answered", owned)
    assert codes(archive_findings(Config())) == [("note", "not_checked")]


def test_a_trust_file_that_cannot_be_read_ends_no_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trust = tmp_path / "trust.yaml"
    trust.write_text("nonsense")

    async def nothing_wrong(_: object) -> list[Finding]:
        return []

    async def refuses(*_: object) -> list[Finding]:
        raise CommandError(f"{trust}: no trust file", Exit.USAGE)

    monkeypatch.setattr(doctor_command, "broker_findings", nothing_wrong)
    monkeypatch.setattr(doctor_command, "worker_findings", refuses)
    monkeypatch.setenv("KLAXON_SIGNATURES_TRUST_FILE", str(trust))
    monkeypatch.setenv("KLAXON_CLICKHOUSE_DSN", f"http://{NOBODY}")
    code, said = told()
    assert code is Exit.UNREACHABLE, "ClickHouse is away"
    found = {one["code"]: one["what"] for one in said["findings"]}
    assert "no trust file" in found["keys"]
    assert found["not_checked"].startswith("the workers: ")


def test_groups_without_members() -> None:
    found = list(group_findings({"measure": 1, "pair": 0, "gate": 2, "archive": 0, "notify": 0}))
    assert codes(found) == [("error", "group_empty"), *[("warning", "group_empty")] * 2]
    assert [one.remedy for one in found] == ["klaxon worker pair", "klaxon worker archive", "klaxon notify"]


def test_lag_that_grows_and_retention_that_ends() -> None:
    place = Partition("klaxon.requests", 0)

    def lag(records: int, behind_s: int, *, at_risk: bool = False) -> dict[str, dict[Partition, Lag]]:
        return {"archive": {place: Lag(records, behind_s * 1_000_000, 9_000_000, 0, at_risk)}}

    assert list(lag_findings(lag(10, 50), lag(90, 60))) == [], "60 s is in time"
    for before, now, trend in ((10, 30, "growing"), (30, 10, "shrinking"), (10, 10, "standing still")):
        (finding,) = lag_findings(lag(before, 61), lag(now, 61))
        assert f"{now} records behind and {trend}, the oldest for 61 s" in finding.what
    found = list(lag_findings(lag(1, 61), lag(1, 61, at_risk=True)))
    assert codes(found) == [("warning", "lag"), ("error", "retention_at_risk")]


def test_sources_that_stand_still() -> None:
    def source(age_s: int, problem: str) -> list[SourceStanding]:
        return [
            SourceStanding(
                source="klaxon.logits/0",
                worker="pair",
                closed_through=1,
                age_s=age_s,
                whole=not problem,
                problem=problem,
            )
        ]

    members = {"pair": 1, "measure": 0}
    (silent,) = source_findings(source(60, "x"), source(63, "closes nothing for 63 s"), members)
    assert (silent.code, silent.what) == (
        "source_silent",
        "closes nothing for 63 s, and it falls further behind",
    )
    (other,) = source_findings([], source(3, "closed with other content settings: …"), members)
    assert other.code == "other_settings"
    assert "all of them the scoring kernel or none" in other.remedy
    assert list(source_findings([], source(3, ""), members)) == []
    assert list(source_findings([], source(99, "x"), {"pair": 0})) == [], "the group says it already"


def started() -> tuple[Bench, list[Record], list[Record]]:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.write(bench.core.renew(us(T0 + 22)))
    states = [record(Topic.STATE, value, us(T0 + 22)) for value in bench.states.values()]
    control = [record(Topic.CONTROL, msgspec.json.encode(one)) for one in bench.control.values()]
    return bench, states, control


def test_nobody_renews_the_lease() -> None:
    _, states, control = started()
    known = standings(states, control)
    assert list(lease_findings(known, us(T0 + 30), us(20))) == []
    (over,) = lease_findings(known, us(T0 + 40), us(20))
    assert "the lease ran out 3 s ago" in over.what
    (away,) = lease_findings(known, us(T0 + 60), us(20))
    assert (away.code, away.where) == ("lease_not_renewed", "roll-out chat")
    assert "start `klaxon worker gate`" in away.remedy


def test_gates_with_different_settings() -> None:
    bench, states, _ = started()
    ours, now_us = bench.settings.hash, us(T0 + 23)
    assert list(settings_findings(states, ours, now_us, us(20))) == []
    (alone,) = settings_findings(states, "mine", now_us, us(20))
    assert (alone.severity, alone.code) == ("warning", "gates_differ")
    memory = PartitionMemory(partition=1, command_offset=3, settings_hash="another")
    other = record(Topic.STATE, encode_state(memory), now_us, partition=1)
    (differ,) = settings_findings(
        [*states, other, record(Topic.STATE, b"junk", now_us)], ours, now_us, us(20)
    )
    assert (differ.severity, differ.code) == ("error", "gates_differ")
    assert f"partition 0: {ours}, partition 1: another" in differ.what
    assert list(settings_findings([*states, other], ours, now_us + us(30), us(20))) == [], "written long ago"


def test_settings_that_decide_shape_the_hash() -> None:
    hashes = {
        Bench.new(**change).settings.hash
        for change in (
            {},
            {"lease_us": 1},
            {"blind_after_us": 1},
            {"settings_hash": "x"},
            {"default_policy": "y"},
        )
    }
    assert len(hashes) == 5


def test_no_router_reports() -> None:
    _, states, control = started()
    known = standings(states, control)

    def applied(generation: int) -> Record:
        said = Applied(rollout="chat", router="r", generation=generation, epoch=3, applied_us=1)
        return record(Topic.APPLIED, msgspec.json.encode(said))

    assert list(router_findings(known, [record(Topic.APPLIED, b"junk"), applied(1)])) == []
    (none,) = router_findings(known, [])
    assert (none.severity, none.code) == ("warning", "no_router")
    assert "none has ever" in none.what
    newer = [msgspec.structs.replace(one, generation=2) for one in known]
    (old,) = router_findings(newer, [applied(1)])
    assert "the newest is 1" in old.what


def test_dead_letters_by_reason() -> None:
    def letter(field: str) -> Record:
        one = DeadLetter(
            topic="klaxon.requests",
            partition=0,
            offset=1,
            position=None,
            field=field,
            reason="bad",
            sha256="",
        )
        return record(Topic.DEAD_LETTER, msgspec.json.encode(one))

    found = list(
        letter_findings([letter("status"), letter("v"), letter("status"), record(Topic.DEAD_LETTER, b"{")])
    )
    assert codes(found) == [("warning", "dead_letters")] * 2
    assert found[0].what == "2 refused in the last 10 min: status: bad"


def gateway_with(tmp_path: Path, *, ends_in_days: int) -> tuple[Config, int]:
    """A configuration that names a gateway's secret keys, and the time now."""
    now_us = 1_767_225_600_000_000
    paths = {}
    for kind in KeyKind:
        path = tmp_path / f"{kind.value}.key"
        until_us = now_us + ends_in_days * DAY_US
        create_secret_key_file(path, SecretKey(kind, bytes(32), until_us - 90 * DAY_US, until_us))
        paths[f"{kind.value}_key_file"] = str(path)
    return Config(gateway=GatewaySettings(privacy=PrivacySettings(**paths))), now_us


def of_the_gateway(config: Config, now_us: int) -> list[Finding]:
    return [one for one in security_findings(config, now_us) if one.where.startswith("gateway.privacy.")]


@pytest.mark.parametrize(
    ("days", "severities"),
    [(15, []), (14, []), (13, ["warning"] * 3), (0, ["warning"] * 3), (-1, ["warning", "warning", "error"])],
)
def test_a_gateways_keys_are_replaced_in_time(tmp_path: Path, days: int, severities: list[str]) -> None:
    found = of_the_gateway(*gateway_with(tmp_path, ends_in_days=days))
    assert [one.severity for one in found] == severities
    assert [one.remedy for one in found] == [f"klaxon keys rotate {kind.value}" for kind in KeyKind][
        : len(found)
    ]
    assert ("no text leaves the gateway" in found[-1].what) if days < 0 else True


def test_a_gateways_keys_that_others_may_read_or_that_are_none(tmp_path: Path) -> None:
    config, now_us = gateway_with(tmp_path, ends_in_days=80)
    (tmp_path / "text.key").chmod(0o640)
    (tmp_path / "signature.key").write_text("nothing")
    (tmp_path / "pseudonym.key").unlink()
    trust = tmp_path / "trust.yaml"
    trust.write_text("")
    trust.chmod(0o666)
    privacy = msgspec.structs.replace(config.gateway.privacy, consent_trust_file=str(trust))
    config = msgspec.structs.replace(config, gateway=GatewaySettings(privacy=privacy))
    told = {(one.code, one.where.rpartition(".")[2]): one.what for one in of_the_gateway(config, now_us)}
    assert "its group may read it" in told["file_open", "text_key_file"]
    assert "who may consent and everybody" in told["file_open", "consent_trust_file"]
    assert "no secret key of Klaxon's" in told["keys", "signature_key_file"]
    assert "cannot be read" in told["keys", "pseudonym_key_file"]
    assert len(told) == 4
