"""From closed and changed seconds to records: per gating partition, split to what a broker takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import msgspec

from pipeline.core.buckets import Buckets, changed_together, close_together
from pipeline.core.cell_bytes import Portion, array_head
from pipeline.core.source import BucketRecord, ContentSettings, LogPosition
from schemas.buckets import FinalBuckets, FreshCells, Population
from schemas.topics import MAX_RECORD_BYTES, Topic, gating_partition

VERSION: Final = 1
_ENVELOPE_BYTES: Final = 2_000
"""More than everything around the seconds of a record takes."""
_PORTION_BYTES: Final = 32
"""More than the array heads and numbers around one more portion."""


class Records:
    """Makes the records of one source partition."""

    def __init__(
        self, topic: Topic, partition: int, settings: ContentSettings, limit_bytes: int = MAX_RECORD_BYTES
    ) -> None:
        """`limit_bytes` bounds every record made here."""
        self._topic = topic.value
        self._partition = partition
        self._gating_partitions = settings.gating_partitions
        self._settings_hash = settings.hash
        self._limit_bytes = limit_bytes - _ENVELOPE_BYTES
        self._encode = msgspec.msgpack.Encoder().encode

    def finals(
        self, portions: Sequence[Portion], closed: tuple[int, int], whole_from: int, offset: int
    ) -> list[BucketRecord]:
        """The statement that `closed` (first, last second) are closed, for every gating partition."""
        records = []
        for gating, held in enumerate(self._by_gating_partition(portions)):
            pieces = self._split(held)
            for part, piece in enumerate(pieces):
                statement = FinalBuckets(
                    v=VERSION,
                    topic=self._topic,
                    partition=self._partition,
                    gating_partition=gating,
                    closed_from=closed[0],
                    closed_through=closed[1],
                    whole_from=whole_from,
                    offset=offset,
                    settings_hash=self._settings_hash,
                    part=part,
                    parts=len(pieces),
                    seconds=[],
                )
                records.append(BucketRecord(gating, self._record(statement, piece)))
        return records

    def fresh(self, portions: Sequence[Portion], whole_from: int, offset: int) -> list[BucketRecord]:
        """Changed cells of open seconds; nothing for a gating partition without any."""
        records: list[BucketRecord] = []
        for gating, held in enumerate(self._by_gating_partition(portions)):
            statement = FreshCells(
                v=VERSION,
                topic=self._topic,
                partition=self._partition,
                gating_partition=gating,
                offset=offset,
                whole_from=whole_from,
                settings_hash=self._settings_hash,
                seconds=[],
            )
            pieces = self._split(held) if held else ()
            records += (BucketRecord(gating, self._record(statement, piece)) for piece in pieces)
        return records

    def _by_gating_partition(self, portions: Sequence[Portion]) -> list[list[Portion]]:
        """Populations go to their roll-out's gating partition, telemetry (no population) to every one."""
        spread: list[list[Portion]] = [[] for _ in range(self._gating_partitions)]
        for portion in portions:
            if portion.population is None:
                for held in spread:
                    held.append(portion)
            else:
                spread[gating_partition(portion.population.rollout, self._gating_partitions)].append(portion)
        return spread

    def _split(self, portions: Sequence[Portion]) -> list[list[Portion]]:
        """Pieces that fit a record each; at least one, in order, cut between portions."""
        pieces: list[list[Portion]] = [[]]
        used = 0
        for portion in portions:
            size = len(portion.value) + len(self._encode(portion.population)) + _PORTION_BYTES
            if used and used + size > self._limit_bytes:
                pieces.append([])
                used = 0
            pieces[-1].append(portion)
            used += size
        return pieces

    def _record(self, statement: FinalBuckets | FreshCells, portions: Sequence[Portion]) -> bytes:
        """A statement with these cells as its last element, `seconds`, which is empty so far."""
        seconds = [(second, list(held)) for second, held in groupby(portions, key=_second)]
        parts = [self._encode(statement)[: -len(array_head(0))], array_head(len(seconds))]
        for second, of_second in seconds:
            contents = [(population, list(held)) for population, held in groupby(of_second, key=_population)]
            parts += (array_head(2), self._encode(second), array_head(len(contents)))
            for population, held in contents:
                cells = array_head(sum(portion.cells for portion in held))
                parts += (array_head(2), self._encode(population), cells)
                parts += (portion.value for portion in held)
        return b"".join(parts)


class Outlet:
    """The open seconds of a source, and what leaves of them."""

    def __init__(self, buckets: Buckets, log: LogPosition, records: Records) -> None:
        """Nothing has left yet."""
        self.buckets = buckets
        self.log = log
        self._records = records
        self._finals: list[BucketRecord] = []
        self._fresh: list[BucketRecord] = []
        self.stated_through = -1
        """Newest closed second that was taken out of the buckets."""

    def state(self, closed: Sequence[Portion]) -> None:
        """State what is closed, none that was not seen whole; `closed`: what was in it."""
        log = self.log
        first, last = max(self.stated_through + 1, log.whole_from), log.closed_through
        self.stated_through = last
        if first <= last:
            self._finals += self._records.finals(closed, (first, last), log.whole_from, log.closing_offset)

    def show(self, changed: Sequence[Portion]) -> None:
        """Cells of open seconds that changed."""
        offset = -1 if self.log.next_offset is None else self.log.next_offset - 1
        self._fresh += self._records.fresh(changed, self.log.whole_from, offset)

    def take(self) -> tuple[list[BucketRecord], list[BucketRecord]]:
        """Finals and fresh cells that have not left yet."""
        finals, fresh = self._finals, self._fresh
        self._finals, self._fresh = [], []
        return finals, fresh

    @property
    def finals_waiting(self) -> int:
        """Finals that have not left yet."""
        return len(self._finals)


def close_all(outlets: Sequence[Outlet]) -> None:
    """Take out the seconds that are closed, and state it. All that counts in them must have been added."""
    due = [outlet for outlet in outlets if outlet.log.closed_through != outlet.stated_through]
    closed = close_together([(outlet.buckets, outlet.log.closed_through) for outlet in due])
    for outlet, portions in zip(due, closed, strict=True):
        outlet.state(portions)


def show_all(outlets: Sequence[Outlet], waiting: float) -> None:
    """Take out the cells that changed, but of seconds that what waits will close (`LogPosition.flushed`)."""
    changed = changed_together([(outlet.buckets, outlet.log.flushed(waiting)) for outlet in outlets])
    for outlet, portions in zip(outlets, changed, strict=True):
        outlet.show(portions)


def _second(portion: Portion) -> int:
    return portion.second


def _population(portion: Portion) -> Population | None:
    return portion.population
