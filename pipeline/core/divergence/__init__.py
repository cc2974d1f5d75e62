"""Divergence of two arms' answers: per position, per pair, and an interval over pairs."""

from pipeline.core.divergence.gathering import Half, Matched
from pipeline.core.divergence.measures import ESTIMATOR
from pipeline.core.divergence.pairs import PairScores, score_matched, score_pairs

__all__ = ["ESTIMATOR", "Half", "Matched", "PairScores", "score_matched", "score_pairs"]
