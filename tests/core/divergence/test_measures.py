"""Per-position measures against an independent solver, an independent search, and real full vocabularies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.divergence.completion import _network
from pipeline.core.divergence.measures import Measures, measure
from tests.core.divergence.oracle import Entry, greedy_kl, least_kl
from tests.core.divergence.samples import top_lists

ETA = 1e-6


@pytest.fixture(scope="module")
def vectors(shared_dir: Path) -> list[dict[str, Any]]:
    cases = json.loads((shared_dir / "data" / "kl" / "vectors.json").read_text())
    assert len(cases) == 426
    return cases


def measure_cases(cases: Sequence[dict[str, Any]], k: int = 0) -> Measures:
    def caps(side: int) -> list[float | None]:
        return [None if case["caps"] is None else math.log(case["caps"][side]) for case in cases]

    return measure(
        top_lists([case["p"] for case in cases], caps(0), k),
        top_lists([case["q"] for case in cases], caps(1), k),
        np.array([case["eta"] for case in cases]),
    )


def disagreements(cases: Sequence[dict[str, Any]], found: Measures) -> list[str]:
    return [
        f"{case['name']}: {name} {value} ≠ {case[name]}"
        for name in ("kl_lower", "js_lower", "tv_lower")
        for case, value in zip(cases, getattr(found, name), strict=True)
        if not abs(value - case[name]) <= case["tolerance"]
    ]


@pytest.mark.shared
def test_agrees_with_the_solver_on_every_vector(vectors: list[dict[str, Any]]) -> None:
    assert disagreements(vectors, measure_cases(vectors)) == []


@pytest.mark.shared
def test_stays_below_the_known_truth_of_the_vectors(vectors: list[dict[str, Any]]) -> None:
    found = measure_cases(vectors)
    for case, value in zip(vectors, found.kl_lower, strict=True):
        if case["kl_true"] is not None and case["eta"] <= 1e-6:
            assert 0.0 <= value <= case["kl_true"] + widened(value, 1e-6) + 1e-9, case["name"]


@pytest.mark.shared
def test_same_bits_alone_padded_and_in_a_batch(vectors: list[dict[str, Any]]) -> None:
    together = measure_cases(vectors)
    for column, case in enumerate(vectors):
        for k in (0, 20):
            alone = measure_cases([case], k)
            for name in ("kl_lower", "js_lower", "tv_lower", "kl_floor", "cosine", "top1_agree"):
                assert getattr(alone, name)[0] == getattr(together, name)[column], (case["name"], name, k)


def widened(value: float, eta: float) -> float:
    """How far rounding to ε ≤ η may lift `kl_lower` above the true KL."""
    return eta * (2 + value + math.log(1 / eta))


def violations(values: Sequence[float], truths: Sequence[float], stored_error: float = 3e-5) -> int:
    """How many values are no lower bound, given lists in float32 and a truth good to `stored_error`."""
    return sum(
        not 0.0 <= value <= truth + widened(value, ETA) + stored_error
        for value, truth in zip(values, truths, strict=True)
    )


def real_lists(
    shared_dir: Path, answers: str, variant: str, k: int
) -> tuple[list[Any], list[Any], np.ndarray]:
    folder = shared_dir / "data" / "logits"
    base = np.load(folder / f"base.{answers}.npz")
    canary = np.load(folder / f"tf.{answers}.{variant}.npz")

    def entries(ids: np.ndarray, values: np.ndarray) -> list[list[Entry]]:
        return [list(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(ids, values, strict=True)]

    p = entries(base["top_ids"][:, :k], base["top_lp"][:, :k])
    return p, entries(canary["top_ids"], canary["top_lp"]), canary["kl_true"]


VARIANTS = [
    ("greedy", "same"),
    ("greedy", "fp8_cal"),
    ("greedy", "q4_0"),
    ("greedy", "temp0.7"),
    ("greedy", "mismatch_x1.25"),
    ("greedy", "mismatch_x2"),
    ("sample", "same"),
    ("sample", "fp8_cal"),
    ("sample", "mismatch_x1.25"),
]


@pytest.mark.shared
@pytest.mark.parametrize(("answers", "variant"), VARIANTS)
@pytest.mark.parametrize("k", [5, 20])
def test_lower_bound_at_every_real_position(shared_dir: Path, answers: str, variant: str, k: int) -> None:
    p, q, truth = real_lists(shared_dir, answers, variant, k)
    found = measure(top_lists(p), top_lists(q), np.full(len(p), ETA))
    assert violations(found.kl_lower.tolist(), truth.tolist()) == 0
    assert (found.js_lower <= math.log(2)).all()
    assert (found.tv_lower <= 1).all()


@pytest.mark.shared
def test_known_bad_estimators_are_caught(shared_dir: Path) -> None:
    """The check above must fail for the greedy fill and for the 1e-9 floor."""
    p, q, truth = real_lists(shared_dir, "greedy", "mismatch_x2", 5)
    greedy = [greedy_kl(a, b, ETA) for a, b in zip(p, q, strict=True)]
    assert violations(greedy, truth.tolist()) > 0
    floor = measure(top_lists(p), top_lists(q), np.full(len(p), ETA)).kl_floor
    assert violations(floor.tolist(), truth.tolist()) > 0


def test_greedy_fill_is_no_bound_where_the_minimum_is() -> None:
    """A case small enough to check by hand: the search finds less than the greedy fill does."""
    p = [(1, math.log(0.4)), (2, math.log(0.3)), (3, math.log(0.2))]
    q = [(4, math.log(0.5)), (5, math.log(0.4))]
    least = least_kl(p, q, ETA)
    assert measured(p, q) == pytest.approx(least, abs=1e-7)
    assert greedy_kl(p, q, ETA) > least + 0.1


def measured(p: Sequence[Entry], q: Sequence[Entry], eta: float = ETA) -> float:
    return float(measure(top_lists([p]), top_lists([q]), np.array([eta])).kl_lower[0])


@st.composite
def distributions(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[np.ndarray, np.ndarray]:
    """Two full distributions over one vocabulary, from nearly equal to unrelated."""
    size = draw(sizes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=size) * draw(st.sampled_from([0.1, 1.0, 3.0, 8.0]))
    other = logits + rng.normal(size=size) * draw(st.sampled_from([0.0, 0.01, 0.3, 3.0]))

    def softmax(values: np.ndarray) -> np.ndarray:
        weights = np.exp(values - values.max())
        return weights / weights.sum()

    return softmax(logits), softmax(other)


def top(distribution: np.ndarray, k: int) -> list[Entry]:
    order = np.argsort(-distribution, kind="stable")[:k]
    return [(int(token), float(np.log(distribution[token]))) for token in order]


def full_kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


@given(distributions(st.integers(3, 60)), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_between_zero_and_the_truth(pair: tuple[np.ndarray, np.ndarray], k_p: int, k_q: int) -> None:
    p, q = pair
    found = measure(top_lists([top(p, k_p)]), top_lists([top(q, k_q)]), np.array([ETA]))
    mixed = (p + q) / 2
    assert 0.0 <= found.kl_lower[0] <= full_kl(p, q) + 1e-9
    assert 0.0 <= found.js_lower[0] <= (full_kl(p, mixed) + full_kl(q, mixed)) / 2 + 1e-9
    assert 0.0 <= found.tv_lower[0] <= np.abs(p - q).sum() / 2 + 1e-9
    assert 0.0 <= found.cosine[0] <= 1.0
    assert 0.0 <= found.kl_floor[0] < math.inf


@given(distributions(st.integers(1, 20)))
@settings(max_examples=100, deadline=None)
def test_equals_the_truth_when_everything_is_listed(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    found = measure(top_lists([top(p, len(p))]), top_lists([top(q, len(q))]), np.array([ETA]))
    assert found.kl_lower[0] == pytest.approx(full_kl(p, q), abs=1e-9)


@given(
    distributions(st.integers(4, 40)),
    st.integers(1, 10),
    st.integers(1, 10),
    st.integers(0, 5),
    st.integers(0, 5),
)
@settings(max_examples=300, deadline=None)
def test_never_decreases_when_a_list_grows(
    pair: tuple[np.ndarray, np.ndarray], k_p: int, k_q: int, more_p: int, more_q: int
) -> None:
    p, q = pair
    short, long = measured(top(p, k_p), top(q, k_q)), measured(top(p, k_p + more_p), top(q, k_q + more_q))
    assert long >= short - 1e-9


@given(distributions(st.integers(2, 40)), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_zero_for_identical_lists(pair: tuple[np.ndarray, np.ndarray], k: int) -> None:
    entries = top(pair[0], k)
    found = measure(top_lists([entries]), top_lists([entries]), np.array([ETA]))
    assert found.kl_lower[0] == found.js_lower[0] == found.tv_lower[0] == found.kl_floor[0] == 0.0
    assert found.cosine[0] == found.top1_agree[0] == 1.0


@given(distributions(st.integers(2, 40)), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_independent_of_list_order(pair: tuple[np.ndarray, np.ndarray], k: int, shuffler: Any) -> None:
    p, q = top(pair[0], k), top(pair[1], k)
    shuffled_p, shuffled_q = list(p), list(q)
    shuffler.shuffle(shuffled_p)
    shuffler.shuffle(shuffled_q)
    assert measured(shuffled_p, shuffled_q) == pytest.approx(measured(p, q), abs=1e-12, rel=1e-12)


@given(distributions(st.integers(3, 30)), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_agrees_with_a_search_in_plain_python(
    pair: tuple[np.ndarray, np.ndarray], k_p: int, k_q: int
) -> None:
    p, q = top(pair[0], k_p), top(pair[1], k_q)
    least = least_kl(p, q, ETA)
    assert measured(p, q) == pytest.approx(least, abs=1e-7, rel=1e-6)


@pytest.mark.parametrize("eta", [1e-6, 5e-5, 5e-4])
def test_finite_and_large_when_the_sure_token_is_missing(eta: float) -> None:
    sure = [(1, math.log(0.999)), (2, math.log(0.0005))]
    other = [(3, math.log(0.999)), (4, math.log(0.0005))]
    value = measured(sure, other, eta)
    assert 5.0 < value < math.inf


@pytest.mark.parametrize("value", [-700.0, -1000.0, -5000.0, 0.0])
def test_extreme_values_stay_finite(value: float) -> None:
    p = [(1, value), (2, -900.0)]
    q = [(2, -3.0), (3, value)]
    for a, b in ((p, q), (q, p), (p, p)):
        found = measure(top_lists([a]), top_lists([b]), np.array([ETA]))
        for name in ("kl_lower", "js_lower", "tv_lower", "kl_floor", "cosine", "top1_agree"):
            assert np.isfinite(getattr(found, name)[0]), name


def test_floor_estimator_as_the_reference_states_it() -> None:
    """Both lists renormalised over their own tokens, aligned on the baseline's, 1e-9 where one is missing."""
    p = [(1, math.log(0.5)), (2, math.log(0.3))]
    q = [(1, math.log(0.4)), (3, math.log(0.4))]
    expected = 0.625 * math.log(0.625 / 0.5) + 0.375 * math.log(0.375 / 1e-9)
    found = measure(top_lists([p]), top_lists([q]), np.array([ETA]))
    assert found.kl_floor[0] == pytest.approx(expected, rel=1e-12)


def test_ties_at_the_top_agree_in_either_order() -> None:
    tied = [(1, -1.0), (2, -1.0), (3, -3.0)]
    for entries, agree in (([(2, -0.5), (1, -2.0)], 1.0), ([(3, -0.5), (1, -2.0)], 0.0)):
        found = measure(top_lists([tied]), top_lists([entries]), np.array([ETA]))
        assert found.top1_agree[0] == agree


@pytest.mark.parametrize("k", range(1, 21))
def test_the_sorting_network_sorts(k: int) -> None:
    """A network that sorts every sequence of zeros and ones sorts everything; sampled above k = 12."""
    rng = np.random.default_rng(k)
    inputs: Sequence[Sequence[int]] = (
        list(product((0, 1), repeat=k)) if k <= 12 else rng.integers(0, 2, (4000, k)).tolist()
    )
    rows = np.array(inputs).T.copy()
    for low, high in _network(k):
        rows[low], rows[high] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
    assert (rows[:-1] <= rows[1:]).all()
