"""Workers around one roll-out, for tests that need several of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from schemas.topics import Topic, gating_partition
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import Written, dump, produce
from tests.kafka.waiting import eventually
from tests.workers.events import answer, encoded, soon_us, start_command

QUICK = {
    "KLAXON_CONTENT_LATENESS_S": "1",
    "KLAXON_CONTENT_JOIN_TIMEOUT_S": "3",
    "KLAXON_GATE_RENEW_S": "1",
}
"""Short times."""
SEAT = gating_partition("r1")
"""The gating partition of the roll-out."""


async def directives(broker: Broker) -> list[dict[str, Any]]:
    """Everything on the control topic."""
    return [json.loads(record.value) for record in await dump(broker, Topic.CONTROL)]


async def decisions(broker: Broker, kind: str | None = None) -> list[dict[str, Any]]:
    """Everything on the decisions topic, of one kind or of all."""
    found = [json.loads(record.value) for record in await dump(broker, Topic.DECISIONS)]
    return [decision for decision in found if kind is None or decision["kind"] == kind]


async def start_rollout(broker: Broker) -> None:
    """Start roll-out r1 and wait for its first directive."""
    command = encoded(start_command())
    await produce(broker, [Written(Topic.COMMANDS, command, key=b"r1", partition=SEAT)])

    async def started() -> list[dict[str, Any]]:
        return await directives(broker)

    await eventually(started)


async def send_pairs(broker: Broker, count: int, *, bad: bool, first: int = 0) -> None:
    """Publish `count` pairs of answers, one record per half, both halves of a pair in partition 0.

    Ahead of time, as evidence counts from the first whole second after the start of the generation.
    """

    def halves() -> Iterator[Written]:
        for number in range(first, first + count):
            ts_us = soon_us()
            for arm in ("baseline", "canary"):
                half = answer(ts_us, arm, f"p{number}", bad=bad and arm == "canary")
                yield Written(Topic.LOGITS, encoded(half), partition=0)

    await produce(broker, halves())


@asynccontextmanager
async def fleet(
    broker: Broker, log_folder: Path, environment: Mapping[str, str] = QUICK, *, gate_fault: str | None = None
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Measure, pair and gate; gives pair and gate, once the other two are ready."""
    async with (
        Worker("measure", broker, log_folder, environment=QUICK) as measure,
        Worker("pair", broker, log_folder, environment=QUICK) as pair,
        Worker("gate", broker, log_folder, environment=environment, fault=gate_fault) as gate,
    ):
        await measure.until_log("measure: ready")
        await pair.until_log("pair: ready")
        yield pair, gate
