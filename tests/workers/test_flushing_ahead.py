"""What is computed while the broker has not answered yet, what waits for it, what is committed then."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.errors import KafkaError, LeaderNotAvailableError

from pipeline.config import Config
from pipeline.core.source import BucketRecord, Flush, RecordMeta
from pipeline.workers.cadence import GATHER_S, MOST_UNACKNOWLEDGED
from pipeline.workers.records import APPEND_TIME, Partition, Record
from pipeline.workers.source import COMMIT_EVERY_S, SourceWorker
from pipeline.workers.source_kind import SourceKind
from pipeline.workers.transport import Link, Position
from schemas.columns import Rejected
from schemas.topics import TICK, Topic
from tests.workers.moved_loop import in_moved_time

PLACE = Partition(Topic.LOGITS, 0)
LONG_S = 3 * COMMIT_EVERY_S
BAD = SimpleNamespace(unknown_version=None, rejected=[Rejected(None, "", "it is none")])
"""What every record is that is no tick."""


@dataclass
class Talks:
    """Stands for the core object: every flush says one thing, and allows to commit one offset more."""

    next_offset: int = 5
    flushed_at_s: list[float] = field(default_factory=list)
    flushed_offsets: list[int] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    """What was said with each flush."""
    pairs: list[Any] = field(default_factory=list)
    """Scored, and not flushed yet."""

    def read(self, meta: RecordMeta, _decoded: object) -> None:
        self.next_offset = meta.offset + 1

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        self.flushed_at_s.append(asyncio.get_running_loop().time())
        self.waiting.append(waiting)
        self.flushed_offsets.append(self.next_offset)
        pairs, self.pairs = self.pairs, []
        return Flush(fresh=[BucketRecord(0, b"cells")], pairs=pairs, commit=len(self.flushed_at_s))


@dataclass
class Answers:
    """Stands for the link: the test answers what is sent, in any order; commits are kept."""

    end: int = 5
    room: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: the producer's buffer is full, and whoever sends waits."""
    read_to: int = 0
    coordinator: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: the group has none, and whoever commits waits."""
    group: str = "klaxon-pair"
    sent: list[asyncio.Future[None]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    ticks: int = 0
    letters: list[asyncio.Future[None]] = field(default_factory=list)
    dead_letters: dict[str, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.room.set()
        self.coordinator.set()

    def position(self, _place: Partition) -> Position:
        return Position(self.read_to, self.end)

    async def send(self, topic: Topic, *_: object, **__: object) -> Awaitable[None]:
        await self.room.wait()
        if topic == PLACE.topic:
            self.ticks += 1
            return asyncio.get_running_loop().create_future()
        if topic in (Topic.DEAD_LETTER, Topic.PAIRS):
            self.letters.append(asyncio.get_running_loop().create_future())
            return self.letters[-1]
        self.sent.append(asyncio.get_running_loop().create_future())
        return self.sent[-1]

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        await self.coordinator.wait()
        self.committed += offsets.values()
        return True


@dataclass
class Running:
    worker: SourceWorker
    source: Talks
    link: Answers
    task: asyncio.Task[None]


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    source, link = Talks(), Answers()
    kind = SourceKind(lambda *_: cast("Any", BAD), lambda *_: cast("Any", source))
    worker = SourceWorker(cast("Link", link), Config(), {Topic.LOGITS: kind})
    await worker.assigned(frozenset({PLACE}))
    task = asyncio.create_task(worker.run())
    try:
        yield Running(worker, source, link, task)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await worker.stop()


def moved(test: Coroutine[Any, Any, None]) -> None:
    in_moved_time(test)


def test_the_next_flush_is_computed_while_the_last_is_under_way_but_no_third() -> None:
    async def scene() -> None:
        async with running() as now:
            await asyncio.sleep(LONG_S)
            assert len(now.source.flushed_at_s) == len(now.link.sent) == MOST_UNACKNOWLEDGED
            now.link.sent[0].set_result(None)
            await asyncio.sleep(LONG_S)
            assert len(now.source.flushed_at_s) == MOST_UNACKNOWLEDGED + 1

    moved(scene())


def test_a_worker_that_is_behind_says_so_to_what_it_flushes() -> None:
    async def scene() -> None:
        async with running() as now:
            now.link.end = 1_000
            await asyncio.sleep(LONG_S)
            assert all(waiting > 1 for waiting in now.source.waiting)
            assert len(now.source.waiting) == MOST_UNACKNOWLEDGED
            now.link.end = now.source.next_offset
            for sent in now.link.sent:
                sent.set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.source.waiting[-1] == 0

    moved(scene())


def test_nothing_is_committed_before_every_earlier_flush_is_acknowledged() -> None:
    async def scene() -> None:
        async with running() as now:
            await asyncio.sleep(LONG_S)
            now.link.sent[1].set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [], "the first flush is not acknowledged"
            now.link.sent[0].set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [2]

    moved(scene())


@pytest.mark.parametrize("which", range(MOST_UNACKNOWLEDGED))
def test_what_the_broker_does_not_take_ends_the_worker(which: int) -> None:
    async def scene() -> None:
        async with running() as now:
            await asyncio.sleep(LONG_S)
            for sent in now.link.sent[:which]:
                sent.set_result(None)
            now.link.sent[which].set_exception(LeaderNotAvailableError())
            await asyncio.wait([now.task], timeout=LONG_S)
            assert now.task.done()
            with pytest.raises(KafkaError):
                now.task.result()
            assert now.link.committed == [] or which > 0, "what came before it may be"

    moved(scene())


def test_what_was_flushed_before_a_revocation_is_not_committed_after_it() -> None:
    async def scene() -> None:
        async with running() as now:
            await asyncio.sleep(LONG_S)
            await now.worker.revoked(frozenset({PLACE}))
            await now.worker.assigned(frozenset({PLACE}))
            for sent in now.link.sent:
                sent.set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [], "it may have been read elsewhere meanwhile"
            for sent in now.link.sent[MOST_UNACKNOWLEDGED:]:
                sent.set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [2 * MOST_UNACKNOWLEDGED]

    moved(scene())


def test_what_was_flushed_before_a_revocation_is_not_committed_though_it_was_sent_after_it() -> None:
    async def scene() -> None:
        async with running() as now:
            now.link.room.clear()
            await asyncio.sleep(LONG_S)
            assert len(now.source.flushed_at_s) == 1, "it was taken, and waits for room"
            await now.worker.revoked(frozenset({PLACE}))
            await now.worker.assigned(frozenset({PLACE}))
            now.link.room.set()
            await asyncio.sleep(LONG_S)
            now.link.sent[0].set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [], "it may have been read elsewhere meanwhile"

    moved(scene())


def test_a_commit_never_moves_back_behind_what_was_committed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def by_another(*_: object) -> int:
        return 4

    monkeypatch.setattr("pipeline.workers.source.committed_offset", by_another)

    async def scene() -> None:
        async with running() as now:
            tick = {"content-type": TICK.encode()}
            await now.worker.read(Record(Topic.LOGITS, 0, 5, 1_000_000, APPEND_TIME, tick, None, b""))
            for at in range(6):
                await asyncio.sleep(LONG_S)
                now.link.sent[at].set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [5, 6]

    moved(scene())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("what", ["dead letter", "scored pair"])
def test_what_nobody_decides_by_holds_up_the_commit_and_no_flush(
    monkeypatch: pytest.MonkeyPatch, what: str, fails: bool
) -> None:
    async def by_nobody(*_: object) -> int:
        return 0

    monkeypatch.setattr("pipeline.workers.source.committed_offset", by_nobody)

    async def scene() -> None:
        async with running() as now:
            bad = Record(Topic.LOGITS, 0, 5, 1_000_000, APPEND_TIME, {}, None, b"{}")
            if what == "dead letter":
                await now.worker.read(bad)
            else:
                now.source.pairs = [what]
            await asyncio.sleep(GATHER_S)
            assert len(now.link.letters) == 1
            for at in range(6):
                await asyncio.sleep(LONG_S)
                now.link.sent[at].set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == [], "it may be lost"
            if fails:
                now.link.letters[0].set_exception(LeaderNotAvailableError())
                await asyncio.wait([now.task], timeout=LONG_S)
                with pytest.raises(KafkaError):
                    now.task.result()
            else:
                now.link.letters[0].set_result(None)
                await asyncio.sleep(LONG_S)
                assert now.link.committed == [6]

    moved(scene())


def test_a_group_without_a_coordinator_holds_up_no_tick() -> None:
    async def scene() -> None:
        async with running() as now:
            now.link.coordinator.clear()
            now.link.read_to = now.link.end
            await asyncio.sleep(COMMIT_EVERY_S / 2)
            now.link.sent[0].set_result(None)
            await asyncio.sleep(LONG_S)
            assert now.link.committed == []
            assert now.link.ticks == 1

    moved(scene())


def test_what_waits_unread_is_read_before_a_flush() -> None:
    async def scene() -> None:
        async with running() as now:
            await asyncio.sleep(LONG_S)
            now.link.end = 8
            for sent in now.link.sent:
                sent.set_result(None)
            await asyncio.sleep(GATHER_S / 2)
            now.source.next_offset = 8
            await asyncio.sleep(GATHER_S / 2)
            assert now.source.flushed_offsets == [5] * MOST_UNACKNOWLEDGED + [8]

    moved(scene())


def test_what_goes_on_waiting_holds_a_flush_up_for_a_moment_only() -> None:
    async def scene() -> None:
        async with running() as now:
            now.link.end = 1_000_000
            await asyncio.sleep(LONG_S)
            assert now.source.flushed_at_s[0] == pytest.approx(GATHER_S)
            assert len(now.source.flushed_at_s) == MOST_UNACKNOWLEDGED, "and the next one as well"

    moved(scene())
