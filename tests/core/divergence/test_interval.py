"""Student's t against printed tables, and the interval's edges."""

from __future__ import annotations

import math

import pytest

from pipeline.core.divergence.interval import t_interval, t_quantile

TABLE = [
    (0.90, 1, 6.313752),
    (0.90, 2, 2.919986),
    (0.90, 3, 2.353363),
    (0.90, 4, 2.131847),
    (0.90, 8, 1.859548),
    (0.90, 9, 1.833113),
    (0.90, 30, 1.697261),
    (0.90, 120, 1.657651),
    (0.90, 10_000, 1.645006),
    (0.95, 5, 2.570582),
    (0.99, 10, 3.169273),
    (0.50, 7, 0.711142),
    (0.0, 3, 0.0),
]
"""Confidence, degrees of freedom, quantile to six decimals (standard tables)."""


@pytest.mark.parametrize(("confidence", "degrees", "expected"), TABLE)
def test_quantiles_of_the_tables(confidence: float, degrees: int, expected: float) -> None:
    assert t_quantile(confidence, degrees) == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize(("confidence", "degrees"), [(1.0, 3), (-0.1, 3), (math.nan, 3), (0.9, 0)])
def test_impossible_arguments_raise(confidence: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="no t quantile"):
        t_quantile(confidence, degrees)


def test_interval_of_five_values() -> None:
    low, high = t_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) or (0.0, 0.0)
    reach = 2.131847 * math.sqrt(2.5 / 5)
    assert (low, high) == pytest.approx((3 - reach, 3 + reach), abs=1e-6)


def test_fewer_than_five_values_have_no_interval() -> None:
    assert t_interval([0.0] * 4, 0.9) is None


def test_equal_values_have_an_interval_without_width() -> None:
    assert t_interval([0.0] * 5, 0.9) == (0.0, 0.0)
