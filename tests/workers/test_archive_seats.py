"""A partition that changes hands while a record of it is being read goes on where the table says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from pipeline.config import load_config
from pipeline.workers.archive import ArchiveWorker, PartitionArchive
from pipeline.workers.intake import Intake
from pipeline.workers.records import APPEND_TIME, Partition, Record
from pipeline.workers.transport import Position
from schemas.topics import Topic
from tests.kafka.waiting import eventually

PLACE = Partition(Topic.REQUESTS, 0)
READ = 5
"""Offset of the record that is being read then."""
STORED = 3
"""Where the table says to go on."""


def _record(offset: int) -> Record:
    return Record(Topic.REQUESTS, 0, offset, offset, APPEND_TIME, {}, None, b"")


class _Part:
    full = False
    due_us = None
    oldest = None

    def __init__(self, read_from: int) -> None:
        self.read_from = read_from
        self.added: list[int] = []

    def add(self, record: Record, _now_us: int) -> tuple[()]:
        self.added.append(record.offset)
        return ()

    def take(self, _now_us: int, *, end_offset: int) -> None:
        """Nothing is ever stored here."""

    def gauges(self) -> dict[str, int]:
        return {}


class _Store:
    """The store, and what opens it."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []

    def open(self) -> _Store:
        return self

    def cut(self) -> None:
        """Nothing waits."""

    def open_partition(self, _topic: Topic, _partition: int) -> PartitionArchive:
        self.parts.append(_Part(STORED if self.parts else 0))
        return cast(PartitionArchive, self.parts[-1])

    def store_block(self, _block: Any, _stop: threading.Event) -> bool:
        raise AssertionError

    def gauges(self) -> dict[str, int]:
        return {}


class _Link:
    group = "klaxon-archive"

    def position(self, _place: Partition) -> Position | None:
        return Position(READ + 1, READ + 1)

    async def commit(self, _offsets: object) -> bool:
        return True


class _Log:
    """The records of the partition, read again slowly: each waits to be let through."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def missing(self, intake: Any, place: Partition, first: int, end: int) -> AsyncIterator[Record]:
        """As `Intake._missing`, without a broker."""
        for offset in range(first, end):
            self.asked.set()
            await self.goes_on.wait()
            intake._expected[place] = offset + 1
            yield _record(offset)


async def _until_opened(worker: ArchiveWorker) -> None:
    async def opened() -> bool:
        return not worker.missing()

    await eventually(opened)


async def _lose_and_win(worker: ArchiveWorker) -> None:
    await worker.revoked(frozenset({PLACE}))
    await worker.assigned(frozenset({PLACE}))
    await _until_opened(worker)


@pytest.mark.parametrize("held_up", ["waits for its turn", "reads a gap again", "reads what was left behind"])
async def test_no_record_is_skipped_when_a_partition_is_lost_and_won_meanwhile(
    held_up: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _Log()
    monkeypatch.setattr(Intake, "_missing", lambda self, *arguments: log.missing(self, *arguments))
    store = _Store()
    worker = ArchiveWorker(cast(Any, _Link()), load_config(None, {}), cast(Any, store))
    await worker.assigned(frozenset({PLACE}))
    await _until_opened(worker)
    for offset in range(READ):
        await worker.read(_record(offset))
    if held_up == "waits for its turn":
        await worker._lock.acquire()
        reading = asyncio.create_task(worker.read(_record(READ)))
        await asyncio.sleep(0)
        await _lose_and_win(worker)
        worker._lock.release()
    elif held_up == "reads a gap again":
        reading = asyncio.create_task(worker.read(_record(READ + 1)))
        await log.asked.wait()
        await _lose_and_win(worker)
    else:
        await worker._sweep()  # says where the partition stands
        reading = asyncio.create_task(worker._sweep())
        await log.asked.wait()
        await _lose_and_win(worker)
    log.goes_on.set()
    await reading
    await _until_opened(worker)
    await worker.read(_record(READ + 1))
    await worker.stop()
    assert store.parts[0].added == list(range(READ))
    assert store.parts[1].added == list(range(STORED, READ + 2))


async def test_a_stop_does_not_wait_for_a_read_that_the_broker_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one partition a gap is read again, and nothing comes; another was won and opened meanwhile."""
    log = _Log()
    monkeypatch.setattr(Intake, "_missing", lambda self, *arguments: log.missing(self, *arguments))
    worker = ArchiveWorker(cast(Any, _Link()), load_config(None, {}), cast(Any, _Store()))
    await worker.assigned(frozenset({PLACE}))
    await _until_opened(worker)
    reading = asyncio.create_task(worker.read(_record(READ)))
    await log.asked.wait()
    await worker.assigned(frozenset({PLACE._replace(partition=1)}))
    await _until_opened(worker)
    try:
        async with asyncio.timeout(120):
            await worker.stop()
    finally:
        reading.cancel()
        await asyncio.wait([reading])
