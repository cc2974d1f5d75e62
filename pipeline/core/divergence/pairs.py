"""Scores of pairs: which positions of two answers are compared, and their means.

Two answers to one prompt answer the same question only as long as they agree. Free-running pairs are compared
up to and including the first position whose emitted tokens differ; where the compared arm scored the
baseline's tokens (`source` forced), every position is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.measures import BLOCK_ENTRIES, measure_listed
from pipeline.core.divergence.reading import SentLists, read_lists
from schemas.columns import F8, I4, I8, KINDS, NOT_LISTED, SOURCES, Bool, LogitColumns

Outcome: TypeAlias = Literal["scored", "definition_mismatch", "no_position"]

_FORCED: Final = SOURCES.index("forced")
_LOGITS: Final = KINDS.index("logits")


@dataclass(frozen=True, slots=True)
class Half:
    """One arm's answer: event `index` of a record's columns."""

    columns: LogitColumns
    index: int


@dataclass(frozen=True, slots=True)
class PairScores:
    """n pairs, in the order given. Scores are means over a pair's compared positions, 0 where not scored."""

    n: int
    outcome: tuple[Outcome, ...]
    renormalised: Bool
    """Made of logits without normaliser: never mixed with other pairs in one mean."""
    positions: I8
    """Positions compared."""
    invalid: I8
    """Positions inside the compared stretch that could not be read on one side or the other."""
    agreed: I8
    """Length of the common prefix of emitted tokens."""
    first_difference: I8
    """First position whose emitted tokens differ, −1 if none does as far as both go."""
    ended_together: NDArray[np.int8]
    """1: same tokens, and both ended by themselves; 0: not so; −1: one side does not say whether it ended."""
    kl_lower: F8
    kl_lower_max: F8
    kl_floor: F8
    js_lower: F8
    tv_lower: F8
    cosine: F8
    top1_agree: F8


@dataclass(frozen=True, slots=True)
class _Answers:
    """One arm of n pairs, every column (n,): what scoring reads of an answer beside lists and tokens."""

    halves: Sequence[Half]
    start: I8
    """First position, in its record."""
    length: I8
    first_entry: I8
    k: I8
    terms: I8
    """(3, n): definition, kind, identity. Answers are comparable if all three are equal."""
    source: I8
    ended: I8
    eta: F8


def score_pairs(pairs: Sequence[tuple[Half, Half]]) -> PairScores:
    """Score (baseline, other) pairs. The same pair gets the same bits whatever batch it is scored in.

    Halves that state another definition, kind or token identity are not compared (`definition_mismatch`);
    a pair none of whose compared positions can be read on both sides is `no_position`. η is the coarser
    side's.
    """
    scores = _unscored(len(pairs))
    a, b = _answers([pair[0] for pair in pairs]), _answers([pair[1] for pair in pairs])
    comparable = (a.terms == b.terms).all(axis=0)
    rows = comparable.nonzero()[0]
    scores.renormalised[rows] = a.terms[1, rows] == _LOGITS
    stretch = np.zeros(len(pairs), dtype=np.int64)
    if len(rows):
        stretch[rows] = _compare_tokens(scores, rows, a, b)
    for block in _blocks(stretch, np.maximum(a.k, b.k)):
        _score_block(block, stretch[block], a, b, scores)
    outcome: list[Outcome] = [
        "definition_mismatch" if not same else "scored" if positions else "no_position"
        for same, positions in zip(comparable.tolist(), scores.positions.tolist(), strict=True)
    ]
    return PairScores(
        **{f.name: getattr(scores, f.name) for f in fields(scores) if f.name != "outcome"},
        outcome=tuple(outcome),
    )


def _unscored(n: int) -> PairScores:
    def ints() -> I8:
        return np.zeros(n, dtype=np.int64)

    def floats() -> F8:
        return np.zeros(n, dtype=np.float64)

    return PairScores(
        n=n,
        outcome=(),
        renormalised=np.zeros(n, dtype=np.bool_),
        positions=ints(),
        invalid=ints(),
        agreed=ints(),
        first_difference=np.full(n, -1, dtype=np.int64),
        ended_together=np.full(n, -1, dtype=np.int8),
        kl_lower=floats(),
        kl_lower_max=floats(),
        kl_floor=floats(),
        js_lower=floats(),
        tv_lower=floats(),
        cosine=floats(),
        top1_agree=floats(),
    )


def _answers(halves: Sequence[Half]) -> _Answers:
    """Gathered record by record: halves mostly come many from one."""
    places: dict[int, list[int]] = {}
    for place, half in enumerate(halves):
        places.setdefault(id(half.columns), []).append(place)
    numbers = np.empty((9, len(halves)), dtype=np.int64)
    eta = np.empty(len(halves))
    for at in places.values():
        columns = halves[at[0]].columns
        index = np.array([halves[place].index for place in at], dtype=np.intp)
        starts = columns.offsets[index]
        facts: Sequence[NDArray[Any]] = (
            starts,
            columns.offsets[index + 1] - starts,
            columns.entry_offsets[index],
            columns.k[index],
            columns.definition[index],
            columns.kind[index],
            columns.identity[index],
            columns.source[index],
            columns.ended[index],
        )
        to = np.array(at, dtype=np.intp)
        for row, values in zip(numbers, facts, strict=True):
            row[to] = values
        eta[to] = columns.eta[index]
    start, length, first_entry, k, *_, source, ended = numbers
    return _Answers(halves, start, length, first_entry, k, numbers[4:7], source, ended, eta)


def _tokens(answers: _Answers, rows: I8, lengths: I8) -> I4 | I8:
    """The first `lengths` emitted tokens of these rows' answers, one after the other."""
    return np.concatenate(
        [
            answers.halves[row].columns.tokens[start : start + length]
            for row, start, length in zip(
                rows.tolist(), answers.start[rows].tolist(), lengths.tolist(), strict=True
            )
        ]
    )


def _compare_tokens(scores: PairScores, rows: I8, a: _Answers, b: _Answers) -> I8:
    """Agreed prefix, first difference and common end of these pairs. Returns how far each is compared."""
    length = np.minimum(a.length[rows], b.length[rows])
    differences = (_tokens(a, rows, length) != _tokens(b, rows, length)).nonzero()[0]
    ends = np.cumsum(length)
    # The next difference from each pair's start on, if it lies before the pair's end.
    following = np.append(differences, ends[-1])[np.searchsorted(differences, ends - length)]
    differs = following < ends
    agreed = np.where(differs, following - (ends - length), length)
    scores.agreed[rows] = agreed
    scores.first_difference[rows] = np.where(differs, agreed, -1)
    known = (a.ended[rows] >= 0) & (b.ended[rows] >= 0)
    together = ~differs & (a.length[rows] == b.length[rows]) & (a.ended[rows] == 1) & (b.ended[rows] == 1)
    scores.ended_together[rows] = np.where(known, together, -1)
    return np.where((b.source[rows] == _FORCED) | ~differs, length, agreed + 1)


def _blocks(stretch: I8, width: I8) -> Iterator[I8]:
    """Blocks of rows that have a stretch to compare, pairs of like width together: none pads another."""
    block: list[int] = []
    positions = 0
    order = np.argsort(width, kind="stable")
    order = order[stretch[order] > 0]
    for row, length, widest in zip(
        order.tolist(), stretch[order].tolist(), width[order].tolist(), strict=True
    ):
        positions += length
        if block and positions * widest > BLOCK_ENTRIES:
            yield np.array(block)
            block, positions = [], length
        block.append(row)
    if block:
        yield np.array(block)


def _score_block(rows: I8, stretches: I8, a: _Answers, b: _Answers, scores: PairScores) -> None:
    """Score one block of pairs into `scores`."""
    lists_a, lists_b, valid = read_lists(
        _sent(a, rows, stretches),
        _sent(b, rows, stretches),
        np.repeat(scores.renormalised[rows], stretches),
    )
    owner = np.repeat(np.arange(len(rows)), stretches)
    all_valid = bool(np.logical_and.reduce(valid))
    counts = stretches if all_valid else np.bincount(owner[valid], minlength=len(rows))
    scores.positions[rows] = counts
    scores.invalid[rows] = stretches - counts
    measured = measure_listed(lists_a, lists_b, np.repeat(np.maximum(a.eta[rows], b.eta[rows]), stretches))
    divisor = np.maximum(counts, 1)

    def read(values: F8) -> F8:
        return values if all_valid else np.where(valid, values, 0.0)

    # `bincount` adds in order, so a pair's sum never depends on its block.
    for name in ("kl_lower", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree"):
        sums = np.bincount(owner, weights=read(getattr(measured, name)), minlength=len(rows))
        getattr(scores, name)[rows] = sums / divisor
    starts = np.cumsum(stretches) - stretches
    scores.kl_lower_max[rows] = np.maximum.reduceat(read(measured.kl_lower), starts)


def _sent(answers: _Answers, rows: I8, stretches: I8) -> SentLists:
    """The first positions of several answers side by side; shorter lists padded with entries not listed."""
    total = int(stretches.sum())
    emitted = _tokens(answers, rows, stretches)
    widths = answers.k[rows]
    # One row at least, so that an answer that lists nothing has something to be invalid for.
    widest = max(int(widths.max()), 1)
    ids, values = [], []
    firsts, ends = answers.first_entry[rows], answers.first_entry[rows] + stretches * widths
    for row, first, end in zip(rows.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        columns = answers.halves[row].columns
        ids.append(columns.top_ids[first:end])
        values.append(columns.top_logprobs[first:end])
    if int(widths.min()) == widest:
        flat_ids, flat_values = np.concatenate(ids), np.concatenate(values)
        return SentLists(
            np.ascontiguousarray(flat_ids.reshape(total, widest).T),
            np.array(flat_values.reshape(total, widest).T, dtype=np.float64, order="C"),
            emitted,
        )
    all_ids = np.full((widest, total), NOT_LISTED, dtype=np.int64)
    logprobs = np.full((widest, total), -np.inf)
    at = 0
    for part, value, k, stretch in zip(ids, values, widths.tolist(), stretches.tolist(), strict=True):
        all_ids[:k, at : at + stretch] = part.reshape(stretch, k).T
        logprobs[:k, at : at + stretch] = value.reshape(stretch, k).T
        at += stretch
    return SentLists(all_ids, logprobs, emitted)
