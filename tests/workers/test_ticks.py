"""A partition that takes no tick, because no broker leads it, holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, cast

from aiokafka.errors import LeaderNotAvailableError

from pipeline.config import Config
from pipeline.core.source import Flush
from pipeline.workers.records import Partition
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import SourceKind
from pipeline.workers.transport import Link, Position
from schemas.topics import Topic
from tests.kafka.waiting import eventually

LED, LEADERLESS = Partition(Topic.LOGITS, 0), Partition(Topic.LOGITS, 1)


@dataclass
class Silent:
    """Stands for the core object: there is nothing to say, and it counts how often it is asked."""

    asked: list[int]
    next_offset: int | None = 5

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        self.asked.append(1)
        return Flush()


@dataclass
class Sent:
    offset: int


@dataclass
class HalfLed:
    """Stands for the link: both partitions are read to their ends, one of them acknowledges nothing."""

    ticked: list[int] = field(default_factory=list)
    unanswered: list[asyncio.Future[Any]] = field(default_factory=list)

    def position(self, _place: Partition) -> Position:
        return Position(5, 5)

    async def send(self, _topic: Topic, _value: bytes, *, partition: int, **_: object) -> Awaitable[Any]:
        self.ticked.append(partition)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if partition == LED.partition:
            answer.set_result(Sent(4))
        else:
            self.unanswered.append(answer)
        return answer


async def test_a_tick_that_nobody_acknowledges_holds_up_no_flush_and_is_tried_again() -> None:
    link, asked = HalfLed(), list[int]()
    kind = SourceKind(lambda *_: cast("Any", None), lambda *_: cast("Any", Silent(asked)))
    worker = SourceWorker(cast("Link", link), Config(), {Topic.LOGITS: kind})
    await worker.assigned(frozenset({LED, LEADERLESS}))
    running = asyncio.create_task(worker.run())

    async def flushed_after_the_tick() -> bool:
        if not link.unanswered:
            asked.clear()
        return len(asked) > 4 and link.ticked.count(LED.partition) > 1

    async def ticked_again() -> bool:
        return link.ticked.count(LEADERLESS.partition) > 1

    try:
        await eventually(flushed_after_the_tick, timeout_s=120)
        assert link.ticked.count(LEADERLESS.partition) == 1, "one tick under way is enough"
        link.unanswered[0].set_exception(LeaderNotAvailableError())
        await eventually(ticked_again, timeout_s=120)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
        await worker.stop()
