"""The statistics that llama.cpp's `perplexity --kl-divergence` prints, by its formulas (statistics.md §3a).

Of positions at which both sides say what they think of the same next token. Its errors take positions for
independent, which tokens of one answer are not: they describe a measurement, nothing is judged by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from schemas.columns import F8

QUANTILES: Final = (0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
LEAST_LOGPROB: Final = -16.0
"""Of the baseline: a token at or below it is left out of a position's sum, and no stored logit lies lower
under the largest."""
_CODES: Final = 65_535
_FEW: Final = 10
"""Up to so many values get no error."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error: 0 for ten values or fewer."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class KldStatistics:
    """The seven: of the divergence its mean and quantiles, of Δp its mean, quantiles and root mean square,
    how often the likeliest token is the same, and the logarithm of the ratio of perplexities."""

    kld: Mean
    kld_quantiles: dict[float, float]
    delta_p: Mean
    delta_p_quantiles: dict[float, float]
    rms_delta_p: Mean
    same_top: Mean
    log_perplexity_ratio: Mean

    @property
    def perplexity_ratio(self) -> float:
        """Of Q to P."""
        return math.exp(self.log_perplexity_ratio.value)


def kld_statistics(kld: F8, same_top: F8, logprob_p: F8, logprob_q: F8) -> KldStatistics | None:
    """Of positions: divergence, 1 or 0 where the likeliest token is the same or not, and what either side
    gives the actual next token; these two may be of fewer positions. None without any of either.
    """
    if not len(kld) or not len(logprob_p):
        return None
    delta_p = np.exp(logprob_q) - np.exp(logprob_p)
    rms = math.sqrt(float(np.mean(delta_p * delta_p)))
    agree = float(np.mean(same_top))
    return KldStatistics(
        kld=_mean(kld),
        kld_quantiles=_quantiles(kld),
        delta_p=_mean(delta_p),
        delta_p_quantiles=_quantiles(delta_p),
        rms_delta_p=Mean(rms, 0.5 / rms * _mean(delta_p * delta_p).error if rms > 0.0 else 0.0),
        same_top=Mean(agree, math.sqrt(agree * (1.0 - agree) / max(len(same_top) - 1, 1))),
        log_perplexity_ratio=_paired_difference(-logprob_q, -logprob_p),
    )


def kld_of(logprobs_p: F8, logprobs_q: F8) -> F8:
    """KL(P‖Q) of each of T positions over a whole vocabulary (T, V), without tokens that P hardly gives
    anything; so it can come out slightly negative."""
    kept = logprobs_p > LEAST_LOGPROB
    terms = np.where(kept, np.exp(logprobs_p) * (logprobs_p - logprobs_q), 0.0)
    total: F8 = terms.sum(axis=1)
    return total


def stored(logits: F8) -> F8:
    """Log-probabilities (T, V) as read back from the baseline's file: 16 bits between the largest and the
    smallest, which lies at most 16 below it."""
    largest = logits.max(axis=1, keepdims=True)
    least = np.maximum(logits.min(axis=1, keepdims=True), largest + LEAST_LOGPROB)
    log_total = largest + np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    scale = (largest - least) / _CODES
    codes = np.rint((np.maximum(logits, least) - least) / np.where(scale > 0.0, scale, 1.0))
    read: F8 = scale * codes + (least - log_total)
    return read


def _mean(values: F8) -> Mean:
    n = len(values)
    mean = float(np.mean(values))
    if n <= _FEW:
        return Mean(mean, 0.0)
    return Mean(mean, math.sqrt(_variance(values, values) / (n - 1)))


def _variance(left: F8, right: F8) -> float:
    """S_xy/n − mean · mean, from deviations, which nothing cancels."""
    return float(np.mean((left - np.mean(left)) * (right - np.mean(right))))


def _quantiles(values: F8) -> dict[float, float]:
    return dict(zip(QUANTILES, np.quantile(values, QUANTILES).tolist(), strict=True))


def _paired_difference(left: F8, right: F8) -> Mean:
    """mean(left) − mean(right); both are of the same positions, so their covariance comes off the error."""
    n = len(left)
    value = float(np.mean(left) - np.mean(right))
    if n <= _FEW:
        return Mean(value, 0.0)
    spread = _variance(left, left) + _variance(right, right) - 2.0 * _variance(left, right)
    return Mean(value, math.sqrt(max(spread, 0.0) / (n - 1)))
