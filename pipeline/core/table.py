"""The cells of a source's open seconds as one table of integers, a column per cell.

Python objects per cell and quantity cost more than all arithmetic on them. So counters, sums and extremes
stand in matrices that grow as needed, histograms as sorted (cell, quantity, bin) keys per second, and
`schemas.buckets.Cell` is made only when a cell travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from pipeline.core.bins import KIND_OF_MEASURE, bin_of
from pipeline.core.cells import worst_of
from schemas.buckets import WORST_KEPT, Cell, Distribution
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

    def runs(self, columns: I8, names: Sequence[str]) -> tuple[list[list[int]], list[int], list[int]]:
        """Where the bins of columns × names stand, the bins, and their counts.

        The run of column i and name j is `bins[edges[i][2j] : edges[i][2j + 1]]`.
        """
        self._settle()
        quantities = np.array([_HISTOGRAMS[name] for name in names], dtype=np.int64)
        low = (columns[:, None] << _CELL_BITS) | (quantities << _BIN_BITS)
        edges = np.searchsorted(self._keys, np.stack((low, low + _BIN_MASK + 1), axis=2))
        edges = edges.reshape(len(columns), 2 * len(names))
        if edges.size == 0:
            return edges.tolist(), [], []
        first, last = int(edges.min()), int(edges.max())
        bins, counts = self._keys[first:last] & _BIN_MASK, self._counts[first:last]
        return (edges - first).tolist(), bins.tolist(), counts.tolist()


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
        self._worst: list[list[tuple[int, bytes]]] = []
        """Never changed in place: cells that travel share them."""
        self._enough: I8 = np.zeros(0, dtype=np.int64)
        """Score below which a row is not among the cell's worst: of the last one kept, once all are taken."""
        self._free: list[int] = []
        self.changed: Bool = np.zeros(0, dtype=np.bool_)
        """Columns added to since this was last cleared."""

    def take(self) -> int:
        """A column for a new cell; all zero."""
        if not self._free:
            self._grow()
        return self._free.pop()

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

    def cells(self, names: Sequence[tuple[str, str]], columns: I8, histograms: Histograms) -> list[Cell]:
        """The form that travels: names in order, zero counters and empty measures left out.

        `names` are (dimension, value) of `columns`.
        """
        if not names:
            return []
        counters = sorted(self._counters)
        totals = self._totals[:, columns][[self._counters[name] for name in counters]].T.tolist()
        dimensions, values = zip(*names, strict=True)
        return list(
            map(
                Cell,
                dimensions,
                values,
                [{name: n for name, n in zip(counters, row, strict=True) if n} for row in totals],
                self._distributions(columns, histograms),
                [self._worst[column] for column in columns.tolist()],
            )
        )

    def _distributions(self, columns: I8, histograms: Histograms) -> list[dict[str, Distribution]]:
        """Every cell's measures by name, in order; `map` and `zip`, for there are thousands a second."""
        held = [name for name in sorted(self._measures) if self._count[self._measures[name], columns].any()]
        binned = [name for name in held if name in _HISTOGRAMS]
        edges, bins, counts = histograms.runs(columns, binned)
        empty: list[list[int]] = [[]] * len(columns)
        made: list[Iterable[Distribution]] = []
        for name in held:
            at = self._measures[name]
            bins_of, counts_of = empty, empty
            if name in _HISTOGRAMS:
                first = 2 * binned.index(name)
                runs = [slice(edge[first], edge[first + 1]) for edge in edges]
                bins_of, counts_of = [bins[run] for run in runs], [counts[run] for run in runs]
            sums = (self._count, self._sum, self._least, self._greatest)
            made.append(
                map(Distribution, *(matrix[at, columns].tolist() for matrix in sums), bins_of, counts_of)
            )
        if not held:
            return [{} for _ in columns]
        if all(self._count[self._measures[name], columns].all() for name in held):
            return [dict(zip(held, row, strict=True)) for row in zip(*made, strict=True)]
        return [
            {name: each for name, each in zip(held, row, strict=True) if each.count}
            for row in zip(*made, strict=True)
        ]

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
        self._worst += ([] for _ in range(more))
        self._free += range(width + more - 1, width - 1, -1)


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
