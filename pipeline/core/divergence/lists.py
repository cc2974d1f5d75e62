"""Two arms' top-k lists laid out for measuring.

Arrays have the shape (2, k, T): P, the baseline, and Q, the compared arm, one column per position, so that
every operation runs along contiguous memory and every sum over a list adds its rows in order. A position's
result therefore has the same bits whatever positions stand beside it and however far its list is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from schemas.columns import F8, I4, I8, NOT_LISTED

LEAST: Final = -660.0
"""A listed log-probability below this is read as this. It lowers no divergence by more than what is written
with such numbers, raises none, and leaves no probability that underflows to 0."""
PAD: Final = -700.0
"""Log-probability of an entry that is none. Beside a listed one it changes no bit of a sum; two that stand
beside each other have the ratio 1."""
P_OF_PAD: Final = float(np.exp(PAD))


@dataclass(frozen=True, slots=True)
class TopLists:
    """One arm's T lists of at most k tokens.

    `ids` (k, T): tokens, NOT_LISTED where an entry is none.
    `logprobs` (k, T): −inf where an entry is none.
    `cap` (T,): logarithm of the most an unlisted token can hold, usually the smallest listed value.
    """

    ids: I4 | I8
    logprobs: F8
    cap: F8


@dataclass(frozen=True, slots=True)
class Lists:
    """Both arms', ready to be measured.

    `ids` (2, k, T).
    `logprobs` (2, k, T): PAD where an entry is none, LEAST at least elsewhere.
    `p` (2, k + 1, T): their exponentials; the last row is free for the rest of the vocabulary.
    `room` (4, k + 1, T): for what is made of them. One piece of memory with `p`: an allocator that has once
    let go of it keeps as much from then on, instead of handing it back to the system after every block.
    `total`, `largest`, `cap` (2, T): sum of `p`, largest log-probability, logarithm of the cap.
    `least`: no log-probability is below, PAD included.
    """

    ids: I4 | I8
    logprobs: F8
    p: F8
    room: F8
    total: F8
    largest: F8
    cap: F8
    least: float


def side_by_side(a: TopLists, b: TopLists) -> Lists:
    """Both arms' lists, the shorter ones padded."""
    shape = (2, max(len(a.ids), len(b.ids)), a.ids.shape[1])
    ids, logprobs = np.full(shape, NOT_LISTED, dtype=np.int64), np.full(shape, PAD)
    for arm, lists in enumerate((a, b)):
        none = (lists.ids == NOT_LISTED) | (lists.logprobs == -np.inf)
        ids[arm, : len(lists.ids)] = np.where(none, NOT_LISTED, lists.ids)
        logprobs[arm, : len(lists.ids)] = np.where(none, PAD, np.maximum(lists.logprobs, LEAST))
    largest = np.maximum.reduce(logprobs, axis=1)
    return ready(ids, logprobs, largest, np.maximum([a.cap, b.cap], LEAST), PAD)


def ready(ids: I4 | I8, logprobs: F8, largest: F8, cap: F8, least: float) -> Lists:
    """Everything that follows from these."""
    _, k, size = logprobs.shape
    room = np.empty((6, k + 1, size))
    p = room[:2]
    with np.errstate(over="ignore", invalid="ignore"):
        np.exp(logprobs, out=p[:, :k])
    return Lists(ids, logprobs, p, room[2:], sum_rows(p[:, :k]), largest, cap, least)


def sum_rows(rows: F8) -> F8:
    """(…, k, T) summed over k ≥ 1, in order: the same bits whatever the shape and the padding."""
    if rows.shape[-2] == 1:
        only: F8 = rows[..., 0, :].copy()
        return only
    total: F8 = rows[..., 0, :] + rows[..., 1, :]
    for row in range(2, rows.shape[-2]):
        total += rows[..., row, :]
    return total
