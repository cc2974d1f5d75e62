"""Is the mean score over its limit? Grid betting with restarts (statistics.md §0.1). Pure.

Y = score / limit, Y ≥ 0. Six fixed bets g, one stake M_g each, from 0. Once per non-empty bucket, numbered
b = 1, 2, …: M_g ← (M_g + w_b) · Π (1 + g (Y_i − 1)), w_b = ln 2 · (1/ln(b+1) − 1/ln(b+2)). The evidence is
E = mean M_g; while every score's mean, given the past, is at most the limit, the chance that E ever reaches
1/α is at most α, however often it is looked at. No bet is ever chosen from data: that would break it.

Same counts, same bits: sums are correctly rounded (`fsum`), so they depend on no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from typing import Final, TypeAlias

GRID: Final = (0.8, 0.4, 0.2, 0.1, 0.05, 0.02)
CEILING: Final = 1e30
"""Stakes stay below it: they are sums and products of finite numbers for ever."""
_LOG_MOST: Final = 700.0
"""e to this is still finite."""
_HALVINGS: Final = 200

Growth: TypeAlias = tuple[float, ...]
"""Of one bucket, per bet: Σ ln(1 + g (Y − 1))."""
GrowthTable: TypeAlias = Sequence[Growth]
"""The same of one score in each bin."""


@lru_cache(maxsize=8192)
def restart_weight(bucket: int) -> float:
    """w_b: what is staked anew in bucket b = 1, 2, …; over all buckets it comes to 1."""
    return math.log(2) * (1 / math.log(bucket + 1) - 1 / math.log(bucket + 2))


@lru_cache(maxsize=8192)
def unspent(bucket: int) -> float:
    """What is still to be staked after bucket b = 0, 1, …: 1 − (w_1 + … + w_b). E and this together are a
    supermartingale that begins at 1."""
    return math.log(2) / math.log(bucket + 2)


@dataclass(slots=True)
class Bets:
    """The whole state of one process: six stakes, and how many buckets they have seen."""

    stakes: list[float] = field(default_factory=lambda: [0.0] * len(GRID))
    buckets: int = 0

    def fold(self, growth: Growth, ceiling: float = CEILING) -> None:
        """One non-empty bucket."""
        self.buckets += 1
        weight = restart_weight(self.buckets)
        exp = math.exp
        self.stakes = [
            won
            if (won := (stake + weight) * exp(grown if grown < _LOG_MOST else _LOG_MOST)) < ceiling
            else ceiling
            for stake, grown in zip(self.stakes, growth, strict=True)
        ]

    @property
    def evidence(self) -> float:
        """E: as many times the stake as betting against "the mean is at most the limit" has won."""
        return math.fsum(self.stakes) / len(GRID)

    @property
    def log_evidence(self) -> float:
        """ln E; −∞ before the first bucket."""
        return math.log(evidence) if (evidence := self.evidence) > 0 else -math.inf


def growth_of(ratios: Iterable[float]) -> Growth:
    """Of a bucket that holds these Y ≥ 0, in any order."""
    held = tuple(ratios)
    return tuple(math.fsum(math.log1p(bet * (ratio - 1)) for ratio in held) for bet in GRID)


def growth_table(edges: Iterable[int], limit: tuple[int, int]) -> GrowthTable:
    """Growth by one score at each of these edges; `limit` in their unit, as numerator and denominator.

    With lower edges the evidence is never more than the scores' own.
    """
    over, under = limit
    return tuple(growth_of((edge * under / over,)) for edge in edges)


def growth_of_bins(table: GrowthTable, bins: Sequence[int], counts: Sequence[int]) -> Growth:
    """Of a bucket with so many scores in each of these bins, in any order. Also for tables of other bets."""
    if len(bins) == 1:
        row, count = table[bins[0]], counts[0]
        return row if count == 1 else tuple([count * grown for grown in row])
    rows = [table[held] for held in bins]
    return tuple([math.fsum(map(mul, counts, column)) for column in zip(*rows, strict=True)])


def log_evidence_without_restarts(scores: Sequence[float], limit: float) -> float:
    """ln K = ln mean_g Π (1 + g (score / limit − 1)): the whole run as one bet. For display: a long healthy
    start hides a later fault from it."""
    growth = growth_of(score / limit for score in scores)
    most = max(growth)
    return most + math.log(math.fsum(math.exp(grown - most) for grown in growth) / len(GRID))


def lower_bound(scores: Sequence[float], alpha: float) -> float:
    """The smallest limit that the run does not reject, by bisection: K falls in it. For display."""
    high = max(scores, default=0.0)
    if high <= 0:
        return 0.0
    low, needed = 0.0, -math.log(alpha)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if log_evidence_without_restarts(scores, middle) < needed:
            high = middle
        else:
            low = middle
    return high
