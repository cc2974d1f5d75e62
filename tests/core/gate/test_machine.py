"""The machine: trips absorb, only a pass promotes, equal inputs give equal outputs."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.gate.machine import Evidence, begin, judge, not_ready
from pipeline.core.gate.metrics import Reading
from pipeline.core.gate.policy import Rule
from pipeline.core.gate.rules import CoverageVerdict, Finding, RuleVerdict
from pipeline.core.gate.state import RolloutMemory, decode_state, encode_state
from pipeline.policy_file import parse_policy
from schemas.control import Evaluation, RolloutSpec
from tests.core.gate.build import SPEC

POLICY = parse_policy(
    """
rules:
  - {id: l1, metric: kl_lower, window: 5s, limit: 0.05, action: rollback_l1}
  - {id: back, metric: kl_lower, window: 5s, limit: 0.05, action: fallback}
  - {id: stop, metric: kl_lower, window: 5s, limit: 0.05, action: pause}
  - {id: see, metric: kl_lower, window: 5s, limit: 0.05, action: rollback_l2, mode: observe}
coverage: {window: 5s}
progression: {min_pairs: 10}
"""
)
SPEC_ = msgspec.convert(SPEC, RolloutSpec)
VERDICTS = ("pass", "trip", "not_enough_data", "error")
ORDER = ("pause", "fallback", "rollback_l1", "rollback_l2")


def verdict(rule: Rule, what: str) -> RuleVerdict:
    finding = (Finding(("all", ""), Reading(100, 0.2, 0.2, True)),) if what == "trip" else ()
    return RuleVerdict(rule, what, "" if what == "pass" else "because", (), finding)  # type: ignore[arg-type]


def coverage(what: str, low: bool) -> CoverageVerdict:
    evaluation = Evaluation(rule="coverage", scope="rollout", verdict=what, metric="coverage")  # type: ignore[arg-type]
    return CoverageVerdict(what, 0.5, 100, low, "low" if low else "", evaluation)  # type: ignore[arg-type]


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    said = [draw(st.sampled_from(VERDICTS)) for _ in POLICY.rules]
    low = draw(st.booleans())
    fresh = draw(st.booleans())
    return Evidence(
        second=draw(st.integers(0, 200)),
        verdicts=tuple(verdict(rule, what) for rule, what in zip(POLICY.rules, said, strict=True)),
        coverage=None
        if fresh
        else coverage("not_enough_data" if low else draw(st.sampled_from(VERDICTS[::2])), low),
        fresh=fresh,
        current=draw(st.booleans()),
        complete_at=draw(st.integers(0, 200)),
    )


@st.composite
def memories(draw: st.DrawFn) -> RolloutMemory:
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    return msgspec.structs.replace(
        memory,
        state=draw(st.sampled_from(("observing", "paused", "promoted", "tripped"))),
        step=draw(st.integers(0, 5)),
        step_start=draw(st.integers(0, 100)),
        step_pairs=draw(st.integers(0, 20)),
        holding=draw(st.booleans()),
        streak=draw(st.integers(0, 3)),
    )


@settings(max_examples=600, deadline=None)
@given(memories(), evidences())
def test_every_transition_keeps_the_promises(memory: RolloutMemory, evidence: Evidence) -> None:
    outcome = judge(memory, evidence, POLICY, SPEC_, 1)
    assert outcome == judge(memory, evidence, POLICY, SPEC_, 1), "equal inputs, equal outputs"
    after = outcome.memory
    said = {one.rule.id: one.verdict for one in evidence.verdicts}
    enforced_trips = [name for name in ("l1", "back") if said[name] == "trip"]
    if memory.final:
        assert outcome.memory == memory
        assert outcome.kind is None
        return
    assert (outcome.kind == "trip") == bool(enforced_trips), "a trip wins over everything"
    if outcome.kind == "trip":
        assert after.state == "tripped"
        assert after.weights["v2"] == 0.0
        assert after.last_promoted == after.weights
        assert outcome.tripping[0].rule.id == enforced_trips[0]
        assert sum(after.weights.values()) == 100.0
    if outcome.kind in ("step", "promote"):
        assert not evidence.fresh
        assert memory.state == "observing"
        assert evidence.current
        assert all(said[name] == "pass" for name in ("l1", "back", "stop"))
        assert evidence.coverage is not None
        assert evidence.coverage.verdict == "pass"
        assert not evidence.coverage.low
        assert evidence.second >= memory.step_start + 1 + 5
        assert memory.step_pairs >= 10
    else:
        assert after.weights["v2"] <= memory.weights["v2"], "only a pass raises a weight"
    if evidence.fresh and outcome.kind != "trip":
        assert after == memory
    assert decode_state(encode_state(after)) == after


def test_severest_action_first() -> None:
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    for order in itertools.permutations(range(3)):
        verdicts = tuple(verdict(POLICY.rules[at], "trip") for at in order)
        evidence = Evidence(10, verdicts, coverage("pass", False), fresh=False, current=True, complete_at=20)
        outcome = judge(memory, evidence, POLICY, SPEC_, 1)
        assert [one.rule.id for one in outcome.tripping] == ["l1", "back", "stop"]


def test_readiness_names_the_first_thing_that_is_missing() -> None:
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    assert "no complete second" in not_ready(memory, None, POLICY, 1)
    passing = tuple(verdict(rule, "pass") for rule in POLICY.rules)
    evidence = Evidence(3, passing, coverage("pass", False), fresh=False, current=True, complete_at=20)
    assert "3 s to last" in not_ready(memory, evidence, POLICY, 1)
    evidence = Evidence(6, passing, coverage("pass", False), fresh=False, current=True, complete_at=20)
    assert "0 of 10 pairs" in not_ready(memory, evidence, POLICY, 1)


@pytest.mark.parametrize("what", ["not_enough_data", "error", "trip"])
def test_coverage_that_says_nothing_but_no_pass_holds_the_weight(what: str) -> None:
    """An empty reason is no readiness."""
    memory = msgspec.structs.replace(
        begin(SPEC_, None, start_us=0, evidence_from=0), step_start=0, step_pairs=1_000
    )
    evidence = Evidence(
        second=200,
        verdicts=tuple(verdict(rule, "pass") for rule in POLICY.rules),
        coverage=coverage(what, low=False),
        fresh=False,
        current=True,
        complete_at=200,
    )
    assert judge(memory, evidence, POLICY, SPEC_, 1).kind is None
    passing = dataclasses.replace(evidence, coverage=coverage("pass", low=False))
    assert judge(memory, passing, POLICY, SPEC_, 1).kind == "step"
