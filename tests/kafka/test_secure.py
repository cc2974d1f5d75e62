"""Kafka with TLS, log-ins and an authorizer: who is turned away, who may do what, and in which words."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    for_code,
)
from aiokafka.protocol.admin import DeleteAclsRequest
from aiokafka.protocol.fetch import FetchRequest
from click import Command
from click.testing import CliRunner

from pipeline.cli.doctor.broker import broker_findings
from pipeline.cli.doctor.rights import right_findings
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.publish import publish
from pipeline.cli.status import status
from pipeline.cli.topics import topics
from pipeline.cli.watch import watch
from pipeline.config import Config, KafkaConfig
from pipeline.secret import Secret
from pipeline.store.client import connect
from pipeline.workers import topics as topic_plan
from pipeline.workers.acl_table import CLUSTER_NAME, ROLES, Kind, Operation, granted, table
from pipeline.workers.acls import ALLOW, LITERAL, PREFIXED, acl_problems, create_acls
from pipeline.workers.broker import (
    BrokerAwayError,
    BrokerError,
    RefusedError,
    bare_client,
    client_options,
    partition_counts,
)
from pipeline.workers.kafka_requests import CreateAcls, DescribeGroup, DescribeTopics
from pipeline.workers.rights import lacking_rights
from schemas.buckets import FinalBuckets
from schemas.topics import CONTENT_TYPE, TICK, Topic
from tests.kafka.broker import Broker, broker_of
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import committed_offsets, dump
from tests.kafka.secure import ADMIN, Authority, SecureKafka, secure_kafka
from tests.kafka.waiting import eventually
from tests.store.folder import migrated
from tests.workers.events import answer, encoded, request, soon_us, start_command
from tests.workers.fleet import QUICK, SEAT

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


def principal(role: str) -> str:
    return f"klaxon-{role}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    """A broker with our topics and the rights of the table, made by the command's own functions."""
    folder = tmp_path_factory.mktemp("secure") / "broker"
    with secure_kafka(folder, map(principal, ROLES)) as kafka:
        admin = kafka.as_user(ADMIN).config
        asyncio.run(topic_plan.create(admin))
        granted_now = asyncio.run(create_acls(Config(kafka=admin)))
        assert len(granted_now) == len(table())
        yield kafka


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


def changed(kafka: KafkaConfig, **settings: object) -> KafkaConfig:
    return msgspec.structs.replace(kafka, **settings)


async def test_both_ways_in_are_open_to_those_who_prove_who_they_are(secured: SecureKafka) -> None:
    for broker in (secured.as_user(ADMIN), secured.as_holder(ADMIN)):
        assert await partition_counts(broker.config, Topic) == {
            plan.topic: plan.partitions for plan in topic_plan.plan(broker.config)
        }


WRONG: dict[str, tuple[Callable[[SecureKafka, Authority], KafkaConfig], str]] = {
    "password": (
        lambda on, _: changed(on.as_user(ADMIN).config, password=Secret("wrong")),
        f"refuses the log-in of '{ADMIN}': check kafka.username and kafka.password",
    ),
    "user": (
        lambda on, _: changed(on.as_user(ADMIN).config, username="nobody"),
        "refuses the log-in of 'nobody': check kafka.username and kafka.password",
    ),
    "mechanism": (
        lambda on, _: changed(on.as_user(ADMIN).config, sasl_mechanism="PLAIN"),
        "knows no log-in by PLAIN: set kafka.sasl_mechanism",
    ),
    "authority": (
        lambda on, other: changed(on.as_user(ADMIN).config, ca_file=other.file),
        "a certificate that we do not trust (unable to get local issuer certificate): check kafka.ca_file",
    ),
    "name": (
        lambda on, _: changed(on.as_user(ADMIN).config, bootstrap=on.scram.replace("127.0.0.1", "localhost")),
        "Hostname mismatch, certificate is not valid for 'localhost'): kafka.bootstrap, and what the broker",
    ),
    "plaintext where TLS is spoken": (
        lambda on, _: KafkaConfig(bootstrap=on.scram),
        "speaks TLS on this port: set kafka.security to ssl or sasl_ssl",
    ),
    "TLS where none is spoken": (
        lambda on, _: changed(on.as_user(ADMIN).config, bootstrap=on.open.bootstrap),
        "speaks no TLS on this port",
    ),
    "no log-in where one is asked for": (
        lambda on, _: changed(on.as_holder(ADMIN).config, bootstrap=on.scram),
        "asks for a log-in on this port: set kafka.security to sasl_ssl",
    ),
    "a log-in where none is asked for": (
        lambda on, _: changed(
            on.as_user(ADMIN).config, bootstrap=on.open.bootstrap, security="sasl_plaintext"
        ),
        "asks for no log-in on this port: set kafka.security without SASL",
    ),
    "no certificate": (
        lambda on, _: changed(on.as_holder(ADMIN).config, certificate_file=None),
        "refuses our certificate (sslv3 alert bad certificate): check kafka.certificate_file",
    ),
    "a foreign certificate": (
        lambda on, other: changed(on.as_holder(ADMIN).config, certificate_file=other.certificate(ADMIN)),
        "refuses our certificate (sslv3 alert certificate unknown): check kafka.certificate_file",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_refusal_names_server_reason_and_setting(
    secured: SecureKafka, stranger: Authority, what: str
) -> None:
    make, told = WRONG[what]
    kafka = make(secured, stranger)
    with pytest.raises(RefusedError) as caught:
        await partition_counts(kafka, [Topic.CONTROL])
    await asyncio.sleep(0.1)  # broken connections close themselves in the loop's next turns
    said = str(caught.value)
    assert told in said
    assert said.startswith(f"Kafka at {kafka.bootstrap} ")
    assert "\n" not in said
    assert "password-of" not in said


async def test_a_broker_that_is_away_refuses_nobody(secured: SecureKafka, nowhere: str) -> None:
    away = changed(secured.as_user(ADMIN).config, bootstrap=nowhere)
    with pytest.raises(BrokerAwayError):
        await partition_counts(away, [Topic.CONTROL])


async def test_the_doctor_finds_a_refusal(secured: SecureKafka, stranger: Authority) -> None:
    make, told = WRONG["password"]
    (finding,) = await broker_findings(make(secured, stranger))
    assert (finding.code, finding.severity) == ("kafka_refused", "error")
    assert f"{finding.what}: {finding.remedy}".endswith(told)


@pytest.mark.parametrize("what", ["password", "authority", "plaintext where TLS is spoken"])
def test_a_command_that_is_refused_ends_at_once_with_exit_code_2(
    secured: SecureKafka, stranger: Authority, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, told = WRONG[what]
    for name, value in broker_of(make(secured, stranger)).environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(topics, ["create", "--json"])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code is Exit.USAGE
    assert told in str(result.exception)
    assert result.stdout == ""


async def test_a_worker_that_is_refused_says_one_line_and_ends_with_2(
    secured: SecureKafka, stranger: Authority, log_folder: Path
) -> None:
    make, told = WRONG["password"]
    async with Worker("measure", broker_of(make(secured, stranger)), log_folder) as worker:
        assert await worker.until_ended() == 2
        (line,) = [line for line in worker.log.splitlines() if " INFO " not in line]
    assert told in line


GROUPS = [f"klaxon-{worker}" for worker in ("measure", "pair", "gate", "archive", "notify")]
Seen = dict[tuple[Kind, str], frozenset[str]]
"""What a principal could really do, to each thing: `wrote`, `read`, and what the broker states it may."""


def should(role: str, kind: Kind, name: str) -> frozenset[str]:
    """The same, as the table has it."""
    operations = granted(table(), role, kind, name)
    did = {"wrote"} if Operation.WRITE in operations else set()
    if Operation.READ in operations and kind is Kind.TOPIC:
        did.add("read")
    stated = set() if kind is Kind.TRANSACTIONAL_ID else {f"may {one}" for one in operations}
    return frozenset(did | stated)


async def seen_by(broker: Broker) -> Seen:
    """Try everything as this principal."""
    async with bare_client(broker.config) as client:
        stated, cluster = await _stated(client)
        wrote, read = await _written(broker.config), await _read(client)
        seen = {
            (Kind.TOPIC, topic.value): stated[topic.value]
            | {did for did, where in (("wrote", wrote), ("read", read)) if topic in where}
            for topic in Topic
        }
        for group in GROUPS:
            seen[Kind.GROUP, group] = await _of_group(client, group)
    seen[Kind.CLUSTER, CLUSTER_NAME] = cluster
    seen[Kind.TRANSACTIONAL_ID, "klaxon-gate-3"] = await _transaction(broker.config)
    return seen


def _named(bits: int) -> frozenset[str]:
    return frozenset(f"may {one}" for one in Operation if bits > 0 and bits >> one & 1)


async def _stated(client: AIOKafkaClient) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    request = DescribeTopics([topic.value for topic in Topic])
    answer = await client.send(client.get_random_node(), request)
    return {name: _named(bits) for _, name, *_, bits in answer.topics}, _named(answer.authorized_operations)


async def _of_group(client: AIOKafkaClient, group: str) -> frozenset[str]:
    async def answer() -> tuple[int, int] | None:
        """Code and bits. A new broker has no coordinator for a moment, and then that loads the group."""
        with contextlib.suppress(GroupCoordinatorNotAvailableError):
            node = await client.coordinator_lookup(CoordinationType.GROUP, group)
            ((code, *_, bits),) = (await client.send(node, DescribeGroup(group))).groups
            return None if for_code(code).retriable else (code, bits)
        return None

    try:
        code, bits = await eventually(answer) or (0, 0)
    except GroupAuthorizationFailedError:
        return frozenset()
    assert code == 0
    return _named(bits)


async def _written(kafka: KafkaConfig) -> set[Topic]:
    """Topics to which a tick was really written; anything but a refusal for want of a right is an error."""
    producer = AIOKafkaProducer(**client_options(kafka), acks="all")
    await producer.start()

    async def write(topic: Topic) -> Topic | None:
        headers = [(CONTENT_TYPE, TICK.encode())]
        try:
            await producer.send_and_wait(topic.value, b"", key=b"-", partition=0, headers=headers)
        except TopicAuthorizationFailedError:
            return None
        return topic

    try:
        return {topic for topic in await asyncio.gather(*map(write, Topic)) if topic is not None}
    finally:
        await producer.stop()


async def _read(client: AIOKafkaClient) -> set[Topic]:
    """Topics of which a fetch was answered."""
    fetch = FetchRequest(10, 0, 1 << 20, 1, [(topic.value, [(0, 0, 1 << 10)]) for topic in Topic])
    answer = await client.send(client.get_random_node(), fetch)
    codes = {name: partitions[0][1] for name, partitions in answer.topics}
    assert set(codes.values()) <= {0, TopicAuthorizationFailedError.errno}
    return {Topic(name) for name, code in codes.items() if code == 0}


async def _transaction(kafka: KafkaConfig) -> frozenset[str]:
    producer = AIOKafkaProducer(**client_options(kafka), transactional_id="klaxon-gate-3")
    try:
        await producer.start()
    except TransactionalIdAuthorizationFailed:
        return frozenset()
    finally:
        await producer.stop()
    return frozenset({"wrote"})


@pytest.fixture(scope="module")
def everything_tried(secured: SecureKafka) -> dict[str, Seen]:
    """By role."""

    async def attempt() -> dict[str, Seen]:
        return {role: await seen_by(secured.as_user(principal(role))) for role in ROLES}

    return asyncio.run(attempt())


THINGS = [
    *((Kind.TOPIC, topic.value) for topic in Topic),
    *((Kind.GROUP, group) for group in GROUPS),
    (Kind.CLUSTER, CLUSTER_NAME),
    (Kind.TRANSACTIONAL_ID, "klaxon-gate-3"),
]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("kind", "name"), THINGS, ids=[name for _, name in THINGS])
def test_the_broker_lets_a_role_do_what_the_table_says_and_nothing_else(
    everything_tried: dict[str, Seen], role: str, kind: Kind, name: str
) -> None:
    assert everything_tried[role][kind, name] == should(role, kind, name)


async def test_whoever_holds_a_certificate_has_the_rights_of_its_name(secured: SecureKafka) -> None:
    seen = await seen_by(secured.as_holder(principal("gate")))
    assert seen == {(kind, name): should("gate", kind, name) for kind, name in THINGS}


async def test_rights_are_granted_once_and_by_a_super_user_only(secured: SecureKafka) -> None:
    admin = Config(kafka=secured.as_user(ADMIN).config)
    assert await create_acls(admin) == ()
    assert await acl_problems(admin) == ()
    async with bare_client(admin.kafka) as client:
        row = (Kind.TOPIC, "klaxon.control", LITERAL, "User:somebody", "*", Operation.WRITE, ALLOW)
        await client.send(client.get_random_node(), CreateAcls([row]))
    operator = Config(kafka=secured.as_user(principal("operator")).config)
    # The broker answers before it has applied.
    (problem,) = await eventually(lambda: acl_problems(operator))
    (found,) = await right_findings(operator)
    assert (found.severity, found.code, found.what) == ("warning", "acls", problem.what)
    assert str(problem).startswith(
        "not in the table: User:somebody may write topic klaxon.control; take it away"
    )
    gate = secured.as_user(principal("gate")).config
    (note,) = await right_findings(Config(kafka=gate))
    assert (note.severity, note.code) == ("note", "not_checked")
    with pytest.raises(BrokerError, match="User:klaxon-gate may not describe and alter the cluster's rights"):
        await create_acls(Config(kafka=gate))
    with pytest.raises(
        BrokerError, match=r"User:klaxon-gate may not create topics at .*: run this as a super"
    ):
        await topic_plan.create(gate)
    problems = await topic_plan.check(secured.as_user(principal("operator")).config)
    assert len(problems) == 4
    assert "User:klaxon-operator may not write it: run this as a super user" in problems[0]


@pytest.mark.parametrize(
    ("command", "arguments", "role", "told"),
    [
        (
            publish,
            ["requests", "-"],
            "pair",
            "User:klaxon-pair may not write topic klaxon.requests, as role pub",
        ),
        (
            publish,
            ["commands", "-"],
            "publisher",
            "may not write topic klaxon.commands, as role operator must",
        ),
        (status, [], "publisher", "User:klaxon-publisher may not read topic klaxon.buckets"),
        (
            watch,
            [],
            "measure",
            "User:klaxon-measure may not read topic klaxon.control, as role operator must",
        ),
    ],
)
def test_a_command_names_the_right_it_lacks(
    secured: SecureKafka,
    command: Command,
    arguments: list[str],
    role: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in secured.as_user(principal(role)).environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code is Exit.USAGE
    assert told in str(result.exception)
    assert "run `klaxon topics create --acls`" in str(result.exception)


@pytest.mark.parametrize(
    ("user", "password", "told"),
    [
        (
            "pair",
            None,
            "User:klaxon-pair may not read topic klaxon.control, write topic klaxon.applied, as role r",
        ),
        (
            "router",
            Secret("wrong"),
            "refuses the log-in of 'klaxon-router': check kafka.username and kafka.pass",
        ),
    ],
)
async def test_a_router_says_why_it_cannot_follow_and_tries_on(
    secured: SecureKafka, log_folder: Path, user: str, password: Secret | None, told: str
) -> None:
    kafka = secured.as_user(principal(user)).config
    by = broker_of(kafka if password is None else changed(kafka, password=password))
    async with Worker("router", by, log_folder, command=(*KLAXON, "router")) as router:
        await router.until_log(told)
        await router.until_log("next try in 1.0 s")
        assert await router.stop() == 0, router.log


async def test_a_worker_names_the_rights_it_lacks_and_waits(secured: SecureKafka, log_folder: Path) -> None:
    async with Worker("pair", secured.as_user(principal("measure")), log_folder) as worker:
        await worker.until_log(
            "User:klaxon-measure may not read topic klaxon.logits, read group klaxon-pair, write topic "
            "klaxon.logits, write topic klaxon.pairs, as role pair must: run `klaxon topics create --acls`"
        )
        assert await worker.stop() == 0, worker.log


async def test_a_right_that_shows_only_in_use_is_named_too(secured: SecureKafka, log_folder: Path) -> None:
    admin = Config(kafka=secured.as_user(ADMIN).config)
    row = (Kind.TRANSACTIONAL_ID, "klaxon-gate-", PREFIXED, "User:klaxon-gate", "*", Operation.WRITE, ALLOW)
    async with bare_client(admin.kafka) as client:
        await client.send(client.get_random_node(), DeleteAclsRequest(*row))
    async with Worker("gate", secured.as_user(principal("gate")), log_folder) as worker:
        ended = await worker.until_ended()
    assert len(await create_acls(admin)) == 1
    assert ended == 1
    lines = [
        line for line in worker.log.splitlines() if "klaxon.worker: gate: User:klaxon-gate lacks" in line
    ]
    assert len(lines) == 1
    assert "lacks a right on transactional-id klaxon-gate-" in lines[0]


@pytest.fixture
def archive_environment(tmp_path: Path) -> dict[str, str]:
    return migrated(tmp_path)


async def _publish_as_gateway(on: SecureKafka, topic: Topic, events: list[dict[str, Any]]) -> None:
    options = client_options(on.as_user(principal("gateway")).config)
    producer = AIOKafkaProducer(**options, acks="all", enable_idempotence=True)
    await producer.start()
    try:
        for event in events:
            await producer.send_and_wait(topic.value, encoded(event), partition=0)
    finally:
        await producer.stop()


async def test_a_roll_out_is_tripped_by_processes_with_their_own_rights_only(
    secured: SecureKafka, log_folder: Path, tmp_path: Path, archive_environment: dict[str, str]
) -> None:
    """By certificate (gate, measure) and by password (the rest); from the start command to the router."""
    (spec := tmp_path / "spec.yaml").write_text(json.dumps(start_command()["arguments"]["spec"]))
    starting = (*KLAXON, "rollout", "start", str(spec))
    async with contextlib.AsyncExitStack() as running:

        async def process(
            role: str,
            by: Broker,
            environment: Mapping[str, str] = QUICK,
            command: tuple[str, ...] | None = None,
        ) -> Worker:
            started = Worker(role, by, log_folder, environment=environment, command=command)
            return await running.enter_async_context(started)

        measure = await process("measure", secured.as_holder(principal("measure")))
        pair = await process("pair", secured.as_user(principal("pair")))
        gate = await process("gate", secured.as_holder(principal("gate")))
        archive = await process("archive", secured.as_user(principal("archive")), archive_environment)
        routing = (*KLAXON, "router", "--json")
        router = await process("router", secured.as_user(principal("router")), {}, routing)
        await gate.until_log(f"gating partition {SEAT}: taken")
        operator = await process("operator", secured.as_user(principal("operator")), {}, starting)
        assert await operator.until_ended() == 0, operator.log
        await pair.until_log("pair: ready")
        await measure.until_log("measure: ready")
        await archive.until_log("archive: ready")
        # Ahead of time: evidence counts from the first whole second after the start of the generation.
        ts_us = soon_us()
        arms = ("baseline", "canary")
        answers = [answer(ts_us, arm, f"p{n}", bad=arm == "canary") for n in range(20) for arm in arms]
        await _publish_as_gateway(secured, Topic.LOGITS, answers)
        await _publish_as_gateway(
            secured, Topic.REQUESTS, [request(soon_us(), pair_id=f"p{n}") for n in range(5)]
        )
        await router.until_log('"state":"tripped"')

        async def all_arrived() -> bool:
            place = TopicPartition(Topic.DECISIONS.value, SEAT)
            committed = await committed_offsets(secured.open, "klaxon-archive", [place])
            finals = [
                msgspec.msgpack.decode(record.value, type=FinalBuckets).topic
                for record in await dump(secured.open, Topic.BUCKETS)
                if record.value
            ]
            return sum(committed.values()) > 0 and {Topic.REQUESTS, Topic.LOGITS} <= set(finals)

        await eventually(all_arrived)
        workers = (measure, pair, gate, archive)
        assert [await worker.stop() for worker in workers] == [0, 0, 0, 0]
        assert await router.stop() == 0, router.log
    for each in (*workers, router):
        assert "may not" not in each.log
        assert "Authorization" not in each.log
        assert "password-of" not in each.log
    applied = [json.loads(record.value) for record in await dump(secured.open, Topic.APPLIED) if record.value]
    assert {one["rollout"] for one in applied} == {"r1"}
    store = connect(archive_environment["KLAXON_CLICKHOUSE_DSN"], "klaxon")
    try:
        assert store.rows("SELECT count() FROM v_decisions")[0][0] > 0
    finally:
        store.close()


async def test_known_bad_without_an_authorizer_every_forbidden_write_is_found_to_succeed(
    secured: SecureKafka,
) -> None:
    """The last one here: the broker is another afterwards."""
    secured.without_authorizer()
    replay = secured.as_user(principal("replay")).config
    wrote = await _written(replay)
    wrong = {
        topic for topic in Topic if (topic in wrote) != ("wrote" in should("replay", Kind.TOPIC, topic.value))
    }
    assert wrong == set(Topic)
    assert await lacking_rights(replay, "pair", group="klaxon-pair") == []
    with pytest.raises(BrokerError, match="has no authorizer, so anybody may do anything there"):
        await create_acls(Config(kafka=replay))
    (off,) = await right_findings(Config(kafka=replay))
    assert (off.severity, off.code) == ("warning", "acls_off")
