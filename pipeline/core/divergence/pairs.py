"""Scores of pairs: which positions of two answers are compared, and their means.

Two answers to one prompt answer the same question only as long as they agree. Free-running pairs are compared
up to and including the first position whose emitted tokens differ; where the compared arm scored the
baseline's tokens (`source` forced), every position is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.measures import Measures, measure
from pipeline.core.divergence.reading import SentLists, read_lists
from schemas.columns import F8, I4, I8, KINDS, NOT_LISTED, SOURCES, Bool, LogitColumns

Outcome: TypeAlias = Literal["scored", "definition_mismatch", "no_position"]

_FORCED: Final = SOURCES.index("forced")
_LOGITS: Final = KINDS.index("logits")
_BLOCK_ENTRIES: Final = 12_000
"""Pairs are scored in blocks of about so many list entries a side: a matrix of a block then stays below the
128 KiB above which allocators hand memory back to the system, which costs more than the arithmetic."""


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
class _Task:
    """One comparable pair. `length`: positions both sides have; `width`: entries of the longer lists."""

    baseline: Half
    other: Half
    length: int
    width: int
    forced: bool


def score_pairs(pairs: Sequence[tuple[Half, Half]]) -> PairScores:
    """Score (baseline, other) pairs. The same pair gets the same bits whatever batch it is scored in.

    Halves that state another definition, kind or token identity are not compared (`definition_mismatch`);
    a pair none of whose compared positions can be read on both sides is `no_position`. η is the coarser
    side's.
    """
    scores = _unscored(len(pairs))
    outcome: list[Outcome] = ["no_position"] * len(pairs)
    tasks: list[tuple[int, _Task]] = []
    for row, (baseline, other) in enumerate(pairs):
        if not _same_definition(baseline, other):
            outcome[row] = "definition_mismatch"
            continue
        task = _task(baseline, other)
        scores.renormalised[row] = baseline.columns.kind[baseline.index] == _LOGITS
        _compare_tokens(scores, row, task)
        tasks.append((row, task))
    for block in _blocks(tasks, scores):
        for row in _score_block(block, scores):
            outcome[row] = "scored"
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


def _same_definition(baseline: Half, other: Half) -> bool:
    a, b, i, j = baseline.columns, other.columns, baseline.index, other.index
    return bool(
        a.definition[i] == b.definition[j] and a.kind[i] == b.kind[j] and a.identity[i] == b.identity[j]
    )


def _task(baseline: Half, other: Half) -> _Task:
    a, b = baseline.columns.offsets, other.columns.offsets
    i, j = baseline.index, other.index
    length = min(int(a[i + 1]) - int(a[i]), int(b[j + 1]) - int(b[j]))
    width = max(int(baseline.columns.k[i]), int(other.columns.k[j]))
    return _Task(baseline, other, length, width, int(other.columns.source[j]) == _FORCED)


def _tokens(half: Half, length: int) -> I4 | I8:
    start = int(half.columns.offsets[half.index])
    return half.columns.tokens[start : start + length]


def _compare_tokens(scores: PairScores, row: int, task: _Task) -> None:
    """Agreed prefix, first difference and common end of one pair."""
    same = _tokens(task.baseline, task.length) == _tokens(task.other, task.length)
    first = int(same.argmin()) if task.length else 0
    differs = task.length > 0 and not same[first]
    scores.agreed[row] = first if differs else task.length
    scores.first_difference[row] = first if differs else -1
    a, b, i, j = task.baseline.columns, task.other.columns, task.baseline.index, task.other.index
    if a.ended[i] >= 0 and b.ended[j] >= 0:
        same_length = a.offsets[i + 1] - a.offsets[i] == b.offsets[j + 1] - b.offsets[j]
        together = not differs and same_length and a.ended[i] == 1 and b.ended[j] == 1
        scores.ended_together[row] = 1 if together else 0


def _blocks(tasks: Iterable[tuple[int, _Task]], scores: PairScores) -> Iterator[list[tuple[int, _Task, int]]]:
    """Blocks of (row, task, compared stretch), leaving out pairs without a position."""
    block: list[tuple[int, _Task, int]] = []
    positions = widest = 0
    for row, task in tasks:
        first = int(scores.first_difference[row])
        stretch = task.length if task.forced or first < 0 else first + 1
        if not stretch:
            continue
        positions, widest = positions + stretch, max(widest, task.width)
        if block and positions * widest > _BLOCK_ENTRIES:
            yield block
            block, positions, widest = [], stretch, task.width
        block.append((row, task, stretch))
    if block:
        yield block


def _score_block(block: Sequence[tuple[int, _Task, int]], scores: PairScores) -> list[int]:
    """Score one block into `scores`; returns the rows that have a score."""
    rows = np.array([row for row, _, _ in block], dtype=np.int64)
    stretches = np.array([stretch for _, _, stretch in block], dtype=np.int64)
    a = _sent([(task.baseline, stretch) for _, task, stretch in block])
    b = _sent([(task.other, stretch) for _, task, stretch in block])
    eta = np.array(
        [
            max(t.baseline.columns.eta[t.baseline.index], t.other.columns.eta[t.other.index])
            for _, t, _ in block
        ],
        dtype=np.float64,
    )
    lists_a, lists_b, valid = read_lists(a, b, np.repeat(scores.renormalised[rows], stretches))
    owner = np.repeat(np.arange(len(block)), stretches)
    counts = np.bincount(owner[valid], minlength=len(block))
    scores.positions[rows] = counts
    scores.invalid[rows] = stretches - counts
    measured = measure(lists_a, lists_b, np.repeat(eta, stretches))
    _reduce(measured, valid, owner, counts, rows, scores)
    return [int(row) for row in rows[counts > 0]]


def _sent(halves: Sequence[tuple[Half, int]]) -> SentLists:
    """The first positions of several answers side by side; shorter lists padded with entries not listed."""
    total = sum(stretch for _, stretch in halves)
    widths = [int(half.columns.k[half.index]) for half, _ in halves]
    widest = max(widths)
    slices = []
    for (half, stretch), k in zip(halves, widths, strict=True):
        start = int(half.columns.entry_offsets[half.index])
        slices.append(slice(start, start + stretch * k))
    emitted = np.concatenate([_tokens(half, stretch) for half, stretch in halves], dtype=np.int64)
    if min(widths) == widest:
        id_parts = [half.columns.top_ids[part] for (half, _), part in zip(halves, slices, strict=True)]
        value_parts = [
            half.columns.top_logprobs[part] for (half, _), part in zip(halves, slices, strict=True)
        ]
        flat_ids = np.concatenate(id_parts).reshape(total, widest)
        flat_values = np.concatenate(value_parts).reshape(total, widest)
        return SentLists(
            np.array(flat_ids.T, dtype=np.int64, order="C"),
            np.array(flat_values.T, dtype=np.float64, order="C"),
            emitted,
        )
    ids = np.full((widest, total), NOT_LISTED, dtype=np.int64)
    logprobs = np.full((widest, total), -np.inf)
    at = 0
    for (half, stretch), part, k in zip(halves, slices, widths, strict=True):
        ids[:k, at : at + stretch] = half.columns.top_ids[part].reshape(stretch, k).T
        logprobs[:k, at : at + stretch] = half.columns.top_logprobs[part].reshape(stretch, k).T
        at += stretch
    return SentLists(ids, logprobs, emitted)


def _reduce(measured: Measures, valid: Bool, owner: I8, counts: I8, rows: I8, scores: PairScores) -> None:
    """Means and maximum per pair. `bincount` adds in order, so a pair's sum never depends on its block."""
    divisor = np.maximum(counts, 1)
    all_valid = bool(valid.all())

    def read(values: F8) -> F8:
        return values if all_valid else np.where(valid, values, 0.0)

    for name in ("kl_lower", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree"):
        sums = np.bincount(owner, weights=read(getattr(measured, name)), minlength=len(counts))
        getattr(scores, name)[rows] = sums / divisor
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    scores.kl_lower_max[rows] = np.maximum.reduceat(read(measured.kl_lower), starts)
