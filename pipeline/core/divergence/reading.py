"""From lists as engines send them to lists that can be measured (the rules of reading).

Lists are unordered sets, with one exception: an engine may list the emitted token out of rank, first and
followed by its best alternatives. Such a token says nothing about the tokens left out, so it must not set
the cap of its list. Where it is all that is listed, nothing else can: unless no other token can be more
probable, that position is not measured (decisions.md §2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pipeline.core.divergence.lists import LEAST, P_OF_PAD, PAD, Lists, ready, sum_rows
from schemas.columns import F8, I4, I8, NOT_LISTED, NOT_LISTED_LOGPROB, Bool
from schemas.validity import LOGPROB_SLACK, MASS_SLACK, valid_lists

LOG_HALF: Final = float(np.log(0.5))
"""From here on no other token is more probable."""


@dataclass(frozen=True, slots=True)
class Sent:
    """T positions of both arms as sent: `ids`, `logprobs` (2, k, T) in wire order."""

    ids: I4 | I8
    logprobs: F8
    room: F8
    """(5, k + 1, T), for what is made of them."""
    emitted: Callable[[I8, I8], I4 | I8]
    """The tokens emitted at some of the 2 · T positions: by these arms, at these positions."""


def read_lists(sent: Sent, logits: Bool | None) -> tuple[Lists, Bool | None]:
    """Both arms' lists ready to be measured, and which of the T positions can be (None: all).

    `logits` (T,): values without normaliser, softmaxed here over the listed tokens only; None: none are.
    """
    logprobs = sent.logprobs
    # NaN fails every comparison.
    falling = bool((logprobs[:, :-1] >= logprobs[:, 1:]).all())
    cap = logprobs[:, -1] if falling else np.minimum.reduce(logprobs, axis=1)
    least = float(cap.min())
    if logits is not None or not least > LEAST or sent.ids.min() <= NOT_LISTED:
        return _read_with_care(sent, logits)
    largest = logprobs[:, 0] if falling else np.maximum.reduce(logprobs, axis=1)
    lists = ready(sent.ids, logprobs, sent.room, largest, cap, least)
    valid = None if _plainly_valid(lists) else _valid(lists, logprobs, None)
    if lists.ids.shape[1] == 1:
        valid = _without_lone(lists, valid, sent.emitted)
    return lists if falling else _without_strays(lists, sent.emitted), valid


def _read_with_care(sent: Sent, logits: Bool | None) -> tuple[Lists, Bool | None]:
    """The same where some entries are none, or no numbers, or logits. NaN stays: it spoils its position."""
    none = sent.logprobs <= NOT_LISTED_LOGPROB
    none |= sent.ids == NOT_LISTED
    values = np.where(none, -np.inf, sent.logprobs)
    logprobs = np.maximum(values if logits is None else _softmaxed(values, logits), LEAST)
    cap = np.minimum.reduce(np.where(none, np.inf, logprobs), axis=1)
    logprobs[none] = PAD
    ids = np.where(none, NOT_LISTED, sent.ids)
    lists = ready(ids, logprobs, sent.room, np.maximum.reduce(logprobs, axis=1), cap, PAD)
    valid = _without_lone(lists, _valid(lists, values, logits), sent.emitted)
    return _without_strays(lists, sent.emitted), valid


def _plainly_valid(lists: Lists) -> bool:
    """Whether every position is beyond doubt valid, where every entry is listed and a number."""
    if lists.largest.max() > LOGPROB_SLACK or lists.total.max() > 1 + MASS_SLACK:
        return False
    ids, k = lists.ids, lists.ids.shape[1]
    same = np.empty((2, k * (k - 1) // 2, ids.shape[2]), dtype=np.bool_)
    first = 0
    for shift in range(1, k):
        np.equal(ids[:, shift:], ids[:, :-shift], out=same[:, first : first + k - shift])
        first += k - shift
    return not same.any()


def _valid(lists: Lists, logprobs: F8, logits: Bool | None) -> Bool:
    """Positions valid on both sides; `logprobs`: as sent, −inf where an entry is none."""
    normalised = np.ones(logprobs.shape[2], dtype=np.bool_) if logits is None else ~logits
    valid = [
        valid_lists(ids, values, normalised, total)
        for ids, values, total in zip(lists.ids, logprobs, lists.total, strict=True)
    ]
    return valid[0] & valid[1]


def _without_lone(lists: Lists, valid: Bool | None, emitted: Callable[[I8, I8], I4 | I8]) -> Bool | None:
    """`valid` without the positions where an arm lists the emitted token alone, and that below one half."""
    listed = lists.logprobs > PAD
    lone = (lists.largest < LOG_HALF) & (listed.sum(axis=1) == 1)
    arms, columns = lone.nonzero()
    if not len(columns):
        return valid
    at = listed.argmax(axis=1)[arms, columns]
    unranked = columns[lists.ids[arms, at, columns] == emitted(arms, columns)]
    ranked = np.ones(lists.ids.shape[2], dtype=np.bool_) if valid is None else valid.copy()
    ranked[unranked] = False
    return ranked


def _softmaxed(logprobs: F8, logits: Bool) -> F8:
    """Softmax over the listed tokens where `logits`; other columns unchanged."""
    columns = np.flatnonzero(logits)
    softmaxed = logprobs.copy()
    some = softmaxed[:, :, columns]
    with np.errstate(invalid="ignore", divide="ignore"):
        some -= some.max(axis=1, keepdims=True)
        some -= np.log(sum_rows(np.exp(some)))[:, None]
    softmaxed[:, :, columns] = some
    return softmaxed


def _without_strays(lists: Lists, emitted: Callable[[I8, I8], I4 | I8]) -> Lists:
    """Take emitted tokens out of rank out of the cap, and out of the list, too, if the other arm lacks them.

    Uses up `lists`.
    """
    arms, strays = _emitted_out_of_rank(lists, emitted)
    if not len(strays):
        return lists
    lists.cap[arms, strays] = _smallest(lists, arms, strays)
    others = lists.ids[1 - arms, :, strays]
    dropped = ~(others == lists.ids[arms, 0, strays][:, None]).any(axis=1)
    arms, strays = arms[dropped], strays[dropped]
    lists.ids[arms, 0, strays] = NOT_LISTED
    lists.logprobs[arms, 0, strays] = PAD
    lists.p[arms, 0, strays] = P_OF_PAD
    lists.total[arms, strays] = sum_rows(lists.p[arms, :-1, strays].T)
    return replace(lists, least=PAD)


def _smallest(lists: Lists, arms: I8, columns: I8) -> F8:
    """The smallest log-probability after the first entry."""
    values = np.where(lists.ids[arms, 1:, columns] == NOT_LISTED, np.inf, lists.logprobs[arms, 1:, columns])
    smallest: F8 = np.minimum.reduce(values, axis=1)
    return smallest


def _emitted_out_of_rank(lists: Lists, emitted: Callable[[I8, I8], I4 | I8]) -> tuple[I8, I8]:
    """Arms and positions whose emitted token is first though it is the smallest, while the others fall."""
    if lists.ids.shape[1] < 2:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    # Almost no list rises from its first entry to its second: the rest is asked of those alone.
    arms, maybe = (lists.logprobs[:, 0] < lists.logprobs[:, 1]).nonzero()
    if len(maybe):
        tokens = lists.ids[arms, 0, maybe]
        emits = (tokens != NOT_LISTED) & (tokens == emitted(arms, maybe))
        arms, maybe = arms[emits], maybe[emits]
        others = lists.logprobs[arms, 1:, maybe]
        falling = np.logical_and.reduce(others[:, :-1] >= others[:, 1:], axis=1)
        falling &= lists.logprobs[arms, 0, maybe] < _smallest(lists, arms, maybe)
        arms, maybe = arms[falling], maybe[falling]
    return arms, maybe
