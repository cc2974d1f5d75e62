"""Scores of pairs: which positions of two answers are compared, and their means.

Two answers to one prompt answer the same question only as long as they agree. Free-running pairs are compared
up to and including the first position whose emitted tokens differ; where the compared arm scored the
baseline's tokens (`source` forced), every position is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.gathering import Arm, Half, answers, arm, sent
from pipeline.core.divergence.measures import BLOCK_ENTRIES, MEASURES, measure_lists
from pipeline.core.divergence.reading import read_lists
from schemas.columns import F8, I8, KINDS, SOURCES, Bool

Outcome: TypeAlias = Literal["scored", "definition_mismatch", "no_position"]

_FORCED: Final = SOURCES.index("forced")
_LOGITS: Final = KINDS.index("logits")


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


def score_pairs(pairs: Sequence[tuple[Half, Half]]) -> PairScores:
    """Score (baseline, other) pairs. The same pair gets the same bits whatever batch it is scored in.

    Halves that state another definition, kind or token identity are not compared (`definition_mismatch`);
    a pair none of whose compared positions can be read on both sides is `no_position`. η is the coarser
    side's.
    """
    scores = _unscored(len(pairs))
    if not pairs:
        return scores
    a, b = answers([pair[0] for pair in pairs]), answers([pair[1] for pair in pairs])
    comparable = (a.terms == b.terms).all(axis=0)
    rows = comparable.nonzero()[0]
    scores.renormalised[rows] = a.terms[1, rows] == _LOGITS
    if len(rows):
        length = np.minimum(a.length[rows], b.length[rows])
        arms = arm(a, rows, length), arm(b, rows, length)
        stretch = np.zeros(len(pairs), dtype=np.int64)
        stretch[rows] = _compare_tokens(scores, rows, length, *arms)
        for block in _blocks(stretch, np.maximum(a.k, b.k)):
            _score_block(block, stretch[block], arms, scores)
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


def _compare_tokens(scores: PairScores, rows: I8, length: I8, a: Arm, b: Arm) -> I8:
    """Agreed prefix, first difference and common end of these pairs. Returns how far each is compared.

    `length`: of the shorter answer of each.
    """
    differences = (a.tokens != b.tokens).nonzero()[0]
    ends = np.cumsum(length)
    # The next difference from each pair's start on, if it lies before the pair's end.
    following = np.append(differences, ends[-1])[np.searchsorted(differences, ends - length)]
    differs = following < ends
    agreed = np.where(differs, following - (ends - length), length)
    scores.agreed[rows] = agreed
    scores.first_difference[rows] = np.where(differs, agreed, -1)
    ended_a, ended_b = a.of.ended[rows], b.of.ended[rows]
    together = ~differs & (a.of.length[rows] == b.of.length[rows]) & (ended_a == 1) & (ended_b == 1)
    scores.ended_together[rows] = np.where((ended_a >= 0) & (ended_b >= 0), together, -1)
    return np.where((b.of.source[rows] == _FORCED) | ~differs, length, agreed + 1)


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


def _score_block(rows: I8, stretches: I8, arms: tuple[Arm, Arm], scores: PairScores) -> None:
    """Score one block of pairs into `scores`."""
    renormalised = scores.renormalised[rows]
    lists, valid = read_lists(
        sent(arms, rows, stretches), np.repeat(renormalised, stretches) if renormalised.any() else None
    )
    starts = np.cumsum(stretches) - stretches
    counts = stretches if valid is None else np.add.reduceat(valid, starts, dtype=np.int64)
    scores.positions[rows] = counts
    scores.invalid[rows] = stretches - counts
    eta = np.maximum(arms[0].of.eta[rows], arms[1].of.eta[rows])
    found = measure_lists(lists, np.repeat(eta, stretches))
    if valid is not None:
        found = np.where(valid, found, 0.0)
    # The order in which `reduceat` adds is a function of how many there are, so a pair's sum never depends on
    # its block.
    means = np.add.reduceat(found, starts, axis=1) / np.maximum(counts, 1)
    for name, mean in zip(MEASURES, means, strict=True):
        getattr(scores, name)[rows] = mean
    scores.kl_lower_max[rows] = np.maximum.reduceat(found[MEASURES.index("kl_lower")], starts)
