"""Which positions of top-k lists can be read at all: one rule for readers at the edge and for the scoring core.

Shapes: lists are matrices (k, T), one column per position, so that every step runs along contiguous memory.
Log-probabilities are natural logarithms.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from schemas.columns import F8, I8, KINDS, NOT_LISTED, Bool, LogitColumns

NOT_MEASURED: Final = -9999.0
"""Engines write this value, or −inf, for "zero or unknown": such an entry is not listed."""
MAX_LOGPROB: Final = 1e-3
"""A log-probability above this is none; up to it, it is rounding."""
MAX_MASS: Final = 1.0 + 1e-3
"""Listed probabilities that sum to more than this belong to no distribution."""

_LOGITS: Final = KINDS.index("logits")


def listed_entries(ids: I8, logprobs: F8) -> Bool:
    """Which entries name a token and a value. Shapes (k, T). NaN counts as named: it spoils its position."""
    return (ids > NOT_LISTED) & ~(logprobs <= NOT_MEASURED)


def valid_lists(ids: I8, logprobs: F8, logits: Bool) -> Bool:
    """Which of T positions can be read. `ids`, `logprobs`: (k, T); `logits`: (T,), values without normaliser.

    Invalid: nothing listed, NaN, +inf, the same token twice, and (unless `logits`) a log-probability above
    MAX_LOGPROB or a sum of probabilities above MAX_MASS.
    """
    listed = listed_entries(ids, logprobs)
    values = np.where(listed, logprobs, -np.inf)
    largest = values.max(axis=0, initial=-np.inf)
    # A NaN makes `largest` NaN and an empty list makes it −inf: both fail this comparison.
    valid: Bool = (largest > -np.inf) & (largest < np.inf)
    with np.errstate(over="ignore"):
        mass = np.exp(values).sum(axis=0)
    valid &= logits | ((largest <= MAX_LOGPROB) & (mass <= MAX_MASS))
    k = ids.shape[0]
    tokens = np.where(listed, ids, -2 - np.arange(k)[:, None])
    for row in range(1, k):
        valid &= ~(tokens[:row] == tokens[row]).any(axis=0)
    return valid


def valid_positions(columns: LogitColumns) -> Bool:
    """Which positions of one record can be read: shape (T,), in the order of `columns.tokens`."""
    valid = np.zeros(len(columns.tokens), dtype=np.bool_)
    lengths = np.diff(columns.offsets)
    for k in np.unique(columns.k[lengths > 0]):
        events = np.flatnonzero((columns.k == k) & (lengths > 0))
        if k == 0:
            continue
        counts = lengths[events]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(columns.offsets[events], counts) + within
        starts = np.repeat(columns.entry_offsets[events], counts) + within * int(k)
        entries = starts[None, :] + np.arange(int(k))[:, None]
        logits = np.repeat(columns.kind[events] == _LOGITS, counts)
        valid[positions] = valid_lists(
            columns.top_ids[entries].astype(np.int64),
            columns.top_logprobs[entries].astype(np.float64),
            logits,
        )
    return valid
