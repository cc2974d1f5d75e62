"""Foreign records on the control topic, compacted at once: every router ends where the gate says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from pipeline.cli.break_glass import break_glass
from schemas.control import Aborted
from schemas.signing import SIGNATURE, Signer, Use
from schemas.topics import Topic
from tests.faults.routing import compacted, compacted_at_once, records_of, router, router_here, tell
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import Written, now_us, produce
from tests.kafka.waiting import eventually
from tests.workers.fleet import QUICK, SEAT, decisions, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

SESSION: Final = {"KLAXON_KAFKA_SESSION_TIMEOUT_MS": "4000"}
NEVER_S: Final = 3_600
"""Nothing is renewed: what stands above a foreign record was written because of it."""
CANARY: Final = "m2"
Json = dict[str, Any]


def forged(newest: Json, **changes: Any) -> bytes:
    """A directive that gives the canary nearly all, for a day."""
    at_us = now_us()
    greedy = {"m1": 10.0, CANARY: 90.0}
    made = {**newest, "state": "observing", "weights": greedy, "last_promoted": greedy, "ts_us": at_us}
    made |= {"lease_until_us": at_us + 86_400_000_000, "dead_man_us": 86_400_000_000, **changes}
    made.pop("cause", None)
    return json.dumps(made).encode()


@dataclass(frozen=True)
class Attack:
    """A record that a foreign producer writes under the roll-out's key: value and signature."""

    value: bytes | None
    header: tuple[str, bytes] | None = None
    refused: str = ""
    """How routers count it; "": it is signed with the gate's own key, and obeyed until the gate's answer."""


def signed(value: bytes, signer: Signer, refused: str = "") -> Attack:
    """With this key."""
    return Attack(value, signer.header(Topic.CONTROL.value, b"r1", value), refused)


def _by_key(signer: Signer, refused: str, generations: int) -> Callable[[Json, Any, Any], Attack]:
    return lambda said, _, __: signed(
        forged(said, generation=said["generation"] + generations), signer, refused
    )


ATTACKS: Final[dict[str, Callable[[Json, Any, Any], Attack]]] = {
    "unsigned": lambda said, _, __: Attack(forged(said, epoch=said["epoch"] + 1000), None, "unsigned"),
    "altered": lambda said, newest, _: Attack(
        forged(said, generation=said["generation"] + 20), signature(newest), "wrong_signature"
    ),
    "unknown key": _by_key(keys.STRANGER, "unknown_key", 21),
    "operator's key": lambda said, _, __: signed(
        forged(said, generation=said["generation"] + 22), keys.signer(Use.COMMANDS), "not_for_this_use"
    ),
    "expired key": _by_key(keys.ENDED, "outside_validity", 23),
    "replayed": lambda _, __, first: Attack(first.value, signature(first), "replayed"),
    "lower epoch": lambda said, _, __: Attack(forged(said, epoch=0), None, "unsigned"),
    "garbage": lambda _, __, ___: Attack(b"\x00{not a directive", None, "malformed"),
    "tombstone": lambda _, __, ___: Attack(None, None, "tombstone"),
    "stolen key, higher epoch": lambda said, _, __: signed(
        forged(said, epoch=said["epoch"] + 1000), keys.signer(Use.DIRECTIVES)
    ),
    "stolen key, higher generation": lambda said, _, __: signed(
        forged(said, generation=said["generation"] + 7), keys.signer(Use.DIRECTIVES)
    ),
}
"""From what the gate's newest directive says, its record, and that of its first one: 1 % for the canary."""
DECEIVED: Final = ("unsigned", "altered", "unknown key", "operator's key", "expired key")
"""Of those that no trusted key signed the ones that a router obeys which does not verify."""


def signature(record: Any) -> tuple[str, bytes]:
    """The header that a record was signed with."""
    return SIGNATURE, dict(record.headers)[SIGNATURE]


async def attack(broker: Broker, name: str, first: Any) -> tuple[int, Attack]:
    """Write it as a foreign producer would; its offset."""
    newest = (await records_of(broker, "r1"))[-1]
    made = ATTACKS[name](json.loads(newest.value), newest, first)
    return await write(broker, made), made


async def write(broker: Broker, made: Attack) -> int:
    """Under the roll-out's key; its offset."""
    headers = () if made.header is None else (made.header,)
    value: Any = made.value
    written = Written(Topic.CONTROL, value, key=b"r1", partition=SEAT, headers=headers)
    return (await produce(broker, [written]))[0]


async def answered(broker: Broker, offset: int) -> int:
    """Wait for the gate's directive after this offset; its time in ms."""

    async def found() -> list[Any]:
        return [record for record in await records_of(broker, "r1") if record.offset > offset]

    answer = (await eventually(found))[0]
    directive = json.loads(answer.value)
    assert (directive["state"], directive["weights"][CANARY]) == ("tripped", 0.0)
    return int(answer.timestamp)


def at_zero(line: Json) -> bool:
    """Of the tripped roll-out."""
    nothing = line["effective"]["weights"].get(CANARY, 0.0) == 0.0
    return bool(nothing and line["directive"]["state"] == "tripped")


def deceived(line: Json) -> bool:
    """A forgery is obeyed: it could have worked."""
    return bool(line["effective"]["weights"].get(CANARY) == 90.0)


async def test_foreign_records_on_the_control_topic_do_not_outlive_the_gate(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    environment = {**QUICK, **SESSION, **GAUGES_EVERY_SECOND, "KLAXON_GATE_RENEW_S": str(NEVER_S)}
    took_s: dict[str, float] = {}
    deceives = []
    async with (
        compacted_at_once(kafka),
        router_here(kafka, "running") as running,
        router_here(kafka, "credulous", credulous=True) as credulous,
    ):
        async with Worker("gate", kafka, log_folder, environment=environment) as gate:
            await gate.until_log(f"gating partition {SEAT}: taken")
            await start_rollout(kafka)
            first = (await records_of(kafka, "r1"))[0]
            await tell(kafka, "abort")
            await running.until(at_zero, "tripped, weight 0")
            for name in ATTACKS:
                said, said_to_credulous = len(running.lines), len(credulous.lines)
                counted = running.gauges()["refused/directive"]
                began_us = now_us()
                offset, made = await attack(kafka, name, first)
                took_s[name] = await answered(kafka, offset) / 1000 - began_us / 1_000_000
                await compacted(kafka, "r1", through=offset)
                async with router_here(kafka, "new") as new:
                    await new.until(at_zero, f"tripped, weight 0, after: {name}")
                await running.until(at_zero, f"tripped, weight 0, after: {name}")
                raised = max(running.weights(CANARY, said), default=0.0)
                if made.refused:
                    assert raised == 0.0, f"{name} raised a weight"
                    count = running.gauges()["refused/directive"][made.refused]
                    assert count > counted[made.refused], f"{name} was not counted"
                if made.refused and max(credulous.weights(CANARY, said_to_credulous), default=0.0) > 0.0:
                    deceives.append(name)
            await eventually(lambda: all_counted(gate))
            assert await gate.stop() == 0, gate.log
        print("answered after " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took_s.items()))
        # The known-bad control: what all this asks of a router is not what any router does.
        assert deceives == list(DECEIVED)
        assert "foreign records, which no gate wrote: " in gate.log
        kinds = [(one["kind"], one["directive"]["generation"]) for one in await decisions(kafka)]
        # Only what a trusted key signed uses numbers up.
        assert kinds == [("command", 1), ("command", 1), ("reassert", 8)]
        # Nor is any router deceived while no gate runs, whatever compaction left.
        offset, _ = await attack(kafka, "unknown key", first)
        await compacted(kafka, "r1", through=offset - 1)
        async with router_here(kafka, "new") as new:
            async with Worker("gate", kafka, log_folder, environment=environment) as gate:
                await new.until(at_zero, "tripped, weight 0, once there is a gate")
                assert await gate.stop() == 0, gate.log
            assert max(new.weights(CANARY)) == 0.0
            assert running.weights(CANARY)[-1] == 0.0
    await break_the_glass(kafka, tmp_path / "router.json")


async def all_counted(gate: Worker) -> bool:
    """By the gate, each under its name; a tombstone and garbage are unsigned, too."""
    gauges = gate.gauges()
    refused = gauges["refused/directive"]
    return gauges[f"gating/{SEAT}"]["foreign_directives"] >= len(ATTACKS) and all(
        refused[reason] >= count
        for reason, count in {
            "unsigned": 4, "wrong_signature": 1, "unknown_key": 1, "not_for_this_use": 1,
            "outside_validity": 1,
        }.items()
    )  # fmt: skip


async def break_the_glass(kafka: Broker, path: Path) -> None:
    """No gate, and a forgery with its stolen key: the file on the router's machine holds, restarted too."""
    newest, stolen = json.loads((await records_of(kafka, "r1"))[-1].value), keys.signer(Use.DIRECTIVES)
    await write(kafka, signed(forged(newest, generation=99), stolen))
    async with router(kafka, "glass", "--file", str(path)) as seen:
        await seen.until(deceived, "the forgery")
        began_us = now_us()
        assert break_glass([path], "r1", Aborted(by="op", ts_us=began_us)) == ([str(path)], {})
        line = await seen.until(lambda line: bool(line["effective"]["aborted"]), "the abort")
        print(f"break glass: weight 0 after {(line['changed_us'] - began_us) / 1e6:.2f} s")
        assert line["effective"]["weights"] == {"m1": 100.0, CANARY: 0.0}
        said = len(seen.lines)
        await write(kafka, signed(forged(newest, generation=200), stolen))
        await seen.until(lambda line: bool(line["generation"] == 200), "the greater generation")
        assert max(seen.weights(CANARY, said)) == 0.0
    async with router(kafka, "again", "--file", str(path)) as seen:
        await seen.until(lambda line: bool(line["generation"] == 200), "the newest directive")
        assert max(seen.weights(CANARY)) == 0.0
        path.unlink()  # noqa: ASYNC240 (at once)
        await seen.until(lambda line: bool(line["reason"] == "file_lifted"), "the file is gone")
        assert seen.weights(CANARY)[-1] == 90.0
