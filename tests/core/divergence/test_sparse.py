"""The sparse measures have the bits of the dense ones: what is left out of the work adds exactly nothing."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.divergence import joining, measures
from pipeline.core.divergence.lists import TopLists
from pipeline.core.divergence.measures import Measures, measure
from tests.core.divergence import dense
from tests.core.divergence.samples import Entry, top_lists

NAMES = [f.name for f in fields(Measures)]
ROUNDING = 1e-13
"""Far below every resolution of the wire."""


def other_bits(found: Measures, expected: Measures) -> list[str]:
    """Names of the measures that differ in any bit; of `js_lower`, by more than cancelling may leave."""
    js = np.abs(found.js_lower - expected.js_lower) <= ROUNDING
    others = [n for n in NAMES if n != "js_lower"]
    differ = [n for n in others if getattr(found, n).tobytes() != getattr(expected, n).tobytes()]
    return differ if js.all() else [*differ, "js_lower"]


def some_list(rng: np.random.Generator, k: int) -> list[Entry]:
    """Up to k of twelve tokens: sure, flat or hardly there; sorted as engines do, or not; often with ties."""
    size = int(rng.integers(1, k + 1))
    logits = rng.standard_normal(size) * rng.choice([0.1, 1.0, 3.0, 30.0, 400.0])
    values = (
        logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()) - rng.choice([0.0, 0.01, 1.0])
    )
    if rng.random() < 0.3:
        values = np.round(values, 1)
    if rng.random() < 0.7:
        values = np.sort(values)[::-1]
    return list(zip(rng.choice(12, size, replace=False).tolist(), values.tolist(), strict=True))


def near(rng: np.random.Generator, entries: list[Entry], k: int) -> list[Entry]:
    """What another arm might list: the same tokens, two ranks swapped, one token replaced, or anything."""
    kind = rng.integers(4)
    if kind == 3 or len(entries) > k:
        return some_list(rng, k)
    tokens = [token for token, _ in entries]
    if kind == 1 and len(tokens) > 1:
        i, j = rng.choice(len(tokens), 2, replace=False)
        tokens[i], tokens[j] = tokens[j], tokens[i]
    if kind == 2:
        tokens[int(rng.integers(len(tokens)))] = 99
    noise = rng.normal(0, 0.05, len(tokens))
    values = [value - abs(shift) for (_, value), shift in zip(entries, noise, strict=True)]
    return list(zip(tokens, values, strict=True))


def positions(seed: int, k_a: int, k_b: int, n: int) -> tuple[TopLists, TopLists, np.ndarray]:
    rng = np.random.default_rng(seed)
    lists = [some_list(rng, k_a) for _ in range(n)]
    others = [near(rng, entries, k_b) for entries in lists]
    return top_lists(lists, k=k_a), top_lists(others, k=k_b), rng.choice([0.0, 1e-6, 5e-4], n)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 8), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_same_bits_as_the_dense_form(seed: int, k_a: int, k_b: int, n: int) -> None:
    a, b, eta = positions(seed, k_a, k_b, n)
    assert other_bits(measure(a, b, eta), dense.measure(a, b, eta)) == []


def test_the_comparison_sees_another_order_of_summation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known-bad: sums from the last row up are as good, and another estimator."""
    a, b, eta = positions(5, 5, 5, 2000)
    expected = dense.measure(a, b, eta)
    assert other_bits(measure(a, b, eta), expected) == []
    einsum = np.einsum
    monkeypatch.setattr(
        measures.np, "einsum", lambda over, x, y: einsum(over, x[..., ::-1, :], y[..., ::-1, :])
    )
    assert set(other_bits(measure(a, b, eta), expected)) == {"kl_lower", "kl_floor", "cosine"}


def test_the_comparison_sees_lists_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known-bad: a first rank that agrees does not make two lists the same."""
    a, b, eta = positions(6, 5, 5, 2000)
    apart = joining._apart
    monkeypatch.setattr(joining, "_apart", lambda ids_p, ids_q: apart(ids_p, ids_q) & (ids_p[0] != ids_q[0]))
    assert "kl_lower" in other_bits(measure(a, b, eta), dense.measure(a, b, eta))


def test_blocks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, eta = positions(7, 5, 3, 500)
    expected = measure(a, b, eta)
    for entries in (1, 35, 1024):
        monkeypatch.setattr(measures, "BLOCK_ENTRIES", entries)
        assert other_bits(measure(a, b, eta), expected) == []


@pytest.mark.shared
@pytest.mark.parametrize("answers", ["greedy", "sample"])
@pytest.mark.parametrize("variant", ["same", "fp8_cal", "mismatch_x1.25"])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_same_bits_on_real_lists(shared_dir: Path, answers: str, variant: str, k: int) -> None:
    folder = shared_dir / "data" / "logits"
    base, canary = np.load(folder / f"base.{answers}.npz"), np.load(folder / f"tf.{answers}.{variant}.npz")

    def lists(ids: np.ndarray, logprobs: np.ndarray) -> TopLists:
        values = np.array(logprobs.T, dtype=np.float64, order="C")
        return TopLists(np.array(ids.T, dtype=np.int64, order="C"), values, values.min(axis=0))

    a = lists(base["top_ids"][:, :k], base["top_lp"][:, :k])
    b = lists(canary["top_ids"], canary["top_lp"])
    eta = np.full(len(a.cap), 1e-6)
    for p, q in ((a, b), (b, a)):
        assert other_bits(measure(p, q, eta), dense.measure(p, q, eta)) == []
