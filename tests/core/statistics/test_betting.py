"""Evidence that a mean is over its limit: golden values, exactness, what it promises, and what must fail."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.bins import bin_count, bin_lowers
from pipeline.core.statistics.betting import (
    CEILING,
    GRID,
    Bets,
    growth_of,
    growth_table,
    log_evidence_without_restarts,
    lower_bound,
    restart_weight,
)
from schemas.buckets import SCORE_ONE
from tests.core.statistics.golden import close, golden, of_counts

LIMIT = Fraction(1, 20)
TABLE = growth_table(bin_lowers("score").tolist(), (LIMIT * SCORE_ONE).as_integer_ratio())
BINS = st.integers(0, bin_count("score") - 1)


def after(scores: list[float], limit: float, size: int, ceiling: float = math.inf) -> Bets:
    bets = Bets()
    for at in range(0, len(scores), size):
        bets.fold(growth_of(score / limit for score in scores[at : at + size]), ceiling)
    return bets


@pytest.mark.shared
def test_golden_values(shared_dir: Path) -> None:
    held = golden(shared_dir)
    limit, alpha = held["limit"], held["alpha"]
    assert tuple(held["gammas_trip"]) == GRID
    for row in held["mean_trip"]["rows"]:
        scores = held["mean_trip"]["x"][: row["n"]]
        assert close(after(scores, limit, 1).log_evidence, row["log_m_restart_each"])
        assert close(after(scores, limit, 5).log_evidence, row["log_m_restart_buckets_of_5"])
        assert close(log_evidence_without_restarts(scores, limit), row["log_m_no_restart"])
        assert close(lower_bound(scores, alpha), row["lower_bound_no_restart"])


@pytest.mark.shared
def test_known_bad_a_whole_run_hides_a_late_fault(shared_dir: Path) -> None:
    """300 healthy pairs, then faulty ones: restarts see it within 30, one long bet not in 200."""
    held = golden(shared_dir)
    scores, limit = held["mean_trip"]["x"], held["limit"]
    needed = math.log(20)
    assert after(scores[:330], limit, 1).log_evidence >= needed
    assert after(scores[:300], limit, 1).log_evidence < 0
    assert log_evidence_without_restarts(scores[:500], limit) < needed


def bernstein(scores: list[float], limit: float, bet: float) -> float:
    """The uncapped empirical-Bernstein exponent: its penalty is quadratic in a score."""
    total, seen = 0.0, 0.0
    for n, score in enumerate(scores):
        ratio = score / limit
        mean = min(seen / n, 1.0) if n else 0.0
        total += bet * (ratio - 1) - (-math.log1p(-bet) - bet) * (ratio - mean) ** 2
        seen += ratio
    return total


def test_known_bad_a_variance_penalty_never_sees_the_worst_faults() -> None:
    """At scores of 2 nats, with any bet that finds an ordinary fault soon."""
    scores = [2.0] * 400
    quick = [bet for bet in GRID if bet >= 0.1]
    assert all(bernstein([0.14] * 60, 0.05, bet) >= math.log(20) for bet in quick[1:])
    assert max(bernstein(scores[:n], 0.05, bet) for n in range(1, 401) for bet in quick) < 0
    assert after(scores[:2], 0.05, 1).evidence >= 20


def every_stream(length: int) -> list[tuple[int, ...]]:
    """All streams of scores 0 and 2 × the limit: alike likely, their mean is exactly the limit."""
    return list(itertools.product((0, 2), repeat=length))


def test_at_the_limit_the_evidence_is_worth_what_was_staked() -> None:
    """Over all streams of a mean exactly at the limit: E's mean is the weight spent, however it is cut."""
    for size in (1, 2, 4):
        streams = every_stream(8)
        mean = math.fsum(after(list(map(float, one)), 1.0, size).evidence for one in streams) / len(streams)
        assert mean == pytest.approx(sum(restart_weight(b) for b in range(1, 8 // size + 1)), rel=1e-12)


def test_known_bad_a_bet_chosen_from_its_own_data_is_worth_more_than_was_staked() -> None:
    streams = every_stream(8)
    total = 0.0
    for stream in streams:
        stake = 0.0
        for bucket, ratio in enumerate(stream, 1):
            best = max(growth_of([ratio]))  # looks at the score, then bets
            stake = (stake + restart_weight(bucket)) * math.exp(best)
        total += stake
    assert total / len(streams) > 1.5


def test_the_weights_of_all_buckets_come_to_one() -> None:
    spent = math.fsum(restart_weight(b) for b in range(1, 100_001))
    assert spent == pytest.approx(1 - math.log(2) / math.log(100_002), rel=1e-12)
    assert math.log(1 / restart_weight(3600)) == pytest.approx(12.8, abs=0.05)
    assert math.log(1 / restart_weight(86_400)) == pytest.approx(16.6, abs=0.05)


@given(
    st.lists(st.dictionaries(BINS, st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_the_same_counts_give_the_same_bits(seconds: list[dict[int, int]], rng: random.Random) -> None:
    """However a second's pairs are split over sources, in whatever order they and their bins come."""
    whole, split, again = Bets(), Bets(), Bets()
    for counts in seconds:
        whole.fold(of_counts(TABLE, counts))
        again.fold(of_counts(TABLE, counts))
        pairs = [held for held, count in counts.items() for _ in range(count)]
        rng.shuffle(pairs)
        cut = rng.randrange(len(pairs) + 1)
        merged = Counter(pairs[:cut]) + Counter(pairs[cut:])
        split.fold(of_counts(TABLE, merged))
    assert whole == split == again


@given(
    st.lists(st.tuples(BINS, BINS, st.integers(1, 50), st.booleans()), min_size=1, max_size=30),
)
def test_greater_scores_are_never_less_evidence(steps: list[tuple[int, int, int, bool]]) -> None:
    low, high = Bets(), Bets()
    for one, other, count, _ in steps:
        low.fold(of_counts(TABLE, {min(one, other): count}))
        high.fold(of_counts(TABLE, {max(one, other): count}))
    assert low.evidence <= high.evidence
    assert 0 <= low.evidence <= CEILING * (1 + 1e-12)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=40))
def test_bins_are_never_more_evidence_than_the_scores_and_hardly_less(scores: list[float]) -> None:
    from pipeline.core.bins import score_bin

    units = [round(score * SCORE_ONE) for score in scores]
    bins = [int(score_bin([unit])[0]) for unit in units]  # type: ignore[arg-type]
    exact = growth_of(unit / SCORE_ONE / 0.05 for unit in units)
    binned = of_counts(TABLE, Counter(bins))
    for lower, true in zip(binned, exact, strict=True):
        assert lower <= true + 1e-9
        assert lower >= true - 0.02 * len(scores) * 5


def test_stakes_neither_overflow_nor_die() -> None:
    bets = Bets()
    for _ in range(50):
        bets.fold(of_counts(TABLE, {bin_count("score") - 1: 10**6}))
    assert bets.stakes == [CEILING] * len(GRID)
    for _ in range(50):
        bets.fold(of_counts(TABLE, {0: 10**6}))
    assert bets.evidence == 0
    for _ in range(40):
        bets.fold(growth_of([4.0, 4.0, 4.0]))
    assert bets.evidence > 20, "a fault after any healthy start is found"
