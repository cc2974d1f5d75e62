"""The archive's shell: records of every archived partition into blocks, blocks into ClickHouse, then commits.

The store decides where a partition goes on, what a block is and when it is stored (docs/archive.md); here are
the threads for its blocking calls, the back-pressure, and the order: stored first, committed afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.workers.archive_lag import LagWatch, Stored
from pipeline.workers.broker import back_off_s
from pipeline.workers.dead_letters import VersionError, dead_letters, send_letters
from pipeline.workers.faults import fault
from pipeline.workers.intake import Intake
from pipeline.workers.records import Partition, Record
from pipeline.workers.runner import WorkerSpec
from pipeline.workers.transport import Link
from schemas.columns import Rejected
from schemas.records import UnknownVersionError
from schemas.topics import Topic

log = logging.getLogger("klaxon.archive")

READS: Final = (
    Topic.REQUESTS,
    Topic.LOGITS,
    Topic.TELEMETRY,
    Topic.PAIRS,
    Topic.BUCKETS,
    Topic.DECISIONS,
)
T = TypeVar("T")

PACE_S: Final = 0.05
SWEEP_EVERY_S: Final = 1.0
MOST_THREADS: Final = 256
"""One per assigned partition, of their own: a ClickHouse that hangs must not hold the loop's own threads,
which resolve the broker's name."""
LAST_INSERTS_S: Final = 3.0
"""How long a stop waits for inserts in flight before it breaks their connections."""


class PartitionArchive(Protocol):
    """One assigned partition of the store's archive; never blocks."""

    @property
    def read_from(self) -> int:
        """The first record to read: what lies before it is stored."""

    @property
    def full(self) -> bool:
        """Whether memory's bound is reached."""

    @property
    def oldest(self) -> Stored:
        """Offset of the first record that is not stored, and its append time unless it is not read yet."""

    def add(self, record: Record, now_us: int) -> tuple[Rejected, ...]:
        """Take in the next record; returns what this worker must dead-letter.

        Raises UnknownVersionError for a record of a version that is not read here.
        """

    def take(self, now_us: int) -> Any:
        """The next block that is due, or None."""

    def stored(self, block: Any) -> int:
        """Note that it is stored; returns the offset to commit."""

    def gauges(self) -> dict[str, int]:
        """Sizes and counts by name."""


class BlockStore(Protocol):
    """The store's archive; its methods block."""

    def open_partition(self, topic: Topic, partition: int) -> PartitionArchive:
        """Where to go on, from the table. Raises a PipelineError while ClickHouse cannot say."""

    def store_block(self, block: Any, stop: threading.Event) -> bool:
        """Insert a block until it is stored (True) or `stop` is set (False)."""

    def cut(self) -> None:
        """Make calls that wait for a server's answer fail at once. Does not block."""

    def gauges(self) -> dict[str, int]:
        """Counts by name. Does not block."""


@dataclass(slots=True)
class _Seat:
    """One assigned partition. A new assignment gets a new seat: the table says where it goes on."""

    part: PartitionArchive | None = None
    """None until the table has said where to go on."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the partition is no longer ours."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was opened, a block was stored, or it was left."""


class ArchiveWorker:
    """Processor of `archive`: one task per assigned partition stores, `read` only adds."""

    def __init__(self, link: Link, config: Config, store: BlockStore) -> None:
        self._link = link
        self._config = config
        self._store = store
        self._intake = Intake(link, config.kafka, skips_deleted=True)
        self._lock = asyncio.Lock()
        self._seats: dict[Partition, _Seat] = {}
        self._tasks: dict[Partition, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(MOST_THREADS, "clickhouse")
        self._lag = LagWatch(link.group, config.kafka)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def assigned(self, places: frozenset[Partition]) -> None:
        for place in places:
            self._leave(place)
            seat = self._seats[place] = _Seat()
            before = self._tasks.get(place)
            task = self._tasks[place] = asyncio.create_task(self._serve(place, seat, before))
            task.add_done_callback(self._served)

    async def revoked(self, places: frozenset[Partition]) -> None:
        for place in places:
            self._leave(place)

    def _leave(self, place: Partition) -> None:
        """Drop what is not stored: whoever owns the partition next reads it again."""
        seat = self._seats.pop(place, None)
        if seat is not None:
            seat.stop.set()
            seat.changed.set()

    async def read(self, record: Record) -> None:
        seat = self._seats.get(record.place)
        if seat is None or await self._with_room(seat) is None:
            return  # no longer ours
        async with self._lock:
            await self._add(seat, self._intake.take(record))

    async def _with_room(self, seat: _Seat) -> PartitionArchive | None:
        """The seat's partition once it is open and not full; None when it was left meanwhile."""
        while not seat.stop.is_set():
            if seat.part is not None and not seat.part.full:
                return seat.part
            seat.changed.clear()
            await seat.changed.wait()
        return None

    async def _add(self, seat: _Seat, records: AsyncIterator[Record]) -> None:
        async for record in records:
            if (part := await self._with_room(seat)) is None:
                return  # no longer ours; the next assignment goes on where the table says
            try:
                refused = part.add(record, _now_us())
            except UnknownVersionError as error:
                raise VersionError(record, error.version) from None
            letters = dead_letters(record, refused, payload=self._config.dead_letter.payload)
            for acknowledged in await send_letters(self._link, letters):
                await acknowledged

    async def _serve(self, place: Partition, seat: _Seat, before: asyncio.Task[None] | None) -> None:
        """Open the partition, then store its blocks as they fall due, until it is left.

        Not before its last seat has ended: the table does not show yet what that still inserts. Commits what
        the table has, stored by this process or a predecessor: what lag shows is not stored.
        """
        if before is not None:
            await asyncio.wait([before])
        part = await self._open(place, seat)
        stored, committed = 0 if part is None else part.read_from, 0
        while part is not None and not seat.stop.is_set():
            block = part.take(_now_us())
            if block is None:
                await asyncio.sleep(PACE_S)
            elif await self._in_thread(self._store.store_block, block, seat.stop):
                stored = part.stored(block)
                seat.changed.set()
            if stored > committed and not seat.stop.is_set() and await self._link.commit({place: stored}):
                committed = stored
                fault("after_insert_commit")

    async def _open(self, place: Partition, seat: _Seat) -> PartitionArchive | None:
        attempt = 0
        while not seat.stop.is_set():
            fault("before_checkpoint")
            try:
                part = await self._in_thread(self._store.open_partition, Topic(place.topic), place.partition)
            except PipelineError as error:
                delay_s = back_off_s(attempt)
                log.warning("%s: %s; trying again in %.1f s", place, error, delay_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(seat.changed.wait(), delay_s)  # it is left
                attempt += 1
                continue
            if seat.stop.is_set():
                break
            self._intake.expect(place, part.read_from)
            seat.part = part
            seat.changed.set()
            log.info("%s: going on at offset %d", place, part.read_from)
            fault("after_open")
            return part
        return None

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _served(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._failed.done():
            self._failed.set_exception(error)

    async def run(self) -> None:
        watching = asyncio.create_task(self._lag.run(self._stored))
        try:
            while not self._failed.done() and not watching.done():
                await asyncio.wait([self._failed], timeout=SWEEP_EVERY_S)
                await self._sweep()
            (self._failed if self._failed.done() else watching).result()
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    def _stored(self) -> dict[Partition, Stored | None]:
        return {place: None if seat.part is None else seat.part.oldest for place, seat in self._seats.items()}

    async def _sweep(self) -> None:
        """Read what Faust left out at the end of a partition."""
        for place, seat in list(self._seats.items()):
            if seat.part is not None:
                async with self._lock:
                    await self._add(seat, self._intake.left_behind(place))

    def gauges(self) -> dict[str, dict[str, int]]:
        lags = self._lag.lags
        return {
            "archive": {**self._store.gauges(), **self._lag.gauges()},
            **{
                str(place): {
                    **(seat.part.gauges() if seat.part is not None else {}),
                    **(lags[place].gauges() if place in lags else {}),
                }
                for place, seat in sorted(self._seats.items())
            },
        }

    async def stop(self) -> None:
        for place in list(self._seats):
            self._leave(place)
        await self._last_inserts()
        self._threads.shutdown(wait=False)
        await self._intake.stop()

    async def _last_inserts(self) -> None:
        """Wait for them; those that a server does not answer are given up: the table will say."""
        left, wait_s = set(self._tasks.values()), LAST_INSERTS_S
        while left:
            _, left = await asyncio.wait(left, timeout=wait_s)
            if left:
                self._store.cut()
                wait_s = 0.5


def archive(config: Config, store: BlockStore) -> WorkerSpec:
    """The worker, configured; the composition root brings the store."""

    def make(link: Link, _counts: Mapping[Topic, int]) -> ArchiveWorker:
        return ArchiveWorker(link, config, store)

    return WorkerSpec("archive", reads=READS, needs=(Topic.DEAD_LETTER,), make=make)


def _now_us() -> int:
    return time.time_ns() // 1000
