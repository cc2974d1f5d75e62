"""Pair and gate as real processes on real Kafka: one trip, one writer, whatever dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agents.router.runner import Router, RouterSettings
from pipeline.cli.main import cli
from pipeline.key_file import read_key_file
from pipeline.signatures import NOT_REQUIRED
from pipeline.trust_file import Entry, WatchedTrust, read_trust_file, trust_text
from schemas.signing import SIGNATURE, Signer, TrustedKey, Use, Verdict, signer_of
from schemas.topics import Topic
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import Written, dump, now_us, produce
from tests.kafka.waiting import eventually
from tests.workers.events import encoded, start_command
from tests.workers.fleet import QUICK, SEAT, decisions, directives, fleet, send_pairs, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_bad_answers_trip_once_and_the_directive_says_why(kafka: Broker, log_folder: Path) -> None:
    async with fleet(kafka, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(kafka)
        await send_pairs(kafka, 20, bad=True)

        async def tripped() -> list[dict[str, Any]]:
            return await decisions(kafka, "trip")

        (trip,) = await eventually(tripped)
        assert await gate.stop() == 0, gate.log
    directive = trip["directive"]
    assert (directive["state"], directive["fallback"], directive["generation"]) == ("tripped", "m1", 1)
    assert directive["weights"]["m1"] == 100
    assert directive["cause"]["rule"] == "G3-divergence"
    epochs = [directive["epoch"] for directive in await directives(kafka)]
    assert epochs == sorted(set(epochs))


async def test_good_answers_do_not_trip_and_leases_are_renewed(kafka: Broker, log_folder: Path) -> None:
    async with fleet(kafka, log_folder):
        await start_rollout(kafka)
        await send_pairs(kafka, 20, bad=False)

        async def renewed() -> bool:
            leases = {directive["lease_until_us"] for directive in await directives(kafka)}
            return len(leases) >= 4

        await eventually(renewed)
    assert await decisions(kafka, "trip") == []


@pytest.mark.parametrize(
    "fault", ["gate_before_transaction:2", "gate_in_transaction:2", "gate_after_transaction:2"]
)
async def test_a_gate_that_dies_around_a_transaction_leaves_one_trip(
    kafka: Broker, log_folder: Path, fault: str
) -> None:
    # Without renewals the first transaction is the start, and the second one the trip.
    environment = {**QUICK, "KLAXON_GATE_RENEW_S": "3600"}
    async with fleet(kafka, log_folder, environment, gate_fault=fault) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(kafka)
        await send_pairs(kafka, 20, bad=True)
        await gate.until_fault(fault.partition(":")[0])
        async with Worker("gate", kafka, log_folder, environment=QUICK):

            async def tripped() -> list[dict[str, Any]]:
                return await decisions(kafka, "trip")

            await eventually(tripped)
            await asyncio.sleep(3)  # time for a second one
    assert len(await decisions(kafka, "trip")) == 1
    epochs = [directive["epoch"] for directive in await directives(kafka)]
    assert len(epochs) == len(set(epochs))


async def test_a_frozen_gate_is_fenced_by_its_successor(kafka: Broker, log_folder: Path) -> None:
    async with fleet(kafka, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(kafka)
        gate.freeze()
        async with Worker("gate", kafka, log_folder, environment=QUICK) as successor:
            await successor.until_log(f"gating partition {SEAT}: taken")
            await send_pairs(kafka, 20, bad=True)

            async def tripped() -> list[dict[str, Any]]:
                return await decisions(kafka, "trip")

            await eventually(tripped)
            gate.thaw()
            await asyncio.sleep(3)  # what it would do wrong, it does at once
    assert len(await decisions(kafka, "trip")) == 1
    epochs = [directive["epoch"] for directive in await directives(kafka)]
    assert epochs == sorted(set(epochs))
    states = [directive["state"] for directive in await directives(kafka)]
    assert "observing" not in states[states.index("tripped") :]


async def test_a_malformed_command_goes_to_the_dead_letter(kafka: Broker, log_folder: Path) -> None:
    async with Worker("gate", kafka, log_folder, environment=QUICK) as gate:
        await gate.until_log(f"gating partition {SEAT}: taken")
        broken = {**start_command(), "command": "explode"}
        await produce(kafka, [Written(Topic.COMMANDS, encoded(broken), key=b"r1", partition=SEAT)])

        async def letters() -> list[Any]:
            return await dump(kafka, Topic.DEAD_LETTER)

        (letter,) = await eventually(letters)
    assert json.loads(letter.value)["field"] == "command"
    assert await directives(kafka) == []


async def test_a_command_that_no_operator_signed_is_refused_by_name(kafka: Broker, log_folder: Path) -> None:
    """Each is counted and named in its dead letter; the one that is signed is obeyed, once."""
    operator, gates = keys.signer(Use.COMMANDS), keys.signer(Use.DIRECTIVES)
    good = encoded(start_command("good"))
    old = encoded({**start_command("old"), "ts_us": now_us() - 3_700_000_000})
    ahead = encoded({**start_command("ahead"), "ts_us": now_us() + 3_600_000_000})

    def written(value: bytes, signer: Signer | None, signed: bytes | None = None) -> Written:
        header = () if signer is None else (signer.header(Topic.COMMANDS, b"r1", signed or value),)
        return Written(Topic.COMMANDS, value, key=b"r1", partition=SEAT, headers=header, signed=False)

    forged = {
        "unsigned: not obeyed": written(encoded(start_command("a")), None),
        "wrong signature: ": written(encoded(start_command("b")), operator, good),
        "unknown key: ": written(encoded(start_command("c")), keys.STRANGER),
        "not for this use: ": written(encoded(start_command("d")), gates),
        "outside validity: ": written(encoded(start_command("e")), keys.ENDED),
        "over 3600 s (signatures.command_age_s) ago": written(old, operator),
        "over 300 s from now": written(ahead, operator),
    }
    environment = {**QUICK, **GAUGES_EVERY_SECOND}
    async with Worker("gate", kafka, log_folder, environment=environment) as gate:
        await gate.until_log(f"gating partition {SEAT}: taken")
        await produce(kafka, forged.values())

        async def letters() -> list[Any]:
            found = await dump(kafka, Topic.DEAD_LETTER)
            return found if len(found) == len(forged) else []

        told = [json.loads(letter.value) for letter in await eventually(letters)]
        assert await directives(kafka) == []
        await produce(kafka, [written(good, operator), written(good, operator)])

        async def repeated() -> bool:
            return gate.gauges().get(f"gating/{SEAT}", {}).get("commands_repeated", 0) == 1

        await eventually(repeated)
        counted = {name: count for name, count in gate.gauges()["refused/command"].items() if count}
    for letter, reason in zip(told, forged, strict=True):
        assert reason in letter["reason"]
        assert letter["kind"] == "untrusted"
        assert letter["field"] == ("ts_us" if reason.startswith("over") else SIGNATURE)
    assert counted == {
        "unsigned": 1, "wrong_signature": 1, "unknown_key": 1, "not_for_this_use": 1, "outside_validity": 1,
        "expired": 2,
    }  # fmt: skip
    assert [one["command_id"] for one in await decisions(kafka)] == ["good"]
    (first, *_) = await dump(kafka, Topic.CONTROL)
    signed_by = dict(first.headers)[SIGNATURE]
    assert keys.trusted().check(Topic.CONTROL, b"r1", first.value, signed_by, now_us()) is Verdict.TRUSTED


async def test_a_command_that_was_turned_away_stays_so_for_the_next_gate(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    """Known-bad: the next gate reads it again, believes its key by now, and starts what nobody waits for. The
    other way about it would refuse what was obeyed, once that key has ended, and wake somebody for it."""
    keys.make_keys(tmp_path)
    value = encoded(start_command("stranger"))
    header = keys.STRANGER.header(Topic.COMMANDS, b"r1", value)
    stranger = Written(Topic.COMMANDS, value, key=b"r1", partition=SEAT, headers=(header,), signed=False)
    environment = {**QUICK, **keys.settings(tmp_path)}
    async with Worker("gate", kafka, log_folder, environment=environment) as gate:
        await gate.until_log(f"gating partition {SEAT}: taken")
        await produce(kafka, [stranger])

        async def remembered() -> bool:
            said = [json.loads(record.value) for record in await dump(kafka, Topic.STATE) if record.value]
            return any("answered" in one for one in said)

        await eventually(remembered)
        assert await gate.stop() == 0, gate.log
    trust = read_trust_file(tmp_path / "trust.yaml")
    believed = Entry(TrustedKey(keys.STRANGER.public_key, frozenset({Use.COMMANDS})))
    (tmp_path / "trust.yaml").write_text(trust_text({**trust, keys.STRANGER.key_id: believed}))
    async with Worker("gate", kafka, log_folder, environment=environment) as gate:
        await gate.until_log(f"gating partition {SEAT}: taken")
    assert await decisions(kafka) == []
    assert len(await dump(kafka, Topic.DEAD_LETTER)) == 1


async def test_keys_are_rotated_while_gate_and_router_run(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    """No record is refused, before, during or after; the one after the change is signed with the new key."""
    folder, stop = tmp_path / "keys", asyncio.Event()

    def klaxon(*arguments: str) -> None:
        done = CliRunner().invoke(cli, ["keys", *arguments, str(folder)])
        assert done.exit_code == 0, done.output

    def commanded(name: str) -> Written:
        value = encoded({**start_command(name), "command": name})
        header = read_key_file(folder / "commands.key").header(Topic.COMMANDS, b"r1", value)
        return Written(Topic.COMMANDS, value, key=b"r1", partition=SEAT, headers=(header,), signed=False)

    klaxon("create")
    router = Router(
        RouterSettings(kafka.bootstrap, "r"), lambda _: None, trust=WatchedTrust(folder / "trust.yaml")
    )
    following = asyncio.create_task(router.run(stop))
    async with Worker("gate", kafka, log_folder, environment={**QUICK, **keys.settings(folder)}) as gate:
        await gate.until_log(f"gating partition {SEAT}: taken")
        await produce(kafka, [commanded("start"), commanded("abort")])  # a final state is always renewed

        async def renewed_by_new_key() -> bool:
            await asyncio.sleep(0.3)
            found = await dump(kafka, Topic.CONTROL)
            return bool(found) and signer_of(dict(found[-1].headers)[SIGNATURE]) == new

        new = read_key_file(folder / "directives.key").key_id
        await eventually(renewed_by_new_key)
        klaxon("rotate", "directives")
        await gate.until_log("read again: 3 keys")
        (folder / "directives.key.next").rename(folder / "directives.key")
        new = read_key_file(folder / "directives.key").key_id
        await eventually(renewed_by_new_key)
        epoch = json.loads((await dump(kafka, Topic.CONTROL))[-1].value)["epoch"]

        async def obeyed() -> bool:
            held = router._states.get("r1")
            return held is not None and held.directive is not None and held.directive.epoch >= epoch

        await eventually(obeyed)
    stop.set()
    await following
    # The start's lease is over as it comes: no evidence is there that a gate could see.
    refused = {reason for reason, count in router.gauges()["refused/directive"].items() if count}
    assert refused <= {"expired"}
    assert f"{new} signs from now on" in gate.log


async def test_with_signatures_off_anybody_is_obeyed_and_it_says_so(kafka: Broker, log_folder: Path) -> None:
    environment = {**QUICK, "KLAXON_SIGNATURES_REQUIRED": "false"}
    async with Worker("gate", kafka, log_folder, environment=environment) as gate:
        await gate.until_log(NOT_REQUIRED)
        await gate.until_log(f"gating partition {SEAT}: taken")
        value = encoded({**start_command(), "ts_us": 1})
        await produce(kafka, [Written(Topic.COMMANDS, value, key=b"r1", partition=SEAT, signed=False)])

        async def obeyed() -> list[dict[str, Any]]:
            return await decisions(kafka, "command")

        await eventually(obeyed)


async def test_a_command_in_the_wrong_partition_makes_no_second_gate(kafka: Broker, log_folder: Path) -> None:
    """A producer without a key puts it anywhere; the seat there must not start the roll-out."""
    other = (SEAT + 1) % 4
    async with Worker("gate", kafka, log_folder, environment=QUICK) as gate:
        await gate.until_log(f"gating partition {other}: taken")
        await produce(kafka, [Written(Topic.COMMANDS, encoded(start_command()), partition=other)])

        async def letters() -> list[Any]:
            return await dump(kafka, Topic.DEAD_LETTER)

        (letter,) = await eventually(letters)
    told = json.loads(letter.value)
    assert (told["field"], told["position"]) == ("rollout", 0)
    assert told["reason"].startswith(f"partition {SEAT} decides")
    assert await directives(kafka) == []


def _assigned_seats(worker: Worker) -> list[str]:
    """Gating partitions of the worker's newest assignment, by what it says."""
    newest = worker.log.rpartition("gate: assigned ")[2].partition("\n")[0]
    return re.findall(r"klaxon\.commands/(\d)", newest)


async def _shares(workers: list[Worker]) -> list[list[str]]:
    """What each holds, once nobody is in the midst of a rebalance: every seat is one's, and each has some."""
    shares = [_assigned_seats(worker) for worker in workers]
    return shares if all(shares) and sorted(itertools.chain(*shares)) == ["0", "1", "2", "3"] else []


async def test_two_gates_share_the_seats_and_one_takes_over(kafka: Broker, log_folder: Path) -> None:
    async with fleet(kafka, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(kafka)
        async with Worker("gate", kafka, log_folder, environment=QUICK) as second:
            await gate.until_log("gate: revoked klaxon.")
            await gate.until_log("gate: assigned klaxon.")
            await second.until_log("gate: assigned klaxon.")
            shares = await eventually(lambda: _shares([gate, second]))
            owner = gate if str(SEAT) in shares[0] else second
            await owner.until_log(f"gating partition {SEAT}: taken")
            await owner.kill()
            await send_pairs(kafka, 20, bad=True)

            async def tripped() -> list[dict[str, Any]]:
                return await decisions(kafka, "trip")

            await eventually(tripped)
    assert len(await decisions(kafka, "trip")) == 1
    epochs = [directive["epoch"] for directive in await directives(kafka)]
    assert epochs == sorted(set(epochs))
