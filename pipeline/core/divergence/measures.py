"""Divergence of two top-k lists, for many positions at once.

P is the baseline, Q the compared arm; natural logarithms, float64.

`kl_lower` is the smallest full-vocabulary KL(P‖Q) consistent with both lists: entries outside P's list hold
at most its cap d (its smallest listed value), entries outside Q's at most c, P sums to 1 and Q to 1 + η. With
M = A∖B, N = B∖A, entries below their cap share one ratio with the rest of the vocabulary, and either all of N
or all of M sits at its cap; so the minimum is closed. The same completion minimises every f-divergence.

Lists hold logarithms, so log(q/p) of a token on both is a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.completion import TINY, complete
from pipeline.core.divergence.joining import Joined, join
from pipeline.core.divergence.lists import Lists, TopLists, side_by_side, sum_rows
from schemas.columns import F8, NOT_LISTED

ESTIMATOR: Final = "kl_lower/2"
"""Name and version of the estimator, in every stored score."""

BLOCK_ENTRIES: Final = 81_920
"""Positions are measured in blocks of about so many list entries a side (256 pairs of 64 positions, top 5).
In smaller ones the price of a numpy call weighs as much as the arithmetic; larger ones leave the cache."""
FLOOR: Final = 1e-9
"""Probability that `kl_floor` gives a token the other side does not list (G5)."""
_LOG_FLOOR: Final = float(np.log(FLOOR))
_LOG_2: Final = float(np.log(2.0))
_LOWEST: Final = _LOG_FLOOR + 0.01
"""No log-probability above is below the floor, renormalised by what a list that can be read may sum to."""
_ROUNDING: Final = 1e-15
"""What may stay when η is subtracted again: taken off too, so that equal lists give exactly 0."""
_SCALE: Final = np.array([[-1.0], [0.5], [0.5]])
_OF_ETA: Final = np.array([[_LOG_2 / 2], [0.5]])
_MOST: Final = np.array([[np.inf], [_LOG_2], [1.0], [np.inf], [1.0], [1.0]])
"""Of each of the MEASURES."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Per position, shape (T,): divergences in nats, `tv_lower`, `cosine` and `top1_agree` in [0, 1]."""

    kl_lower: F8
    js_lower: F8
    tv_lower: F8
    kl_floor: F8
    cosine: F8
    top1_agree: F8


MEASURES: Final = tuple(f.name for f in fields(Measures))


def measure(a: TopLists, b: TopLists, eta: F8) -> Measures:
    """All measures of T positions. `eta` (T,): mass added to Q's rest, the resolution of the wire.

    Every result is finite where each side lists something; elsewhere it means nothing.
    """
    size = max(1, BLOCK_ENTRIES // max(len(a.ids), len(b.ids)))
    blocks = [slice(start, start + size) for start in range(0, max(a.ids.shape[1], 1), size)]
    parts = [measure_lists(side_by_side(_cut(a, block), _cut(b, block)), eta[block]) for block in blocks]
    return Measures(*np.concatenate(parts, axis=1))


def _cut(lists: TopLists, block: slice) -> TopLists:
    return TopLists(lists.ids[:, block], lists.logprobs[:, block], lists.cap[block])


def measure_lists(lists: Lists, eta: F8) -> F8:
    """All MEASURES, one a row, in one block: the caller keeps it near BLOCK_ENTRIES list entries a side.

    Uses up `lists.p` and `lists.room`.
    """
    found = np.empty((len(MEASURES), len(eta)))
    certified, (floor, cosine, agree) = found[:3], found[3:]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        agree[:] = _top1_agree(lists)
        work = lists.room[1:, :-1]
        squares = sum_rows(np.square(lists.p[:, :-1], out=work[:2]))
        joined = join(lists)
        # Of what stands on both lists; the completion then fills in what Q lacks. 1 exactly for equal lists.
        common = sum_rows(np.multiply(lists.p[0, :-1], lists.p[1, :-1], out=work[2]))
        np.divide(common, np.sqrt(np.maximum(squares[0] * squares[1], TINY)), out=cosine)
        sums, on_p = _completed(lists, joined, eta)
        np.multiply(sums, _SCALE, out=certified)
        # Mass that η adds can raise these two; kl_lower it only lowers.
        certified[1:] -= eta * _OF_ETA
        certified[1:] -= _ROUNDING
        np.subtract(_lifted(lists, joined), on_p, out=floor)
        floor /= lists.total[0]
        floor += np.log(lists.total[1] / lists.total[0])
        np.maximum(found, 0.0, out=found)
        np.minimum(found, _MOST, out=found)
    return found


def _completed(lists: Lists, joined: Joined, eta: F8) -> tuple[F8, F8]:
    """Of the minimiser: Σ p·log(q/p), twice the Jensen–Shannon divergence and Σ|p − q|, shape (3, T).

    And the first of them over P's list alone, shape (T,). Fills what only P lists, and the rest of the
    vocabulary, into `lists.p` and `joined.log_ratio`.
    """
    (p, q), log_ratio, terms = lists.p, joined.log_ratio, lists.room[1:]
    only_p, only_q = joined.only_p, joined.only_q
    rests = np.maximum(1.0 - lists.total, 0.0)
    rests[1] += eta
    done = None
    if len(only_p.entries) or len(only_q.entries):
        done = complete(only_p, only_q, rests, lists.cap)
        q.reshape(-1)[only_p.entries] = done.q_m
        log_ratio.reshape(-1)[only_p.entries] = done.ratio_m
        rests[0, done.at], rests[1, done.at] = done.rests
    np.maximum(rests, TINY, out=lists.p[:, -1])
    np.divide(q[-1], p[-1], out=log_ratio[-1])
    np.log(log_ratio[-1], out=log_ratio[-1])
    _terms(p, q, log_ratio, terms)
    sums = sum_rows(terms[:, :-1])
    on_p = sums[0].copy()
    sums += terms[:, -1]
    if done is not None:
        of_n = np.empty((3, len(done.p_n)))
        _terms(done.p_n, only_q.values, done.ratio_n, of_n)
        for total, part in zip(sums, of_n, strict=True):
            # Entries come row by row, and `bincount` adds in order: the order of `sum_rows`.
            total[done.at] += np.bincount(done.in_n, weights=part, minlength=len(done.at))
    return sums, on_p


def _terms(p: F8, q: F8, log_ratio: F8, out: F8) -> None:
    """p·log(q/p), the terms of twice the Jensen–Shannon divergence, |p − q|; all exactly 0 where p = q.

    With r = q/p: JS = ½ Σ (q·log r − (p + q)·log((1 + r)/2)).
    """
    kl, js, tv = out
    np.divide(q, p, out=js)
    js += 1.0
    js *= 0.5
    np.log(js, out=js)
    js *= np.add(p, q, out=tv)
    np.multiply(q, log_ratio, out=tv)
    np.subtract(tv, js, out=js)
    np.multiply(p, log_ratio, out=kl)
    np.subtract(p, q, out=tv)
    np.abs(tv, out=tv)


def _lifted(lists: Lists, joined: Joined) -> F8 | float:
    """What the floor adds to Σ p·log(p/q) over P's list before that is renormalised, shape (T,)."""
    only_p, size = joined.only_p, lists.total.shape[1]
    added: F8 | float = 0.0
    if len(only_p.entries):
        added = _floored(lists, joined, only_p.entries, only_p.columns, lacking=True)
    if lists.least < _LOWEST:
        low = np.minimum(lists.logprobs[0], lists.logprobs[0] + joined.log_ratio[:-1]) < _LOWEST
        low &= lists.ids[0] != NOT_LISTED
        entries = low.reshape(-1)
        entries[only_p.entries] = False
        at = entries.nonzero()[0]
        added = added + _floored(lists, joined, at, at % size, lacking=False)
    return added


def _floored(
    lists: Lists, joined: Joined, entries: NDArray[np.intp], columns: NDArray[np.intp], *, lacking: bool
) -> F8:
    """`_lifted` of these entries of P's lists; `lacking`: Q's lists have none of their tokens."""
    log_p, log_q = lists.logprobs[0].reshape(-1).take(entries), joined.log_ratio.reshape(-1).take(entries)
    floor_p, floor_q = np.log(lists.total.take(columns, axis=1)) + _LOG_FLOOR
    added = np.maximum(log_p, floor_p) + log_q
    log_q += log_p
    added -= floor_q if lacking else np.maximum(log_q, floor_q)
    added *= lists.p[0].reshape(-1).take(entries)
    return np.bincount(columns, weights=added, minlength=lists.total.shape[1]).astype(np.float64, copy=False)


def _top1_agree(lists: Lists) -> F8:
    """1 where a most likely token of P is a most likely token of Q: equal values have no order."""
    (ids_p, ids_q), (logprobs_p, logprobs_q) = lists.ids, lists.logprobs
    first = lists.logprobs[:, 0] == lists.largest
    agree = ids_p[0] == ids_q[0]
    agree &= first[0]
    agree &= first[1]
    # Almost every list begins with its most likely token: the rest is asked of the others alone.
    others = (~agree).nonzero()[0]
    if len(others):
        rows, at = (logprobs_p.take(others, axis=1) == lists.largest[0].take(others)).nonzero()
        columns = others.take(at)
        same = ids_q.take(columns, axis=1) == ids_p[rows, columns]
        same &= logprobs_q.take(columns, axis=1) == lists.largest[1].take(columns)
        agree[columns[np.logical_or.reduce(same, axis=0)]] = True
    found: F8 = agree.astype(np.float64)
    return found
