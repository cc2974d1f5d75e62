"""The cells of open seconds, of one source or of many, as one table of integers, a row of numbers per cell.

Python objects per cell and quantity cost more than all arithmetic on them, and calls on short arrays more
than their elements. So counters, sums and extremes of all cells stand in three matrices that grow as needed,
to which many rows are added at once; a cell travels as bytes made from them (cell_bytes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Raw

from pipeline.core.cell_bytes import CellBytes, Measured, cell_head
from pipeline.core.cells import worst_of
from pipeline.core.claims import Members, Order
from pipeline.core.histograms import Measures, Runs, keeps_histogram
from schemas.buckets import WORST_KEPT
from schemas.columns import I8, Bool

_LARGEST: Final = np.iinfo(np.int64).max
_SMALLEST: Final = np.iinfo(np.int64).min
_GROWTH: Final = 256
"""Cells a table grows by at least."""


class Quantities:
    """Counters and measures of n rows, side by side."""

    def __init__(self, n: int, counters: Mapping[str, I8], measures: Measures) -> None:
        """Measures without any value are left out."""
        held = {name: each for name, each in measures.items() if each[1].any()}
        self.counters = tuple(counters)
        self.measures = tuple(held)
        values = _matrix([values for values, _ in held.values()], n)
        present = _matrix([present for _, present in held.values()], n).astype(np.bool_)
        # Mostly the same rows have all of them.
        patterns: dict[bytes, int] = {}
        self._pattern = [patterns.setdefault(row.tobytes(), len(patterns)) for row in present]
        distinct = [self._pattern.index(number) for number in range(len(patterns))]
        if present.all():
            added, self._least, self._greatest = values, values, values
        else:
            added = np.where(present, values, 0)
            self._least = np.where(present, values, _LARGEST)
            self._greatest = np.where(present, values, _SMALLEST)
        self._added = np.concatenate((_matrix(list(counters.values()), n), added, present[distinct]))

    def summed(self, members: Members) -> tuple[I8, I8, I8]:
        """Of groups of rows: (counters + counts + sums, …), and (measures, …) least and greatest values."""
        rows, starts = members.rows, members.starts
        gathered = self._added.take(rows, axis=1)
        sums = np.add.reduceat(gathered, starts, axis=1)
        first = len(self.counters)
        last = first + len(self.measures)
        counts = sums[last:][self._pattern]
        added = np.concatenate((sums[:first], counts, sums[first:last]))
        if self._least is self._greatest:
            lowest = highest = gathered[first:last]
        else:
            lowest, highest = self._least.take(rows, axis=1), self._greatest.take(rows, axis=1)
        least = np.minimum.reduceat(lowest, starts, axis=1)
        return added, least, np.maximum.reduceat(highest, starts, axis=1)


class Worst:
    """What n rows are called, and the score by which cells keep their worst."""

    def __init__(self, scores: I8, present: Bool, ids: Sequence[bytes]) -> None:
        """Rows that are not `present` have no score."""
        self.scores = np.where(present, scores, _SMALLEST)
        self.present = present
        self.entries = list(zip(scores.tolist(), ids, strict=True))

    def order(self) -> Order:
        """Ascending by score, then id; rows without a score first."""
        rows = np.argsort(self.scores, kind="stable")
        ranked = self.scores[rows]
        equal = np.flatnonzero(ranked[1:] == ranked[:-1])
        equal = equal[self.present[rows[equal]]]
        if len(equal):
            # Ids decide among equal scores: runs of them are put in order one by one.
            begins = equal[np.flatnonzero(np.diff(equal, prepend=-2) > 1)]
            ends = equal[np.flatnonzero(np.diff(equal, append=len(rows) + 1) > 1)] + 2
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                rows[begin:end] = sorted(rows[begin:end].tolist(), key=self.entries.__getitem__)
        return Order.by(rows)


class CellTable:
    """A slot per cell, of all open seconds of the sources that share it. Slots are taken and given back."""

    def __init__(self) -> None:
        """No cell yet."""
        self._counters: dict[str, int] = {}
        self._measures: dict[str, int] = {}
        """Names in the order in which they came, and where they stand: a counter in `_added`, a measure's
        extremes in `_least` and `_greatest`."""
        self._counts: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        """Where a measure's count and sum stand in `_added`."""
        self._added: I8 = np.zeros((0, 0), dtype=np.int64)
        self._least: I8 = np.zeros((0, 0), dtype=np.int64)
        self._greatest: I8 = np.zeros((0, 0), dtype=np.int64)
        self._heads: list[Raw] = []
        """How the encoding of each slot's cell begins."""
        self._worst: list[Sequence[tuple[int, bytes]]] = []
        """Never changed in place."""
        self._enough: I8 = np.zeros(0, dtype=np.int64)
        """Score below which a row is not among the cell's worst: of the last one kept, once all are taken."""
        self._free: list[int] = []
        self.changed: Bool = np.zeros(0, dtype=np.bool_)
        """Slots added to since they were last taken out as changed."""

    def take(self, dimension: str, value: str) -> int:
        """A slot for a new cell; all zero."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._heads[slot] = cell_head(dimension, value)
        return slot

    @property
    def taken(self) -> int:
        """Number of cells."""
        return len(self._heads) - len(self._free)

    def give_back(self, slots: I8) -> None:
        """These cells are gone."""
        self._added[slots] = 0
        self._least[slots] = _LARGEST
        self._greatest[slots] = _SMALLEST
        self._enough[slots] = _SMALLEST
        self.changed[slots] = False
        given_back = slots.tolist()
        for slot in given_back:
            self._worst[slot] = ()
        self._free += given_back

    def add(self, quantities: Quantities, members: Members, slots: I8) -> None:
        """Add rows: those of group i to `slots[i]`; slots are distinct."""
        at = [self._counter(name) for name in quantities.counters]
        measures = [self._measure(name) for name in quantities.measures]
        at += [self._counts[name] for name in quantities.measures]
        at += [self._sums[name] for name in quantities.measures]
        added, least, greatest = quantities.summed(members)
        # Whole slots at a time: what they have besides stays as it is.
        self._added[slots] += _spread(added, at, self._added, 0)
        least = _spread(least, measures, self._least, _LARGEST)
        self._least[slots] = np.minimum(self._least[slots], least)
        greatest = _spread(greatest, measures, self._greatest, _SMALLEST)
        self._greatest[slots] = np.maximum(self._greatest[slots], greatest)
        self.changed[slots] = True

    def add_counts(self, name: str, values: I8, slots: I8) -> None:
        """Add to one counter; slots may repeat."""
        at = self._counter(name)
        np.add.at(self._added[:, at], slots, values)
        self.changed[slots] = True

    def add_worst(self, worst: Worst, members: Members, slots: I8) -> None:
        """The rows of group i, in the order of `worst`, are candidates for the worst of `slots[i]`."""
        rows, starts = members.rows, members.starts
        ends = starts + members.sizes
        near = np.flatnonzero(worst.present[rows[ends - 1]])
        near = near[worst.scores[rows[ends[near] - 1]] >= self._enough[slots[near]]]
        top = ends[near] - 1 - np.arange(WORST_KEPT)[:, None]
        candidates = rows.take(top, mode="clip")
        candidates[(top < starts[near]) | ~worst.present[candidates]] = len(worst.entries)
        entries = [*worst.entries, None]
        slots = slots[near]
        full = candidates[-1] < len(worst.entries)
        self._enough[slots[full]] = worst.scores[candidates[-1, full]]
        best_of = zip(*(map(entries.__getitem__, each) for each in candidates.tolist()), strict=True)
        for slot, best in zip(slots.tolist(), best_of, strict=True):
            held = self._worst[slot]
            if not held and best[-1] is not None:
                self._worst[slot] = best
            else:
                self._worst[slot] = kept = worst_of((*filter(None, best), *held))
                if len(kept) == WORST_KEPT:
                    self._enough[slot] = kept[-1][0]

    def cells(self, slots: I8, runs: Runs) -> CellBytes:
        """The form that travels: names in order, zero counters and empty measures left out.

        `runs`: the histograms of `slots`, of what is `binned`.
        """
        added = self._added.take(slots, axis=0).T.tolist()
        least = self._least.take(slots, axis=0).T.tolist()
        greatest = self._greatest.take(slots, axis=0).T.tolist()
        histograms = {name: runs.lists(number) for number, name in enumerate(self.binned)}
        held = slots.tolist()
        return CellBytes(
            [self._heads[slot] for slot in held],
            [(name, added[at]) for name, at in sorted(self._counters.items())],
            [
                Measured(
                    name,
                    added[self._counts[name]],
                    added[self._sums[name]],
                    least[at],
                    greatest[at],
                    *histograms.get(name, (None, None)),
                )
                for name, at in sorted(self._measures.items())
            ],
            [self._worst[slot] for slot in held],
        )

    @property
    def binned(self) -> list[str]:
        """Measures that keep a histogram, in order."""
        return [name for name in sorted(self._measures) if keeps_histogram(name)]

    def _counter(self, name: str) -> int:
        at = self._counters.get(name)
        if at is None:
            at = self._counters[name] = self._new()
        return at

    def _measure(self, name: str) -> int:
        at = self._measures.get(name)
        if at is None:
            at = self._measures[name] = len(self._measures)
            self._counts[name], self._sums[name] = self._new(), self._new()
            column = np.full((len(self._worst), 1), _LARGEST, dtype=np.int64)
            self._least = np.hstack((self._least, column))
            self._greatest = np.hstack((self._greatest, np.full_like(column, _SMALLEST)))
        return at

    def _new(self) -> int:
        self._added = np.hstack((self._added, np.zeros((len(self._worst), 1), dtype=np.int64)))
        return int(self._added.shape[1]) - 1

    def _grow(self) -> None:
        size = len(self._worst)
        more = max(size, _GROWTH)
        self._added = _longer(self._added, more, 0)
        self._least = _longer(self._least, more, _LARGEST)
        self._greatest = _longer(self._greatest, more, _SMALLEST)
        self._enough = _longer(self._enough, more, _SMALLEST)
        self.changed = np.concatenate((self.changed, np.zeros(more, dtype=np.bool_)))
        self._heads += (Raw() for _ in range(more))
        self._worst += [()] * more
        self._free += range(size + more - 1, size - 1, -1)


def _matrix(rows: Sequence[np.ndarray[tuple[int], np.dtype[Any]]], n: int) -> I8:
    return np.array(rows, dtype=np.int64).reshape(len(rows), n)


def _spread(rows: I8, at: list[int], matrix: I8, neutral: int) -> I8:
    """Rows of numbers as columns of a matrix like this one, `neutral` in all others."""
    if at == list(range(matrix.shape[1])):
        return rows.T
    spread = np.full((matrix.shape[1], rows.shape[1]), neutral, dtype=np.int64)
    spread[at] = rows
    return spread.T


def _longer(matrix: I8, more: int, value: int) -> I8:
    added: I8 = np.full((more, *matrix.shape[1:]), value, dtype=np.int64)
    return np.concatenate((matrix, added))
