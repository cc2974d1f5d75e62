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
ALIGNED: Final = 8
"""There are always a multiple of so many columns. So rows begin where a cache line does, and `np.add.reduce`
and `np.einsum` over a list add its rows in order: of one column alone they would add several at a time."""
_LINE: Final = 64


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
    `room` (3, k + 1, T): for what is made of them.
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
    """Both arms' lists, the shorter ones padded, and empty ones up to a multiple of ALIGNED."""
    size = a.ids.shape[1]
    shape = (2, max(len(a.ids), len(b.ids)), -(-size // ALIGNED) * ALIGNED)
    ids, (logprobs, room) = np.full(shape, NOT_LISTED, dtype=np.int64), rooms(shape)
    logprobs[:] = PAD
    cap = np.zeros((2, shape[2]))
    for arm, lists in enumerate((a, b)):
        none = (lists.ids == NOT_LISTED) | (lists.logprobs == -np.inf)
        ids[arm, : len(lists.ids), :size] = np.where(none, NOT_LISTED, lists.ids)
        logprobs[arm, : len(lists.ids), :size] = np.where(none, PAD, np.maximum(lists.logprobs, LEAST))
        cap[arm, :size] = np.maximum(lists.cap, LEAST)
    return ready(ids, logprobs, room, np.maximum.reduce(logprobs, axis=1), cap, PAD)


def ready(ids: I4 | I8, logprobs: F8, room: F8, largest: F8, cap: F8, least: float) -> Lists:
    """Everything that follows from these; `room` of `rooms`."""
    p, listed = room[:2], room[:2, :-1]
    with np.errstate(over="ignore", invalid="ignore"):
        np.exp(logprobs, out=listed)
    return Lists(ids, logprobs, p, room[2:], np.add.reduce(listed, axis=1), largest, cap, least)


def rooms(shape: tuple[int, int, int]) -> tuple[F8, F8]:
    """Room for log-probabilities of this shape (2, k, T), and (5, k + 1, T) for what is made of them.

    Both begin where a cache line does: arithmetic that writes across lines takes twice as long. They are one
    piece of memory: an allocator that has once let go of it keeps as much from then on, instead of handing it
    back to the system after every block.
    """
    _, k, size = shape
    entries = (2 * k + 5 * (k + 1)) * size
    memory = np.empty(entries + _LINE // 8)
    first = -memory.ctypes.data % _LINE // 8
    first_after = first + 2 * k * size
    return (
        memory[first:first_after].reshape(shape),
        memory[first_after : first + entries].reshape(5, k + 1, size),
    )


def sum_rows(rows: F8) -> F8:
    """(…, k, T) summed over k ≥ 1, in order: the same bits whatever the shape and the padding."""
    if rows.shape[-2] == 1:
        only: F8 = rows[..., 0, :].copy()
        return only
    total: F8 = rows[..., 0, :] + rows[..., 1, :]
    for row in range(2, rows.shape[-2]):
        total += rows[..., row, :]
    return total
