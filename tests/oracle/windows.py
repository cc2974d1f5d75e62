"""What a window over complete seconds says, and where the point rules G3 and G5 must trip.

Contents are those of `request_seconds` / `logit_seconds`, one per source partition. A rule trips at the first
second at whose window's end a cell holds at least `min_samples` and lies over the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.oracle.bins import KINDS, edges
from tests.oracle.cells import Contents, Population

UNIT = 2**30
Chosen = Callable[[Population, int], bool]
"""(population, second) → whether it is the evidence asked for."""


@dataclass(frozen=True)
class Window:
    """All values of one measure in one cell, over some seconds."""

    count: int
    total: int
    bins: dict[int, int]
    kind: str | None

    @property
    def mean(self) -> float | None:
        """Mean in the measure's own integer unit."""
        return self.total / self.count if self.count else None

    def quantile_bounds(self, q: float) -> tuple[int, int] | None:
        """Edges of the bin that holds the nearest-rank quantile."""
        if not self.count or self.kind is None:
            return None
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for k in sorted(self.bins):
            seen += self.bins[k]
            if seen >= rank:
                return max(edges(self.kind)[k], 0), edges(self.kind)[k + 1]
        raise AssertionError("bins hold less than the count")

    def over(self, limit: int) -> int:
        """Values over a limit that is an edge."""
        assert self.kind is not None
        assert limit in edges(self.kind)
        return sum(n for k, n in self.bins.items() if edges(self.kind)[k] >= limit)


def window(
    contents: Sequence[Contents],
    measure: str,
    cell: tuple[str, str],
    end: int,
    length_s: int,
    chosen: Chosen,
) -> Window:
    """The window of the `length_s` seconds that end with second `end`, both inclusive."""
    count = total = 0
    bins: dict[int, int] = {}
    for held in contents:
        for second in range(end - length_s + 1, end + 1):
            for population, cells in held.get(second, {}).items():
                m = cells.get(cell, {}).get("measures", {}).get(measure)
                if m is None or not chosen(population, second):
                    continue
                count += m["count"]
                total += m["sum"]
                for k, n in m["bins"].items():
                    bins[k] = bins.get(k, 0) + n
    return Window(count, total, bins, KINDS.get(measure))


def coverage(contents: Sequence[Contents], end: int, length_s: int, chosen: Chosen) -> Fraction | None:
    """Scored ÷ (scored + unmatched except duplicates + reported drops); None where nothing was expected."""
    scored = missing = 0
    for held in contents:
        for second in range(end - length_s + 1, end + 1):
            for population, cells in held.get(second, {}).items():
                if not chosen(population, second):
                    continue
                counters: dict[str, int] = cells.get(("all", ""), {}).get("counters", {})
                scored += counters.get("pairs", 0) + counters.get("renormalised", 0)
                missing += counters.get("dropped", 0)
                missing += sum(
                    n
                    for reason, n in counters.items()
                    if reason.startswith("unmatched.") and reason != "unmatched.duplicate"
                )
    return Fraction(scored, scored + missing) if scored + missing else None


def cells_of(contents: Sequence[Contents], dimensions: Sequence[str]) -> list[tuple[str, str]]:
    """All cells of these dimensions that occur."""
    found: set[Any] = {
        name
        for held in contents
        for populations in held.values()
        for cells in populations.values()
        for name in cells
        if name[0] in dimensions
    }
    return sorted(found)


def _first_trip(
    contents: Sequence[Contents],
    measure: str,
    dimensions: Sequence[str],
    length_s: int,
    min_samples: int,
    is_over: Callable[[Window], bool],
    chosen: Chosen,
) -> tuple[int, list[tuple[str, str]]] | None:
    seconds = sorted({second for held in contents for second in held})
    names = cells_of(contents, dimensions)
    for end in seconds:
        tripped = []
        for name in names:
            found = window(contents, measure, name, end, length_s, chosen)
            if found.count >= min_samples and is_over(found):
                tripped.append(name)
        if tripped:
            return end, tripped
    return None


def divergence_trip(
    contents: Sequence[Contents],
    chosen: Chosen,
    limit: str = "0.05",
    length_s: int = 300,
    min_samples: int = 100,
    dimensions: Sequence[str] = ("all",),
) -> tuple[int, list[tuple[str, str]]] | None:
    """G3 (and G5's divergence): mean kl_lower over its limit; the first second and the cells, or None."""

    def is_over(found: Window) -> bool:
        return found.total > Fraction(limit) * UNIT * found.count

    return _first_trip(contents, "kl_lower", dimensions, length_s, min_samples, is_over, chosen)


def slow_share_trip(
    contents: Sequence[Contents],
    chosen: Chosen,
    over_us: int = 500_000,
    limit: str = "0.05",
    length_s: int = 300,
    min_samples: int = 100,
    dimensions: Sequence[str] = ("all",),
) -> tuple[int, list[tuple[str, str]]] | None:
    """G5: more than the limit's share of requests over the TTFT limit; the first second and the cells."""

    def is_over(found: Window) -> bool:
        return found.over(over_us) > Fraction(limit) * found.count

    return _first_trip(contents, "ttft_us", dimensions, length_s, min_samples, is_over, chosen)
