"""Scopes as one weighted sum: who appears first holds most, and all together never more than one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.statistics.betting import restart_weight
from pipeline.core.statistics.scopes import ScopeKey, Weights, largest, weighted

LEVELS = ("all", "node", "context", "node_context")


def test_ranks_are_given_by_second_and_then_by_bytes() -> None:
    weights = Weights(LEVELS)
    weights.appear([("node", "b"), ("all", ""), ("node", "é"), ("node", "a")])
    weights.appear([("node", "A"), ("node", "b")])
    order = [scope for scope in weights.of if scope[0] == "node"]
    assert order == [("node", "a"), ("node", "b"), ("node", "é"), ("node", "A")]
    assert [weights.of[scope] for scope in order] == [restart_weight(k) / 4 for k in (1, 2, 3, 4)]
    assert weights.of["all", ""] == restart_weight(1) / 4


@given(
    st.lists(st.lists(st.tuples(st.sampled_from(LEVELS), st.text(max_size=2)), max_size=9), max_size=6),
    st.randoms(use_true_random=False),
)
def test_weights_depend_on_seconds_and_not_on_the_order_inside(
    seconds: list[list[ScopeKey]], rng: object
) -> None:
    one, other = Weights(LEVELS), Weights(LEVELS)
    for scopes in seconds:
        one.appear(scopes)
        shuffled = [*scopes, *scopes]
        rng.shuffle(shuffled)  # type: ignore[attr-defined]
        other.appear(shuffled)
    assert list(one.of.items()) == list(other.of.items())
    assert math.fsum(one.of.values()) < 1


def test_the_sum_and_its_largest_term() -> None:
    weights = {("all", ""): 0.1, ("node", "a"): 0.2, ("node", "b"): 0.05}
    evidence = {("all", ""): 2.0, ("node", "a"): 100.0, ("node", "b"): 400.0}
    assert weighted(weights, evidence) == pytest.approx(0.2 + 20 + 20)
    order = [("node", "a"), ("node", "b"), ("all", "")]
    assert largest(weights, evidence, 3) == order, "ties: who came first"
    assert largest(weights, evidence, 1) == order[:1]
    assert weighted(weights, {}) == 0.0


def test_known_bad_scopes_without_weights_would_add_up_beyond_their_stake() -> None:
    """A hundred scopes with E = 1 each, as they begin: one test's worth of evidence, not a hundred's."""
    weights = Weights(LEVELS)
    scopes = [("node", f"n{at}") for at in range(100)]
    weights.appear(scopes)
    assert weighted(weights.of, dict.fromkeys(scopes, 1.0)) < 0.25
    assert sum(dict.fromkeys(scopes, 1.0).values()) >= 20
