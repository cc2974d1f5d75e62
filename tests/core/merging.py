"""Published cells merged, and what is read off a histogram: as whoever reads `klaxon.buckets` would do it.

Merging is exact, associative, and knows no order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isqrt

from pipeline.core.bins import Kind, bin_lower, bin_upper
from pipeline.core.cells import worst_of
from schemas.buckets import Cell, Distribution


@dataclass(slots=True)
class Sums:
    """A Distribution while it is being added up; `bins` maps bin → count. With count 0 all is 0."""

    count: int = 0
    sum: int = 0
    min: int = 0
    max: int = 0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, count: int, total: int, least: int, greatest: int) -> None:
        """Add `count` > 0 values with this sum and these extremes; their bins are added by the caller."""
        if self.count == 0:
            self.min, self.max = least, greatest
        else:
            self.min, self.max = min(self.min, least), max(self.max, greatest)
        self.count += count
        self.sum += total

    def merge(self, other: Distribution) -> None:
        """Add a whole distribution."""
        if other.count == 0:
            return
        self.add(other.count, other.sum, other.min, other.max)
        for at, count in zip(other.bins, other.counts, strict=True):
            self.bins[at] = self.bins.get(at, 0) + count

    def subtract(self, other: Distribution) -> None:
        """Take out what was merged before: exact for count, sum and bins.

        min and max cannot be taken back: they stay as outer bounds until the count is 0.
        """
        self.count -= other.count
        self.sum -= other.sum
        for at, count in zip(other.bins, other.counts, strict=True):
            left = self.bins.get(at, 0) - count
            if left:
                self.bins[at] = left
            else:
                del self.bins[at]
        if self.count == 0:
            self.min = self.max = 0

    def distribution(self) -> Distribution:
        """The form that travels, bins ascending."""
        bins = sorted(self.bins)
        return Distribution(self.count, self.sum, self.min, self.max, bins, [self.bins[at] for at in bins])


@dataclass(slots=True)
class CellSums:
    """A Cell while it is being added up."""

    counters: dict[str, int] = field(default_factory=dict)
    measures: dict[str, Sums] = field(default_factory=dict)
    worst: list[tuple[int, bytes]] = field(default_factory=list)

    def merge(self, cell: Cell) -> None:
        """Add a cell's content; the caller sees to it that dimension and value agree."""
        for name, count in cell.counters.items():
            self.counters[name] = self.counters.get(name, 0) + count
        for name, distribution in cell.measures.items():
            self.measure(name).merge(distribution)
        if cell.worst:
            self.worst = worst_of((*self.worst, *cell.worst))

    def subtract(self, cell: Cell) -> None:
        """Take out a cell that was merged before: exact for counters, counts, sums and bins.

        Extremes stay as outer bounds; `worst` keeps what it holds (the caller who needs the window's own
        merges the window's cells anew).
        """
        for name, count in cell.counters.items():
            left = self.counters[name] - count
            if left:
                self.counters[name] = left
            else:
                del self.counters[name]
        for name, distribution in cell.measures.items():
            sums = self.measures[name]
            sums.subtract(distribution)
            if sums.count == 0:
                del self.measures[name]

    def measure(self, name: str) -> Sums:
        """The sums of one quantity, created empty at first."""
        sums = self.measures.get(name)
        if sums is None:
            sums = self.measures[name] = Sums()
        return sums

    def cell(self, dimension: str, value: str) -> Cell:
        """The form that travels: names in order, zero counters left out."""
        counters = {name: count for name, count in sorted(self.counters.items()) if count}
        measures = {name: sums.distribution() for name, sums in sorted(self.measures.items()) if sums.count}
        return Cell(dimension, value, counters, measures, list(self.worst))


def merge_cells(first: Cell, second: Cell) -> Cell:
    """Both cells' content in one; dimension and value are the first's. Associative, commutative, exact."""
    sums = CellSums()
    sums.merge(first)
    sums.merge(second)
    return sums.cell(first.dimension, first.value)


def merge_all(cells: Iterable[Cell], dimension: str, value: str) -> Cell:
    """The content of any number of cells in one."""
    sums = CellSums()
    for cell in cells:
        sums.merge(cell)
    return sums.cell(dimension, value)


def subtract_cells(whole: Cell, part: Cell) -> Cell:
    """`whole` without `part`, which was merged into it (see CellSums.subtract for extremes and worst)."""
    sums = CellSums()
    sums.merge(whole)
    sums.subtract(part)
    return sums.cell(whole.dimension, whole.value)


def quantile(distribution: Distribution, kind: Kind, q: float) -> int | None:
    """Nearest-rank quantile from the histogram: geometric middle of the bin, within min and max.

    None without a value. The error is at most half a bin's width (1 % for latencies). 0 ≤ q ≤ 1.
    """
    if not distribution.bins:
        return None
    rank = max(1, -int(-q * distribution.count // 1))
    seen = 0
    at = distribution.bins[-1]
    for candidate, count in zip(distribution.bins, distribution.counts, strict=True):
        seen += count
        if seen >= rank:
            at = candidate
            break
    middle = isqrt((bin_lower(kind, at) + 1) * bin_upper(kind, at)) if at else 0
    return min(max(middle, distribution.min), distribution.max)


def count_over(distribution: Distribution, kind: Kind, limit: int) -> int:
    """How many values are certainly over `limit`: exact where the limit is an edge, else never too many."""
    over = 0
    for at, count in zip(distribution.bins, distribution.counts, strict=True):
        if at and bin_lower(kind, at) >= limit:
            over += count
    return over


def mean(distribution: Distribution) -> float | None:
    """Mean in the distribution's own unit; None without a value."""
    return distribution.sum / distribution.count if distribution.count else None
