"""The measures position by position in dense matrices: every list joined, completed and sorted in full.

The plain form of what `pipeline.core.divergence.measures` computes sparsely, and its bits: the same sums in
the same order. Any difference is another estimator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from pipeline.core.divergence.measures import FLOOR, Measures, TopLists
from schemas.columns import F8, Bool

_LOG_2: Final = float(np.log(2.0))
_HUGE: Final = float(np.finfo(np.float64).max)
_ROUNDING: Final = 1e-15
_TINY: Final = 1e-305


def measure(a: TopLists, b: TopLists, eta: F8) -> Measures:
    """All measures of T positions. `eta` (T,): mass added to Q's rest, the resolution of the wire.

    Every result is finite; where a position lists nothing on a side it means nothing.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        p, q = np.exp(a.logprobs), np.exp(b.logprobs)
        q_on_a, only_b = _join(a, b, q)
        completed = _complete(p, q, q_on_a, only_b, np.exp(a.cap), np.exp(b.cap), eta)
        kl, js, tv = _total(_divergences(*rows) for rows in completed)
        return Measures(
            kl_lower=np.maximum(kl, 0.0),
            js_lower=np.minimum(np.maximum(js - eta * (_LOG_2 / 2) - _ROUNDING, 0.0), _LOG_2),
            tv_lower=np.minimum(np.maximum((tv - eta) / 2 - _ROUNDING, 0.0), 1.0),
            kl_floor=_kl_floor(p, q, q_on_a),
            cosine=_cosine(p, q, q_on_a),
            top1_agree=_top1_agree(p, q, q_on_a),
        )


def _join(a: TopLists, b: TopLists, q: F8) -> tuple[F8, Bool]:
    """Q's value of A's tokens (k_A, T), 0 where B lacks them; and which of B's tokens A lacks (k_B, T)."""
    q_on_a = np.zeros(a.ids.shape)
    only_b = np.empty(b.ids.shape, dtype=np.bool_)
    for row in range(len(b.ids)):
        same = a.ids == b.ids[row]
        np.logical_not(same.any(axis=0), out=only_b[row])
        q_on_a += same * q[row]
    return q_on_a, only_b


def _complete(
    p: F8, q: F8, q_on_a: F8, only_b: Bool, d: F8, c: F8, eta: F8
) -> tuple[tuple[F8, F8], tuple[F8, F8], tuple[F8, F8]]:
    """The minimiser (P, Q) on A's tokens (k_A, T), on those only B lists (k_B, T), on the rest (1, T).

    Entries that are none, or that stand among A's tokens already, are 0 on both sides.
    """
    p_m, q_n = p * (q_on_a == 0.0), q * only_b
    m, n = _count(p_m), _count(q_n)
    p_r = np.maximum(1.0 - _sum(p), 0.0)
    q_r = np.maximum(1.0 - _sum(q), 0.0) + eta
    p_after, q_after = p_r - n * d, q_r - m * c
    p_plus, q_plus = np.maximum(p_after, 0.0), np.maximum(q_after, 0.0)
    s = _largest_ratio(q_r, c, p_plus, p_m)
    t = _largest_ratio(p_r, d, q_plus, q_n)

    q_hat = s * p_m
    np.minimum(q_hat, c, out=q_hat)
    q_hat += q_on_a
    p_hat = t * q_n
    np.minimum(p_hat, d, out=p_hat)
    # Where the rest keeps P's mass, all of N sits at its cap; else all of M does and the rest keeps Q's.
    keeps_p = (p_plus > 0.0) & (q_after * d <= p_after * c)
    p_rest = np.where(keeps_p, p_plus, np.where(q_plus > 0.0, t * q_plus, 0.0))
    q_rest = np.where(keeps_p, s * p_plus, q_plus)
    return (p, q_hat), (p_hat, q_n), (p_rest[None], q_rest[None])


def _largest_ratio(rest: F8, cap: F8, plus: F8, values: F8) -> F8:
    """max over j of (rest − j·cap) / (plus + sum of the (count − j) smallest values), at least 0; shape (T,).

    `values` (k, T) holds 0 for entries that do not count. They sort first and add nothing, and a j beyond
    the count never exceeds j = count; so j may run to k in every position.
    """
    ordered = np.sort(values, axis=0)
    partial = plus
    # From the largest j down: `partial` then grows by one entry a step.
    best = (rest - len(ordered) * cap) / partial
    for j, value in zip(range(len(ordered) - 1, -1, -1), ordered, strict=True):
        partial = partial + value
        best = np.fmax(best, (rest - j * cap) / partial)
    # 0/0 leaves that j out: fmax passes over NaN, and a NaN that stays means that no j was left. The largest
    # finite number stands for infinity: times 0 it stays 0, times any value it is above every cap.
    return np.minimum(np.fmax(best, 0.0), _HUGE)


def _count(values: F8) -> F8:
    """How many rows are above 0, per column."""
    count: F8 = np.add.reduce(values > 0.0, axis=0, dtype=np.uint8).astype(np.float64)
    return count


def _sum(rows: F8 | Sequence[F8]) -> F8:
    """Sum over the rows (one at least), in order: the same bits whatever the shape and the padding."""
    if len(rows) == 1:
        return rows[0]
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total


def _divergences(p: F8, q: F8) -> tuple[F8, F8, F8]:
    """KL(P‖Q), Jensen–Shannon and Σ|p − q| over the rows; a row that is 0 on both sides adds exactly 0.

    With r = q/p: JS = ½ Σ (q·log r − (p + q)·log((1 + r)/2)), whose terms are exactly 0 where p = q.
    """
    ratio = np.maximum(q, _TINY)
    ratio /= np.maximum(p, _TINY)
    log_ratio = np.log(ratio)
    kl = -_sum(p * log_ratio)
    ratio += 1.0
    ratio *= 0.5
    half = np.log(ratio, out=ratio)
    half *= p + q
    log_ratio *= q
    log_ratio -= half
    difference = p - q
    return kl, 0.5 * _sum(log_ratio), _sum(np.abs(difference, out=difference))


def _total(parts: Iterable[tuple[F8, F8, F8]]) -> tuple[F8, F8, F8]:
    """Sums of the parts' KL, Jensen–Shannon and Σ|p − q|, in order."""
    kl, js, tv = zip(*parts, strict=True)
    return _sum(kl), _sum(js), _sum(tv)


def _kl_floor(p: F8, q: F8, q_on_a: F8) -> F8:
    """The reference estimator (G5): both lists renormalised, aligned on A, floored; for comparison only."""
    p_own, q_own = p / np.maximum(_sum(p), _TINY), q_on_a / np.maximum(_sum(q), _TINY)
    ratio = np.maximum(p_own, FLOOR)
    ratio /= np.maximum(q_own, FLOOR)
    terms = np.log(ratio, out=ratio)
    terms *= p_own
    return np.maximum(_sum(terms), 0.0)


def _cosine(p: F8, q: F8, q_on_a: F8) -> F8:
    """Of the two probability vectors over all listed tokens; 1 exactly for equal lists."""
    squares = _sum(p * p) * _sum(q * q)
    return np.where(squares > 0.0, np.minimum(_sum(p * q_on_a) / np.sqrt(squares), 1.0), 0.0)


def _top1_agree(p: F8, q: F8, q_on_a: F8) -> F8:
    """1 where a most likely token of A is a most likely token of B: equal values have no order."""
    agree: Bool = ((p == p.max(axis=0)) & (q_on_a == q.max(axis=0))).any(axis=0)
    return agree.astype(np.float64)
