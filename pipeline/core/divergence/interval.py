"""A t-interval for the mean of a fixed sample. Not for sequences that are looked at again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LEAST_PAIRS: Final = 5
"""Fewer values get no interval."""


def t_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Two-sided interval for the mean: mean ± t · s/√n. None for fewer than LEAST_PAIRS values."""
    n = len(values)
    if n < LEAST_PAIRS:
        return None
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    reach = t_quantile(confidence, n - 1) * math.sqrt(variance / n)
    return mean - reach, mean + reach


def t_quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| ≤ t) = confidence for Student's T; 0 ≤ confidence < 1, degrees ≥ 1."""
    if not 0.0 <= confidence < 1.0 or degrees < 1:
        raise ValueError(f"no t quantile for confidence {confidence} and {degrees} degrees of freedom")
    low, high = 0.0, math.pi / 2
    # The angle θ with t = √ν · tan θ is bounded, so bisection needs no starting bracket.
    for _ in range(100):
        middle = (low + high) / 2
        if _within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """P(|T| ≤ √ν · tan angle), by the finite series for whole ν (Abramowitz & Stegun 26.7.3–4)."""
    cos, sin = math.cos(angle), math.sin(angle)
    odd = degrees % 2 == 1
    term = total = 0.0 if degrees == 1 else (cos if odd else 1.0)
    first = 3 if odd else 2
    for i in range(first, degrees - 1, 2):
        term *= cos * cos * ((i - 1) / i)
        total += term
    return 2 / math.pi * (angle + sin * total) if odd else sin * total
