"""Is the mean score under its limit? The test that a promotion needs (statistics.md §0.2). Pure.

x = min(score, c), c = 4 nats, m the limit:
K = 0.75 Π (1 + 0.9 (m − x)/(c − m)) + 0.25 Π (1 + 0.5 (m − x)/(c − m)).
It passes while K ≥ 1/α: its value now, begun anew at every weight step; never latched, never a maximum. What
it says is of mean(min(score, 4)); a test of an upper mean needs a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.core.statistics.betting import CEILING, Growth, GrowthTable

CAP: Final = 4.0
"""Nats that a pair counts at most. Below 2 or so a canary whose few answers are ruined would pass."""
BETS: Final = (0.9, 0.5)
SHARES: Final = (0.75, 0.25)
"""Of the stake, one a bet."""
MOST_PAIRS: Final = 10**9
_HALVINGS: Final = 200


@dataclass(slots=True)
class Capped:
    """The whole state: the logarithms of both products, and how many pairs are in them."""

    logs: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
    pairs: int = 0

    def fold(self, growth: Growth, pairs: int) -> None:
        """One bucket of so many pairs."""
        self.logs = [log + grown for log, grown in zip(self.logs, growth, strict=True)]
        self.pairs += pairs

    @property
    def log_evidence(self) -> float:
        """ln K, now."""
        most = max(self.logs)
        terms = (share * math.exp(log - most) for share, log in zip(SHARES, self.logs, strict=True))
        return most + math.log(math.fsum(terms))

    @property
    def evidence(self) -> float:
        """K, now, cut at the ceiling of stakes."""
        return math.exp(min(self.log_evidence, math.log(CEILING)))


def growth_of(scores: Iterable[float], limit: float) -> Growth:
    """Σ ln(1 + bet (m − x)/(c − m)) of these scores ≥ 0, in any order, per bet. 0 < `limit` < CAP."""
    steps = [(limit - min(score, CAP)) / (CAP - limit) for score in scores]
    return tuple(math.fsum(math.log1p(bet * step) for step in steps) for bet in BETS)


def growth_table(edges: Iterable[int], unit: int, limit: float) -> GrowthTable:
    """Growth by one score at each of these edges, in so many units a nat. With upper edges the evidence is
    never more than the scores' own."""
    return tuple(growth_of((edge / unit,), limit) for edge in edges)


def upper_bound(scores: Sequence[float], alpha: float) -> float:
    """The greatest limit that is not shown to be over the mean, by bisection: K rises in it. CAP if there is
    none yet. For display."""
    low, high, needed = 0.0, CAP, -math.log(alpha)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        held = Capped()
        held.fold(growth_of(scores, middle), len(scores))
        if held.log_evidence < needed:
            low = middle
        else:
            high = middle
    return high


def pairs_left(held: Capped, mean: float, limit: float, alpha: float) -> int | None:
    """How many more pairs until K ≥ 1/α if each adds what one at `mean` does: 0 it passes; None: never, or
    over MOST_PAIRS. From an empty state and a mean of 0 it is the least number whatever is seen."""
    growth = growth_of((mean,), limit)

    def passes(more: int) -> bool:
        after = Capped(list(held.logs))
        after.fold(tuple(more * grown for grown in growth), more)
        return after.log_evidence >= -math.log(alpha)

    if passes(0):
        return 0
    if growth[0] <= 0:
        return None
    more = 1
    while not passes(more):
        more *= 2
        if more > MOST_PAIRS:
            return None
    least = more // 2
    while more - least > 1:
        middle = (least + more) // 2
        if passes(middle):
            more = middle
        else:
            least = middle
    return more
