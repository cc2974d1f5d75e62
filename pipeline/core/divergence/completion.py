"""The completion of two lists where a token is on one of them only: the minimiser behind `kl_lower`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.joining import Own
from schemas.columns import F8

TINY: Final = 1e-305
"""Stands for 0 under a logarithm: below every probability that matters, above the denormal numbers."""
_LOG_TINY: Final = float(np.log(TINY))
_HUGE: Final = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True)
class Completion:
    """The minimiser in the C columns `at` in which P's list or Q's holds a token that the other lacks.

    `rests` (C,): P's and Q's rest of the vocabulary.
    Of the `m` entries only P lists, and then of those only Q lists: `places` in `at`, what the other side is
    `filled` in with, and the `ratio`: logarithm of that over what is listed.
    """

    at: NDArray[np.intp]
    rests: tuple[F8, F8]
    m: int
    places: NDArray[np.intp]
    filled: F8
    ratio: F8


def complete(only_p: Own, only_q: Own, rests: F8, caps: F8) -> Completion:
    """`rests` (2, T): mass outside P's list, and outside Q's with η; `caps` (2, T): the caps' logarithms."""
    at, place = _columns(only_p.columns, only_q.columns, rests.shape[1])
    size = len(at)
    in_m, in_n = place.take(only_p.columns), place.take(only_q.columns)
    # Q's side first: what fills M; then P's: what fills N.
    places, values = np.concatenate([in_m, in_n + size]), np.concatenate([only_p.values, only_q.values])
    counts = np.bincount(places, minlength=2 * size)
    rest, log_cap = np.empty((2, size)), np.empty((2, size))
    for side, (rest_of, cap_of) in enumerate(((rests[1], caps[1]), (rests[0], caps[0]))):
        rest_of.take(at, out=rest[side], mode="clip")
        cap_of.take(at, out=log_cap[side], mode="clip")
    cap = np.exp(log_cap)
    after = rest - counts.reshape(2, size) * cap
    plus = np.maximum(after, 0.0)
    # M's ratio is of Q's rest to P's plus, N's the other way round.
    flat = rest.reshape(-1), cap.reshape(-1), after.reshape(-1), plus[::-1].reshape(-1)
    ratios = _largest_ratio(*flat, counts, places, values)
    # Where the rest keeps P's mass, all of N sits at its cap; else all of M does and the rest keeps Q's.
    keeps_p = (plus[1] > 0.0) & (after[0] * cap[1] <= after[1] * cap[0])
    rests_p = np.where(keeps_p, plus[1], ratios[size:] * plus[0])
    rests_q = np.where(keeps_p, ratios[:size] * plus[1], plus[0])
    filled = np.minimum(ratios.take(places) * values, cap.reshape(-1).take(places))
    np.maximum(filled, TINY, out=filled)
    own = np.concatenate([only_p.logprobs, only_q.logprobs])
    to_cap = log_cap.reshape(-1).take(places) - own
    log_filled = np.minimum(to_cap, np.log(np.maximum(ratios, TINY)).take(places))
    np.maximum(log_filled, _LOG_TINY - own, out=log_filled)
    return Completion(
        at=at,
        rests=(rests_p, rests_q),
        m=len(in_m),
        places=np.concatenate([in_m, in_n]),
        filled=filled,
        ratio=log_filled,
    )


def _columns(
    in_a: NDArray[np.intp], in_b: NDArray[np.intp], n: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The columns, of n, in which there are entries, and each of the n columns' place among them."""
    mark = np.zeros(n, dtype=np.bool_)
    mark[in_a] = True
    mark[in_b] = True
    at = mark.nonzero()[0]
    place = np.empty(n, dtype=np.intp)
    place[at] = np.arange(len(at))
    return at, place


def _largest_ratio(
    rest: F8, cap: F8, after: F8, plus: F8, counts: NDArray[np.intp], columns: NDArray[np.intp], values: F8
) -> F8:
    """max over j of (rest − j·cap) / (plus + sum of the (count − j) smallest values), at least 0; shape (C,).

    `values` stand in `columns`, `counts` (C,) of them in each; `after`: rest − count·cap.
    """
    *ascending, last = _by_column(counts, columns, values)
    partial = plus
    # From the largest j down: `partial` then grows by one entry a step. Rows of 0 stand first or last, and
    # add nothing. With the last row j is 0.
    best = after / partial
    if ascending:
        j = counts.astype(np.float64)
        for value in ascending:
            partial = partial + value
            j -= value > 0.0
            np.fmax(best, (rest - j * cap) / partial, out=best)
    np.fmax(best, rest / (partial + last), out=best)
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
