"""Cutting one source partition's rows into blocks. Pure: no clock, no I/O.

A block is what is inserted at once and therefore stored whole or not at all: rows of one source partition
and one table partition (`day`), in offset order, within the limits. Records are never split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.store.columns import Column, Columns, constant, joined
from pipeline.store.rows import Rows

US_PER_DAY: Final = 86_400_000_000
BEHIND_TIMES: Final = 2


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """When a block is full or old enough."""

    rows: int = 100_000
    size_bytes: int = 64 << 20
    age_us: int = 10_000_000

    @property
    def behind_age_us(self) -> int:
        """How old a block gets while more records of its partition wait: an insert costs the same for few
        rows as for many, and what waits is late already."""
        return BEHIND_TIMES * self.age_us


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of one stored block, both inclusive."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Block:
    """Records `first..last` of one source partition. Frozen: a retry sends exactly these rows."""

    table: str
    topic: str
    partition: int
    first: int
    last: int
    append_us: int
    """Append time of the first record."""
    rows: int
    """0 where no record left a row: nothing is to be inserted, the offsets are done with all the same."""
    columns: Columns
    """All of the table's columns; empty if `rows` is 0."""
    token: str
    completes: bool
    """The same range was inserted before and may be there in part: only what is missing may be inserted."""


@dataclass(slots=True)
class _Open:
    first: int
    last: int
    append_us: int
    opened_us: int
    day: int | None = None
    rows: int = 0
    size_bytes: int = 0
    parts: list[Rows] = field(default_factory=list)


class BlockCutter:
    """Rows of one source partition in, blocks out, in order.

    `completing`: a block of an earlier process that is not whole. Its records come first and become one block
    of exactly that range, whatever the limits.
    """

    def __init__(
        self,
        table: str,
        topic: str,
        partition: int,
        limits: BlockLimits,
        boot_id: str,
        completing: Range | None = None,
    ) -> None:
        self._table = table
        self._topic = topic
        self._partition = partition
        self._limits = limits
        self._boot_id = boot_id
        self._completing = completing
        self._open: _Open | None = None
        self._sealed: deque[Block] = deque()

    def add(self, offset: int, append_us: int, rows: Rows | None, now_us: int) -> None:
        """One record's rows (None or n = 0: it leaves none). Offsets ascend; holes are fine."""
        day = day_of(append_us)
        n = rows.n if rows is not None else 0
        size_bytes = rows.size_bytes if rows is not None else 0
        if self._open is None and self._completing is not None and offset > self._completing.last:
            # Nothing of the range is in the log any more: there is nothing to complete it from.
            self._completing = None
        if self._open is not None and self._cut_before(self._open, offset, day, n, size_bytes):
            self._seal()
        if self._open is None:
            self._open = _Open(offset, offset, append_us, now_us)
        self._open.last = offset
        if rows is not None and n > 0:
            self._open.day = day
            self._open.rows += n
            self._open.size_bytes += size_bytes
            self._open.parts.append(rows)
        if self._completing is not None:
            if offset >= self._completing.last:
                self._seal()
        elif self._open.rows >= self._limits.rows or self._open.size_bytes >= self._limits.size_bytes:
            self._seal()

    def take(self, now_us: int, *, force: bool = False, more_wait: bool = False) -> Block | None:
        """The oldest block that is full or old enough; `force`: also one that is neither.

        `more_wait`: records of this partition stand in the log that were not added yet.
        A block that completes an earlier one is never cut short.
        """
        if not self._sealed and self._open is not None:
            age_us = self._limits.behind_age_us if more_wait else self._limits.age_us
            due = force or now_us - self._open.opened_us >= age_us
            if due and self._completing is None:
                self._seal()
        return self._sealed.popleft() if self._sealed else None

    @property
    def due_us(self) -> int | None:
        """When there is a block to take, if no more wait; None: nothing is held."""
        if self._sealed:
            return 0
        return None if self._open is None else self._open.opened_us + self._limits.age_us

    @property
    def sealed(self) -> int:
        """Blocks that wait to be taken."""
        return len(self._sealed)

    @property
    def holds_records(self) -> bool:
        """Whether a block is still filling."""
        return self._open is not None

    @property
    def oldest(self) -> tuple[int, int] | None:
        """Offset and append time of the first record that is not taken; None where there is none."""
        held = self._sealed[0] if self._sealed else self._open
        return None if held is None else (held.first, held.append_us)

    @property
    def open_rows(self) -> int:
        """Rows in the block that is still filling."""
        return self._open.rows if self._open is not None else 0

    def _cut_before(self, open_: _Open, offset: int, day: int, n: int, size_bytes: int) -> bool:
        if self._completing is not None:
            # Only if the range's last record is gone from the log.
            return offset > self._completing.last
        if n == 0 or open_.rows == 0:
            return False
        return (
            day != open_.day
            or open_.rows + n > self._limits.rows
            or open_.size_bytes + size_bytes > self._limits.size_bytes
        )

    def _seal(self) -> None:
        open_ = self._open
        assert open_ is not None
        completing, self._completing, self._open = self._completing, None, None
        first = open_.first if completing is None else completing.first
        last = open_.last if completing is None else completing.last
        columns: dict[str, Column] = {}
        if open_.rows > 0:
            assert open_.day is not None
            columns = {
                name: joined([part.columns[name] for part in open_.parts]) for name in open_.parts[0].columns
            }
            constants: Mapping[str, int | str] = {
                "topic": self._topic,
                "part": self._partition,
                "blk_first": first,
                "blk_last": last,
                "blk_rows": open_.rows,
                "blk_boot": self._boot_id,
                "day": open_.day,
            }
            columns |= {name: constant(value, open_.rows) for name, value in constants.items()}
        token = token_of(self._topic, self._partition, first, last, self._boot_id)
        self._sealed.append(
            Block(
                self._table,
                self._topic,
                self._partition,
                first,
                last,
                open_.append_us,
                open_.rows,
                columns,
                token,
                completing is not None,
            )
        )


def token_of(topic: str, partition: int, first: int, last: int, boot_id: str) -> str:
    """De-duplication token of a block. It never outlives its process: a crash may have poisoned it."""
    return f"{topic}:{partition}:{first}-{last}:{boot_id}"


def day_of(append_us: int) -> int:
    """UTC day (days since the epoch) of a record: the table partition of its rows, a function of the log."""
    return append_us // US_PER_DAY
