"""What every source partition has in common: log time, what was read, `whole_from`, the commit rule, flushes.

A source is one partition of an input topic. Its content is a function of the partition's log alone
(architecture.md, "Buckets"); nothing here reads a clock.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pipeline.core.bins import BIN_LAYOUT
from pipeline.core.divergence import KERNEL
from pipeline.core.evidence import SECOND_US
from schemas.pairs import PairBatch
from schemas.topics import GATING_PARTITIONS

EVENT_AHEAD_US: Final = 5_000_000
"""An event's time is cut at its record's append time plus this."""
COMMIT_MARGIN_US: Final = 10_000_000
REPORT_MEMORY_US: Final = 5_000_000
"""A producer's report of drops counts once if it is re-sent within this log time."""
WAITING_BYTES: Final = 256 << 20
"""A group of halves waits, and a key is remembered, for at most this many bytes of further records; a record
counts with what it takes in memory: its value, RECORD_BYTES for its columns, HALF_BYTES for every half."""
RECORD_BYTES: Final = 8_192
HALF_BYTES: Final = 1_536
"""Measured: without them, halves of one position would take 20 times the bytes they came in."""
BYTES_AT_ONCE: Final = 32 << 20
"""What waits to be counted holds its records: it waits for at most this many bytes of the log."""
_INDEX_STEP_US: Final = 250_000
_CONTENT_RULES: Final = 6
"""Raised whenever the meaning of a bucket's content changes, so that the settings hash does."""


class SourceError(Exception):
    """A source cannot go on with what it was given."""


class HoleError(SourceError):
    """Records between what was read and what came are missing; seek back to `expected` and read again.

    If the same record comes again, the hole is the log's own (a foreign transaction's marker): it is then
    accepted and counted. After a reassignment, drop the source and start a new one instead.
    """

    def __init__(self, expected: int, found: int) -> None:
        """Offsets: what should have come, and what came."""
        super().__init__(f"offsets {expected} to {found - 1} did not come; read again from {expected}")
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class ContentSettings:
    """What shapes the content of buckets. Sources with different hashes are never judged together."""

    lateness_us: int = 15_000_000
    join_timeout_us: int = 60_000_000
    cells_per_bucket: int = 2048
    gating_partitions: int = GATING_PARTITIONS

    @property
    def hash(self) -> str:
        """16 hex digits over every setting that shapes content, the bin layout, and what scores pairs."""
        shaping = (
            _CONTENT_RULES,
            BIN_LAYOUT,
            KERNEL,
            self.lateness_us,
            self.join_timeout_us,
            self.cells_per_bucket,
            self.gating_partitions,
        )
        return hashlib.sha256(repr(shaping).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """Where a record stands: `append_us` is the broker's time, `size_bytes` the length of its value."""

    offset: int
    append_us: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """An encoded `FinalBuckets` or `FreshCells`, as it is sent."""

    gating_partition: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Flush:
    """What a source has to say since the last flush.

    `commit` (the offset to re-read from first after a crash; None: nothing new) may be committed only after
    everything in this and all earlier flushes is acknowledged.
    """

    finals: list[BucketRecord] = field(default_factory=list)
    fresh: list[BucketRecord] = field(default_factory=list)
    pairs: list[PairBatch] = field(default_factory=list)
    commit: int | None = None


class LogPosition:
    """How far a source has read: log time, bytes, `whole_from`, closed seconds, and what may be committed.

    Only offsets at which the log time rose are candidates for a commit: a successor that begins at one knows
    the true log time from its first record on, and every earlier record was appended strictly before.
    """

    def __init__(self, lateness_us: int, memory_us: int) -> None:
        """`memory_us`: how far back content may depend on the log beyond lateness (3J for pairs, else 0)."""
        self._lateness_us = lateness_us
        self._retain_us = memory_us + lateness_us + COMMIT_MARGIN_US
        self._warm_up_us = memory_us + EVENT_AHEAD_US
        self._index: deque[tuple[int, int]] = deque()
        self._committed: int | None = None
        self._hole: tuple[int, int] | None = None
        self._flushed_us: int | None = None
        """Log time at the last flush."""
        self.holes = 0
        self.next_offset: int | None = None
        self.log_us = -1
        self.bytes_read = 0
        self.whole_from = 0
        self.closed_through = -1
        """Newest second that nothing can enter any more."""
        self.closing_offset = -1
        """Of the record that closed it."""

    def advance(self, offset: int, append_us: int, size_bytes: int) -> bool:
        """Take note of a record; False if it was read before. Raises HoleError once per hole."""
        expected = self.next_offset
        if expected is None:
            if offset > 0:
                self.whole_from = -(-(append_us + self._warm_up_us) // SECOND_US)
        elif offset < expected:
            return False
        elif offset > expected:
            if self._hole != (expected, offset):
                self._hole = (expected, offset)
                raise HoleError(expected, offset)
            self.holes += 1
        self._hole = None
        self.next_offset = offset + 1
        self.bytes_read += size_bytes
        if append_us > self.log_us:
            self.log_us = append_us
            if not self._index or append_us >= self._index[-1][1] + _INDEX_STEP_US:
                self._index.append((offset, append_us))
            closed_through = self._closed_at(append_us)
            if closed_through > self.closed_through:
                self.closed_through, self.closing_offset = closed_through, offset
        return True

    def _closed_at(self, log_us: int) -> int:
        """Newest second that is closed at this log time; −1 for none."""
        # Strictly past the end of the second plus lateness, so that an event at exactly that time enters.
        return max(-(-(log_us - self._lateness_us) // SECOND_US) - 2, -1)

    def flushed(self, waiting: float) -> int:
        """Take note of a flush; the newest second that will be closed once what waits is read.

        `waiting`: records that wait, over those read since the last flush. Log time is taken to go on with
        them as it did, and no further than since the last flush.
        """
        moved_us = 0 if self._flushed_us is None else self.log_us - self._flushed_us
        self._flushed_us = self.log_us
        return self._closed_at(self.log_us + int(moved_us * min(waiting, 1.0)))

    def accepts(self, second: int) -> bool:
        """Whether an event of this second may enter its bucket at the present log time."""
        return second > self.closed_through

    def commit(self) -> int | None:
        """The offset that may be committed once everything so far is flushed; None if it did not move."""
        horizon = self.log_us - self._retain_us
        while len(self._index) > 1 and self._index[1][1] <= horizon:
            self._index.popleft()
        if not self._index:
            return None
        offset, log_us = self._index[0]
        if log_us > horizon or (self._committed is not None and offset <= self._committed):
            return None
        self._committed = offset
        return offset

    @property
    def index_entries(self) -> int:
        """Entries of the index from offset to log time."""
        return len(self._index)


class ReportMemory:
    """Producers' reports of drops, so that a re-sent batch does not report twice.

    A report counts unless the same one stood in the log within REPORT_MEMORY_US before it.
    """

    def __init__(self) -> None:
        """Empty; bounded by expiry: one entry per record that reports a drop, for 5 s of log time."""
        self._last: dict[tuple[str, int], int] = {}

    def is_new(self, producer_id: str, sequence: int, log_us: int) -> bool:
        """Take note of a report at this log time (never falling); whether it counts."""
        while self._last:
            oldest = next(iter(self._last))
            if log_us - self._last[oldest] <= REPORT_MEMORY_US:
                break
            del self._last[oldest]
        key = (producer_id, sequence)
        known = self._last.pop(key, None) is not None
        self._last[key] = log_us
        return not known

    def __len__(self) -> int:
        return len(self._last)
