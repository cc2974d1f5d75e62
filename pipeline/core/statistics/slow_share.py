"""Is the canary's p99 over 1.15 × the baseline's? The share of slow requests per block (statistics.md §0.4).

Per block of 30 s: x = 1.15 × the upper edge of the bin of the baseline's p99 over the 300 s before it (at
least 100 samples, else the block is skipped); Y = (k_c / n_c) / max((k_b + 1)/(n_b + 1), 0.015), k_c of n_c
requests of the canary over x, k_b of n_b of the baseline over x/1.15, in the same block. Y feeds the betting
of §0.1 with limit 1, once per block with n_c > 0. Latency bins make 1.15 exactly seven of them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

BLOCK_S: Final = 30
LOOK_BACK_S: Final = 300
LEAST_SAMPLES: Final = 100
FLOOR: Final = Fraction(15, 1000)
"""A canary share below it is never compared with less: slack for bursts."""
QUANTILE: Final = Fraction(99, 100)
_BINS: Final = 7
_FACTOR: Final = 1.15
"""So many latency bins make this factor."""


def block_start(second: int) -> int:
    """The first second of the block that holds this one; blocks are cut by the epoch, in all scopes alike."""
    return second - second % BLOCK_S


def bins_of(ratio: Fraction) -> int:
    """How many bins make this ratio; rounded up where it is no whole number, so that less never trips."""
    return max(0, math.ceil(_BINS * math.log(ratio) / math.log(_FACTOR) - 1e-9))


def p99_bin(counts: Mapping[int, int]) -> int | None:
    """The bin of the p99 (nearest rank); None with too few samples."""
    total = sum(counts.values())
    if total < LEAST_SAMPLES:
        return None
    rank, seen = math.ceil(QUANTILE * total), 0
    for held in sorted(counts):
        seen += counts[held]
        if seen >= rank:
            return held
    return None


@dataclass(frozen=True, slots=True)
class Block:
    """Requests of one block, and how many of them were slow, per arm."""

    slow: int
    requests: int
    baseline_slow: int
    baseline_requests: int

    @classmethod
    def of(cls, canary: Mapping[int, int], baseline: Mapping[int, int], p99: int, bins: int) -> Block:
        """Both arms' histograms of a block. `p99`: the baseline's before it; `bins`: the ratio in bins."""
        return cls(
            _beyond(canary, p99 + bins), sum(canary.values()), _beyond(baseline, p99), sum(baseline.values())
        )

    @property
    def ratio(self) -> float:
        """Y. There are requests of the canary."""
        share = max(Fraction(self.baseline_slow + 1, self.baseline_requests + 1), FLOOR)
        return float(Fraction(self.slow, self.requests) / share)


def _beyond(counts: Mapping[int, int], last: int) -> int:
    return sum(count for held, count in counts.items() if held > last)
