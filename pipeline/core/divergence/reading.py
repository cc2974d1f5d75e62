"""From lists as engines send them to lists that can be measured (the rules of reading).

Lists are unordered sets, with one exception: an engine may list the emitted token out of rank, first and
followed by its best alternatives. Such a token says nothing about the tokens left out, so it must not set
the cap of its list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.core.divergence.measures import TopLists
from schemas.columns import F8, I8, NOT_LISTED, NOT_LISTED_LOGPROB, Bool
from schemas.validity import valid_lists


@dataclass(frozen=True, slots=True)
class SentLists:
    """T positions of one arm as sent: `ids`, `logprobs` (k, T) in wire order, `emitted` (T,) tokens."""

    ids: I8
    logprobs: F8
    emitted: I8


def read_lists(a: SentLists, b: SentLists, logits: Bool) -> tuple[TopLists, TopLists, Bool]:
    """Both arms' lists ready to be measured, and which of the T positions can be (shape (T,)).

    `logits` (T,): values without normaliser, softmaxed here over the listed tokens only.
    """
    logprobs_a, logprobs_b = _measured(a), _measured(b)
    valid = valid_lists(a.ids, logprobs_a, ~logits) & valid_lists(b.ids, logprobs_b, ~logits)
    listed_a, listed_b = logprobs_a > -np.inf, logprobs_b > -np.inf
    logprobs_a, logprobs_b = _normalised(logprobs_a, logits), _normalised(logprobs_b, logits)
    strays_a = _emitted_out_of_rank(a, listed_a, logprobs_a)
    strays_b = _emitted_out_of_rank(b, listed_b, logprobs_b)
    both_a = _first_is_on(a.ids, b.ids, listed_b, strays_a)
    both_b = _first_is_on(b.ids, a.ids, listed_a, strays_b)
    return (
        _top_lists(a.ids, logprobs_a, listed_a, strays_a, both_a),
        _top_lists(b.ids, logprobs_b, listed_b, strays_b, both_b),
        valid,
    )


def _measured(sent: SentLists) -> F8:
    """Values as sent, −inf where nothing was measured. NaN stays: it spoils its position."""
    unknown = (sent.ids == NOT_LISTED) | (sent.logprobs <= NOT_LISTED_LOGPROB)
    return np.where(unknown, -np.inf, sent.logprobs)


def _normalised(values: F8, logits: Bool) -> F8:
    """Softmax over the listed tokens where `logits`; other columns unchanged."""
    columns = np.flatnonzero(logits)
    if not columns.size:
        return values
    some = np.ascontiguousarray(values[:, columns])
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = some - some.max(axis=0)
        total = np.zeros(columns.size)
        for row in np.exp(shifted):
            total = total + row
        values = values.copy()
        values[:, columns] = np.where(some > -np.inf, shifted - np.log(total), -np.inf)
    return values


def _emitted_out_of_rank(sent: SentLists, listed: Bool, logprobs: F8) -> Bool:
    """Where the emitted token stands first though it is the smallest and the others fall."""
    others = logprobs[1:]
    if not len(others):
        return np.zeros(sent.emitted.shape, dtype=np.bool_)
    smallest_other = np.where(listed[1:], others, np.inf).min(axis=0)
    stray: Bool = listed[0] & (sent.ids[0] == sent.emitted)
    stray &= (logprobs[0] < smallest_other) & (smallest_other < np.inf)
    return stray & (others[:-1] >= others[1:]).all(axis=0)


def _first_is_on(ids: I8, other_ids: I8, other_listed: Bool, strays: Bool) -> Bool:
    """Where the first entry of one list is on the other list too; only asked for stray entries."""
    if not strays.any():
        return strays
    on_other: Bool = ((other_ids == ids[0]) & other_listed).any(axis=0)
    return on_other


def _top_lists(ids: I8, logprobs: F8, listed: Bool, strays: Bool, on_both: Bool) -> TopLists:
    ranked = listed
    if strays.any():
        ranked, listed, logprobs = listed.copy(), listed.copy(), logprobs.copy()
        ranked[0] &= ~strays
        dropped = strays & ~on_both
        listed[0] &= ~dropped
        logprobs[0, dropped] = -np.inf
    return TopLists(ids, logprobs, listed, np.where(ranked, logprobs, np.inf).min(axis=0))
