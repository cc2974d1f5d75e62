"""How many pairs a verdict needs: golden values, what raises, what it must grow with."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.statistics.sample_size import (
    MOST_PAIRS,
    Plan,
    SampleSizeError,
    fewest_pairs_to_pass,
    pairs_needed,
    pairs_needed_real,
)

# α, power, r, CV, lift, one-sided, pairs: figures of the reference, for who has no shared data.
KNOWN = [
    (0.05, 0.8, 1.8, 1.0, 0.1, False, 1413),
    (0.05, 0.8, 1.0, 1.0, 0.1, False, 785),
    (0.05, 0.8, 1.8, 0.84, 0.5, True, 32),
    (0.01, 0.9, 1.8, 2.9, 0.2, False, 5632),
]


@pytest.mark.parametrize(("alpha", "power", "ratio", "cv", "lift", "one_sided", "pairs"), KNOWN)
def test_known_values(
    alpha: float, power: float, ratio: float, cv: float, lift: float, one_sided: bool, pairs: int
) -> None:
    plan = Plan(alpha=alpha, power=power, variance_ratio=ratio, cv=cv, lift=lift, one_sided=one_sided)
    assert pairs_needed(plan) == pairs
    other = Plan(alpha=alpha, power=power, variance_ratio=ratio, cv=cv, lift=lift, one_sided=not one_sided)
    assert pairs_needed(other) != pairs, "a formula deaf to the side would pass too"


def test_golden_values(shared_dir: Path) -> None:
    golden = json.loads((shared_dir / "data/stats/golden.json").read_text())["sample_size"]
    assert len(golden) == 4
    for one in golden:
        plan = Plan(
            alpha=one["alpha"],
            power=one["power"],
            variance_ratio=one["variance_ratio"],
            cv=one["cv"],
            lift=one["lift"],
            one_sided=one["alternative"] == "larger",
        )
        assert pairs_needed_real(plan) == pytest.approx(one["n_real"], rel=1e-9)
        assert pairs_needed(plan) == one["pairs"]


def test_unpaired_arms_need_one_variance_more() -> None:
    """r → 1 + r, per arm."""
    assert pairs_needed_real(Plan(unpaired=True)) == pytest.approx(pairs_needed_real(Plan()) * 2.8 / 1.8)


@given(
    st.floats(1e-12, 0.4),
    st.floats(0.45, 1 - 1e-9),
    st.floats(0.1, 10),
    st.floats(0.01, 100),
    st.floats(0.01, 10),
)
def test_it_grows_with_all_that_makes_it_harder(
    alpha: float, power: float, ratio: float, cv: float, lift: float
) -> None:
    def real(**changed: float) -> float:
        values = {"alpha": alpha, "power": power, "variance_ratio": ratio, "cv": cv, "lift": lift}
        return pairs_needed_real(Plan(**(values | changed)))  # type: ignore[arg-type]

    whole = real()
    assert math.isfinite(whole)
    assert whole > 0
    for changed in (
        {"alpha": alpha / 2},
        {"power": (1 + power) / 2},
        {"variance_ratio": 2 * ratio},
        {"cv": 2 * cv},
        {"lift": lift / 2},
    ):
        assert real(**changed) > whole
    assert pairs_needed_real(Plan(alpha, power, ratio, cv, lift, one_sided=True)) < whole


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"alpha": 0.0}, "alpha", "between 0 and 1"),
        ({"alpha": 1.0}, "alpha", "between 0 and 1"),
        ({"alpha": math.nan}, "alpha", "between 0 and 1"),
        ({"power": 1.0}, "power", "between 0 and 1"),
        ({"power": 0.05}, "power", "at most alpha"),
        ({"variance_ratio": 0.0}, "variance_ratio", "above 0"),
        ({"cv": -1.0}, "cv", "above 0"),
        ({"cv": math.inf}, "cv", "finite"),
        ({"lift": 0.0}, "lift", "above 0"),
        ({"lift": math.nan}, "lift", "above 0"),
    ],
)
def test_what_no_plan_can_be_made_with(wrong: dict[str, float], field: str, says: str) -> None:
    with pytest.raises(SampleSizeError, match=says) as caught:
        Plan(**wrong)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_number_that_nobody_has_is_refused() -> None:
    assert pairs_needed(Plan(lift=1e-5)) < MOST_PAIRS
    for lift in (1e-6, 1e-200):
        with pytest.raises(SampleSizeError, match="greater lift"):
            pairs_needed(Plan(lift=lift))


def wealth(scores: list[float], limit: float) -> float:
    """The test for a pass, from its definition."""
    stakes = [
        share * math.prod(1 + bet * (limit - min(score, 4.0)) / (4.0 - limit) for score in scores)
        for share, bet in ((0.75, 0.9), (0.25, 0.5))
    ]
    return sum(stakes)


def test_the_fewest_pairs_of_a_pass() -> None:
    assert fewest_pairs_to_pass(0.05) == 290
    assert wealth([0.0] * 290, 0.05) >= 20
    assert wealth([0.0] * 270, 0.05) < 20, "bit-identical answers pass a few pairs sooner, not many"
    assert wealth([0.001] * 285, 0.05) < 20
    assert fewest_pairs_to_pass(0.05, 0.01) == 432
    assert fewest_pairs_to_pass(3.999999, 0.99) == 1


@pytest.mark.parametrize(("limit", "alpha"), [(0.0, 0.05), (4.0, 0.05), (math.nan, 0.05), (0.05, 0.0)])
def test_no_pass_is_planned_without_a_limit(limit: float, alpha: float) -> None:
    with pytest.raises(SampleSizeError):
        fewest_pairs_to_pass(limit, alpha)
