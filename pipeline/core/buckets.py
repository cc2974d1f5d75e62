"""One-second buckets of one source: cells, their cap in log order, what changed, what is closed.

Everything here is a function of the rows in log order: not of how they were cut into records, nor of when
anything was taken out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias

import numpy as np

from pipeline.core.cell_bytes import Portion
from pipeline.core.cells import OTHER, OVERFLOW
from pipeline.core.evidence import Evidence
from pipeline.core.table import CellTable, Histograms, Runs, histogram_keys
from schemas.buckets import Population
from schemas.columns import I8, Bool
from schemas.events import Arm

CellKey: TypeAlias = tuple[Population | None, str, str]

_NO_ROOM: Final = -1
"""Stands for the column of a cell that found no room in its bucket."""
_CELLS_AT_ONCE: Final = 1024
"""Cells encoded together, unless one second has more: a few hundred bytes of memory for each number."""
_SMALL_KEYS: Final = 1 << 16
"""Keys below it are sorted as 16-bit integers: by radix, in a tenth of the time."""


@dataclass(slots=True)
class Bucket:
    """One open second. `used` counts the cells held against the cap."""

    table: CellTable
    cells: dict[CellKey, int] = field(default_factory=dict)
    """Each cell's column of the table."""
    members: dict[Population | None, list[int]] = field(default_factory=dict)
    """The columns of each population's cells; both in the order in which cells were claimed."""
    histograms: Histograms = field(default_factory=Histograms)
    populations: set[Population] = field(default_factory=set)
    """Those with cells of their own: of the others only the catch-all has some."""
    used: int = 0
    seen: set[Hashable] = field(default_factory=set)
    """Keys of the events counted here, for dropping duplicates."""

    def place(self, key: CellKey, capacity: int) -> int | None:
        """The cell's column, taken if there is room for it; None where there is none."""
        column = self.cells.get(key)
        if column is not None:
            return column
        population, _, _ = key
        # A new population takes two places, so that it always has its own `other`.
        newcomer = population is not None and population not in self.populations
        needed = 2 if newcomer else 1
        if self.used + needed > capacity:
            return None
        if newcomer and population is not None:
            self.populations.add(population)
        self.used += needed
        return self._take(key)

    def overflow(self, population: Population | None) -> int:
        """The column of evidence that found no cell: its population's `other`, or its arm's catch-all."""
        if population is not None and population not in self.populations:
            population = catch_all(population.arm)
        key: CellKey = (population, OTHER, "")
        column = self.cells.get(key)
        return self._take(key) if column is None else column

    def _take(self, key: CellKey) -> int:
        population, dimension, value = key
        column = self.cells[key] = self.table.take(dimension, value)
        self.members.setdefault(population, []).append(column)
        return column

    def columns(self) -> I8:
        """Of all cells, in order."""
        return np.fromiter(chain.from_iterable(self.members.values()), dtype=np.int64, count=len(self.cells))


def catch_all(arm: Arm) -> Population:
    """The population of evidence whose own population found no room in a bucket."""
    return Population("", None, arm, None)


class Buckets:
    """The open seconds of one source."""

    def __init__(self, capacity: int) -> None:
        """At most `capacity` cells per second, besides one `other` per arm for populations without room."""
        self._capacity = capacity
        self._table = CellTable()
        self._open: dict[int, Bucket] = {}
        self._changed: set[int] = set()

    def bucket(self, second: int) -> Bucket:
        """The bucket of an open second; the caller guarantees that it is not closed yet."""
        bucket = self._open.get(second)
        if bucket is None:
            bucket = self._open[second] = Bucket(self._table)
        return bucket

    def add(self, evidence: Evidence) -> None:
        """Add rows, all of open seconds, in log order."""
        if evidence.n == 0:
            return
        claims = _claims(evidence)
        self._changed.update(claims.seconds)
        columns = self._place(evidence, claims)
        totals = {name: counts for name, counts in evidence.totals.items() if counts.any()}
        homes = claims.homes(columns, evidence.n) if totals else None
        lost = columns == _NO_ROOM
        if lost.any():
            rows, times = np.unique(claims.only(lost).rows, return_counts=True)
            others = self._overflow_columns(evidence, rows)
            self._table.add_counts(OVERFLOW, times, others)
            if homes is not None:
                unhoused = homes[rows] == _NO_ROOM
                homes[rows[unhoused]] = others[unhoused]
            self._add(evidence, *_grouped(rows, others))
            claims, columns = claims.only(~lost), columns[~lost]
        self._add(evidence, claims.rows, claims.starts, columns)
        for name, counts in totals.items():
            assert homes is not None
            held = np.flatnonzero((counts != 0) & (homes != _NO_ROOM))
            self._table.add_counts(name, counts[held], homes[held])

    def _place(self, evidence: Evidence, claims: _Claims) -> I8:
        """Every claim's column, taken in log order: by first row, within a row by dimension."""
        order = np.lexsort((claims.dimension, claims.rows[claims.starts]))
        columns = np.empty(len(order), dtype=np.int64)
        wanted = zip(
            order.tolist(),
            evidence.second[claims.rows[claims.starts[order]]].tolist(),
            claims.population[order].tolist(),
            claims.dimension[order].tolist(),
            claims.code[order].tolist(),
            strict=True,
        )
        for at, second, population, number, code in wanted:
            dimension = evidence.dimensions[number]
            key = (evidence.populations[population], dimension.name, dimension.values[code])
            column = self.bucket(second).place(key, self._capacity)
            columns[at] = _NO_ROOM if column is None else column
        return columns

    def _overflow_columns(self, evidence: Evidence, rows: I8) -> I8:
        """Where each of these rows counts, once, however many of its cells found no room."""
        seconds, populations = evidence.second[rows].tolist(), evidence.population[rows].tolist()
        found = [
            self.bucket(second).overflow(evidence.populations[population])
            for second, population in zip(seconds, populations, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def _add(self, evidence: Evidence, rows: I8, starts: I8, columns: I8) -> None:
        """Add counters, measures and worst rows: `rows[starts[i] : starts[i + 1]]` to `columns[i]`."""
        if len(rows) == 0:
            return
        table = self._table
        for name, counts in evidence.counters.items():
            table.add_counts(name, np.add.reduceat(counts[rows], starts), columns)
        table.add_rows(evidence.measures, rows, starts, columns)
        owners = np.repeat(columns, np.diff(starts, append=len(rows)))
        for keys, owning in histogram_keys(evidence.measures, rows, owners):
            seconds = evidence.second[owning]
            for second in np.unique(seconds).tolist():
                self.bucket(second).histograms.add(keys[seconds == second])
        if evidence.worst is not None and evidence.ids is not None:
            scores, present = evidence.worst
            held = present[rows]
            table.add_worst(scores, evidence.ids, rows[held], owners[held])

    def close(self, through: int) -> list[Portion]:
        """Take out all seconds up to and including `through`, ascending, in the form that travels."""
        closed = [(second, self._open[second]) for second in sorted(self._open) if second <= through]
        portions = list(self._portions(closed, changed_only=False))
        for second, bucket in closed:
            self._table.give_back(bucket.columns())
            self._changed.discard(second)
            del self._open[second]
        return portions

    def changed(self) -> list[Portion]:
        """Whole cells of open seconds that changed since the last call, seconds ascending."""
        changed = [(second, self._open[second]) for second in sorted(self._changed)]
        portions = list(self._portions(changed, changed_only=True))
        self._changed.clear()
        self._table.changed[:] = False
        return portions

    def _portions(self, seconds: Sequence[tuple[int, Bucket]], *, changed_only: bool) -> Iterator[Portion]:
        """Cells of these seconds, by population; many cells at once cost less each."""
        batch = _Batch(self._table)
        for second, bucket in seconds:
            batch.add(second, bucket, changed_only=changed_only)
            if batch.cells >= _CELLS_AT_ONCE:
                yield from batch.portions()
                batch = _Batch(self._table)
        yield from batch.portions()

    @property
    def open_seconds(self) -> int:
        """Number of open seconds."""
        return len(self._open)

    @property
    def cells_held(self) -> int:
        """Number of cells in all open seconds."""
        return sum(len(bucket.cells) for bucket in self._open.values())

    @property
    def keys_held(self) -> int:
        """Number of event keys held to drop duplicates."""
        return sum(len(bucket.seen) for bucket in self._open.values())


class _Batch:
    """Cells that are encoded together."""

    def __init__(self, table: CellTable) -> None:
        self._table = table
        self._members: list[tuple[int, Population | None, int]] = []
        """Second, population, and how many cells of it follow."""
        self._columns: list[I8] = []
        self._runs: list[Runs] = []
        self.cells = 0

    def add(self, second: int, bucket: Bucket, *, changed_only: bool) -> None:
        """One second's cells."""
        columns = bucket.columns()
        sizes = [len(members) for members in bucket.members.values()]
        if changed_only:
            chosen = self._table.changed[columns]
            ends = np.cumsum(sizes)
            sizes = np.diff(np.cumsum(chosen)[ends - 1], prepend=0).tolist()
            columns = columns[chosen]
        self._members += [
            (second, population, size) for population, size in zip(bucket.members, sizes, strict=True)
        ]
        self._columns.append(columns)
        self._runs.append(self._table.runs(columns, bucket.histograms))
        self.cells += len(columns)

    def portions(self) -> Iterator[Portion]:
        """All of them, in order."""
        if not self.cells:
            return
        made = self._table.cells(np.concatenate(self._columns), self._runs)
        first = 0
        for second, population, size in self._members:
            yield from made.portions(second, population, first, first + size)
            first += size


@dataclass(frozen=True, slots=True)
class _Claims:
    """Rows × cells, cell by cell: rows `rows[starts[i] : starts[i + 1]]`, ascending, belong to cell i."""

    rows: I8
    starts: I8
    population: I8
    dimension: I8
    code: I8
    seconds: list[int]
    """All there are."""

    @property
    def _sizes(self) -> I8:
        return np.diff(self.starts, append=len(self.rows))

    def only(self, cells: Bool) -> _Claims:
        """Those of some of the cells."""
        sizes = self._sizes
        return _Claims(
            self.rows[np.repeat(cells, sizes)],
            _starts_of(sizes[cells]),
            self.population[cells],
            self.dimension[cells],
            self.code[cells],
            self.seconds,
        )

    def homes(self, columns: I8, n: int) -> I8:
        """(n,) each row's column in the first dimension, where its totals count; _NO_ROOM for none."""
        homes = np.full(n, _NO_ROOM, dtype=np.int64)
        first = np.repeat(self.dimension == 0, self._sizes)
        homes[self.rows[first]] = np.repeat(columns, self._sizes)[first]
        return homes


def _claims(evidence: Evidence) -> _Claims:
    """Which rows claim which cells. Cells stand by second, dimension, population and code."""
    seconds, second_at = np.unique(evidence.second, return_inverse=True)
    widths = np.array([len(dimension.values) for dimension in evidence.dimensions], dtype=np.int64)
    begins = _starts_of(widths * len(evidence.populations))
    per_second = int(widths.sum()) * len(evidence.populations)
    base = second_at.astype(np.int64) * per_second
    row_parts, key_parts = [], []
    for dimension, width, begin in zip(evidence.dimensions, widths.tolist(), begins.tolist(), strict=True):
        keys = evidence.population * width + base
        keys += dimension.codes + begin
        if int(dimension.codes.min()) >= 0:
            row_parts.append(np.arange(evidence.n))
        else:
            rows = np.flatnonzero(dimension.codes >= 0)
            row_parts.append(rows)
            keys = keys[rows]
        key_parts.append(keys)
    rows, keys = np.concatenate(row_parts), np.concatenate(key_parts)
    small = per_second * len(seconds) <= _SMALL_KEYS
    # Stable, and rows ascend within a dimension: so they do within a cell.
    order = np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")
    rows, keys = rows[order], keys[order]
    starts = _starts_of_runs(keys)
    cells = keys[starts] % per_second
    number = np.searchsorted(begins, cells, side="right") - 1
    cells -= begins[number]
    width = widths[number]
    return _Claims(rows, starts, cells // width, number, cells % width, seconds.tolist())


def _grouped(rows: I8, columns: I8) -> tuple[I8, I8, I8]:
    """Rows by column, where each column's begin, and the distinct columns."""
    order = np.argsort(columns, kind="stable")
    rows, columns = rows[order], columns[order]
    starts = _starts_of_runs(columns)
    return rows, starts, columns[starts]


def _starts_of(sizes: I8) -> I8:
    return np.cumsum(sizes) - sizes


def _starts_of_runs(values: I8) -> I8:
    """Where every run of equal values starts."""
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
