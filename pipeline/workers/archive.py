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
from pipeline.monitoring.timing import Timing
from pipeline.store.errors import QueryError, StoreUnavailableError
from pipeline.workers.archive_lag import LagWatch, Stored
from pipeline.workers.broker import back_off_s
from pipeline.workers.dead_letters import VersionError, dead_letters, send_letters
from pipeline.workers.faults import fault
from pipeline.workers.intake import Intake
from pipeline.workers.records import Partition, Record
from pipeline.workers.runner import WorkerSpec
from pipeline.workers.transport import Link
from schemas.columns import Rejected
from schemas.plain import Log
from schemas.records import UnknownVersionError
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.archive")

READS: Final = (
    Topic.REQUESTS,
    Topic.LOGITS,
    Topic.TELEMETRY,
    Topic.PAIRS,
    Topic.BUCKETS,
    Topic.DECISIONS,
)
TRANSACTIONAL: Final = frozenset({Topic.DECISIONS})
"""What of these the gate writes in transactions: a marker stands after every one of them."""
T = TypeVar("T")

PACE_S: Final = 0.05
"""How often a block is asked for that waits for more records."""
COMMIT_AGAIN_S: Final = 0.5
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

    @property
    def due_us(self) -> int | None:
        """When there may be a block to take; None: nothing is held."""

    def take(self, now_us: int, *, end_offset: int) -> Any:
        """The next block that is due, or None. `end_offset`: where the partition ends, as far as known."""

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


class StoreOpener(Protocol):
    """What connects to ClickHouse. It need not be there yet when the worker starts."""

    def open(self) -> BlockStore:
        """The store, connected. Blocks.

        Raises StoreUnavailableError or QueryError while ClickHouse cannot be used.
        """

    def cut(self) -> None:
        """Make an `open` that waits for a server's answer fail at once. Does not block."""


@dataclass(slots=True)
class _Seat:
    """One assigned partition. A new assignment gets a new seat: the table says where it goes on."""

    part: PartitionArchive | None = None
    """None until the table has said where to go on."""
    going_on: bool = False
    """Whether the intake goes on there."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the partition is no longer ours."""
    due_us: int | None = None
    """When its next block is due, as far as whoever stores its blocks was told."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was opened, when `due_us` changed, a block was stored, or it was left."""


class ArchiveWorker:
    """Processor of `archive`: one task per assigned partition stores, `read` only adds."""

    def __init__(self, link: Link, config: Config, opener: StoreOpener) -> None:
        self._link = link
        self._config = config
        self._opener = opener
        self._store: BlockStore | None = None
        self._intake = Intake(link, config.kafka, skips_deleted=True)
        self._lock = asyncio.Lock()
        self._seats: dict[Partition, _Seat] = {}
        self._tasks: dict[Partition, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(MOST_THREADS, "clickhouse")
        self._lag = LagWatch(link.group, config.kafka)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._connecting = asyncio.create_task(self._connect())
        self._connecting.add_done_callback(self._served)

    async def _connect(self) -> None:
        """Open the store; partitions wait for it, and meanwhile Kafka's commit tells their lag."""
        attempt = 0
        while self._store is None and not self._stopping.is_set():
            try:
                self._store = await self._in_thread(self._opener.open)
            except (StoreUnavailableError, QueryError) as error:
                delay_s = back_off_s(attempt)
                log.warning(
                    "%s; trying again in %.1f s (a new database: run `klaxon migrate`)", error, delay_s
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._stopping.wait()
                attempt += 1
        for seat in self._seats.values():
            seat.changed.set()

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
            if self._goes_on(record.place, seat):
                await self._add(seat, self._intake.take(record))

    def _goes_on(self, place: Partition, seat: _Seat) -> bool:
        """Whether the partition is still this seat's; the intake then goes on where the table said.

        Under the lock alone: what is still read for the last seat moves the intake on, and is dropped.
        """
        if seat.part is None or self._seats.get(place) is not seat:
            return False
        if not seat.going_on:
            self._intake.expect(place, seat.part.read_from)
            seat.going_on = True
        return True

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
            if part.due_us != seat.due_us:
                seat.due_us = part.due_us
                seat.changed.set()
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
        store = await self._connected(seat)
        part = None if store is None else await self._open(place, seat, store)
        if store is None or part is None:
            return
        stored, committed = part.read_from, 0
        while not seat.stop.is_set():
            block = part.take(_now_us(), end_offset=self._end_offset(place))
            if block is not None and await self._in_thread(store.store_block, block, seat.stop):
                stored = part.stored(block)
                seat.changed.set()
            if stored > committed and not seat.stop.is_set() and await self._link.commit({place: stored}):
                committed = stored
                fault("after_insert_commit")
            if block is None:
                await self._until_due(seat, part, committed=committed == stored)

    def _end_offset(self, place: Partition) -> int:
        """0 where it is not known, or where it is a marker's, which nobody adds."""
        if place.topic in TRANSACTIONAL:
            return 0
        position = self._link.position(place)
        return 0 if position is None else position.end_offset

    async def _until_due(self, seat: _Seat, part: PartitionArchive, *, committed: bool) -> None:
        """Wait until there may be a block to take, a commit to try again, or the seat was left."""
        due_us = seat.due_us = part.due_us
        wait_s = None if committed else COMMIT_AGAIN_S
        if due_us is not None:
            wait_s = max((due_us - _now_us()) / 1_000_000, PACE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while part.due_us == due_us and not seat.stop.is_set():
                    seat.changed.clear()
                    await seat.changed.wait()

    async def _connected(self, seat: _Seat) -> BlockStore | None:
        """The store once it is open; None when the seat was left meanwhile."""
        while self._store is None and not seat.stop.is_set():
            seat.changed.clear()
            await seat.changed.wait()
        return self._store

    async def _open(self, place: Partition, seat: _Seat, store: BlockStore) -> PartitionArchive | None:
        attempt = 0
        while not seat.stop.is_set():
            fault("before_checkpoint")
            try:
                part = await self._in_thread(store.open_partition, Topic(place.topic), place.partition)
            except PipelineError as error:
                delay_s = back_off_s(attempt)
                log.warning("%s: %s; trying again in %.1f s", place, error, delay_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await seat.changed.wait()  # it is left
                attempt += 1
                continue
            if seat.stop.is_set():
                break
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
                    if self._goes_on(place, seat):
                        await self._add(seat, self._intake.left_behind(place))

    def gauges(self) -> dict[str, dict[str, int]]:
        lags = self._lag.lags
        return {
            "archive": {**({} if self._store is None else self._store.gauges()), **self._lag.gauges()},
            **{
                str(place): {
                    **(seat.part.gauges() if seat.part is not None else {}),
                    **(lags[place].gauges() if place in lags else {}),
                }
                for place, seat in sorted(self._seats.items())
            },
        }

    def timings(self) -> dict[str, Timing]:
        return {}

    @property
    def recovered(self) -> int:
        return self._intake.recovered

    def missing(self) -> tuple[str, ...]:
        return tuple(
            f"{place}: ClickHouse has not said yet where to go on"
            for place, seat in sorted(self._seats.items())
            if seat.part is None
        )

    async def stop(self) -> None:
        for place in list(self._seats):
            self._leave(place)
        self._stopping.set()
        while not self._connecting.done():
            self._opener.cut()  # again and again: the driver asks once more on a new connection
            await asyncio.wait([self._connecting], timeout=0.2)
        if self._store is not None:
            await self._last_inserts(self._store)
        self._threads.shutdown(wait=False)
        await self._intake.stop()

    async def _last_inserts(self, store: BlockStore) -> None:
        """Wait for them; those that a server does not answer are given up: the table will say."""
        left, wait_s = set(self._tasks.values()), LAST_INSERTS_S
        while left:
            _, left = await asyncio.wait(left, timeout=wait_s)
            if left:
                store.cut()
                wait_s = 0.5


def archive(config: Config, opener: StoreOpener) -> WorkerSpec:
    """The worker, configured; the composition root brings what opens the store."""

    def make(link: Link, _counts: Mapping[Topic, int]) -> ArchiveWorker:
        return ArchiveWorker(link, config, opener)

    return WorkerSpec("archive", reads=READS, needs=(Topic.DEAD_LETTER,), make=make, patient=True)


def _now_us() -> int:
    return time.time_ns() // 1000
