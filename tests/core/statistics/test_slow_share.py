"""Paired differences and blocks of slow requests: golden values, numbers at, under, over, what must fail."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.bins import EXCESS_SHIFT, bin_lower, bin_upper, latency_bin
from pipeline.core.statistics.betting import Bets, growth_of
from pipeline.core.statistics.noise_floor import CONTROL_CAP, shifted, shifted_limit
from pipeline.core.statistics.slow_share import Block, bins_of, block_start, p99_bin
from schemas.buckets import SCORE_ONE
from tests.core.statistics.golden import close, golden


@pytest.mark.shared
def test_golden_values_of_the_noise_floor(shared_dir: Path) -> None:
    held = golden(shared_dir)["noise_floor"]
    assert float(CONTROL_CAP) == held["control_cap"]
    limit = float(shifted_limit(Fraction(repr(held["tolerance"]))))
    for row in held["rows"]:
        bets = Bets()
        for canary, control in zip(held["canary"][: row["n"]], held["control"][: row["n"]], strict=True):
            difference = shifted(canary, control)
            if difference is not None:
                bets.fold(growth_of([difference / limit]), math.inf)
        assert bets.buckets == row["kept"]
        assert close(bets.log_evidence, row["log_m_restart_each"])


def test_the_bins_hold_the_same_shift() -> None:
    assert round(CONTROL_CAP * SCORE_ONE) == EXCESS_SHIFT


def test_a_prompt_the_control_does_not_reproduce_is_left_out() -> None:
    assert shifted(0.5, 0.1) == pytest.approx(0.5)
    assert shifted(0.5, 0.1000001) is None


@pytest.mark.shared
def test_golden_values_of_slow_blocks(shared_dir: Path) -> None:
    held = golden(shared_dir)["ttft_share"]
    for row in held["rows"]:
        bets = Bets()
        for block in held["blocks"][: row["blocks"]]:
            if block[1]:
                bets.fold(growth_of([Block(*block).ratio]), math.inf)
        assert bets.buckets == row["used"]
        assert close(bets.log_evidence, row["log_m_restart_each"])


def test_a_ratio_of_1_15_is_seven_bins_at_every_latency() -> None:
    assert bins_of(Fraction(115, 100)) == 7
    assert bins_of(Fraction(1)) == 0
    assert bins_of(Fraction(116, 100)) == 8, "rounded up: less than asked for never trips"
    for latency_us in (5_000, 123_456, 500_000, 1_234_567, 30_000_000):
        held = int(latency_bin([latency_us])[0])  # type: ignore[arg-type]
        assert bin_upper("latency", held + 7) / bin_upper("latency", held) == pytest.approx(1.15, rel=4e-4)
        assert bin_lower("latency", held) < latency_us <= bin_upper("latency", held)


@pytest.mark.parametrize(("samples", "found"), [(99, None), (100, 7), (101, 7)])
def test_a_threshold_needs_a_hundred_samples(samples: int, found: int | None) -> None:
    assert p99_bin({3: samples - 2, 7: 2}) == found


def test_the_rank_of_p99() -> None:
    assert p99_bin({3: 99, 7: 1}) == 3
    assert p99_bin({3: 98, 7: 2}) == 7
    assert p99_bin({3: 990, 7: 10}) == 3
    assert p99_bin({3: 989, 7: 11}) == 7


@pytest.mark.parametrize(
    ("block", "ratio"),
    [
        (Block(3, 200, 0, 10_000), 1.0),  # 1.5 % against the floor of 1.5 %
        (Block(3, 200, 149, 9_999), 1.0),  # the baseline is at the floor
        (Block(3, 200, 299, 9_999), 0.5),  # and at twice the floor
        (Block(0, 200, 0, 0), 0.0),
        (Block(200, 200, 0, 0), 1.0),  # no baseline: nothing can be said against the canary
        (Block(200, 200, 0, 9_999), 1 / 0.015),
    ],
)
def test_the_ratio_of_a_block(block: Block, ratio: float) -> None:
    assert block.ratio == pytest.approx(ratio, rel=1e-12)


def test_a_block_counts_what_is_beyond_the_threshold() -> None:
    canary = {10: 5, 17: 3, 18: 2}
    baseline = {10: 90, 11: 1}
    assert Block.of(canary, baseline, 10, 7) == Block(2, 10, 1, 91)


def test_known_bad_a_threshold_one_bin_lower_counts_requests_at_the_ratio() -> None:
    canary = {17: 10}
    assert Block.of(canary, {10: 100}, 10, 7).ratio == 0.0
    assert Block.of(canary, {10: 100}, 10, 6).ratio > 1


def test_blocks_are_cut_by_the_epoch() -> None:
    assert [block_start(second) for second in (29, 30, 59, 60)] == [0, 30, 30, 60]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_more_slow_requests_are_more_and_a_slower_baseline_less(n: int, k: int, n_b: int, k_b: int) -> None:
    k, k_b = min(k, n), min(k_b, n_b)
    ratio = Block(k, n, k_b, n_b).ratio
    assert 0 <= ratio <= 1 / 0.015 + 1e-9
    if k < n:
        assert Block(k + 1, n, k_b, n_b).ratio > ratio
    if k_b < n_b:
        assert Block(k, n, k_b + 1, n_b).ratio <= ratio
