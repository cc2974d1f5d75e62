"""Divergence of two arms' answers: per position, per pair, and an interval over pairs."""

from pipeline.core.divergence.compiled import KERNEL, KERNEL_SAID, score_matched, score_pairs
from pipeline.core.divergence.gathering import Half, Matched
from pipeline.core.divergence.measures import ESTIMATOR
from pipeline.core.divergence.pairs import PairScores

__all__ = [
    "ESTIMATOR", "KERNEL", "KERNEL_SAID", "Half", "Matched", "PairScores", "score_matched", "score_pairs",
]  # fmt: skip
