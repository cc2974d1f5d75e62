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
from dataclasses import dataclass, fields
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.columns import F8, I4, I8, NOT_LISTED, Bool

ESTIMATOR: Final = "kl_lower/1"
"""Name and version of the estimator, in every stored score."""

BLOCK_ENTRIES: Final = 20_480
"""Positions are measured in blocks of about so many list entries a side (64 pairs of 64 positions, top 5). In
smaller ones the price of a numpy call weighs more than the arithmetic; much larger ones leave the cache. A
matrix of a block is above the 128 KiB that a fresh process hands back to the system each time; one that has
let go of a record as large keeps it."""
FLOOR: Final = 1e-9
"""Probability that `kl_floor` gives a token the other side does not list (G5)."""
_LOG_2: Final = float(np.log(2.0))
_HUGE: Final = float(np.finfo(np.float64).max)
_ROUNDING: Final = 1e-15
"""What may stay when η is subtracted again: taken off too, so that equal lists give exactly 0."""
_TINY: Final = 1e-305
"""Stands for 0 under a logarithm: below every probability that matters, above the denormal numbers."""


@dataclass(frozen=True, slots=True)
class TopLists:
    """T lists of at most k tokens.

    `ids` (k, T): tokens, NOT_LISTED where an entry is none.
    `logprobs` (k, T): −inf where an entry is none.
    `cap` (T,): logarithm of the most an unlisted token can hold, usually the smallest listed value.
    """

    ids: I4 | I8
    logprobs: F8
    cap: F8


@dataclass(frozen=True, slots=True)
class Listed:
    """The same as probabilities: `p` (k, T), 0 where an entry is none; `total` (T,): its sum; `cap` (T,)."""

    ids: I4 | I8
    p: F8
    total: F8
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
class _Own:
    """Entries of one arm's lists whose token the other lacks (M or N), row by row; their values are above 0.

    `entries`: places in the flattened (k, T) matrices.
    """

    entries: NDArray[np.intp]
    columns: NDArray[np.intp]
    values: F8


def measure(a: TopLists, b: TopLists, eta: F8) -> Measures:
    """All measures of T positions. `eta` (T,): mass added to Q's rest, the resolution of the wire.

    Every result is finite where each side lists something; elsewhere it means nothing.
    """
    size = max(1, BLOCK_ENTRIES // max(len(a.ids), len(b.ids)))
    blocks = [slice(start, start + size) for start in range(0, max(a.ids.shape[1], 1), size)]
    parts = [measure_listed(_listed(a, block), _listed(b, block), eta[block]) for block in blocks]
    if len(parts) == 1:
        return parts[0]
    return Measures(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Measures)}
    )


def _listed(lists: TopLists, block: slice) -> Listed:
    with np.errstate(under="ignore", over="ignore", invalid="ignore"):
        p: F8 = np.exp(lists.logprobs[:, block])
        ids = lists.ids[:, block]
        return Listed(ids, p, sum_rows(p), np.exp(lists.cap[block]))


def measure_listed(a: Listed, b: Listed, eta: F8) -> Measures:
    """What `measure` says, in one block: the caller keeps it near BLOCK_ENTRIES list entries a side."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        q_on_a, only_a, only_b = _align(a, b)
        # These read Q's values alone; the completion then fills the same matrix where B lacks a token.
        floor, cosine, agree = _kl_floor(a, b, q_on_a), _cosine(a, b, q_on_a), _top1_agree(a, b, q_on_a)
        kl, js, tv = _completed(a, b, q_on_a, only_a, only_b, eta)
        return Measures(
            kl_lower=np.maximum(-kl, 0.0),
            js_lower=np.minimum(np.maximum(js * 0.5 - eta * (_LOG_2 / 2) - _ROUNDING, 0.0), _LOG_2),
            tv_lower=np.minimum(np.maximum((tv - eta) / 2 - _ROUNDING, 0.0), 1.0),
            kl_floor=floor,
            cosine=cosine,
            top1_agree=agree,
        )


def _align(a: Listed, b: Listed) -> tuple[F8, _Own, _Own]:
    """Q's value of A's tokens (k_A, T), 0 where B lacks them; what only A lists (M) and only B lists (N).

    Most entries of a healthy canary name the token that stands beside them in the other list. Only the others
    are looked up: what they cost does not grow with the positions that agree.
    """
    k_a, k_b = len(a.ids), len(b.ids)
    q_on_a = b.p[:k_a].copy() if k_a <= k_b else np.concatenate([b.p, np.zeros((k_a - k_b, b.p.shape[1]))])
    apart_a = _apart(a.ids, b.ids)
    apart_b = apart_a.copy() if k_a == k_b else _apart(b.ids, a.ids)
    if not np.minimum.reduce(q_on_a, axis=None) > 0.0:
        # A value of Q that underflowed to 0 counts as not listed.
        apart_a |= (q_on_a == 0.0) & (a.p > 0.0)
    size = q_on_a.shape[1]
    entries = apart_a.reshape(-1).nonzero()[0]
    columns = entries % size
    p = a.p.reshape(-1)[entries]
    # Within a position, every token of Q that P lists on another row is among these entries, too.
    found = (b.ids.take(columns, axis=1) == a.ids.reshape(-1)[entries]).reshape(-1).nonzero()[0]
    rows = found // max(len(entries), 1)
    which = found - rows * len(entries)
    entries_b = rows * size + columns[which]
    q = np.zeros(len(entries))
    q[which] = b.p.reshape(-1)[entries_b]
    q_on_a.reshape(-1)[entries] = q
    apart_b.reshape(-1)[entries_b] = False
    m = ((q == 0.0) & (p > 0.0)).nonzero()[0]
    entries_n = apart_b.reshape(-1).nonzero()[0]
    entries_n = entries_n[b.p.reshape(-1)[entries_n] > 0.0]
    return (
        q_on_a,
        _Own(entries[m], columns[m], p[m]),
        _Own(entries_n, entries_n % size, b.p.reshape(-1)[entries_n]),
    )


def _apart(ids: I4 | I8, others: I4 | I8) -> Bool:
    """Entries of `ids` beside which `others` has another token or none."""
    k = min(len(ids), len(others))
    if k == len(ids):
        return np.asarray(ids != others[:k])
    return np.concatenate([ids[:k] != others, ids[k:] != NOT_LISTED])


def _completed(a: Listed, b: Listed, q_on_a: F8, only_a: _Own, only_b: _Own, eta: F8) -> tuple[F8, F8, F8]:
    """Σ p·log(q/p), twice the Jensen–Shannon divergence and Σ|p − q| of the minimiser, each of shape (T,).

    Fills Q's values of the tokens that only A lists into `q_on_a`.
    """
    p_r = np.maximum(1.0 - a.total, 0.0)
    q_r = np.maximum(1.0 - b.total, 0.0) + eta
    c, d = b.cap, a.cap
    at = _columns(only_a, only_b, len(p_r))
    if not len(at):
        keeps_p = (p_r > 0.0) & (q_r * d <= p_r * c)
        kept, ratio = _rest(keeps_p, p_r, q_r, p_r, q_r)
        from_n = None
    else:
        place = np.zeros(len(p_r), dtype=np.intp)
        place[at] = np.arange(len(at))
        in_m, in_n = place[only_a.columns], place[only_b.columns]
        m, n = np.bincount(in_m, minlength=len(at)), np.bincount(in_n, minlength=len(at))
        p_after, q_after = p_r.copy(), q_r.copy()
        p_after[at] -= n * d[at]
        q_after[at] -= m * c[at]
        p_plus, q_plus = np.maximum(p_after, 0.0), np.maximum(q_after, 0.0)
        both = _largest_ratio(
            np.concatenate([q_r[at], p_r[at]]),
            np.concatenate([c[at], d[at]]),
            np.concatenate([p_plus[at], q_plus[at]]),
            np.concatenate([m, n]),
            np.concatenate([in_m, in_n + len(at)]),
            np.concatenate([only_a.values, only_b.values]),
        )
        s, t = both[: len(at)], both[len(at) :]
        q_on_a.reshape(-1)[only_a.entries] = np.minimum(s[in_m] * only_a.values, c[only_a.columns])
        p_n = np.minimum(t[in_n] * only_b.values, d[only_b.columns])
        # Entries come row by row, and `bincount` adds in order: the order of `sum_rows`.
        from_n = [np.bincount(in_n, weights=terms, minlength=len(at)) for terms in _terms(p_n, only_b.values)]
        # Where the rest keeps P's mass, all of N sits at its cap; else all of M does and the rest keeps Q's.
        keeps_p = (p_plus > 0.0) & (q_after * d <= p_after * c)
        kept, ratio = _rest(keeps_p, p_plus, q_plus, p_r, q_r)
        ratio[at] = np.where(keeps_p[at], s, t)
    other: F8 = ratio * kept
    p_rest, q_rest = np.where(keeps_p, kept, other), np.where(keeps_p, other, kept)
    sums = [sum_rows(terms) for terms in _terms(a.p, q_on_a)]
    if from_n is not None:
        for total, part in zip(sums, from_n, strict=True):
            total[at] += part
    kl, js, tv = (total + part for total, part in zip(sums, _terms(p_rest, q_rest), strict=True))
    return kl, js, tv


def _rest(keeps_p: Bool, p_plus: F8, q_plus: F8, p_r: F8, q_r: F8) -> tuple[F8, F8]:
    """The side of the rest that is kept, and the other side's ratio to it where M and N are empty."""
    kept = np.where(keeps_p, p_plus, q_plus)
    return kept, _finite(np.where(keeps_p, q_r, p_r) / kept)


def _columns(only_a: _Own, only_b: _Own, n: int) -> NDArray[np.intp]:
    """The columns, of n, in which there are entries."""
    mark = np.zeros(n, dtype=np.bool_)
    mark[only_a.columns] = True
    mark[only_b.columns] = True
    return mark.nonzero()[0]


def _largest_ratio(
    rest: F8, cap: F8, plus: F8, counts: NDArray[np.intp], columns: NDArray[np.intp], values: F8
) -> F8:
    """max over j of (rest − j·cap) / (plus + sum of the (count − j) smallest values), at least 0; shape (C,).

    `values` stand in `columns`, `counts` (C,) of them in each.
    """
    ascending = _by_column(counts, columns, values)
    j = counts.astype(np.float64)
    partial = plus
    # From the largest j down: `partial` then grows by one entry a step. Rows of 0 stand first or last, and
    # add nothing; a j below 0 is left out.
    best = (rest - j * cap) / partial
    for value in ascending:
        partial = partial + value
        j -= value > 0.0
        np.fmax(best, (rest - j * cap) / partial, out=best)
    return _finite(best)


def _by_column(counts: NDArray[np.intp], columns: NDArray[np.intp], values: F8) -> F8 | list[F8]:
    """Rows of shape (C,): the values of each column from the smallest up, among zeros."""
    rows = np.zeros((int(np.maximum.reduce(counts)), len(counts)))
    if len(rows) == 1:
        rows[0, columns] = values
        return rows
    # 16 bits are sorted by radix, several times faster.
    narrow = columns.astype(np.uint16) if len(counts) <= 1 << 16 else columns
    order = narrow.argsort(kind="stable")
    columns = columns[order]
    # Lists mostly fall from row to row: the last entry of a column is its smallest.
    rows[np.cumsum(counts)[columns] - 1 - np.arange(len(columns)), columns] = values[order]
    if np.logical_or.reduce((rows[1:] < rows[:-1]) & (rows[1:] > 0.0), axis=None):
        return _sorted_rows(rows)
    return rows


def _finite(ratio: F8) -> F8:
    """In place. 0/0 is no ratio: 0. The largest finite number stands for infinity: times 0 it stays 0, times
    any value it is above every cap."""
    np.fmax(ratio, 0.0, out=ratio)
    np.minimum(ratio, _HUGE, out=ratio)
    return ratio


def sum_rows(rows: F8) -> F8:
    """Sum over the rows (one at least), in order: the same bits whatever the shape and the padding."""
    if len(rows) == 1:
        only: F8 = rows[0].copy()
        return only
    total: F8 = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
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


def _terms(p: F8, q: F8) -> tuple[F8, F8, F8]:
    """p·log(q/p), the terms of twice the Jensen–Shannon divergence, |p − q|; exactly 0 where both are 0.

    With r = q/p: JS = ½ Σ (q·log r − (p + q)·log((1 + r)/2)), whose terms are exactly 0 where p = q.
    """
    ratio, divisor = np.maximum(q, _TINY), np.maximum(p, _TINY)
    ratio /= divisor
    js = np.log(ratio)
    kl = np.multiply(p, js, out=divisor)
    js *= q
    ratio += 1.0
    ratio *= 0.5
    half = np.log(ratio, out=ratio)
    both = p + q
    half *= both
    js -= half
    difference = np.subtract(p, q, out=both)
    return kl, js, np.abs(difference, out=difference)


def _kl_floor(a: Listed, b: Listed, q_on_a: F8) -> F8:
    """The reference estimator (G5): both lists renormalised, aligned on A, floored; for comparison only."""
    p_own, ratio = a.p / np.maximum(a.total, _TINY), q_on_a / np.maximum(b.total, _TINY)
    np.maximum(ratio, FLOOR, out=ratio)
    np.divide(np.maximum(p_own, FLOOR), ratio, out=ratio)
    terms = np.log(ratio, out=ratio)
    terms *= p_own
    return np.maximum(sum_rows(terms), 0.0)


def _cosine(a: Listed, b: Listed, q_on_a: F8) -> F8:
    """Of the two probability vectors over all listed tokens; 1 exactly for equal lists."""
    squares = sum_rows(a.p * a.p) * sum_rows(b.p * b.p)
    return np.where(squares > 0.0, np.minimum(sum_rows(a.p * q_on_a) / np.sqrt(squares), 1.0), 0.0)


def _top1_agree(a: Listed, b: Listed, q_on_a: F8) -> F8:
    """1 where a most likely token of A is a most likely token of B: equal values have no order."""
    agree: Bool = ((a.p == np.maximum.reduce(a.p, axis=0)) & (q_on_a == np.maximum.reduce(b.p, axis=0))).any(
        axis=0
    )
    return agree.astype(np.float64)
