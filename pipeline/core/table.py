"""The cells of a source's open seconds as one table of integers, a column per cell.

Python objects per cell and quantity cost more than all arithmetic on them. So counters, sums and extremes
stand in matrices that grow as needed, histograms as sorted (cell, quantity, bin) keys per second, and
`schemas.buckets.Cell` is never made: a cell travels as bytes (cell_bytes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import Raw

from pipeline.core.bins import KIND_OF_MEASURE, bin_of
from pipeline.core.cell_bytes import CellBytes, Measured, cell_head
from pipeline.core.cells import worst_of
from schemas.buckets import WORST_KEPT
from schemas.columns import I8, Bool

_LARGEST: Final = np.iinfo(np.int64).max
_SMALLEST: Final = np.iinfo(np.int64).min
_GROWTH: Final = 256
"""Columns a table grows by at least."""
_HISTOGRAMS: Final = {name: number for number, name in enumerate(KIND_OF_MEASURE)}
_BIN_BITS: Final = 13
_CELL_BITS: Final = 16
"""A histogram key is column << 16 | quantity << 13 | bin."""
_BIN_MASK: Final = (1 << _BIN_BITS) - 1
_PENDING_KEYS: Final = 1 << 16
"""Keys that wait to be counted before that is done at once."""

Measures = Mapping[str, tuple[I8, Bool]]
"""Values by name, and which rows have one."""


class Histograms:
    """Sparse histograms of one second: sorted distinct keys and how often each came."""

    def __init__(self) -> None:
        self._keys: I8 = np.empty(0, dtype=np.int64)
        self._counts: I8 = np.empty(0, dtype=np.int64)
        self._pending: list[I8] = []
        self._pending_keys = 0

    def add(self, keys: I8) -> None:
        """Count every key once more; keys in any order."""
        self._pending.append(keys)
        self._pending_keys += len(keys)
        if self._pending_keys > _PENDING_KEYS:
            self._settle()

    def _settle(self) -> None:
        if not self._pending:
            return
        found, times = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending, self._pending_keys = [], 0
        at = np.searchsorted(self._keys, found)
        known = np.zeros(len(found), dtype=np.bool_)
        inside = at < len(self._keys)
        known[inside] = self._keys[at[inside]] == found[inside]
        self._counts[at[known]] += times[known]
        fresh = ~known
        self._keys = np.insert(self._keys, at[fresh], found[fresh])
        self._counts = np.insert(self._counts, at[fresh], times[fresh])

    def runs(self, columns: I8, names: Sequence[str]) -> Runs:
        """Where the bins of columns × names stand, the bins, and their counts."""
        self._settle()
        quantities = np.array([_HISTOGRAMS[name] for name in names], dtype=np.int64)
        low = (columns << _CELL_BITS) | (quantities << _BIN_BITS)[:, None]
        edges = np.searchsorted(self._keys, (low, low + _BIN_MASK + 1))
        first, last = (int(edges.min()), int(edges.max())) if edges.size else (0, 0)
        bins, counts = self._keys[first:last] & _BIN_MASK, self._counts[first:last]
        begins, ends = (edges - first).tolist()
        return Runs(begins, ends, bins.tolist(), counts.tolist())


@dataclass(frozen=True, slots=True)
class Runs:
    """Histograms of some cells: the one of quantity j and cell i is `bins[begins[j][i] : ends[j][i]]`."""

    begins: list[list[int]]
    ends: list[list[int]]
    bins: list[int]
    counts: list[int]

    def lists(self, quantity: int) -> tuple[list[list[int]], list[list[int]]]:
        """Every cell's bins and counts."""
        cuts = list(map(slice, self.begins[quantity], self.ends[quantity]))
        return list(map(self.bins.__getitem__, cuts)), list(map(self.counts.__getitem__, cuts))


class CellTable:
    """One column per cell, of all open seconds of one source. Columns are taken and given back."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._measures: dict[str, int] = {}
        self._totals: I8 = np.zeros((0, 0), dtype=np.int64)
        self._count: I8 = np.zeros((0, 0), dtype=np.int64)
        self._sum: I8 = np.zeros((0, 0), dtype=np.int64)
        self._least: I8 = np.zeros((0, 0), dtype=np.int64)
        self._greatest: I8 = np.zeros((0, 0), dtype=np.int64)
        self._heads: list[Raw] = []
        """How the encoding of each column's cell begins."""
        self._worst: list[list[tuple[int, bytes]]] = []
        """Never changed in place: cells that travel share them."""
        self._enough: I8 = np.zeros(0, dtype=np.int64)
        """Score below which a row is not among the cell's worst: of the last one kept, once all are taken."""
        self._free: list[int] = []
        self.changed: Bool = np.zeros(0, dtype=np.bool_)
        """Columns added to since this was last cleared."""

    def take(self, dimension: str, value: str) -> int:
        """A column for a new cell; all zero."""
        if not self._free:
            self._grow()
        column = self._free.pop()
        self._heads[column] = cell_head(dimension, value)
        return column

    def give_back(self, columns: I8) -> None:
        """These cells are gone."""
        self._totals[:, columns] = 0
        self._count[:, columns] = 0
        self._sum[:, columns] = 0
        self._least[:, columns] = _LARGEST
        self._greatest[:, columns] = _SMALLEST
        self._enough[columns] = _SMALLEST
        self.changed[columns] = False
        for column in columns.tolist():
            self._worst[column] = []
            self._free.append(column)

    def add_counts(self, name: str, values: I8, columns: I8) -> None:
        """Add to one counter; columns may repeat."""
        at = self._counter(name)
        np.add.at(self._totals[at], columns, values)
        self.changed[columns] = True

    def add_rows(self, measures: Measures, rows: I8, starts: I8, columns: I8) -> None:
        """Add values of rows: `rows[starts[i] : starts[i + 1]]` to `columns[i]`; columns may repeat."""
        for name, (values, present) in measures.items():
            if not present.any():
                continue
            at = self._measure(name)
            if present.all():
                held = values[rows]
                lowest = highest = held
                count = np.diff(starts, append=len(rows))
            else:
                has = present[rows]
                held = np.where(has, values[rows], 0)
                lowest, highest = np.where(has, held, _LARGEST), np.where(has, held, _SMALLEST)
                count = np.add.reduceat(has, starts, dtype=np.int64)
            np.add.at(self._count[at], columns, count)
            np.add.at(self._sum[at], columns, np.add.reduceat(held, starts))
            np.minimum.at(self._least[at], columns, np.minimum.reduceat(lowest, starts))
            np.maximum.at(self._greatest[at], columns, np.maximum.reduceat(highest, starts))

    def add_worst(self, scores: I8, ids: Sequence[bytes], rows: I8, columns: I8) -> None:
        """Row `rows[i]` is a candidate for the worst of `columns[i]`; columns may repeat."""
        near = np.flatnonzero(scores[rows] >= self._enough[columns])
        if len(near) == 0:
            return
        near = near[np.lexsort((scores[rows[near]], columns[near]))]
        rows, columns = rows[near], columns[near]
        ranked = scores[rows]
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        ends = np.append(starts[1:], len(columns))
        # Of each column its greatest few, and whatever equals the least of them: ids decide among equals.
        least = ranked[np.maximum(ends - WORST_KEPT, starts)]
        chosen = np.flatnonzero(ranked >= np.repeat(least, ends - starts))
        gathered: dict[int, list[tuple[int, bytes]]] = {}
        for row, column, score in zip(
            rows[chosen].tolist(), columns[chosen].tolist(), ranked[chosen].tolist(), strict=True
        ):
            gathered.setdefault(column, []).append((score, ids[row]))
        for column, entries in gathered.items():
            kept = self._worst[column] = worst_of((*self._worst[column], *entries))
            if len(kept) == WORST_KEPT:
                self._enough[column] = kept[-1][0]

    def cells(self, columns: I8, runs: Sequence[Runs]) -> CellBytes:
        """The form that travels: names in order, zero counters and empty measures left out.

        `runs`, one after the other, are the histograms of `columns`.
        """
        at = columns.tolist()
        totals = self._totals.take(columns, axis=1).tolist()
        sums = (self._count, self._sum, self._least, self._greatest)
        held = [matrix.take(columns, axis=1).tolist() for matrix in sums]
        histograms = {name: _joined(runs, number) for number, name in enumerate(self._binned())}
        return CellBytes(
            [self._heads[column] for column in at],
            [(name, totals[self._counters[name]]) for name in sorted(self._counters)],
            [
                Measured(name, *(each[at] for each in held), *histograms.get(name, (None, None)))
                for name, at in sorted(self._measures.items())
            ],
            [self._worst[column] for column in at],
        )

    def runs(self, columns: I8, histograms: Histograms) -> Runs:
        """The histograms of these cells of one second."""
        return histograms.runs(columns, self._binned())

    def _binned(self) -> list[str]:
        return [name for name in sorted(self._measures) if name in _HISTOGRAMS]

    def _counter(self, name: str) -> int:
        at = self._counters.get(name)
        if at is None:
            at = self._counters[name] = len(self._counters)
            self._totals = np.vstack((self._totals, np.zeros((1, len(self._worst)), dtype=np.int64)))
        return at

    def _measure(self, name: str) -> int:
        at = self._measures.get(name)
        if at is None:
            at = self._measures[name] = len(self._measures)
            row = np.zeros((1, len(self._worst)), dtype=np.int64)
            self._count = np.vstack((self._count, row))
            self._sum = np.vstack((self._sum, row))
            self._least = np.vstack((self._least, row + _LARGEST))
            self._greatest = np.vstack((self._greatest, row + _SMALLEST))
        return at

    def _grow(self) -> None:
        width = len(self._worst)
        more = max(width, _GROWTH)

        def wider(matrix: I8, value: int) -> I8:
            added = np.full((*matrix.shape[:-1], more), value, dtype=np.int64)
            return np.concatenate((matrix, added), axis=-1)

        self._totals, self._count = wider(self._totals, 0), wider(self._count, 0)
        self._sum = wider(self._sum, 0)
        self._least, self._greatest = wider(self._least, _LARGEST), wider(self._greatest, _SMALLEST)
        self._enough = wider(self._enough, _SMALLEST)
        self.changed = np.concatenate((self.changed, np.zeros(more, dtype=np.bool_)))
        self._heads += (Raw() for _ in range(more))
        self._worst += ([] for _ in range(more))
        self._free += range(width + more - 1, width - 1, -1)


def _joined(runs: Sequence[Runs], quantity: int) -> tuple[list[list[int]], list[list[int]]]:
    """One quantity's bins and counts of all cells."""
    bins, counts = [], []
    for each in runs:
        more = each.lists(quantity)
        bins += more[0]
        counts += more[1]
    return bins, counts


def histogram_keys(measures: Measures, rows: I8, columns: I8) -> Iterator[tuple[I8, I8]]:
    """Per quantity with a histogram: keys of those `rows` that have a value, and these rows.

    Row `rows[i]` counts in `columns[i]`.
    """
    for name, (values, present) in measures.items():
        kind = KIND_OF_MEASURE.get(name)
        if kind is None or not present.any():
            continue
        of_rows = bin_of(kind, values) | (_HISTOGRAMS[name] << _BIN_BITS)
        keys = (columns << _CELL_BITS) | of_rows[rows]
        if present.all():
            yield keys, rows
        else:
            held = present[rows]
            yield keys[held], rows[held]
