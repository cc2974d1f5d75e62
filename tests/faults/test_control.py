"""Foreign records on the control topic, compacted at once: every router ends where the gate says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from pipeline.cli.break_glass import break_glass
from schemas.control import Aborted
from schemas.topics import Topic
from tests.faults.routing import compacted, compacted_at_once, records_of, router, router_here, tell
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import Written, now_us, produce
from tests.kafka.waiting import eventually
from tests.workers.fleet import QUICK, SEAT, decisions, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

SESSION: Final = {"KLAXON_KAFKA_SESSION_TIMEOUT_MS": "4000"}
RENEW_S: Final = 4
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


ATTACKS: Final[dict[str, Callable[[Json, bytes], bytes | None]]] = {
    "altered": lambda newest, _: forged(newest),
    "replayed": lambda _, first: first,
    "lower epoch": lambda newest, _: forged(newest, epoch=0),
    "lower generation": lambda newest, _: forged(newest, generation=0, epoch=10**9),
    "higher epoch": lambda newest, _: forged(newest, epoch=newest["epoch"] + 1000),
    "higher generation": lambda newest, _: forged(newest, generation=newest["generation"] + 7),
    "garbage": lambda _, __: b"\x00{not a directive",
    "tombstone": lambda _, __: None,
}
"""From the newest directive of the gate and its first one, which gave the canary 1 %."""
RAISING: Final = ("higher epoch", "higher generation")


async def attack(broker: Broker, name: str, first: bytes) -> int:
    """Write it as a foreign producer would; its offset."""
    newest = json.loads((await records_of(broker, "r1"))[-1].value)
    return await write(broker, ATTACKS[name](newest, first))


async def write(broker: Broker, value: bytes | None) -> int:
    """Under the roll-out's key; its offset."""
    written = Written(Topic.CONTROL, value, key=b"r1", partition=SEAT)  # type: ignore[arg-type]
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
    environment = {**QUICK, **SESSION, **GAUGES_EVERY_SECOND, "KLAXON_GATE_RENEW_S": str(RENEW_S)}
    took_s: dict[str, float] = {}
    async with compacted_at_once(kafka), router_here(kafka, "running") as running:
        async with Worker("gate", kafka, log_folder, environment=environment) as gate:
            await gate.until_log(f"gating partition {SEAT}: taken")
            await start_rollout(kafka)
            first = (await records_of(kafka, "r1"))[0].value
            await tell(kafka, "abort")
            await running.until(at_zero, "tripped, weight 0")
            for name in ATTACKS:
                said = len(running.lines)
                began_us = now_us()
                offset = await attack(kafka, name, first)
                took_s[name] = await answered(kafka, offset) / 1000 - began_us / 1_000_000
                await compacted(kafka, "r1", through=offset)
                async with router_here(kafka, "new") as new:
                    await new.until(at_zero, f"tripped, weight 0, after: {name}")
                await running.until(at_zero, f"tripped, weight 0, after: {name}")
                raised = max(running.weights(CANARY, said), default=0.0)
                assert name in RAISING or raised == 0.0, f"{name} raised a weight"
            count = gate.gauges()[f"gating/{SEAT}"]["foreign_directives"]
            assert count >= len(ATTACKS), count
            assert await gate.stop() == 0
        print("answered after " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took_s.items()))
        assert max(took_s.values()) <= RENEW_S
        assert "foreign records, which no gate wrote: " in gate.log
        kinds = [(one["kind"], one["directive"]["generation"]) for one in await decisions(kafka)]
        assert kinds == [("command", 1), ("command", 1), ("reassert", 8)]
        # While no gate runs a router believes what it reads. The next gate takes it back.
        offset = await attack(kafka, "higher generation", first)
        await compacted(kafka, "r1", through=offset - 1)
        async with router_here(kafka, "new") as new:
            await new.until(deceived, "the forgery")
            await running.until(deceived, "the forgery")
            async with Worker("gate", kafka, log_folder, environment=environment) as gate:
                await new.until(at_zero, "tripped, weight 0, once there is a gate")
                await running.until(at_zero, "tripped, weight 0, once there is a gate")
                assert await gate.stop() == 0
    await break_the_glass(kafka, tmp_path / "router.json")


async def break_the_glass(kafka: Broker, path: Path) -> None:
    """No gate, and a forgery on the topic: the file on the router's machine holds, across a restart too."""
    newest = json.loads((await records_of(kafka, "r1"))[-1].value)
    await write(kafka, forged(newest, generation=99))
    async with router(kafka, "glass", "--file", str(path)) as seen:
        await seen.until(deceived, "the forgery")
        began_us = now_us()
        assert break_glass([path], "r1", Aborted(by="op", ts_us=began_us)) == ([str(path)], {})
        line = await seen.until(lambda line: bool(line["effective"]["aborted"]), "the abort")
        print(f"break glass: weight 0 after {(line['changed_us'] - began_us) / 1e6:.2f} s")
        assert line["effective"]["weights"] == {"m1": 100.0, CANARY: 0.0}
        said = len(seen.lines)
        await write(kafka, forged(newest, generation=200))
        await seen.until(lambda line: bool(line["generation"] == 200), "the greater generation")
        assert max(seen.weights(CANARY, said)) == 0.0
    async with router(kafka, "again", "--file", str(path)) as seen:
        await seen.until(lambda line: bool(line["generation"] == 200), "the newest directive")
        assert max(seen.weights(CANARY)) == 0.0
        path.unlink()  # noqa: ASYNC240 (at once)
        await seen.until(lambda line: bool(line["reason"] == "file_lifted"), "the file is gone")
        assert seen.weights(CANARY)[-1] == 90.0
