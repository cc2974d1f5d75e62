"""From lists as engines send them to lists that can be measured (the rules of reading).

Lists are unordered sets, with one exception: an engine may list the emitted token out of rank, first and
followed by its best alternatives. Such a token says nothing about the tokens left out, so it must not set
the cap of its list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.core.divergence.measures import Listed, sum_rows
from schemas.columns import F8, I4, I8, NOT_LISTED, NOT_LISTED_LOGPROB, Bool
from schemas.validity import valid_lists


@dataclass(frozen=True, slots=True)
class SentLists:
    """T positions of one arm as sent: `ids`, `logprobs` (k, T) in wire order, `emitted` (T,) tokens."""

    ids: I4 | I8
    logprobs: F8
    emitted: I4 | I8


def read_lists(a: SentLists, b: SentLists, logits: Bool) -> tuple[Listed, Listed, Bool]:
    """Both arms' lists ready to be measured, and which of the T positions can be (shape (T,)).

    `logits` (T,): values without normaliser, softmaxed here over the listed tokens only.
    """
    a, b = _measured(a), _measured(b)
    p, q = _probabilities(a), _probabilities(b)
    p_total, q_total = sum_rows(p), sum_rows(q)
    normalised = ~logits
    valid = valid_lists(a.ids, a.logprobs, normalised, p_total)
    valid &= valid_lists(b.ids, b.logprobs, normalised, q_total)
    if not np.logical_and.reduce(normalised):
        a, b = _softmaxed(a, logits), _softmaxed(b, logits)
        p, q = _probabilities(a), _probabilities(b)
        p_total, q_total = sum_rows(p), sum_rows(q)
    return _listed(a, b.ids, p, p_total), _listed(b, a.ids, q, q_total), valid


def _probabilities(sent: SentLists) -> F8:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.exp(sent.logprobs)


def _measured(sent: SentLists) -> SentLists:
    """(NOT_LISTED, −inf) where nothing was measured. NaN stays: it spoils its position."""
    least = np.minimum.reduce(sent.logprobs, axis=None, initial=np.inf)
    if least > NOT_LISTED_LOGPROB and np.minimum.reduce(sent.ids, axis=None, initial=0) > NOT_LISTED:
        return sent
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


def _listed(sent: SentLists, others: I4 | I8, p: F8, total: F8) -> Listed:
    """`sent` as probabilities `p` that sum to `total`, changed in place; `others`: the other arm's ids."""
    cap = _smallest(p, sent.logprobs)
    strays = _emitted_out_of_rank(sent)
    if not len(strays):
        return Listed(sent.ids, p, total, cap)
    cap[strays] = _smallest(p[1:, strays], sent.logprobs[1:, strays])
    # The entry itself is evidence only if both lists have it.
    dropped = strays[~(others[:, strays] == sent.ids[0, strays]).any(axis=0)]
    ids = sent.ids.copy()
    ids[0, dropped], p[0, dropped] = NOT_LISTED, 0.0
    total[dropped] = sum_rows(p[:, dropped])
    return Listed(ids, p, total, cap)


def _smallest(p: F8, logprobs: F8) -> F8:
    """Smallest listed probability of each column, +inf where nothing is listed."""
    smallest: F8 = np.minimum.reduce(p, axis=0)
    doubtful = (~(smallest > 0.0)).nonzero()[0]
    if len(doubtful):
        some = np.where(logprobs[:, doubtful] > -np.inf, p[:, doubtful], np.inf)
        smallest[doubtful] = some.min(axis=0)
    return smallest


def _emitted_out_of_rank(sent: SentLists) -> I8:
    """Positions whose emitted token stands first though it is the smallest, while the others fall."""
    if len(sent.ids) < 2:
        return np.zeros(0, dtype=np.int64)
    first = sent.logprobs[0]
    # Almost no list rises from its first entry to its second: the rest is asked of those alone.
    maybe = (first < sent.logprobs[1]).nonzero()[0]
    maybe = maybe[(first[maybe] > -np.inf) & (sent.ids[0, maybe] == sent.emitted[maybe])]
    others = sent.logprobs[1:, maybe]
    falling = (others[:-1] >= others[1:]).all(axis=0)
    least = np.where(others > -np.inf, others, np.inf).min(axis=0)
    strays: I8 = maybe[falling & (first[maybe] < least)]
    return strays
