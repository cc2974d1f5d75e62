"""A worker in the test's own process that keeps what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from unittest import mock

from pipeline.config import Config
from pipeline.monitoring.timing import Timing
from pipeline.workers.records import Partition, Record
from pipeline.workers.runner import OK, Processor, Runner, WorkerSpec
from pipeline.workers.transport import Link
from schemas.topics import Topic
from tests.kafka.broker import Broker

TIMEOUT_S = 120


class Collector:
    """A processor that keeps what it reads and lets a test wait for it."""

    def __init__(self, link: Link, counts: Mapping[Topic, int]) -> None:
        self.link = link
        self.counts = counts
        self.records: list[Record] = []
        self.assignments: list[frozenset[Partition]] = []
        self.revocations: list[frozenset[Partition]] = []
        self._changed = asyncio.Condition()

    async def assigned(self, places: frozenset[Partition]) -> None:
        self.assignments.append(places)

    async def revoked(self, places: frozenset[Partition]) -> None:
        self.revocations.append(places)

    async def read(self, record: Record) -> None:
        self.records.append(record)
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> None:
        await asyncio.Event().wait()

    def gauges(self) -> dict[str, dict[str, int]]:
        return {"archive": {"records": len(self.records)}}

    def timings(self) -> Mapping[str, Timing]:
        return {}

    @property
    def recovered(self) -> int:
        return 0

    def missing(self) -> tuple[str, ...]:
        return ()

    async def stop(self) -> None:
        return

    async def until(self, done: Callable[[list[Record]], bool]) -> None:
        async with self._changed, asyncio.timeout(TIMEOUT_S):
            await self._changed.wait_for(lambda: done(self.records))


@asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[Collector]:
    made: list[Collector] = []

    def make(link: Link, counts: Mapping[Topic, int]) -> Processor:
        made.append(Collector(link, counts))
        return made[0]

    runner = Runner(
        WorkerSpec("test", (Topic.REQUESTS,), (Topic.CONTROL,), make), Config(kafka=broker.config)
    )
    with mock.patch("pipeline.workers.runner.end_process", _does_not_end):
        task = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not made or not made[0].assignments:
                    assert not task.done(), "the runner ended by itself"
                    await asyncio.sleep(0.05)
            yield made[0]
        finally:
            runner.stop()
            assert await asyncio.wait_for(task, TIMEOUT_S) == OK


def _does_not_end(reason: str, _code: int = 0) -> None:
    """In the place of what would end the test's own process, and every test that it still has to run."""
    raise AssertionError(f"the worker would have ended its process: {reason}")
