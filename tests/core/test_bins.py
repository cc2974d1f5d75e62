"""Bin tables: the oracle's integers, the promised widths, exact limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.bins import (
    Kind,
    bin_count,
    bin_lower,
    bin_lowers,
    bin_of,
    bin_upper,
    bin_uppers,
    latency_bin,
    score_bin,
)
from schemas.buckets import SCORE_ONE
from tests.oracle import bins as oracle_bins

KINDS: tuple[Kind, ...] = ("latency", "score", "excess")


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_the_exact_ones(kind: Kind) -> None:
    edges = oracle_bins.edges(kind)
    assert [bin_upper(kind, k) for k in range(bin_count(kind))] == list(edges[1:])
    assert [bin_lower(kind, k) for k in range(bin_count(kind))] == [max(edge, 0) for edge in edges[:-1]]
    assert bin_lowers(kind).tolist() == [max(edge, 0) for edge in edges[:-1]]
    assert bin_uppers(kind).tolist() == list(edges[1:])


@given(st.sampled_from(KINDS), st.integers(-5, 2**41))
def test_a_value_lies_in_its_bin(kind: Kind, value: int) -> None:
    k = int(bin_of(kind, np.array([value]))[0])
    assert k == oracle_bins.bin_of(kind, value)
    if value > 0 and k < bin_count(kind) - 1:
        assert bin_lower(kind, k) < value <= bin_upper(kind, k)


def test_limits_are_edges() -> None:
    at, over = latency_bin(np.array([500_000, 500_001])).tolist()
    assert over == at + 1
    limit = round(0.05 * SCORE_ONE)
    at, over = score_bin(np.array([limit, limit + 1])).tolist()
    assert over == at + 1


def test_zero_has_a_bin_of_its_own() -> None:
    assert latency_bin(np.array([0, 1])).tolist() == [0, 1]
    assert score_bin(np.array([-3, 0, 1])).tolist() == [0, 0, 1]


def test_a_factor_of_1_15_is_seven_bins() -> None:
    for value in (10_000, 123_457, 500_000, 3_000_000):
        low, high = latency_bin(np.array([value, round(value * 1.15)])).tolist()
        assert high - low in (7, 8) if value != 500_000 else high - low == 7


@pytest.mark.parametrize(("kind", "ratio"), [("latency", 1.0203), ("score", 1.02), ("excess", 1.005)])
def test_bins_are_no_wider_than_promised(kind: Kind, ratio: float) -> None:
    uppers = bin_uppers(kind).astype(float)
    coarse = uppers[uppers > 20_000]
    assert (coarse[1:] / coarse[:-1]).max() <= ratio


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        bin_uppers("score")[0] = 7
