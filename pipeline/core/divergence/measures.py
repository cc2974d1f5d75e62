"""Divergence of two top-k lists, for many positions at once.

P is the baseline, Q the compared arm; natural logarithms, float64. Matrices have the shape (k, T): one column
per position, so that every operation runs along contiguous memory and every sum over a list adds its rows in
order. A position's result therefore has the same bits whatever positions stand beside it and however far
its list is padded.

`kl_lower` is the smallest full-vocabulary KL(P‖Q) consistent with both lists: entries outside P's list hold
at most its cap d (its smallest listed value), entries outside Q's at most c, P sums to 1 and Q to 1 + η. With
M = A∖B, N = B∖A, entries below their cap share one ratio with the rest of the vocabulary, and either all of N
or all of M sits at its cap; so the minimum is closed. The same completion minimises every f-divergence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from schemas.columns import F8, I8, Bool

ESTIMATOR: Final = "kl_lower/1"
"""Name and version of the estimator, in every stored score."""

FLOOR: Final = 1e-9
"""Probability that `kl_floor` gives a token the other side does not list (G5)."""
_LOG_FLOOR: Final = float(np.log(FLOOR))
_LOG_2: Final = float(np.log(2.0))


@dataclass(frozen=True, slots=True)
class TopLists:
    """T lists of at most k tokens.

    `ids` (k, T): tokens; where `listed` is False the value is arbitrary.
    `logprobs` (k, T): finite where listed, else −inf.
    `cap` (T,): logarithm of the most an unlisted token can hold, usually the smallest listed value.
    """

    ids: I8
    logprobs: F8
    listed: Bool
    cap: F8


@dataclass(frozen=True, slots=True)
class Measures:
    """Per position, shape (T,): divergences in nats, `tv_lower`, `cosine` and `top1_agree` in [0, 1]."""

    kl_lower: F8
    js_lower: F8
    tv_lower: F8
    kl_floor: F8
    cosine: F8
    top1_agree: F8


@dataclass(frozen=True, slots=True)
class _Joined:
    """Both lists seen from each other's tokens."""

    in_b: Bool
    """(k_A, T): this token of A is on B too."""
    in_a: Bool
    q_on_a: F8
    logq_on_a: F8
    """(k_A, T): Q's value of A's tokens; 0 and −inf where B lacks them."""


@dataclass(frozen=True, slots=True)
class _Completion:
    """The minimiser: Q on A's tokens, P on the tokens only B lists, and the rest of the vocabulary."""

    q_on_a: F8
    log_ratio_a: F8
    """(k_A, T): log(p/q) of A's tokens."""
    p_on_n: F8
    log_ratio_n: F8
    """(k_B, T): log(p/q) of the tokens only B lists; p is 0 elsewhere."""
    p_rest: F8
    q_rest: F8
    log_ratio_rest: F8


def measure(a: TopLists, b: TopLists, eta: F8) -> Measures:
    """All measures of T positions. `eta` (T,): mass added to Q's rest, the resolution of the wire.

    Every position must list something on both sides. With η > 0 every result is finite.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        p, q = np.exp(a.logprobs), np.exp(b.logprobs)
        joined = _join(a, b, q)
        completed = _complete(a, b, p, q, joined, eta)
        q_n = np.where(joined.in_a, 0.0, q)
        return Measures(
            kl_lower=_kl(p, completed),
            js_lower=_js(p, q_n, completed, eta),
            tv_lower=_tv(p, q_n, completed, eta),
            kl_floor=_kl_floor(a, p, q, joined),
            cosine=_cosine(p, q, joined),
            top1_agree=_top1_agree(a, b, joined),
        )


def _join(a: TopLists, b: TopLists, q: F8) -> _Joined:
    in_b = np.zeros(a.ids.shape, dtype=np.bool_)
    in_a = np.empty(b.ids.shape, dtype=np.bool_)
    q_on_a = np.zeros(a.ids.shape)
    logq_on_a = np.full(a.ids.shape, -np.inf)
    for row in range(b.ids.shape[0]):
        same = (a.ids == b.ids[row]) & a.listed & b.listed[row]
        in_b |= same
        in_a[row] = same.any(axis=0)
        np.copyto(q_on_a, q[row], where=same)
        np.copyto(logq_on_a, b.logprobs[row], where=same)
    return _Joined(in_b, in_a, q_on_a, logq_on_a)


def _complete(a: TopLists, b: TopLists, p: F8, q: F8, joined: _Joined, eta: F8) -> _Completion:
    only_a, only_b = a.listed & ~joined.in_b, b.listed & ~joined.in_a
    m, n = only_a.sum(axis=0), only_b.sum(axis=0)
    c, d = np.exp(b.cap), np.exp(a.cap)
    p_r = np.maximum(1.0 - _sum(p), 0.0)
    q_r = np.maximum(1.0 - _sum(q), 0.0) + eta
    p_after, q_after = p_r - n * d, q_r - m * c
    p_plus, q_plus = np.maximum(p_after, 0.0), np.maximum(q_after, 0.0)
    s = _largest_ratio(q_r, c, p_plus, np.where(only_a, p, 0.0))
    t = _largest_ratio(p_r, d, q_plus, np.where(only_b, q, 0.0))
    log_s, log_t = np.log(s), np.log(t)

    # On M: q = min(c, s·p); an infinite s times p = 0 is NaN, which fmin reads as "at the cap".
    q_on_a = np.where(joined.in_b, joined.q_on_a, np.where(only_a, np.fmin(c, s * p), 0.0))
    shared_ratio = a.logprobs - joined.logq_on_a
    log_ratio_a = np.where(joined.in_b, shared_ratio, np.maximum(a.logprobs - b.cap, -log_s))
    p_on_n = np.where(only_b, np.fmin(d, t * q), 0.0)
    log_ratio_n = np.minimum(a.cap - b.logprobs, log_t)

    # Where the rest keeps P's mass, all of N sits at its cap; else all of M does and the rest keeps Q's.
    keeps_p = (p_plus > 0.0) & (q_after * d <= p_after * c)
    keeps_q = ~keeps_p & (q_plus > 0.0)
    p_rest = np.where(keeps_p, p_plus, np.where(keeps_q, t * q_plus, 0.0))
    q_rest = np.where(keeps_p, s * p_plus, np.where(keeps_q, q_plus, 0.0))
    return _Completion(
        q_on_a, log_ratio_a, p_on_n, log_ratio_n, p_rest, q_rest, np.where(keeps_p, -log_s, log_t)
    )


def _largest_ratio(rest: F8, cap: F8, plus: F8, values: F8) -> F8:
    """max over j of (rest − j·cap) / (plus + sum of the (count − j) smallest values), at least 0; shape (T,).

    `values` (k, T) holds 0 for entries that do not count. They sort first and add nothing, and a j beyond
    the count never exceeds j = count; so j may run to k in every position.
    """
    ordered = _sorted_rows(values)
    k = len(ordered)
    best = rest / (plus + _sum(ordered)) if k else rest / plus
    partial = plus + 0.0
    # From the largest j down: `partial` then grows by one entry a step.
    for j in range(k, 0, -1):
        best = np.fmax(best, (rest - j * cap) / partial)
        partial = partial + ordered[k - j]
    # 0/0 leaves that j out: fmax passes over NaN, and a NaN that stays means that no j was left.
    return np.fmax(best, 0.0)


def _sum(rows: F8 | list[F8]) -> F8:
    """Sum over the rows in order, whatever their number: the same bits with and without padding."""
    total = np.zeros(rows[0].shape) if len(rows) else np.zeros(0)
    for row in rows:
        total = total + row
    return total


def _sorted_rows(values: F8) -> list[F8]:
    """The rows of (k, T), each column in ascending order."""
    rows = list(values)
    for low, high in _network(len(rows)):
        rows[low], rows[high] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
    return rows


@cache
def _network(k: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort for k rows: the pairs to compare, in order."""
    return tuple(_batcher(k))


def _batcher(k: int) -> Iterator[tuple[int, int]]:
    p = 1
    while p < k:
        step = p
        while step >= 1:
            for start in range(step % p, k - step, 2 * step):
                for i in range(start, min(start + step, k - step)):
                    if i // (2 * p) == (i + step) // (2 * p):
                        yield i, i + step
            step //= 2
        p *= 2


def _weighted(weights: F8, values: F8) -> F8:
    """weights · values with 0 · anything = 0."""
    return np.where(weights > 0.0, weights * values, 0.0)


def _kl(p: F8, done: _Completion) -> F8:
    total = (
        _sum(_weighted(p, done.log_ratio_a))
        + _sum(_weighted(done.p_on_n, done.log_ratio_n))
        + _weighted(done.p_rest, done.log_ratio_rest)
    )
    return np.maximum(total, 0.0)


def _js(p: F8, q_n: F8, done: _Completion, eta: F8) -> F8:
    total = (
        _sum(_js_terms(p, done.q_on_a, done.log_ratio_a))
        + _sum(_js_terms(done.p_on_n, q_n, done.log_ratio_n))
        + _js_terms(done.p_rest, done.q_rest, done.log_ratio_rest)
    )
    return np.clip(total - eta * (_LOG_2 / 2), 0.0, _LOG_2)


def _js_terms(p: F8, q: F8, log_ratio: F8) -> F8:
    """½·(p·log(p/m) + q·log(q/m)) with m = (p + q)/2, exactly 0 where p = q; symmetric, so no overflow."""
    small, large = np.minimum(p, q), np.maximum(p, q)
    ratio = np.where(large > 0.0, small / large, 1.0)
    return -0.5 * ((p + q) * np.log(0.5 * (1.0 + ratio)) + _weighted(small, np.abs(log_ratio)))


def _tv(p: F8, q_n: F8, done: _Completion, eta: F8) -> F8:
    total = (
        _sum(np.abs(p - done.q_on_a)) + _sum(np.abs(done.p_on_n - q_n)) + np.abs(done.p_rest - done.q_rest)
    )
    return np.clip((total - eta) / 2, 0.0, 1.0)


def _kl_floor(a: TopLists, p: F8, q: F8, joined: _Joined) -> F8:
    """The reference estimator (G5): both lists renormalised, aligned on A, floored; for comparison only."""
    total_p, total_q = _sum(p), _sum(q)
    log_p = np.maximum(a.logprobs - np.log(total_p), _LOG_FLOOR)
    log_q = np.maximum(joined.logq_on_a - np.log(total_q), _LOG_FLOOR)
    return np.maximum(_sum(_weighted(p / total_p, log_p - log_q)), 0.0)


def _cosine(p: F8, q: F8, joined: _Joined) -> F8:
    norms = np.sqrt(_sum(p * p) * _sum(q * q))
    return np.where(norms > 0.0, np.minimum(_sum(p * joined.q_on_a) / norms, 1.0), 0.0)


def _top1_agree(a: TopLists, b: TopLists, joined: _Joined) -> F8:
    """1 where a most likely token of A is a most likely token of B: equal values have no order."""
    best_a = a.logprobs == a.logprobs.max(axis=0)
    best_b = joined.logq_on_a == b.logprobs.max(axis=0)
    agree: Bool = (best_a & best_b & joined.in_b).any(axis=0)
    return agree.astype(np.float64)
