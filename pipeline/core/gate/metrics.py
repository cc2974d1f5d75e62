"""From cells to numbers: what a window adds up per metric, what is read off it, and G5's worked function.

A window adds up a `Vec`, a sparse vector of integers, so adding the newest second and taking away the oldest
is exact. Its slots: mean and share keep COUNT, VALUE (sum, or number over) and EXCESS; a quantile keeps its
histogram, one slot a bin.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Final, TypeAlias

from pipeline.core.bins import Kind, bin_count, bin_lower, bin_upper
from pipeline.core.gate.policy import Metric, Rule
from schemas.buckets import Cell, Distribution

Vec: TypeAlias = dict[int, int]
COUNT: Final = 0
VALUE: Final = 1
EXCESS: Final = 2

KL_FLOOR: Final = 1e-9


class EvidenceError(Exception):
    """A cell contradicts itself; its second cannot be judged."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric read off a window. `value` in the policy's unit (nats, µs, share), None without samples.

    `bound`: a value that the true one is certainly not below. `over` compares exactly, never by `value`.

    Of a rule relative to the baseline `value` is how many times worse the canary is; `level` and `baseline`
    are what it and its like measure, in the metric's unit, `baseline_samples` the like's number of values.
    """

    samples: int
    value: float | None
    bound: float | None
    over: bool
    level: float | None = None
    baseline: float | None = None
    baseline_samples: int | None = None

    def enough(self, samples: int) -> bool:
        """Whether there are so many values, on both sides where there are two."""
        return self.samples >= samples and (self.baseline_samples is None or self.baseline_samples >= samples)


def add_into(total: Vec, vec: Mapping[int, int], sign: int = 1) -> None:
    """total += sign · vec, leaving out zeros: equal contents are equal dicts, whatever was added before."""
    for slot, amount in vec.items():
        left = total.get(slot, 0) + sign * amount
        if left:
            total[slot] = left
        else:
            total.pop(slot, None)


def extract(rule: Rule, cell: Cell) -> Vec | None:
    """What this cell adds to the rule's window; None if nothing. Raises EvidenceError."""
    metric = rule.metric
    found = cell.measures.get(metric.measure)
    if found is None or not found.count:
        return None
    if len(found.bins) != len(found.counts) or found.count < 0:
        raise EvidenceError(
            f"{cell.dimension}={cell.value}: histogram of {metric.measure} contradicts itself"
        )
    if metric.statistic != "mean" and sum(found.counts) != found.count:
        raise EvidenceError(f"{cell.dimension}={cell.value}: {metric.measure} has no full histogram")
    if metric.statistic == "quantile":
        return dict(zip(found.bins, found.counts, strict=True))
    if metric.statistic == "share":
        assert metric.over is not None
        over = _count_from(found, over_from(metric.kind, metric.over))
        return {COUNT: found.count, VALUE: over, EXCESS: over} if over else {COUNT: found.count}
    vec = {COUNT: found.count}
    if found.sum:
        vec[VALUE] = found.sum
    excess = _excess(found, rule)
    if excess:
        vec[EXCESS] = excess
    return vec


def read(rule: Rule, vec: Mapping[int, int]) -> Reading:
    """Compare a window with the rule's limit: mean > limit, share > limit, quantile > limit.

    A quantile is the nearest rank's bin: `value` its geometric middle (within 1 % for latencies), and it is
    over only if the whole bin is, so the resolution of the histogram never trips anything.
    """
    metric = rule.metric
    if metric.statistic == "quantile":
        return _read_quantile(rule, vec)
    count = vec.get(COUNT, 0)
    if count <= 0:
        return Reading(0, None, None, False)
    amount = vec.get(VALUE, 0)
    numerator, denominator = rule.limit_ratio
    over = amount * denominator > numerator * count
    value = (amount - metric.offset * count) / count / metric.unit
    return Reading(count, value, value, over)


def excess_of(rule: Rule, vec: Mapping[int, int]) -> int:
    """How much of the deviation this window carries: what single values have over the limit, added up."""
    if rule.metric.statistic != "quantile":
        return vec.get(EXCESS, 0)
    first = over_from(rule.metric.kind, int(rule.limit))
    return sum(count for at, count in vec.items() if at >= first)


def samples_of(rule: Rule, vec: Mapping[int, int]) -> int:
    """Number of values in this window."""
    return sum(vec.values()) if rule.metric.statistic == "quantile" else vec.get(COUNT, 0)


def _read_quantile(rule: Rule, vec: Mapping[int, int]) -> Reading:
    metric = rule.metric
    count = sum(vec.values())
    if count <= 0:
        return Reading(0, None, None, False)
    held = quantile_bin(metric, vec)
    lower = bin_lower(metric.kind, held)
    value = bin_middle(metric, held) / metric.unit
    return Reading(count, value, lower / metric.unit, held > 0 and lower >= rule.limit)


def quantile_bin(metric: Metric, vec: Mapping[int, int]) -> int:
    """The bin of the nearest rank; of a reciprocal the rank counts from its own lower end. Not of nothing."""
    assert metric.quantile is not None
    count = sum(vec.values())
    numerator, denominator = metric.quantile.as_integer_ratio()
    rank = max(1, -(-numerator * count // denominator))
    if metric.per_second:
        rank = count + 1 - rank
    seen = 0
    held = 0
    for held in sorted(vec):
        seen += vec[held]
        if seen >= rank:
            break
    return held


def bin_middle(metric: Metric, held: int) -> int:
    """The geometric middle of a bin, in the cells' unit; 0 of bin 0."""
    return isqrt((bin_lower(metric.kind, held) + 1) * bin_upper(metric.kind, held)) if held else 0


@lru_cache(maxsize=1024)
def over_from(kind: Kind, limit: int) -> int:
    """The first bin all of whose values are over `limit`."""
    low, high = 1, bin_count(kind)
    while low < high:
        middle = (low + high) // 2
        if bin_lower(kind, middle) >= limit:
            high = middle
        else:
            low = middle + 1
    return low


def _count_from(found: Distribution, first: int) -> int:
    return sum(found.counts[bisect_right(found.bins, first - 1) :])


def _excess(found: Distribution, rule: Rule) -> int:
    """Σ (bin's middle − limit) over the bins above the limit; the measures without bins carry their sum."""
    if not found.bins:
        return found.sum
    numerator, denominator = rule.limit_ratio
    first, weights = _weights_over(rule.metric.kind, numerator // denominator)
    start = bisect_right(found.bins, first - 1)
    return sum(
        count * weights[held - first]
        for held, count in zip(found.bins[start:], found.counts[start:], strict=True)
    )


@lru_cache(maxsize=256)
def _weights_over(kind: Kind, limit: int) -> tuple[int, tuple[int, ...]]:
    """The first bin that lies wholly over `limit`, and from it on what each bin's middle has over it."""
    first = over_from(kind, limit)
    middles = (
        (bin_lower(kind, held) + bin_upper(kind, held) + 1) // 2 for held in range(first, bin_count(kind))
    )
    return first, tuple(middle - limit for middle in middles)


class KlError(ValueError):
    """G5's reference function was given what it cannot compare."""


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """G5's reference estimator: Σ p·log(max(p, 1e-9) / max(q, 1e-9)) of two aligned vectors, in nats.

    Raises KlError on different lengths, on empty input, and on a result that is not finite. For the worked
    value of G5 and for comparison only: the gate's metric is `kl_lower`.
    """
    if len(p) != len(q):
        raise KlError(f"{len(p)} against {len(q)} probabilities: align them first")
    if not p:
        raise KlError("no probabilities: nothing to compare")
    try:
        total = math.fsum(
            a * math.log(max(a, KL_FLOOR) / max(b, KL_FLOOR)) for a, b in zip(p, q, strict=True)
        )
    except (ValueError, OverflowError):
        total = math.nan
    if not math.isfinite(total):
        raise KlError("the divergence is not finite: the probabilities hold NaN or infinity")
    return total
