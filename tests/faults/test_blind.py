"""A gate that sees nothing of one source: routers decay to the last promoted split, and status says why."""

from __future__ import annotations

import asyncio
import json
import os
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.faults.crew import held_by
from tests.faults.routing import RouterSeen, router
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.waiting import eventually
from tests.workers.fleet import QUICK, SEAT, decisions, directives, send_pairs, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

GATE: Final = {
    **QUICK,
    "KLAXON_GATE_LEASE_S": "3",
    "KLAXON_GATE_DEAD_MAN_S": "5",
    "KLAXON_GATE_BLIND_AFTER_S": "5",
}
LASTING: Final = {
    **QUICK,
    "KLAXON_KAFKA_SESSION_TIMEOUT_MS": "80000",
    "KLAXON_KAFKA_REBALANCE_TIMEOUT_MS": "30000",
}
"""Frozen, such a worker keeps its partitions: nobody closes their seconds, nobody ticks. Killed it would keep
them, too: it is told to stop."""
CANARY: Final = "m2"


async def status(broker: Broker, *arguments: str) -> str:
    """What `klaxon status` prints."""
    process = await asyncio.create_subprocess_exec(
        *KLAXON, "status", *arguments, cwd=REPOSITORY, env={**os.environ, **broker.environment, **GATE},
        stdout=PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def sharing(workers: list[Worker]) -> list[list[str]]:
    """What each holds, once all sources are shared out and nobody has none."""

    async def found() -> list[list[str]]:
        held = [sorted(held_by(worker)) for worker in workers]
        every = [f"{topic}/{number}" for topic in (Topic.REQUESTS, Topic.TELEMETRY) for number in range(2)]
        return held if all(held) and sorted(chain(*held)) == every else []

    return await eventually(found)


def decayed(line: dict[str, Any]) -> bool:
    return bool(line["effective"]["dead_man"])


def holding(line: dict[str, Any]) -> bool:
    return bool(line["effective"]["lease_valid"] and line["effective"]["weights"].get(CANARY) == 1.0)


@asynccontextmanager
async def traffic(broker: Broker) -> AsyncIterator[None]:
    """A few good pairs a second."""

    async def send() -> None:
        for first in range(0, 100_000, 2):
            await send_pairs(broker, 2, bad=False, first=first)
            await asyncio.sleep(0.5)

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def blinded(broker: Broker, seen: RouterSeen, since: int, silent: list[str]) -> None:
    """The router decays and never rises; status names these sources and no other, and the lease."""
    await seen.until(decayed, "the dead man's rule")
    assert seen.weights(CANARY)[-1] == 0.0
    weights = seen.weights(CANARY, since)
    assert weights == sorted(weights, reverse=True), "it rose while the gate saw nothing"

    async def told() -> dict[str, Any]:
        said: dict[str, Any] = json.loads(await status(broker, "--json"))
        late = [one for one in said["sources"] if one["problem"]]
        return said if sorted(one["source"] for one in late) == sorted(silent) else {}

    said = await eventually(told)
    (judged,) = said["deciding"]
    assert judged["deciding"] is False
    assert sorted(re.findall(r"klaxon\.[a-z]+/\d", judged["why"])) == sorted(silent), judged["why"]
    for one in said["sources"]:
        if one["problem"]:
            assert re.match(
                r"closes nothing for \d+ s, since \d\d:\d\d:\d\d: is `klaxon worker", one["problem"]
            )
    text = await status(broker)
    assert re.search(r"deciding: no, the newest complete second is \d+ s old; waiting for klaxon\.", text), (
        text
    )
    assert re.search(
        r"lease: ran out \d+ s ago, at [\d:]+: no weight rises, routers are back at the last", text
    )
    newest = (await directives(broker))[-1]
    assert (newest["state"], newest["weights"][CANARY]) == ("observing", 1.0), "the gate itself moved nothing"


async def test_without_sight_routers_decay_and_status_says_why(kafka: Broker, log_folder: Path) -> None:
    async with (
        Worker("measure", kafka, log_folder, environment=LASTING) as one,
        Worker("measure", kafka, log_folder, environment=LASTING) as other,
        Worker("pair", kafka, log_folder, environment=QUICK) as pair,
        Worker("gate", kafka, log_folder, environment=GATE) as gate,
        router(kafka, "r1") as seen,
        traffic(kafka),
    ):
        await gate.until_log(f"gating partition {SEAT}: taken")
        held = await sharing([one, other])
        await start_rollout(kafka)
        await seen.until(holding, "1 % under a lease")
        # One measure worker stands still: its sources are silent, not even ticks come.
        since = len(seen.lines) - 1
        other.freeze()
        await blinded(kafka, seen, since, held[1])
        other.thaw()
        await seen.until(holding, "1 % again, once the source speaks")
        # No pair worker is left.
        since = len(seen.lines) - 1
        await pair.kill()
        await blinded(kafka, seen, since, [f"{Topic.LOGITS}/0", f"{Topic.LOGITS}/1"])
        for worker in (one, other):
            assert await worker.stop() == 0, worker.log
    assert [one["kind"] for one in await decisions(kafka)] == ["command"]
