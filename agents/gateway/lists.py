"""An answer's positions as they travel: readable lists of the best candidates, tokens as pseudonyms. Pure.

A list leaves falling, cut to the best `top`. One exception is kept in place: an emitted token that an engine
put first though it is the list's smallest stays first, because that is how readers know that it says nothing
about the tokens left out. A position that breaks the rules of reading (docs/events.md) lists nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from agents.gateway.pseudonyms import IDS, PairPseudonyms
from schemas.answers.positions import Position, Token, has_bytes, has_ids
from schemas.columns import NOT_LISTED_LOGPROB
from schemas.validity import LOGPROB_SLACK, MASS_SLACK

Key: TypeAlias = int | bytes
"""A token by one identity: its id; or its bytes, or its id where an engine of bytes gave no more."""
Row: TypeAlias = Sequence[tuple[Key, float]]
Rows: TypeAlias = tuple[tuple[Key, ...], ...]
T = TypeVar("T")
_value: Final = itemgetter(1)

# Readers go by float32: what lies within its rounding of a limit is left out here.
_NOT_LISTED: Final = NOT_LISTED_LOGPROB + 0.01
_MOST_LOGPROB: Final = LOGPROB_SLACK * (1 - 1e-6)
_MOST_MASS: Final = 1 + MASS_SLACK * (1 - 1e-2)
_SURE_MASS: Final = 1 + MASS_SLACK / 2
_MOST_LOGIT: Final = 1e38


@dataclass(frozen=True, slots=True)
class IdLists:
    """T positions of an engine that gives ids."""

    tokens: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ByteLists:
    """T positions of an engine that gives bytes."""

    token_bytes: tuple[str, ...]
    top_bytes: tuple[tuple[str, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of an answer besides its positions."""

    top: int
    """Candidates a position that leave."""
    unknown: int
    """0, 1 or 2 by arm: what an emitted token becomes that nothing identifies; no other arm's equals it."""
    normalised: bool = True
    """Its values are logarithms of probabilities, not logits."""


def lists_of(
    positions: Sequence[Position], told: Told, pseudonyms: PairPseudonyms
) -> IdLists | ByteLists | None:
    """By ids, else by bytes; None where no position lists anything that can be read."""
    if has_ids(positions):
        return _id_lists(positions, told, pseudonyms)
    return _byte_lists(positions, told, pseudonyms) if has_bytes(positions) else None


def decimals_of(top_logprobs: Iterable[Iterable[float]]) -> int:
    """Decimals as sent, as far as they matter: 6 for six and more, 4 for four and five, else 3.

    Zeros and whole numbers tell nothing; where there is nothing else, 3.
    """
    values = np.array([value for row in top_logprobs for value in row])
    for decimals, told in ((3, 3), (5, 4)):
        if bool((np.round(values, decimals) == values).all()):
            return told
    return 6


def _id_lists(positions: Sequence[Position], told: Told, pseudonyms: PairPseudonyms) -> IdLists | None:
    emitted = [_id(position.emitted) for position in positions]
    rows = rows_of(positions, emitted, [_id(t) for p in positions for t, _ in p.entries], told)
    if rows is None:
        return None
    tokens = [IDS - 1 - told.unknown if one is None else one for one in emitted]
    keys, values = rows
    every = np.array([*tokens, *chain.from_iterable(keys)], dtype=np.int64)
    hidden: list[int] = pseudonyms.ids(every).tolist()
    return IdLists(tuple(hidden[: len(tokens)]), _split(hidden, len(tokens), keys), values)


def _byte_lists(positions: Sequence[Position], told: Told, pseudonyms: PairPseudonyms) -> ByteLists | None:
    emitted = [position.emitted.raw for position in positions]
    rows = rows_of(positions, emitted, [t.raw for p in positions for t, _ in p.entries], told)
    if rows is None:
        return None
    tokens: list[Key] = []
    for raw, position in zip(emitted, positions, strict=True):
        number = _id(position.emitted)
        tokens.append(raw or (IDS - 1 - told.unknown if number is None else number))
    keys, values = rows
    hidden = pseudonyms.of_bytes([*tokens, *chain.from_iterable(keys)])
    return ByteLists(tuple(hidden[: len(tokens)]), _split(hidden, len(tokens), keys), values)


def rows_of(
    positions: Sequence[Position], emitted: Sequence[Key | None], keys: Sequence[Key | None], told: Told
) -> tuple[Rows, tuple[tuple[float, ...], ...]] | None:
    """What of each position's list leaves: tokens, and their values; None where nothing does.

    `keys`: the listed tokens of all positions in a row; None: one that nothing identifies.
    """
    width = len(positions[0].entries)
    if width and len(keys) == width * len(positions) and all(len(p.entries) == width for p in positions):
        found = plain_rows(positions, emitted, keys, told)
        if found is not None:
            return found
    rows, at = [], 0
    for position, token in zip(positions, emitted, strict=True):
        width = len(position.entries)
        rows.append(careful_row(position, token, keys[at : at + width], told))
        at += width
    if not any(rows):
        return None
    tokens = tuple(tuple(key for key, _ in row) for row in rows)
    return tokens, tuple(tuple(value for _, value in row) for row in rows)


def plain_rows(
    positions: Sequence[Position], emitted: Sequence[Key | None], keys: Sequence[Key | None], told: Told
) -> tuple[Rows, tuple[tuple[float, ...], ...]] | None:
    """`careful_row` of all positions at once, where all lists are of one length and beyond doubt readable.

    None: they are not, or not surely.
    """
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    if None in codes:
        return None
    shape = (len(positions), -1)
    ids = np.array(list(map(codes.__getitem__, keys))).reshape(shape)
    values = np.array([value for p in positions for _, value in p.entries]).reshape(shape)
    if not (values.min() > _NOT_LISTED and values.max() < _MOST_LOGIT):  # a NaN fails both
        return None
    if told.normalised and values.max() > _MOST_LOGPROB:
        return None
    if told.normalised and np.exp(values).sum(axis=1).max() > _SURE_MASS:
        return None
    ordered = np.sort(ids, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return None
    ranks = np.argsort(-values, axis=1, kind="stable")
    width = ids.shape[1]
    if 1 < width <= told.top:
        # An emitted token out of rank is the last by rank, and first in its list.
        strays = np.flatnonzero((ranks[:, -1] == 0) & (values[:, 0] < values[:, 1:].min(axis=1)))
        first = [codes.get(emitted[at], -1) for at in strays.tolist()]
        strays = strays[ids[strays, 0] == np.array(first, dtype=np.int64)]
        ranks[strays] = np.roll(ranks[strays], 1, axis=1)
    ranks = ranks[:, : told.top]
    names: list[Any] = list(codes)
    best = np.take_along_axis(values, ranks, axis=1).tolist()
    tokens = [tuple([names[code] for code in row]) for row in np.take_along_axis(ids, ranks, axis=1).tolist()]
    return tuple(tokens), tuple(map(tuple, best))


def careful_row(position: Position, emitted: Key | None, keys: Sequence[Key | None], told: Told) -> Row:
    """What of a position's list leaves; () where it cannot be read. `keys`: its tokens."""
    entries: list[tuple[Key, float]] = []
    for key, (_, value) in zip(keys, position.entries, strict=True):
        if not value < math.inf:
            return ()
        if value > _NOT_LISTED:
            if key is None:
                return ()
            entries.append((key, value))
    ranked = sorted(entries, key=_value, reverse=True)
    if not ranked or len({key for key, _ in ranked}) < len(ranked) or not _sound(ranked, told):
        return ()
    if len(ranked) > told.top:
        return ranked[: told.top]
    out_of_rank = len(ranked) > 1 and entries[0][0] == emitted and entries[0][1] < ranked[-2][1]
    return [entries[0], *ranked[:-1]] if out_of_rank else ranked


def _sound(ranked: Row, told: Told) -> bool:
    """Whether these may be the values that they claim to be, read as float32."""
    if not told.normalised:
        return ranked[0][1] < _MOST_LOGIT
    mass = math.fsum(math.exp(min(value, 1.0)) for _, value in ranked)
    return ranked[0][1] <= _MOST_LOGPROB and mass <= _MOST_MASS


def _id(token: Token) -> int | None:
    """Its id, if there may be such a one."""
    return token.id if token.id is not None and 0 <= token.id < IDS else None


def _split(hidden: Sequence[T], start: int, rows: Rows) -> tuple[tuple[T, ...], ...]:
    """The pseudonyms after `start`, row by row."""
    tops = []
    for row in rows:
        tops.append(tuple(hidden[start : start + len(row)]))
        start += len(row)
    return tuple(tops)
