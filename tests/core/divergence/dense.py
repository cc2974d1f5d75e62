"""The measures position by position in dense matrices: every list joined, completed and sorted in full.

The plain form of what `pipeline.core.divergence.measures` computes sparsely, and its bits: the same sums in
the same order. Any difference is another estimator. Only the Jensen–Shannon divergence is another sum here,
term by term with nothing to cancel; it agrees to a few roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeline.core.divergence.completion import TINY
from pipeline.core.divergence.lists import LEAST, TopLists
from pipeline.core.divergence.measures import FLOOR, Measures
from schemas.columns import F8, NOT_LISTED, Bool

_LOG_2: Final = float(np.log(2.0))
_LOG_FLOOR: Final = float(np.log(FLOOR))
_LOG_TINY: Final = float(np.log(TINY))
_HUGE: Final = float(np.finfo(np.float64).max)
_ROUNDING: Final = 1e-14


@dataclass(frozen=True)
class Joined:
    """(k, T) along P's tokens: Q's value and log q − log p, 0 where Q lacks the token; M and N."""

    q: F8
    log_ratio: F8
    m: Bool
    n: Bool


def measure(a: TopLists, b: TopLists, eta: F8) -> Measures:
    """All measures of T positions. `eta` (T,): mass added to Q's rest, the resolution of the wire.

    Every result is finite; where a position lists nothing on a side it means nothing.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        log_p, log_q = (np.maximum(lists.logprobs, LEAST) for lists in (a, b))
        p, q = (np.where(_listed(lists), np.exp(logs), 0.0) for lists, logs in ((a, log_p), (b, log_q)))
        joined = _join(a, b, log_p, log_q, q)
        cosine = _cosine(p, q, joined.q)
        (kl, js, tv), on_p, ratio = _completed(a, b, p, q, log_p, log_q, joined, eta)
        return Measures(
            kl_lower=np.maximum(-kl, 0.0),
            js_lower=np.minimum(np.maximum(js * 0.5 - (eta * (_LOG_2 / 2) + _ROUNDING), 0.0), _LOG_2),
            tv_lower=np.minimum(np.maximum(tv * 0.5 - (eta * 0.5 + _ROUNDING), 0.0), 1.0),
            kl_floor=_kl_floor(p, q, log_p, ratio, joined.m, on_p),
            cosine=cosine,
            top1_agree=_top1_agree(a, b, log_p, log_q),
        )


def _listed(lists: TopLists) -> Bool:
    return (lists.ids != NOT_LISTED) & (lists.logprobs > -np.inf)


def _join(a: TopLists, b: TopLists, log_p: F8, log_q: F8, q: F8) -> Joined:
    q_on_a, log_ratio = np.zeros(a.ids.shape), np.zeros(a.ids.shape)
    m, n = _listed(a), _listed(b)
    for row in range(len(b.ids)):
        same = (a.ids == b.ids[row]) & _listed(a) & _listed(b)[row]
        n[row] &= ~same.any(axis=0)
        m &= ~same
        q_on_a[same] = np.broadcast_to(q[row], same.shape)[same]
        log_ratio[same] = (log_q[row] - log_p)[same]
    return Joined(q_on_a, log_ratio, m, n)


def _completed(
    a: TopLists, b: TopLists, p: F8, q: F8, log_p: F8, log_q: F8, joined: Joined, eta: F8
) -> tuple[tuple[F8, F8, F8], F8, F8]:
    """Sums of the minimiser's terms; the first of them over P's list alone; log q − log p along that list."""
    log_d, log_c = np.maximum(a.cap, LEAST), np.maximum(b.cap, LEAST)
    d, c = np.exp(log_d), np.exp(log_c)
    p_m, q_n = np.where(joined.m, p, 0.0), np.where(joined.n, q, 0.0)
    m, n = _count(p_m), _count(q_n)
    p_r = np.maximum(1.0 - _sum(p), 0.0)
    q_r = np.maximum(1.0 - _sum(q), 0.0) + eta
    p_after, q_after = p_r - n * d, q_r - m * c
    p_plus, q_plus = np.maximum(p_after, 0.0), np.maximum(q_after, 0.0)
    s = _largest_ratio(q_r, c, p_plus, p_m)
    t = _largest_ratio(p_r, d, q_plus, q_n)
    keeps_p = (p_plus > 0.0) & (q_after * d <= p_after * c)
    some = (m > 0) | (n > 0)
    p_rest = np.maximum(np.where(some, np.where(keeps_p, p_plus, t * q_plus), p_r), TINY)
    q_rest = np.maximum(np.where(some, np.where(keeps_p, s * p_plus, q_plus), q_r), TINY)

    q_hat = np.where(joined.m, _filled(s, p, c), joined.q)
    ratio = np.where(joined.m, _log_filled(s, log_p, log_c), joined.log_ratio)
    p_hat, minus_ratio = _filled(t, q, d), _log_filled(t, log_q, log_d)
    on_a = [_sum(np.where(_listed(a), terms, 0.0)) for terms in _terms(p, q_hat, ratio)]
    rest = _terms(p_rest, q_rest, np.log(q_rest) - np.log(p_rest))
    on_n = [_sum(np.where(joined.n, terms, 0.0)) for terms in _terms(p_hat, q, -minus_ratio)]
    kl, js, tv = (first + second + third for first, second, third in zip(on_a, rest, on_n, strict=True))
    return (kl, js, tv), on_a[0], ratio


def _filled(ratio: F8, values: F8, cap: F8) -> F8:
    return np.maximum(np.minimum(ratio * values, cap), TINY)


def _log_filled(ratio: F8, logs: F8, log_cap: F8) -> F8:
    """Logarithm of what was filled in over the value it stands beside."""
    return np.maximum(np.minimum(log_cap - logs, np.log(np.maximum(ratio, TINY))), _LOG_TINY - logs)


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


def _terms(p: F8, q: F8, log_ratio: F8) -> tuple[F8, F8, F8]:
    """p·log(q/p), those of twice the Jensen–Shannon divergence, and |p − q|.

    With r = q/p: JS = ½ Σ (q·log r − (p + q)·log((1 + r)/2)), whose terms are exactly 0 where p = q.
    """
    return p * log_ratio, q * log_ratio - np.log((q / p + 1.0) * 0.5) * (p + q), np.abs(p - q)


def _kl_floor(p: F8, q: F8, log_p: F8, log_ratio: F8, m: Bool, on_p: F8) -> F8:
    """The reference estimator (G5): both lists renormalised, aligned on A, floored; for comparison only."""
    floor_p, floor_q = np.log(_sum(p)) + _LOG_FLOOR, np.log(_sum(q)) + _LOG_FLOOR
    own = np.maximum(log_p, floor_p) + log_ratio
    lacking = np.where(m, p * (own - floor_q), 0.0)
    both = np.where((p > 0.0) & ~m, p * (own - np.maximum(log_ratio + log_p, floor_q)), 0.0)
    return np.maximum((_sum(lacking) + _sum(both) - on_p) / _sum(p) + np.log(_sum(q)) - np.log(_sum(p)), 0.0)


def _cosine(p: F8, q: F8, q_on_a: F8) -> F8:
    """Of the two probability vectors over all listed tokens; 1 exactly for equal lists."""
    squares = _sum(p * p) * _sum(q * q)
    return np.minimum(_sum(p * q_on_a) / np.sqrt(np.maximum(squares, TINY)), 1.0)


def _top1_agree(a: TopLists, b: TopLists, log_p: F8, log_q: F8) -> F8:
    """1 where a most likely token of A is a most likely token of B: equal values have no order."""
    agree = np.zeros(a.ids.shape[1], dtype=np.bool_)
    likeliest_a = _listed(a) & (log_p == np.where(_listed(a), log_p, -np.inf).max(axis=0))
    likeliest_b = _listed(b) & (log_q == np.where(_listed(b), log_q, -np.inf).max(axis=0))
    for row in range(len(b.ids)):
        agree |= (likeliest_a & (a.ids == b.ids[row]) & likeliest_b[row]).any(axis=0)
    return agree.astype(np.float64)
