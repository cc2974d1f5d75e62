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
    a, b = _measured(a), _measured(b)
    valid = valid_lists(a.ids, a.logprobs, ~logits) & valid_lists(b.ids, b.logprobs, ~logits)
    if logits.any():
        a, b = _softmaxed(a, logits), _softmaxed(b, logits)
    return _top_lists(a, b), _top_lists(b, a), valid


def _measured(sent: SentLists) -> SentLists:
    """(NOT_LISTED, −inf) where nothing was measured. NaN stays: it spoils its position."""
    unknown = sent.logprobs <= NOT_LISTED_LOGPROB
    unknown |= sent.ids == NOT_LISTED
    if not unknown.any():
        return sent
    ids = np.where(unknown, NOT_LISTED, sent.ids)
    return SentLists(ids, np.where(unknown, -np.inf, sent.logprobs), sent.emitted)


def _softmaxed(sent: SentLists, logits: Bool) -> SentLists:
    """Softmax over the listed tokens where `logits`; other columns unchanged."""
    columns = np.flatnonzero(logits)
    logprobs = sent.logprobs.copy()
    some = logprobs[:, columns]
    with np.errstate(invalid="ignore", divide="ignore"):
        some -= some.max(axis=0)
        total = np.zeros(columns.size)
        for row in np.exp(some):
            total += row
        logprobs[:, columns] = some - np.log(total)
    return SentLists(sent.ids, logprobs, sent.emitted)


def _top_lists(sent: SentLists, other: SentLists) -> TopLists:
    strays = _emitted_out_of_rank(sent)
    if not len(strays):
        return TopLists(sent.ids, sent.logprobs, _smallest(sent.logprobs))
    ids, logprobs, cap = sent.ids.copy(), sent.logprobs.copy(), _smallest(sent.logprobs)
    cap[strays] = _smallest(logprobs[1:, strays])
    # The entry itself is evidence only if both lists have it.
    dropped = strays[~(other.ids[:, strays] == ids[0, strays]).any(axis=0)]
    ids[0, dropped], logprobs[0, dropped] = NOT_LISTED, -np.inf
    return TopLists(ids, logprobs, cap)


def _smallest(logprobs: F8) -> F8:
    """Smallest listed value of each column, +inf where nothing is listed."""
    smallest: F8 = logprobs.min(axis=0, initial=np.inf)
    if np.isneginf(smallest).any():
        smallest = np.where(logprobs > -np.inf, logprobs, np.inf).min(axis=0, initial=np.inf)
    return smallest


def _emitted_out_of_rank(sent: SentLists) -> I8:
    """Positions whose emitted token stands first though it is the smallest, while the others fall."""
    if len(sent.ids) < 2:
        return np.zeros(0, dtype=np.int64)
    first = sent.logprobs[0]
    maybe = np.flatnonzero((first < sent.logprobs[1]) & (first > -np.inf) & (sent.ids[0] == sent.emitted))
    others = sent.logprobs[1:, maybe]
    falling = (others[:-1] >= others[1:]).all(axis=0)
    strays: I8 = maybe[falling & (first[maybe] < _smallest(others))]
    return strays
