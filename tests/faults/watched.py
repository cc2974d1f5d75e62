"""An installation as operators run it, watched: workers that are started again, what was acknowledged to the
producers of its traffic, and how long each source closed nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka.structs import ConsumerRecord

from schemas.topics import GATING_PARTITIONS, SOURCES
from tests.kafka.processes import Worker
from tests.system.findings import Finding
from tests.system.stack import Stack
from tests.system.workload import PARTITIONS

FOREVER_S: Final = 86_400.0
START_AGAIN_S: Final = 1.0
LOOK_EVERY_S: Final = 0.05
Source = tuple[str, int]
ALL_SOURCES: Final[tuple[Source, ...]] = tuple(
    (topic.value, number) for topic in SOURCES for number in range(PARTITIONS)
)


@dataclass(frozen=True)
class Row:
    """What came of one kind of fault. `figures`: what is printed of it."""

    name: str
    planned: int
    fired: int
    figures: str
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Every fault happened, and nothing was found."""
        return self.fired == self.planned and not self.findings

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.fired}/{self.planned}; {self.figures}"]
        return "\n  ".join(lines + [f"{finding.kind}: {finding}" for finding in self.findings])


@dataclass
class Supervised:
    """One worker under a process manager: it is started again whenever it ends by itself.

    A worker that was told to stop (exit code 0) is not.
    """

    on: Stack
    kind: str
    worker: Worker | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ends: list[str] = field(default_factory=list)
    """Why those ended that ended by themselves: their last error, else their last line."""

    async def run(self) -> None:
        """Until it is told to stop."""
        while True:
            self.worker = self.on.worker(self.kind)
            await self.worker.start()
            self.started.set()
            if await self.worker.until_ended(timeout_s=FOREVER_S) == 0:
                return
            lines = self.worker.log.strip().splitlines() or ["without a word"]
            # While it leaves its group its client may say more.
            self.ends.append(next((line for line in reversed(lines) if " ERROR klaxon." in line), lines[-1]))
            await asyncio.sleep(START_AGAIN_S)

    async def ready(self) -> None:
        """Wait until it has joined its group."""
        await self.started.wait()
        assert self.worker is not None
        await self.worker.until_log(f"{self.kind}: assigned")


@asynccontextmanager
async def supervised(on: Stack, kinds: Iterable[str]) -> AsyncIterator[list[Supervised]]:
    """One of each kind, assigned its partitions; nobody starts them again once the body has ended."""
    made = [Supervised(on, kind) for kind in kinds]
    tasks = [asyncio.create_task(each.run()) for each in made]
    try:
        for each in made:
            await each.ready()
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Ledger:
    """A producer that remembers what was acknowledged, to be compared with the log afterwards."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._sent: list[tuple[bytes, asyncio.Future[Any]]] = []

    async def send(self, topic: str, value: bytes, **options: Any) -> asyncio.Future[Any]:
        """As the producer's own."""
        future: asyncio.Future[Any] = await self._producer.send(topic, value, **options)
        self._sent.append((value, future))
        return future

    async def send_and_wait(self, topic: str, value: bytes, **options: Any) -> Any:
        """As the producer's own."""
        return await (await self.send(topic, value, **options))

    def acknowledged(self) -> list[tuple[bytes, Any]]:
        """(value, where it was said to be) so far."""
        return [
            (value, sent.result())
            for value, sent in self._sent
            if sent.done() and not sent.cancelled() and sent.exception() is None
        ]

    def lost(self, records: Iterable[ConsumerRecord[bytes, bytes]]) -> list[Finding]:
        """What was acknowledged and does not stand where it was said to be, among these records."""
        there = {(at.topic, at.partition, at.offset): at.value or b"" for at in records}
        return [
            Finding("lost", f"{at.topic}/{at.partition} offset {at.offset}: acknowledged, and not there")
            for value, at in self.acknowledged()
            if there.get((at.topic, at.partition, at.offset)) != value
        ]


@dataclass
class Closings:
    """When each source was seen to have closed a further second for every gating partition (monotonic s)."""

    on: Stack
    seen: dict[Source, list[float]] = field(default_factory=lambda: {source: [] for source in ALL_SOURCES})
    through: dict[Source, int] = field(default_factory=dict)
    """The newest of them."""

    async def run(self) -> None:
        """Look on until cancelled."""
        while True:
            now_s = time.monotonic()
            for source in ALL_SOURCES:
                closed = self.on.follower.closed
                through = min(closed.get((*source, gating), -1) for gating in range(GATING_PARTITIONS))
                if through > self.through.get(source, -1):
                    self.through[source] = through
                    self.seen[source].append(now_s)
            await asyncio.sleep(LOOK_EVERY_S)

    def closed_since(self, since_s: float) -> set[Source]:
        """Sources that have closed a second since then."""
        return {source for source, seen in self.seen.items() if seen and seen[-1] > since_s}

    def pauses(self, since_s: float) -> dict[Source, float]:
        """Per source its longest pause that ended after this time: last final before it to first after it."""
        return {
            source: max(
                (after - before for before, after in itertools.pairwise(seen) if after > since_s),
                default=float("inf"),
            )
            for source, seen in self.seen.items()
        }


@asynccontextmanager
async def closings(on: Stack) -> AsyncIterator[Closings]:
    """Watched while the body runs."""
    made = Closings(on)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


def listed(pauses: dict[Source, float]) -> str:
    """Pauses in seconds, by source."""
    return ", ".join(
        f"{topic.removeprefix('klaxon.')}/{number} {pause_s:.1f}"
        for (topic, number), pause_s in pauses.items()
    )
