"""Evidence that a mean is under its limit: golden values, the least number of pairs, what must fail."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.bins import bin_count, bin_uppers
from pipeline.core.statistics.capped import (
    CAP,
    Capped,
    growth_of,
    growth_table,
    pairs_left,
    upper_bound,
)
from pipeline.core.statistics.sample_size import fewest_pairs_to_pass
from schemas.buckets import SCORE_ONE
from tests.core.statistics.golden import close, golden, of_counts

LIMIT = 0.05
TABLE = growth_table(bin_uppers("score").tolist(), SCORE_ONE, LIMIT)
BINS = st.integers(0, bin_count("score") - 1)


def after(scores: list[float], limit: float = LIMIT) -> Capped:
    held = Capped()
    for score in scores:
        held.fold(growth_of([score], limit), 1)
    return held


@pytest.mark.shared
def test_golden_values(shared_dir: Path) -> None:
    held = golden(shared_dir)
    assert (held["cap"], held["gammas_pass"], held["weights_pass"]) == (CAP, [0.9, 0.5], [0.75, 0.25])
    for row in held["mean_pass"]["rows"]:
        scores = held["mean_pass"]["x"][: row["n"]]
        assert close(after(scores).log_evidence, row["log_k"])
        assert close(upper_bound(scores, held["alpha"]), row["upper_bound"])
    for row in held["mean_pass_faulty"]["rows"]:
        assert close(after(held["mean_trip"]["x"][: row["n"]]).log_evidence, row["log_k"])


def test_at_the_limit_the_evidence_is_worth_its_stake() -> None:
    """Scores 0 and 2 × the limit, alike likely: over all streams K's mean is 1."""
    mean = 0.0
    for stream in range(2**10):
        scores = [2 * LIMIT * (stream >> at & 1) for at in range(10)]
        mean += math.exp(after(scores).log_evidence) / 2**10
    assert mean == pytest.approx(1.0, rel=1e-12)


def test_known_bad_a_maximum_that_is_kept_passes_what_went_bad() -> None:
    """K latched at its greatest would still pass a canary that has been faulty for 400 pairs."""
    scores = [0.001] * 320 + [0.14] * 400
    ever = max(after(scores[:n]).evidence for n in range(0, len(scores) + 1, 8))
    assert ever >= 20
    assert after(scores).evidence < 20


def test_known_bad_a_cap_of_one_nat_passes_a_canary_that_ruins_a_few_answers() -> None:
    """3.0 nats on 2 % of pairs: a mean of 0.06."""
    scores = ([0.0] * 49 + [3.0]) * 40
    low_cap = math.fsum(math.log1p(0.5 * (LIMIT - min(score, 1.0)) / (1 - LIMIT)) for score in scores)
    assert 0.25 * math.exp(low_cap) > 20
    assert after(scores).evidence < 20


def test_the_least_number_of_pairs() -> None:
    needed = pairs_left(Capped(), 0.0, LIMIT, 0.05)
    assert needed == 284
    assert after([0.0] * needed).evidence >= 20 > after([0.0] * (needed - 1)).evidence
    assert needed <= fewest_pairs_to_pass(LIMIT) <= needed + 10, "the plan's round figure is on the safe side"
    assert pairs_left(Capped(), 0.012, LIMIT, 0.05) == 372
    assert pairs_left(Capped(), LIMIT, LIMIT, 0.05) is None
    assert pairs_left(Capped(), 0.2, LIMIT, 0.05) is None


@given(st.lists(st.floats(0, 0.2), max_size=60), st.floats(0, 0.045))
def test_pairs_left_is_the_first_number_that_passes(scores: list[float], mean: float) -> None:
    held = after(scores)
    left = pairs_left(held, mean, LIMIT, 0.05)
    assert left is not None
    more = [mean] * left
    assert after([*scores, *more]).log_evidence >= math.log(20) - 1e-9
    if left:
        assert after([*scores, *more[1:]]).log_evidence < math.log(20) + 1e-9


@given(st.lists(st.tuples(BINS, BINS, st.integers(1, 9)), min_size=1, max_size=20))
def test_greater_scores_never_pass_sooner(steps: list[tuple[int, int, int]]) -> None:
    low, high = Capped(), Capped()
    for one, other, count in steps:
        low.fold(of_counts(TABLE, {min(one, other): count}), count)
        high.fold(of_counts(TABLE, {max(one, other): count}), count)
    assert low.log_evidence >= high.log_evidence
    assert low.pairs == high.pairs


def test_nothing_seen_proves_nothing() -> None:
    assert Capped().evidence == 1.0
    assert upper_bound([], 0.05) == CAP


def test_it_stays_finite() -> None:
    held = Capped()
    for _ in range(1000):
        held.fold(of_counts(TABLE, {0: 10**6}), 10**6)
    assert 20 <= held.evidence < math.inf
    for _ in range(3000):
        held.fold(of_counts(TABLE, {bin_count("score") - 1: 10**6}), 10**6)
    assert held.evidence == 0.0
