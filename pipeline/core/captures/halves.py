"""From two answers to the two halves of a pair: which positions, by which identity, in the shared columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeline.core.divergence import Half
from schemas.answers.positions import Answer, Position, Skipped, Token, has_bytes, has_ids
from schemas.columns import IDENTITIES, NOT_LISTED, SOURCES, LogitColumns
from schemas.identity import token_hash

_BYTES: Final = IDENTITIES.index("bytes")
_IDS: Final = IDENTITIES.index("ids")
_FORCED: Final = SOURCES.index("forced")
_MOST_ENTRIES: Final = 200
"""Longer lists are cut to their best: still the top of the same distribution."""

_UNKNOWN_BASELINE: Final = -2
_UNKNOWN_CANARY: Final = -3
"""An emitted token that nothing identifies: never equal to the other side's, so the comparison ends there."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What a capture says besides its body: definition code of its log-probabilities, and η of its side."""

    definition: int
    eta: float


def halves(
    baseline: Answer, canary: Answer, stated: tuple[Stated, Stated], forced: bool
) -> tuple[Half, Half] | Skipped:
    """The pair to score, or why there is none: no common identity, or forced tokens that are not the same."""
    if forced:
        aligned = _forced_positions(baseline, canary)
        if aligned is None:
            return Skipped("forced_mismatch")
        ours, theirs = aligned
    else:
        ours, theirs = baseline.generated, canary.generated
    if not all(any(position.entries for position in side) for side in (ours, theirs)):
        return Skipped("no_logprobs")
    if has_ids(ours) and has_ids(theirs):
        identity = _IDS
    elif has_bytes(ours) and has_bytes(theirs):
        identity = _BYTES
    elif all(has_ids(side) or has_bytes(side) for side in (ours, theirs)):
        return Skipped("identity_mismatch")
    else:
        return Skipped("no_token_identity")
    return (
        _half(ours, baseline.ended, stated[0], identity, _UNKNOWN_BASELINE, forced=False),
        _half(theirs, canary.ended, stated[1], identity, _UNKNOWN_CANARY, forced=forced),
    )


def _forced_positions(
    baseline: Answer, canary: Answer
) -> tuple[Sequence[Position], Sequence[Position]] | None:
    """Positions of the same tokens on both sides, None where the canary scored others.

    Two scored prompts are compared whole. Else the canary's prompt ends with the baseline's answer, or its
    entries are themselves those of the baseline's tokens: either without the end-of-text token perhaps.
    """
    if canary.scored and baseline.scored:
        same = _same_tokens(baseline.scored, canary.scored)
        return (baseline.scored, canary.scored) if same else None
    for length in (len(baseline.generated), len(baseline.generated) - 1):
        ours = baseline.generated[: max(length, 0)]
        theirs = canary.scored[-len(ours) :] if canary.scored else canary.generated
        if _same_tokens(ours, theirs) and (ours or not canary.scored):
            return ours, theirs
    return None


def _same_tokens(ours: Sequence[Position], theirs: Sequence[Position]) -> bool:
    """Whether both are positions of the same tokens, as far as ids, else bytes, tell."""
    return len(ours) == len(theirs) and all(
        not _differ(a.emitted, b.emitted) for a, b in zip(ours, theirs, strict=True)
    )


def _differ(ours: Token, theirs: Token) -> bool:
    """Whether these are two tokens. Where one side has ids alone and the other bytes alone nothing tells."""
    if ours.id is not None and theirs.id is not None:
        return ours.id != theirs.id
    if ours.raw is not None and theirs.raw is not None:
        return ours.raw != theirs.raw
    return False


def _half(
    positions: Sequence[Position],
    ended: bool | None,
    stated: Stated,
    identity: int,
    unknown: int,
    *,
    forced: bool,
) -> Half:
    """One answer as columns of one event. Labels are empty: a captured pair has none to be told apart by."""
    lists = [_readable(position, identity) for position in positions]
    k = max((len(entries) for entries in lists), default=0)
    ids = np.full((len(lists), k), NOT_LISTED, dtype=np.int64)
    logprobs = np.full((len(lists), k), -np.inf)
    for row, entries in enumerate(lists):
        if entries:
            ids[row, : len(entries)], logprobs[row, : len(entries)] = zip(*entries, strict=True)
    emitted = [_emitted(position.emitted, identity, unknown) for position in positions]
    zeros = np.zeros(1, dtype=np.int64)
    columns = LogitColumns(
        n=1,
        signature=np.zeros((1, 16), np.uint8),
        pair_id=np.zeros((1, 16), np.uint8),
        has_pair_id=np.zeros(1, np.bool_),
        arm=np.zeros(1, np.uint8),
        generation=np.zeros(1, np.int32),
        ts_us=zeros,
        duration_us=zeros,
        input_tokens=np.zeros(1, np.int32),
        cached_tokens=np.zeros(1, np.int32),
        temperature=np.zeros(1),
        top_p=np.zeros(1),
        max_tokens=np.zeros(1, np.int32),
        seed=zeros,
        has_seed=np.zeros(1, np.bool_),
        labels={},
        expected_arms=np.zeros(1, np.uint8),
        definition=np.array([stated.definition], np.uint8),
        source=np.array([_FORCED if forced else 0], np.uint8),
        kind=np.zeros(1, np.uint8),
        eta=np.array([stated.eta]),
        identity=np.array([identity], np.uint8),
        ended=np.array([-1 if ended is None else int(ended)], np.int8),
        offsets=np.array([0, len(lists)], np.int64),
        k=np.array([k], np.uint8),
        entry_offsets=np.array([0, len(lists) * k], np.int64),
        tokens=np.array(emitted, dtype=np.int64),
        top_ids=ids.reshape(-1),
        top_logprobs=logprobs.reshape(-1),
    )
    return Half(columns, 0)


def _readable(position: Position, identity: int) -> list[tuple[int, float]]:
    """The list by one identity; empty where a listed token lacks it, for then it may be any of several."""
    entries: list[tuple[int, float]] = []
    for token, value in position.entries:
        number = token.id if identity == _IDS else None if token.raw is None else token_hash(token.raw.hex())
        if number is None:
            return []
        entries.append((number, value))
    if len(entries) > _MOST_ENTRIES:
        entries = sorted(entries, key=lambda entry: -entry[1])[:_MOST_ENTRIES]
    return entries


def _emitted(token: Token, identity: int, unknown: int) -> int:
    """The emitted token as a number of its own identity; ids stand below all others when bytes identify."""
    if identity == _IDS:
        return unknown if token.id is None else token.id
    if token.raw is not None:
        return token_hash(token.raw.hex())
    return unknown if token.id is None else -10 - token.id
