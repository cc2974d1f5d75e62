"""What is asked of a comparison once, and of no pair on its way to the gate.

Numbers that decide nothing cost as much as those that do: `klaxon compare` computes them, the pair worker
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.gathering import Half, Matched
from pipeline.core.divergence.lists import Lists, sum_rows
from pipeline.core.divergence.measures import MEASURES
from pipeline.core.divergence.pairs import Block, PairScores, score_matched
from schemas.columns import F8, I4, I8, NOT_LISTED, Bool

_KL: Final = MEASURES.index("kl_lower")
_JS: Final = MEASURES.index("js_lower")
_TOP1: Final = MEASURES.index("top1_agree")
_LOG_2: Final = float(np.log(2.0))
P95: Final = 0.95


@dataclass(frozen=True, slots=True)
class Positions:
    """All compared positions that can be read, of all pairs: n of them, pair after pair, in their order.

    `pair`: which pair. `behaviour_offset`: sqrt(JS / log 2) of `js_lower`, in [0, 1].
    `entropy_lower_p`, `entropy_lower_q`: over the listed tokens and one tail bucket, so never above the
    entropy of the whole vocabulary.
    `logprob_p`, `logprob_q`: of the token y that the baseline emitted; 0 unless `common`, which says that y
    is listed on both sides. `delta_p`: q(y) − p(y), 0 unless common.
    """

    pair: I8
    kl_lower: F8
    top1_agree: F8
    behaviour_offset: F8
    entropy_lower_p: F8
    entropy_lower_q: F8
    common: Bool
    logprob_p: F8
    logprob_q: F8
    delta_p: F8


@dataclass(frozen=True, slots=True)
class PairDetails:
    """n pairs, in the order given; 0 where not scored.

    `kl_lower_p95`: over positions, between neighbours by straight line.
    `over_limit`: share of positions whose `kl_lower` is over the limit.
    `coverage`: share of the compared stretch that could be read on both sides.
    `behaviour_offset`, `entropy_lower_p`, `entropy_lower_q`: means over positions.
    `common`: positions whose emitted token both sides list; `delta_p`: its mean over those.
    """

    kl_lower_p95: F8
    over_limit: F8
    coverage: F8
    behaviour_offset: F8
    entropy_lower_p: F8
    entropy_lower_q: F8
    common: I8
    delta_p: F8


def describe_pairs(
    pairs: Sequence[tuple[Half, Half]], limit: float
) -> tuple[PairScores, PairDetails, Positions]:
    """Scores of (baseline, other) pairs, what else there is to say of each, and of their positions."""
    blocks: list[Positions] = []
    scores = score_matched(Matched.of(pairs), lambda block: blocks.append(_positions(block)))
    positions = _in_order(blocks)
    return scores, _of_pairs(scores, positions, limit), positions


def perplexity_ratio(positions: Positions) -> float | None:
    """exp(mean nll of Q − mean nll of P) over the emitted tokens that both sides list; None without any."""
    common = positions.common
    if not common.any():
        return None
    return float(np.exp((positions.logprob_p[common] - positions.logprob_q[common]).mean()))


def _positions(block: Block) -> Positions:
    measured = block.measured
    size = measured.shape[1]
    chosen = np.arange(size) if block.valid is None else np.flatnonzero(block.valid)
    lists = block.lists
    emitted = block.emitted(np.zeros(len(chosen), dtype=np.int64), chosen)
    logprob_p, logprob_q, common = _of_emitted(lists, chosen, emitted)
    entropy_lower_p, entropy_lower_q = _entropies(lists, chosen)
    return Positions(
        pair=np.repeat(block.rows, block.stretches)[chosen],
        kl_lower=measured[_KL, chosen],
        top1_agree=measured[_TOP1, chosen],
        behaviour_offset=np.sqrt(measured[_JS, chosen] / _LOG_2),
        entropy_lower_p=entropy_lower_p,
        entropy_lower_q=entropy_lower_q,
        common=common,
        logprob_p=logprob_p,
        logprob_q=logprob_q,
        delta_p=np.where(common, np.exp(logprob_q) - np.exp(logprob_p), 0.0),
    )


def _of_emitted(lists: Lists, chosen: I8, emitted: I4 | I8) -> tuple[F8, F8, Bool]:
    """Log-probabilities that P and Q list for the emitted tokens, 0 unless both do, and whether they do."""
    found = np.zeros((2, len(chosen)))
    listed = np.zeros((2, len(chosen)), dtype=np.bool_)
    for arm in (0, 1):
        ids = lists.ids[arm].take(chosen, axis=1)
        rows, at = ((ids == emitted) & (ids != NOT_LISTED)).nonzero()
        listed[arm, at] = True
        found[arm, at] = lists.logprobs[arm, rows, chosen[at]]
    common = listed[0] & listed[1]
    found[:, ~common] = 0.0
    return found[0], found[1], common


def _entropies(lists: Lists, chosen: I8) -> tuple[F8, F8]:
    """−Σ p·log p over the listed tokens and the rest of the mass, of P and of Q."""
    logprobs = lists.logprobs.take(chosen, axis=2)
    p = np.exp(logprobs)
    rest = np.maximum(1.0 - sum_rows(p), 0.0)
    listed = sum_rows(p * logprobs)
    entropies = np.maximum(-listed - rest * np.log(np.where(rest > 0.0, rest, 1.0)), 0.0)
    return entropies[0], entropies[1]


def _in_order(blocks: Sequence[Positions]) -> Positions:
    """Blocks put pairs of like width together: back in the order of the pairs."""

    def column(name: str, dtype: type) -> NDArray[Any]:
        parts = [getattr(block, name) for block in blocks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)

    order = np.argsort(column("pair", np.int64), kind="stable")
    kinds = {"pair": np.int64, "common": np.bool_}
    return Positions(
        **{name: column(name, kinds.get(name, np.float64))[order] for name in Positions.__slots__}
    )


def _of_pairs(scores: PairScores, positions: Positions, limit: float) -> PairDetails:
    n, pair = scores.n, positions.pair
    counted = np.maximum(scores.positions, 1)

    def mean(values: NDArray[Any], over: I8 = counted) -> F8:
        sums: F8 = np.bincount(pair, weights=values, minlength=n).astype(np.float64)
        return sums / over

    common = np.bincount(pair, weights=positions.common, minlength=n).astype(np.int64)
    return PairDetails(
        kl_lower_p95=_quantile(positions.kl_lower, scores.positions, P95),
        over_limit=mean(positions.kl_lower > limit),
        coverage=scores.positions / np.maximum(scores.positions + scores.invalid, 1),
        behaviour_offset=mean(positions.behaviour_offset),
        entropy_lower_p=mean(positions.entropy_lower_p),
        entropy_lower_q=mean(positions.entropy_lower_q),
        common=common,
        delta_p=mean(positions.delta_p, np.maximum(common, 1)),
    )


def _quantile(values: F8, counts: I8, share: float) -> F8:
    """Of each stretch of so many values: the sorted ones, by straight line at share · (count − 1)."""
    found = np.zeros(len(counts))
    ends = np.cumsum(counts)
    for at in np.flatnonzero(counts).tolist():
        found[at] = np.quantile(values[ends[at] - counts[at] : ends[at]], share)
    return found
