"""Which of two lists' tokens are the same, position by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.lists import P_OF_PAD, PAD, Lists
from schemas.columns import F8, I4, I8, NOT_LISTED, Bool


@dataclass(frozen=True, slots=True)
class Own:
    """Entries of one arm's lists whose token the other lacks (M or N), row by row.

    `entries`: places in the flattened (k, T) matrices; `columns`: their positions; `values`, `logprobs`: what
    is listed there.
    """

    entries: NDArray[np.intp]
    columns: NDArray[np.intp]
    values: F8
    logprobs: F8


_NOTHING: Final = Own(np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros(0))


@dataclass(frozen=True, slots=True)
class Joined:
    """What stands beside P's tokens in Q's lists.

    `log_ratio` (k + 1, T): log q − log p, 0 where Q lacks the token; the last row is free.
    `only_p`, `only_q`: tokens that only one of the lists holds.
    """

    log_ratio: F8
    only_p: Own
    only_q: Own


def join(lists: Lists) -> Joined:
    """Turns `lists.p[1]` into Q's probabilities of P's tokens, 0 where Q lacks them.

    Most entries of a healthy canary name the token that stands beside them in the other list. Only the others
    are looked up: what they cost does not grow with the positions that agree.
    """
    ids_p, ids_q = lists.ids
    k, size = ids_p.shape
    log_ratio = lists.room[0]
    np.subtract(lists.logprobs[1], lists.logprobs[0], out=log_ratio[:k])
    apart = _apart(ids_p, ids_q)
    # Row by row: numpy finds what is rare in a row and what is common each in its own way.
    in_rows = [row.nonzero()[0] for row in apart]
    columns = np.concatenate(in_rows)
    if not len(columns):
        return Joined(log_ratio, _NOTHING, _NOTHING)
    firsts = range(0, k * size, size)
    entries = np.concatenate([at + first for at, first in zip(in_rows, firsts, strict=True)])
    (flat_p, flat_q), (logprobs_p, logprobs_q) = lists.p.reshape(2, -1), lists.logprobs.reshape(2, -1)
    tokens, logprobs = ids_p.reshape(-1).take(entries), logprobs_p.take(entries)
    # Within a position, every token of Q that P lists on another row is among these entries, too.
    hits = [(row.take(columns) == tokens).nonzero()[0] for row in ids_q]
    found = np.concatenate(hits)
    rows = columns.take(found)
    rows += np.repeat(np.arange(0, k * size, size), [len(hit) for hit in hits])
    flags = apart.reshape(-1)
    flags[rows] = False
    kept = flags.take(entries).nonzero()[0]
    q, ratio = np.zeros(len(entries)), np.zeros(len(entries))
    if lists.least <= PAD:
        kept = kept[ids_q.reshape(-1).take(entries.take(kept)) != NOT_LISTED]
        q[tokens == NOT_LISTED] = P_OF_PAD
    q[found] = flat_q.take(rows)
    ratio[found] = logprobs_q.take(rows) - logprobs.take(found)
    n = entries.take(kept)
    only_q = Own(n, columns.take(kept), flat_q.take(n), logprobs_q.take(n))
    m = (q == 0.0).nonzero()[0]
    in_m = entries.take(m)
    only_p = Own(in_m, columns.take(m), flat_p.take(in_m), logprobs.take(m))
    flat_q[entries] = q
    log_ratio.reshape(-1)[entries] = ratio
    return Joined(log_ratio, only_p, only_q)


def _apart(ids_p: I4 | I8, ids_q: I4 | I8) -> Bool:
    """Entries of P's lists beside which Q's have another token or none, and the other way round."""
    return np.asarray(ids_p != ids_q)
