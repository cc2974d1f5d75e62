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

from pipeline.core.divergence.completion import TINY, Completion, complete
from pipeline.core.divergence.joining import Joined, Own, join
from pipeline.core.divergence.lists import Lists, TopLists, side_by_side
from schemas.columns import F8, NOT_LISTED

ESTIMATOR: Final = "kl_lower/3"
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
_ROUNDING: Final = 1e-14
"""What may stay when sums that are equal but for η are subtracted: taken off too, so that equal lists give
exactly 0."""
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
    parts = [_measured(_cut(a, block), _cut(b, block), eta[block]) for block in blocks]
    return Measures(*np.concatenate(parts, axis=1))


def _measured(a: TopLists, b: TopLists, eta: F8) -> F8:
    lists, size = side_by_side(a, b), len(eta)
    spread = np.zeros(lists.total.shape[1])
    spread[:size] = eta
    return measure_lists(lists, spread)[:, :size]


def _cut(lists: TopLists, block: slice) -> TopLists:
    return TopLists(lists.ids[:, block], lists.logprobs[:, block], lists.cap[block])


def measure_lists(lists: Lists, eta: F8 | float) -> F8:
    """All MEASURES, one a row, in one block: the caller keeps it near BLOCK_ENTRIES list entries a side.

    Uses up `lists.p` and `lists.room`.
    """
    found = np.empty((len(MEASURES), lists.total.shape[1]))
    certified, (floor, cosine, agree) = found[:3], found[3:]
    listed = lists.p[:, :-1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        agree[:] = _top1_agree(lists)
        squares = np.einsum("akt,akt->at", listed, listed)
        own = np.einsum("akt,akt->at", listed, lists.logprobs)
        joined = join(lists)
        # Of what stands on both lists; the completion then fills in what Q lacks. 1 exactly for equal lists.
        common = np.einsum("kt,kt->t", listed[0], listed[1])
        np.divide(common, np.sqrt(np.maximum(squares[0] * squares[1], TINY)), out=cosine)
        on_p, done = _completed(lists, joined, own, eta, certified)
        # Mass that η adds can raise these two; kl_lower it only lowers.
        certified[1:] -= eta * _OF_ETA + _ROUNDING
        log_total = np.log(lists.total)
        np.subtract(_lifted(lists, joined, done, log_total), on_p, out=floor)
        floor /= lists.total[0]
        floor += log_total[1]
        floor -= log_total[0]
        np.maximum(found[:4], 0.0, out=found[:4])
        np.minimum(found[1:], _MOST[1:], out=found[1:])
    return found


def _completed(
    lists: Lists, joined: Joined, own: F8, eta: F8 | float, out: F8
) -> tuple[F8, Completion | None]:
    """KL, Jensen–Shannon divergence and total variation of the minimiser into `out` (3, T).

    Returns Σ p·log(q/p) over P's list alone, shape (T,), and what was filled in. `own` (2, T): Σ p·log p and
    Σ q·log q over the lists; used up. Fills what only P lists, and the rest of the vocabulary, into
    `lists.p` and `joined.log_ratio`.
    """
    (p, q), log_ratio, (mean, work) = lists.p, joined.log_ratio, lists.room[1:]
    kl, js, tv = out
    rests = np.subtract(1.0, lists.total)
    np.maximum(rests, 0.0, out=rests)
    rests[1] += eta
    done = None
    only_p, only_q = joined.only_p, joined.only_q
    if len(only_p.entries) or len(only_q.entries):
        done = complete(only_p, only_q, rests, lists.cap)
        q.reshape(-1)[only_p.entries] = done.filled[: done.m]
        log_ratio.reshape(-1)[only_p.entries] = done.ratio[: done.m]
        rests[0, done.at], rests[1, done.at] = done.rests
    np.maximum(rests, TINY, out=lists.p[:, -1])
    np.log(lists.p[:, -1], out=rests)
    np.subtract(rests[1], rests[0], out=log_ratio[-1])
    # With h = (p + q)/2: JS = ½ (Σ p·log p + Σ q·log q) − Σ h·log h.
    np.add(p, q, out=mean)
    mean *= 0.5
    np.log(mean, out=work)
    own += np.multiply(lists.p[:, -1], rests, out=rests)
    np.add(own[0], own[1], out=js)
    js *= 0.5
    js -= np.einsum("kt,kt->t", mean, work)
    np.subtract(p, q, out=work)
    np.abs(work, out=work)
    np.add.reduce(work, axis=0, out=tv)
    on_p: F8 = np.einsum("kt,kt->t", p[:-1], log_ratio[:-1])
    np.multiply(p[-1], log_ratio[-1], out=kl)
    kl += on_p
    if done is not None:
        _complete_sums(done, only_p, only_q, out)
    np.negative(kl, out=kl)
    tv *= 0.5
    return on_p, done


def _complete_sums(done: Completion, only_p: Own, only_q: Own, out: F8) -> None:
    """Add to Σ p·log(q/p), Jensen–Shannon divergence and Σ|p − q| what no row of P's list holds."""
    m, size = done.m, len(done.at)
    p, q, ratio = done.filled[m:], only_q.values, done.ratio[m:]
    # What is filled in, times its logarithm: the lists' own such sums lack it.
    js = np.concatenate([only_p.logprobs, only_q.logprobs])
    js += done.ratio
    js *= done.filled
    mean = p + q
    mean *= 0.5
    js *= 0.5
    js[m:] -= mean * np.log(mean)
    # Entries come row by row, and `bincount` adds in order.
    out[1, done.at] += np.bincount(done.places, weights=js, minlength=size)
    in_n = done.places[m:]
    out[0, done.at] -= np.bincount(in_n, weights=p * ratio, minlength=size)
    out[2, done.at] += np.bincount(in_n, weights=np.abs(p - q), minlength=size)


def _lifted(lists: Lists, joined: Joined, done: Completion | None, log_total: F8) -> F8 | float:
    """What the floor adds to Σ p·log(p/q) over P's list before that is renormalised, shape (T,).

    `log_total` (2, T): logarithms of what the lists sum to.
    """
    only_p, size = joined.only_p, log_total.shape[1]
    added: F8 | float = 0.0
    if done is not None and done.m:
        floor_p, floor_q = log_total.take(only_p.columns, axis=1) + _LOG_FLOOR
        lifted = np.maximum(only_p.logprobs, floor_p)
        lifted += done.ratio[: done.m]
        lifted -= floor_q
        lifted *= only_p.values
        added = _by_position(only_p.columns, lifted, size)
    if lists.least < _LOWEST:
        low = np.minimum(lists.logprobs[0], lists.logprobs[0] + joined.log_ratio[:-1]) < _LOWEST
        low &= lists.ids[0] != NOT_LISTED
        entries = low.reshape(-1)
        entries[only_p.entries] = False
        at = entries.nonzero()[0]
        columns = at % size
        log_p, log_q = lists.logprobs[0].reshape(-1).take(at), joined.log_ratio.reshape(-1).take(at)
        floor_p, floor_q = log_total.take(columns, axis=1) + _LOG_FLOOR
        lifted = np.maximum(log_p, floor_p) + log_q - np.maximum(log_q + log_p, floor_q)
        lifted *= lists.p[0].reshape(-1).take(at)
        added = added + _by_position(columns, lifted, size)
    return added


def _by_position(columns: NDArray[np.intp], values: F8, size: int) -> F8:
    """Sums of the values that stand in each column."""
    # Of no columns at all numpy makes whole numbers.
    return np.bincount(columns, weights=values, minlength=size).astype(np.float64, copy=False)


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
