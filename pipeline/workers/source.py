"""The shell around the core's sources: what `measure` and `pair` have in common.

It feeds each partition's records, in offset order and without gaps, to one core object; flushes what that
object has to say; commits what it allows once everything is acknowledged; and ticks silent partitions.
All content is decided in the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from aiokafka.errors import KafkaError

from pipeline.config import Config
from pipeline.core.source import Flush, HoleError, RecordMeta
from pipeline.errors import PipelineError
from pipeline.monitoring.timing import Timing
from pipeline.workers.broker import committed_offset
from pipeline.workers.cadence import GATHER_S, GATHER_STEP_S, MOST_UNACKNOWLEDGED, pause_s
from pipeline.workers.dead_letters import VersionError, dead_letters, send_letters
from pipeline.workers.faults import fault
from pipeline.workers.intake import Intake
from pipeline.workers.records import APPEND_TIME, Partition, Record
from pipeline.workers.runner import first_end_of
from pipeline.workers.source_kind import Source, SourceKind
from pipeline.workers.transport import Link
from pipeline.workers.under_way import Sent, UnderWay
from schemas.plain import Log
from schemas.topics import BUCKETS, TICK, Topic

log: Log = logging.getLogger("klaxon.source")

COMMIT_EVERY_S: Final = 1.0
SILENT_S: Final = 1.0
"""A partition that stands at its end is ticked after this long without a record."""


class TimestampError(PipelineError):
    """An input topic does not carry append times: content would depend on producers' clocks."""


@dataclass(slots=True)
class _Seat:
    """A partition that is or was ours. Its state outlives a revocation: it may come back."""

    source: Source
    owned: bool = True
    tenure: int = 0
    """Which assignment it is: a commit belongs to one."""
    first_since_assigned: bool = True
    warming_up: bool = False
    """Whether the source began inside the log and has published no final yet."""
    last_read_s: float = 0.0
    taken_us: int = 0
    """When it became ours."""
    append_us: int | None = None
    """Of the newest record, ticks included."""
    event_us: int | None = None
    """Append time of the newest record with events."""
    goal: int | None = None
    """End of the partition when somebody first asked whether it is caught up; read so far, it is."""
    ticking: asyncio.Task[None] | None = None
    """Waits for our tick to be acknowledged."""
    tick_offset: int | None = None
    """Our tick that was not read yet: one is enough."""
    commit: int | None = None
    committed: int = 0
    """By whomever: a commit never moves back."""
    letters: list[Awaitable[Any]] = field(default_factory=list)
    """Dead letters that were sent since the last flush."""
    flushed_offset: int = 0
    """The offset expected next at the last flush."""


class SourceWorker:
    """Processor of `measure` and `pair`."""

    def __init__(self, link: Link, config: Config, kinds: Mapping[Topic, SourceKind]) -> None:
        self._link = link
        self._config = config
        self._kinds = kinds
        self._intake = Intake(link, config.kafka)
        self._seats: dict[Partition, _Seat] = {}
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._replaced: dict[Topic, Counter[str]] = {topic: Counter() for topic in kinds}
        """What sources counted that others took the place of."""
        self._under_way = UnderWay(MOST_UNACKNOWLEDGED)

    async def assigned(self, places: frozenset[Partition]) -> None:
        now_s = asyncio.get_running_loop().time()
        for place in places:
            seat = self._seats.get(place)
            if seat is None:
                seat = self._seats[place] = _Seat(self._new_source(place))
            seat.owned = True
            seat.tenure += 1
            seat.first_since_assigned = True
            seat.last_read_s = now_s
            seat.taken_us = time.time_ns() // 1000
            seat.goal = None
            seat.tick_offset = None

    async def revoked(self, places: frozenset[Partition]) -> None:
        for place in places:
            if (seat := self._seats.get(place)) is not None:
                seat.owned = False
                seat.commit = None

    async def read(self, record: Record) -> None:
        async with self._lock:
            place = record.place
            seat = self._seats.get(place)
            if seat is None or not seat.owned:
                return  # delivered after the partition was revoked: whoever owns it reads it
            if seat.first_since_assigned:
                await self._resume(place, seat)
            async for each in self._intake.take(record):
                await self._feed(self._seats[place], each)

    async def _resume(self, place: Partition, seat: _Seat) -> None:
        """Where to go on after an assignment: with the state we have, or anew from the group's commit.

        What Faust delivers first says nothing about either: it can be later than both, and the records before
        it are in nobody's state.
        """
        committed = await committed_offset(self._config.kafka, self._link.group, place)
        seat.committed = committed or 0
        expected = seat.source.next_offset
        if expected is not None and (committed is None or committed <= expected):
            self._intake.expect(place, expected)
        else:
            if expected is not None:
                log.info("%s: offsets from %d on were read elsewhere; starting anew", place, expected)
                self._replaced[Topic(place.topic)].update(seat.source.counted)
                seat.source.give_back()
                seat.source = self._new_source(place)
            await self._intake.begin(place, committed)
        seat.first_since_assigned = False

    def _new_source(self, place: Partition) -> Source:
        topic = Topic(place.topic)
        return self._kinds[topic].make(topic, place.partition)

    async def _feed(self, seat: _Seat, record: Record) -> None:
        if self._config.kafka.append_time and record.timestamp_type != APPEND_TIME:
            raise TimestampError(
                f"{record.place}: offset {record.offset} carries its producer's time; set "
                "message.timestamp.type=LogAppendTime on the topic and see `klaxon topics check`"
            )
        kind = self._kinds[record.topic]
        if seat.source.next_offset is None:
            seat.warming_up = record.offset > 0
        decoded = None
        if not record.is_tick:
            decoded = kind.decode(record.value, record.content_type)
            if decoded.unknown_version is not None:
                raise VersionError(record, decoded.unknown_version)
            seat.event_us = record.append_us
            letters = dead_letters(record, decoded.rejected, payload=self._config.dead_letter.payload)
            seat.letters += await send_letters(self._link, letters)
        meta = RecordMeta(record.offset, record.append_us, len(record.value))
        try:
            seat.source.read(meta, decoded)
        except HoleError:
            # The intake has read the gap again and found nothing: said twice, the source accepts it.
            seat.source.read(meta, decoded)
        seat.last_read_s = asyncio.get_running_loop().time()
        seat.append_us = record.append_us
        if seat.tick_offset is not None and record.offset >= seat.tick_offset:
            seat.tick_offset = None
        self._changed.set()
        if seat.warming_up:
            fault("during_warm_up")
        kind.observe(seat.source)

    async def run(self) -> None:
        """Flush, wait for acknowledgements, commit, sweep and tick: none of it waits for another's broker."""
        steps = (self._commit, self._sweep, self._tick)
        await first_end_of(
            self._flush_what_changes(), self._under_way.acknowledge(), *map(_now_and_then, steps)
        )

    async def _flush_what_changes(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._under_way.room()
            await self._gather()
            self._changed.clear()
            started_s = loop.time()
            waiting = self._waiting_over_read()
            due_s = started_s + pause_s(await self._flush(waiting=waiting), behind=waiting > 1)
            await asyncio.sleep(due_s - loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENT_S / 4):
                    await self._changed.wait()

    async def _gather(self) -> None:
        """Let records be read that are known to wait, but not for long."""
        for _ in range(round(GATHER_S / GATHER_STEP_S)):
            if not any(self._waiting(place, seat) for place, seat in self._seats.items()):
                return
            await asyncio.sleep(GATHER_STEP_S)

    def gauges(self) -> dict[str, dict[str, int]]:
        now_us = time.time_ns() // 1000
        counted: dict[str, dict[str, int]] = {
            f"counted/{topic.value}": dict(
                sum(
                    (
                        Counter(seat.source.counted)
                        for place, seat in self._seats.items()
                        if place.topic == topic.value
                    ),
                    self._replaced[topic],
                )
            )
            for topic in self._kinds
        }
        sources = {
            str(place): {**seat.source.gauges(), **self._ages(place, seat, now_us)}
            for place, seat in self._seats.items()
            if seat.owned
        }
        return {**sources, **counted}

    def _ages(self, place: Partition, seat: _Seat, now_us: int) -> dict[str, int]:
        """How far behind a partition is, in records and in time, and how long nobody has sent anything."""
        event_us = seat.taken_us if seat.event_us is None else seat.event_us
        ages = {"evidence_age_us": max(0, now_us - event_us)}
        if seat.append_us is not None:
            ages["log_age_us"] = max(0, now_us - seat.append_us)
        if (lag := self._lag(place)) is not None:
            ages["lag_records"] = lag
        return ages

    def _lag(self, place: Partition) -> int | None:
        """Offsets between the next record to process and the end; None while either is unknown."""
        position, next_offset = self._link.position(place), self._intake.expected(place)
        if position is None:
            return None
        return max(position.end_offset - (position.next_offset if next_offset is None else next_offset), 0)

    def timings(self) -> dict[str, Timing]:
        return {"flush": self._under_way.took}

    @property
    def recovered(self) -> int:
        return self._intake.recovered

    def missing(self) -> tuple[str, ...]:
        behind = []
        for place, seat in sorted(self._seats.items()):
            position = self._link.position(place) if seat.owned else None
            if position is not None and seat.goal is None:
                seat.goal = position.end_offset
            if not seat.owned:
                continue
            if position is None or seat.goal is None:
                behind.append(f"{place}: its end is not known yet")
                continue
            expected = self._intake.expected(place)
            left = seat.goal - (position.next_offset if expected is None else expected)
            if left > 0:
                behind.append(f"{place}: {left} records to catch up")
        return tuple(behind)

    async def stop(self) -> None:
        for seat in self._seats.values():
            if seat.ticking is not None:
                seat.ticking.cancel()
        await self._intake.stop()

    def _waiting_over_read(self) -> float:
        """How many records wait, over those read since the last call. More than 1: this worker is behind."""
        waiting = read = 0
        for place, seat in self._seats.items():
            next_offset = seat.source.next_offset
            if not seat.owned or next_offset is None:
                continue
            read += max(next_offset - seat.flushed_offset, 0)
            seat.flushed_offset = next_offset
            waiting += self._waiting(place, seat)
        return waiting / read if read else math.inf if waiting else 0.0

    def _waiting(self, place: Partition, seat: _Seat) -> int:
        """Records of a partition of ours that are known to stand unread; none before its first one."""
        next_offset = seat.source.next_offset
        position = self._link.position(place) if seat.owned and next_offset is not None else None
        return 0 if position is None or next_offset is None else max(position.end_offset - next_offset, 0)

    async def _flush(self, *, waiting: float) -> float:
        """Publish what every owned source has to say, without waiting until it is acknowledged.

        Returns the seconds of CPU time that it computed: without sending.
        """
        fault("before_flush")
        began_flush_s, began_s = time.monotonic(), time.thread_time()
        for topic, kind in self._kinds.items():
            seats = self._seats.items()
            owned = [seat.source for place, seat in seats if seat.owned and place.topic == topic]
            kind.prepare(owned, waiting)
        commits: list[tuple[_Seat, int, int | None]] = []
        evidence: list[Awaitable[Any]] = []
        besides: list[Awaitable[Any]] = []
        flushes: list[tuple[Partition, Flush]] = []
        # All of it before anything is sent: that can take long, and meanwhile a partition be lost and won,
        # and more be read, which is better settled together by the next flush.
        for place, seat in self._seats.items():
            if not seat.owned:
                continue
            flush = seat.source.take_flush(waiting=waiting)
            commits.append((seat, seat.tenure, flush.commit))
            flushes.append((place, flush))
            seat.warming_up = seat.warming_up and not flush.finals
            besides += seat.letters
            seat.letters = []
        spent_s = time.thread_time() - began_s
        for place, flush in flushes:
            key = str(place).encode()
            for topic, partition, value in _records_of(place, flush):
                sent = await self._link.send(topic, value, key=key, content_type=BUCKETS, partition=partition)
                (besides if topic is Topic.PAIRS else evidence).append(sent)
        if evidence or besides:
            fault("flush_sent_before_acknowledged")
        self._under_way.put(Sent(began_flush_s, evidence, besides, partial(self._may_commit, commits)))
        return spent_s

    def _may_commit(self, commits: Sequence[tuple[_Seat, int, int | None]]) -> None:
        """A flush and all before it are acknowledged: each seat may commit, in the tenure that flushed."""
        for seat, tenure, commit in commits:
            if commit is not None and seat.owned and seat.tenure == tenure:
                seat.commit = commit

    async def _commit(self) -> None:
        offsets = {
            place: seat.commit
            for place, seat in self._seats.items()
            if seat.owned and seat.commit is not None and seat.commit > seat.committed
        }
        if offsets and await self._link.commit(offsets):
            for place, offset in offsets.items():
                self._seats[place].committed = offset
            fault("after_commit")

    async def _sweep(self) -> None:
        """Read what Faust left out at the end of a partition."""
        async with self._lock:
            for place, seat in list(self._seats.items()):
                if seat.owned and not seat.first_since_assigned:
                    async for record in self._intake.left_behind(place):
                        await self._feed(seat, record)

    async def _tick(self) -> None:
        """Append a tick to every owned partition that is read to its end and has been silent for a second."""
        now_s = asyncio.get_running_loop().time()
        for place, seat in list(self._seats.items()):
            position = self._link.position(place) if seat.owned else None
            silent = now_s - seat.last_read_s >= SILENT_S
            if not silent or position is None or not position.at_end:
                continue
            if seat.ticking is None and seat.tick_offset is None:
                sent = await self._link.send(
                    Topic(place.topic), b"", key=None, content_type=TICK, partition=place.partition
                )
                seat.ticking = asyncio.create_task(self._ticked(place, seat, sent))
                fault("tick_sent")

    async def _ticked(self, place: Partition, seat: _Seat, sent: Awaitable[Any]) -> None:
        """Wait for a tick's acknowledgement, apart from all else: the partition may have lost its leader."""
        try:
            offset = (await sent).offset
        except KafkaError as error:
            log.warning("%s: takes no tick, so its seconds stay open: %r; trying again", place, error)
        else:
            if offset >= (seat.source.next_offset or 0):  # else it was read before this line was reached
                seat.tick_offset = offset
        finally:
            seat.ticking = None


async def _now_and_then(step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await step()
        await asyncio.sleep(COMMIT_EVERY_S)


def _records_of(place: Partition, flush: Flush) -> Iterator[tuple[Topic, int, bytes]]:
    """Topic, partition and value of everything a flush publishes."""
    for final in flush.finals:
        yield Topic.BUCKETS, final.gating_partition, final.value
    if flush.finals and flush.fresh:
        fault("finals_sent_before_fresh")
    for fresh in flush.fresh:
        yield Topic.PARTIALS, fresh.gating_partition, fresh.value
    for pairs in flush.pairs:
        yield Topic.PAIRS, place.partition, msgspec.msgpack.encode(pairs)
