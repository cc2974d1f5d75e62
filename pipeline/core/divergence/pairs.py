"""Scores of pairs: which positions of two answers are compared, and their means.

Two answers to one prompt answer the same question only as long as they agree. Free-running pairs are compared
up to and including the first position whose emitted tokens differ; where the compared arm scored the
baseline's tokens (`source` forced), every position is. One that claims it with other tokens is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.gathering import Answers, Half, Matched, Tokens, answers, sent, tokens
from pipeline.core.divergence.lists import Lists
from pipeline.core.divergence.measures import BLOCK_ENTRIES, MEASURES, measure_lists
from pipeline.core.divergence.reading import read_lists
from schemas.columns import F8, I4, I8, KINDS, SOURCES, Bool

Outcome: TypeAlias = Literal[
    "scored", "no_position", "forced_mismatch", "identity_mismatch", "definition_mismatch"
]

_OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
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


@dataclass(frozen=True, slots=True)
class Block:
    """The compared positions of some pairs, one pair after the other: their lists and what was measured.

    `rows`: the pairs; `stretches`: positions of each, T together. `valid` (T,): which can be read (None:
    all); `measured` (MEASURES, T), 0 where not. `lists` may hold more columns than T. `emitted`: see `Sent`.
    """

    rows: I8
    stretches: I8
    lists: Lists
    valid: Bool | None
    measured: F8
    emitted: Callable[[I8, I8], I4 | I8]


def score_pairs(pairs: Sequence[tuple[Half, Half]]) -> PairScores:
    """Score (baseline, other) pairs, see `score_matched`."""
    return score_matched(Matched.of(pairs))


def score_matched(matched: Matched, observe: Callable[[Block], None] | None = None) -> PairScores:
    """Score pairs. The same pair gets the same bits whatever batch it is scored in.

    `observe` is shown every block of positions, for what is asked of them beside the scores.

    Not compared are halves that state another definition or kind (`definition_mismatch`), ids on one side
    and bytes on the other (`identity_mismatch`), and a forced half whose tokens are not the baseline's as far
    as both go (`forced_mismatch`). A pair none of whose compared positions can be read on both sides is
    `no_position`. η is the coarser side's.
    """
    n = matched.n
    found = _unscored(n)
    if n == 0:
        return PairScores(n=0, outcome=(), **found)
    of = answers(matched)
    same_definition, same_kind, same_identity = of.terms[:, 0] == of.terms[:, 1]
    like = same_definition & same_kind
    rows = (like & same_identity).nonzero()[0]
    found["renormalised"][rows] = of.terms[1, 0, rows] == _LOGITS
    if len(rows):
        length = np.minimum(of.length[0], of.length[1]).take(rows)
        emitted = tokens(of, rows, length)
        stretch = np.zeros(n, dtype=np.int64)
        stretch[rows] = _compare_tokens(found, rows, length, of, emitted)
        for block in _blocks(stretch, np.maximum(of.k[0], of.k[1])):
            scored = _score_block(found, block, stretch[block], of, emitted)
            if observe is not None:
                observe(scored)
    misled = (of.source[1] == _FORCED) & (found["first_difference"] >= 0)
    reasons = (found["positions"] > 0, ~like, ~same_identity, misled)
    outcomes = np.select(reasons, (0, 4, 3, 2), default=1)
    return PairScores(n=n, outcome=tuple(map(_OUTCOMES.__getitem__, outcomes.tolist())), **found)


def _unscored(n: int) -> dict[str, NDArray[Any]]:
    """The columns of PairScores, for `_score_block` to fill in."""
    return {
        "renormalised": np.zeros(n, dtype=np.bool_),
        **{name: np.zeros(n, dtype=np.int64) for name in ("positions", "invalid", "agreed")},
        "first_difference": np.full(n, -1, dtype=np.int64),
        "ended_together": np.full(n, -1, dtype=np.int8),
        **dict(zip((*MEASURES, "kl_lower_max"), np.zeros((len(MEASURES) + 1, n)), strict=True)),
    }


def _compare_tokens(found: dict[str, NDArray[Any]], rows: I8, length: I8, of: Answers, emitted: Tokens) -> I8:
    """Agreed prefix, first difference and common end of these pairs. Returns how far each is compared.

    `length`: of the shorter answer of each.
    """
    differences = (emitted.of[0] != emitted.of[1]).nonzero()[0]
    ends = np.cumsum(length)
    starts = ends - length
    # The next difference from each pair's start on, if it lies before the pair's end.
    following = np.concatenate((differences, ends[-1:])).take(differences.searchsorted(starts))
    differs = following < ends
    agreed = np.where(differs, following - starts, length)
    found["agreed"][rows] = agreed
    found["first_difference"][rows] = np.where(differs, agreed, -1)
    ended = np.minimum(of.ended[0], of.ended[1]).take(rows)
    together = ~differs & (of.length[0] == of.length[1]).take(rows) & (ended == 1)
    found["ended_together"][rows] = np.where(ended >= 0, together, -1)
    forced = of.source[1].take(rows) == _FORCED
    return np.where(differs, np.where(forced, 0, agreed + 1), length)


def _blocks(stretch: I8, width: I8) -> Iterator[I8]:
    """Blocks of rows that have a stretch to compare, pairs of like width together: none pads another."""
    order = width.argsort(kind="stable")
    order = order[stretch[order] > 0]
    width, through = width[order], np.cumsum(stretch[order])
    first = 0
    while first < len(order):
        before = through[first - 1] if first else 0
        entries = (through[first:] - before) * width[first:]
        last = first + max(1, int(entries.searchsorted(BLOCK_ENTRIES, side="right")))
        yield order[first:last]
        first = last


def _score_block(
    found: dict[str, NDArray[Any]], rows: I8, stretches: I8, of: Answers, emitted: Tokens
) -> Block:
    """Score one block of pairs into `found`."""
    renormalised = found["renormalised"][rows]
    starts = np.cumsum(stretches) - stretches
    size = int(starts[-1] + stretches[-1])
    laid = sent(of, emitted, rows, stretches)

    def at_positions(values: NDArray[Any]) -> NDArray[Any]:
        spread = np.zeros(laid.ids.shape[2], dtype=values.dtype)
        spread[:size] = np.repeat(values, stretches)
        return spread

    lists, valid = read_lists(laid, at_positions(renormalised) if renormalised.any() else None)
    if valid is not None:
        valid = valid[:size]
    counts = stretches if valid is None else np.add.reduceat(valid, starts, dtype=np.int64)
    found["positions"][rows] = counts
    found["invalid"][rows] = stretches - counts
    eta = np.maximum(of.eta[0], of.eta[1]).take(rows)
    one_eta = eta[0] if (eta == eta[0]).all() else at_positions(eta)
    measured = measure_lists(lists, one_eta)[:, :size]
    if valid is not None:
        measured = np.where(valid, measured, 0.0)
    # The order in which `reduceat` adds is a function of how many there are, so a pair's sum never depends on
    # its block.
    means = np.add.reduceat(measured, starts, axis=1) / np.maximum(counts, 1)
    for name, mean in zip(MEASURES, means, strict=True):
        found[name][rows] = mean
    found["kl_lower_max"][rows] = np.maximum.reduceat(measured[MEASURES.index("kl_lower")], starts)
    return Block(rows, stretches, lists, valid, measured, laid.emitted)
