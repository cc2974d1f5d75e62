"""Scores of pairs: recorded log-probabilities of the shared folder, by the pipeline's own scoring."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from pipeline.core.divergence import Half, score_pairs
from pipeline.core.scoring import to_units
from schemas.columns import F8, I8
from tests.core.divergence.samples import columns_of

POSITIONS: Final = 3
"""Of one pair: a run of so many positions of one recorded answer."""
HEALTHY: Final = "fp8_cal"
FAULTY: Final = "q4_0"
CONTROL: Final = "same"
"""The baseline's engine with other batch shapes: what a control arm is."""
HEALTHY_MEAN: Final = 0.012
LIMIT: Final = 0.05
K: Final = 5


@lru_cache(maxsize=16)
def recorded_scores(shared: Path, variant: str) -> F8:
    """`kl_lower` in nats of every run of POSITIONS positions of one answer, greedy and sampled.

    Only greedy where the variant has no sampled recording.
    """
    found = []
    for answers in ("greedy", "sample"):
        if not (shared / "data" / "logits" / f"tf.{answers}.{variant}.npz").exists():
            continue
        positions, offsets = _positions(shared, variant, answers)
        for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            total = np.concatenate(([0.0], np.cumsum(positions[first:last])))
            if last - first >= POSITIONS:
                found.append((total[POSITIONS:] - total[:-POSITIONS]) / POSITIONS)
    return np.maximum(np.concatenate(found), 0.0)


def _positions(shared: Path, variant: str, answers: str) -> tuple[F8, I8]:
    """`kl_lower` of every recorded position, and where the answers begin."""
    folder = shared / "data" / "logits"
    base = np.load(folder / f"base.{answers}.npz")
    canary = np.load(folder / f"tf.{answers}.{variant}.npz")
    n = len(base["tok"])
    halves = [
        columns_of(
            base["tok"].astype(np.int32),
            ids.reshape(-1).astype(np.int32),
            logprobs.reshape(-1).astype(np.float32),
            [1] * n,
            [K] * n,
            eta=1e-6,
            codes={"source": source},
            ended=[-1] * n,
        )
        for source, ids, logprobs in (
            (0, base["top_ids"][:, :K], base["top_lp"][:, :K]),
            (1, canary["top_ids"], canary["top_lp"]),
        )
    ]
    scores = score_pairs([(Half(halves[0], at), Half(halves[1], at)) for at in range(n)])
    return scores.kl_lower, base["offset"].astype(np.int64)


@lru_cache(maxsize=64)
def pool(shared: Path, variant: str, mean: float) -> I8:
    """The variant's scores scaled to this mean in nats, in units of 2⁻³⁰; the mean is never above it."""
    scores = recorded_scores(shared, variant)
    units = to_units(scores * (mean / scores.mean()))
    # Rounding must not lift a mean that stands at the limit over it.
    excess = float(units.mean()) - mean * (1 << 30)
    return np.maximum(units - int(np.ceil(max(excess, 0.0))), 0) if excess > 0 else units
