"""Which positions of top-k lists can be read at all: one rule for the edge and for the scoring core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.columns import NOT_LISTED, Bool, LogitColumns

LOGPROB_SLACK: Final = 1e-3
"""A log-probability above this is none."""
MASS_SLACK: Final = 1e-3
"""A position whose listed probabilities sum to more than 1 + this is none."""

_LOGPROBS: Final = 0
_FEW: Final = 6
"""Up to this k, duplicates are found by comparing columns pairwise; above, by sorting."""


def _duplicated(ids: NDArray[Any]) -> Bool:
    """Columns of `ids` (k, rows), all of them listed tokens or distinct, in which one id stands twice."""
    k, rows = ids.shape
    if k > _FEW:
        ordered = np.sort(ids, axis=0)
        return np.asarray((ordered[1:] == ordered[:-1]).any(axis=0))
    found = np.zeros(rows, dtype=np.bool_)
    for i in range(1, k):
        found |= (ids[:i] == ids[i]).any(axis=0)
    return found


def valid_lists(
    ids: NDArray[Any], logprobs: NDArray[Any], normalised: Bool, mass: NDArray[np.float64] | None = None
) -> Bool:
    """Validity of positions given as columns: `ids`, `logprobs` (k, rows), `normalised` (rows,).

    `mass` (rows,): the sum of the listed probabilities, for a caller that has it already.
    """
    k, rows = ids.shape
    if k == 0:
        return np.zeros(rows, dtype=np.bool_)
    listed = (logprobs > -np.inf) & (ids != NOT_LISTED)
    if not listed.all():
        # A NaN stays in the values, so that it spoils its position.
        ids = np.where(listed, ids, -1 - np.arange(k)[:, None])
        logprobs = np.where(listed | np.isnan(logprobs), logprobs, -np.inf)
    values = logprobs.astype(np.float64, copy=False)
    largest = values.max(axis=0)
    if mass is None:
        mass = np.zeros(rows)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for row in np.exp(values):
                mass += row
    # −inf here means that nothing is listed; NaN fails both comparisons.
    readable = (largest > -np.inf) & (largest < np.inf)
    sane = (largest <= LOGPROB_SLACK) & (mass <= 1 + MASS_SLACK)
    return np.asarray(readable & (sane | ~normalised) & ~_duplicated(ids))


def _runs(columns: LogitColumns, events: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(k, events of that k) for these events."""
    ks = columns.k[events]
    for k in np.unique(ks):
        yield int(k), events[ks == k]


def _positions_of(columns: LogitColumns, events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Global indices of all positions of these events, in order."""
    starts = columns.offsets[events]
    lengths = columns.offsets[events + 1] - starts
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    spans: NDArray[np.int64] = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return spans


def _judge_events(columns: LogitColumns, events: NDArray[np.int64], valid: Bool) -> None:
    """Fill `valid` (T,) for all positions of these events."""
    for k, members in _runs(columns, events):
        positions = _positions_of(columns, members)
        lengths = columns.offsets[members + 1] - columns.offsets[members]
        first = columns.entry_offsets[members] - columns.offsets[members] * k
        entries = np.repeat(first, lengths) + positions * k
        index = entries + np.arange(k)[:, None]
        normalised = np.repeat(columns.kind[members] == _LOGPROBS, lengths)
        valid[positions] = valid_lists(columns.top_ids[index], columns.top_logprobs[index], normalised)


def valid_positions(columns: LogitColumns) -> Bool:
    """(T,) positions that can be read.

    Not: nothing listed; NaN or +inf; and, for `logprobs`, a value > 1e-3 or Σp > 1 + 1e-3; an id listed
    twice. Entries of (NOT_LISTED, ·) or (·, −inf) are not listed and spoil nothing.
    """
    total = int(columns.offsets[-1])
    valid = np.zeros(total, dtype=np.bool_)
    if total == 0:
        return valid
    k = int(columns.k[0])
    if bool((columns.k == k).all()):
        normalised = np.repeat(columns.kind == _LOGPROBS, np.diff(columns.offsets))
        ids = np.ascontiguousarray(columns.top_ids.reshape(total, k).T)
        logprobs = np.ascontiguousarray(columns.top_logprobs.reshape(total, k).T)
        return valid_lists(ids, logprobs, normalised)
    _judge_events(columns, np.arange(columns.n), valid)
    return valid


def _plainly_readable(columns: LogitColumns, lengths: NDArray[np.int64]) -> bool:
    """Whether every event's first position is beyond doubt valid: true of almost every record, and cheap."""
    k = int(columns.k[0]) if columns.n else 0
    if k == 0 or k > _FEW or int(lengths.min()) == 0 or bool((columns.k != k).any()):
        return False
    index = columns.entry_offsets[:-1] + np.arange(k)[:, None]
    ids, values = columns.top_ids.take(index), columns.top_logprobs.take(index)
    if int(ids.min()) < 0 or not -np.inf < values.min() <= values.max() <= 0.0:
        return False
    mass = np.exp(values).sum(axis=0).max()
    distinct = np.count_nonzero(ids[:, None] == ids) == columns.n * k
    return bool(mass <= 1 + MASS_SLACK / 2 and distinct)


def has_valid_position(columns: LogitColumns) -> Bool:
    """(n,) events with at least one position that can be read; reads little where the first one can."""
    lengths = np.diff(columns.offsets)
    if _plainly_readable(columns, lengths):
        return np.ones(columns.n, dtype=np.bool_)
    has = np.zeros(columns.n, dtype=np.bool_)
    for k, members in _runs(columns, np.flatnonzero((lengths > 0) & (columns.k > 0))):
        index = columns.entry_offsets[members] + np.arange(k)[:, None]
        has[members] = valid_lists(
            columns.top_ids[index], columns.top_logprobs[index], columns.kind[members] == _LOGPROBS
        )
    doubtful = np.flatnonzero(~has & (lengths > 0))
    if len(doubtful):
        valid = np.zeros(int(columns.offsets[-1]), dtype=np.bool_)
        _judge_events(columns, doubtful, valid)
        counts = np.concatenate([[0], np.cumsum(valid)])
        has[doubtful] = (counts[columns.offsets[doubtful + 1]] - counts[columns.offsets[doubtful]]) > 0
    return has
