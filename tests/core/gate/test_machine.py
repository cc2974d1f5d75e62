"""The machine: trips absorb, only a pass promotes, equal inputs give equal outputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.gate.coverage import CoverageVerdict
from pipeline.core.gate.left_out import Exclusion
from pipeline.core.gate.machine import Evidence, Outcome, begin, judge, not_ready
from pipeline.core.gate.metrics import Reading
from pipeline.core.gate.policy import LEAVING_OUT, Rule
from pipeline.core.gate.rules import Finding, RuleVerdict
from pipeline.core.gate.state import RolloutMemory, decode_state, encode_state
from pipeline.core.gate.windows import Scope
from pipeline.policy_file import parse_policy
from schemas.control import Evaluation, Located, RolloutSpec
from tests.core.gate.build import SPEC

POLICY = parse_policy(
    """
rules:
  - {id: l1, metric: kl_lower, window: 5s, limit: 0.05, action: rollback_l1}
  - {id: back, metric: kl_lower, window: 5s, limit: 0.05, action: fallback}
  - {id: stop, metric: kl_lower, window: 5s, limit: 0.05, action: pause}
  - {id: see, metric: kl_lower, window: 5s, limit: 0.05, action: rollback_l2, mode: observe}
  - {id: node, metric: ttft_us, statistic: p99, window: 5s, limit: 300ms, scope: [node, node_context],
     action: eject_node}
  - {id: part, metric: kl_lower, window: 5s, limit: 0.05, action: narrow}
coverage: {window: 5s}
progression: {min_pairs: 10}
"""
)
SPEC_ = msgspec.convert(SPEC, RolloutSpec)
NODE_SCOPES: tuple[Scope, ...] = (
    ("node", "c-0"), ("node", "c-1"), ("node_context", "c-2|>512"), ("node_context", "c-3|>8192"),
)  # fmt: skip
VERDICTS = ("pass", "trip", "not_enough_data", "error")


NODES = tuple(f"c-{number}" for number in range(20))
SEGMENTS = (("context", ">2048"), ("request_type", "chat"), ("node", "c-7"), ("node_context", "c-1|>512"))


def verdict(
    rule: Rule,
    what: str,
    scopes: Sequence[Scope] = (("all", ""),),
    located: Scope | None = None,
    nodes: tuple[str, ...] = NODES[:10],
) -> RuleVerdict:
    said = "" if what == "pass" else "because"
    if what != "trip":
        return RuleVerdict(rule, what, said, ())  # type: ignore[arg-type]
    findings = tuple(Finding(scope, Reading(100, 0.2, 0.2, True)) for scope in scopes)
    place = None
    if located is not None:
        place = Located(dimension=located[0], value=located[1], share_of_excess=0.9, share_of_traffic=0.1)
    return RuleVerdict(rule, "trip", said, (), findings, place, nodes)


def coverage(what: str, low: bool) -> CoverageVerdict:
    evaluation = Evaluation(rule="coverage", scope="rollout", verdict=what, metric="coverage")  # type: ignore[arg-type]
    return CoverageVerdict(what, 0.5, 100, low, "low" if low else "", evaluation)  # type: ignore[arg-type]


def leaving_out(rule: Rule) -> st.SearchStrategy[RuleVerdict]:
    """Trips of some nodes of some, or of some segment or none."""
    return st.builds(
        lambda scopes, located, seen: verdict(rule, "trip", scopes, located, NODES[:seen]),
        st.lists(st.sampled_from(NODE_SCOPES), min_size=1, max_size=3),
        st.none() | st.sampled_from(SEGMENTS),
        st.sampled_from((0, 4, 5, 9, 10, 15, 20)),
    )


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    said = ["pass"] * len(POLICY.rules)
    for at in draw(st.lists(st.integers(0, len(said) - 1), max_size=3)):
        said[at] = draw(st.sampled_from(VERDICTS))
    low = draw(st.integers(0, 3)) == 0
    fresh = draw(st.integers(0, 3)) == 0
    return Evidence(
        second=draw(st.integers(0, 200)),
        verdicts=tuple(
            draw(leaving_out(rule)) if what == "trip" and rule.action in LEAVING_OUT else verdict(rule, what)
            for rule, what in zip(POLICY.rules, said, strict=True)
        ),
        coverage=None
        if fresh
        else coverage(
            "not_enough_data" if low else draw(st.sampled_from(("pass", "pass", *VERDICTS[2:3]))), low
        ),
        fresh=fresh,
        current=draw(st.integers(0, 3)) > 0,
        complete_at=draw(st.integers(0, 200)),
    )


@st.composite
def memories(draw: st.DrawFn) -> RolloutMemory:
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    return msgspec.structs.replace(
        memory,
        state=draw(
            st.sampled_from(
                ("observing", "observing", "observing", "paused", "narrowed", "promoted", "tripped")
            )
        ),
        ejected=tuple(
            Exclusion("node", node, 5)
            for node in sorted(draw(st.sets(st.sampled_from(NODES[:3]), max_size=2)))
        ),
        excluded=tuple(
            Exclusion(*segment, 5) for segment in sorted(draw(st.sets(st.sampled_from(SEGMENTS), max_size=2)))
        ),
        step=draw(st.integers(0, 5)),
        step_start=draw(st.integers(0, 100)),
        step_pairs=draw(st.integers(5, 20)),
        holding=draw(st.booleans()),
        streak=draw(st.integers(0, 3)),
    )


@settings(max_examples=400, deadline=None)
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
    if enforced_trips:
        assert outcome.kind == "trip", "a trip wins over everything"
    if outcome.kind == "trip":
        assert after.state == "tripped"
        assert after.weights["v2"] == 0.0
        assert after.last_promoted == after.weights
        assert sum(after.weights.values()) == 100.0
        if enforced_trips:
            assert outcome.tripping[0].rule.id == enforced_trips[0]
        else:
            assert "the version is at fault" in outcome.reason
            assert not evidence.fresh
            assert "trip" in (said["node"], said["part"]), "only what leaves something out escalates"
    if outcome.kind in ("trip", "eject", "narrow"):
        listed = {one.rule.id for one in outcome.tripping}
        assert listed == {one.rule.id for one in evidence.verdicts if one.verdict == "trip"} - {"see"}
    assert_left_out(memory, evidence, outcome)
    if outcome.kind in ("step", "promote"):
        assert not evidence.fresh
        assert memory.state == "observing"
        assert evidence.current
        assert all(said[name] == "pass" for name in ("l1", "back", "stop", "node", "part"))
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


def assert_left_out(memory: RolloutMemory, evidence: Evidence, outcome: Outcome) -> None:
    """What is left out stays out, grows only by rules that say so, and never beyond the policy's share."""
    after = outcome.memory
    assert after.ejected[: len(memory.ejected)] == memory.ejected
    assert after.excluded[: len(memory.excluded)] == memory.excluded
    assert (after.ejected != memory.ejected) == (outcome.kind == "eject")
    assert (after.excluded != memory.excluded) == (outcome.kind == "narrow")
    if outcome.kind not in ("eject", "narrow"):
        return
    assert not evidence.fresh
    assert after.weights == memory.weights
    assert (after.step_start, after.step_pairs) == (evidence.complete_at, 0), "the step begins anew"
    if outcome.kind == "narrow":
        assert after.state == ("narrowed" if memory.state == "observing" else memory.state)
    else:
        assert after.state == memory.state
    new = (*after.ejected[len(memory.ejected) :], *after.excluded[len(memory.excluded) :])
    assert all(one.since == evidence.second + 1 for one in new)
    if any(one.dimension == "node" for one in new):
        out = {one.value for one in (*after.ejected, *after.excluded) if one.dimension == "node"}
        seen = set().union(*(one.nodes for one in evidence.verdicts))
        assert 5 * len(out) <= len(seen | out), "at most 20 % of the nodes"


LEAVING = {rule.id: rule for rule in POLICY.rules}


def leaving(memory: RolloutMemory, *verdicts: RuleVerdict) -> Outcome:
    evidence = Evidence(50, verdicts, coverage("pass", False), fresh=False, current=True, complete_at=66)
    return judge(memory, evidence, POLICY, SPEC_, 1)


def ejecting(nodes: Sequence[str], seen: int) -> RuleVerdict:
    names = tuple(f"c-{number}" for number in range(seen))
    return verdict(LEAVING["node"], "trip", [("node", node) for node in nodes], nodes=names)


@pytest.mark.parametrize(
    ("nodes", "seen", "kind"),
    [
        (["c-0"], 4, "trip"),
        (["c-0"], 5, "eject"),
        (["c-0"], 6, "eject"),
        (["c-0", "c-1"], 9, "trip"),
        (["c-0", "c-1"], 10, "eject"),
        (["c-0", "c-1"], 11, "eject"),
        (["c-0", "c-1", "c-2"], 10, "trip"),
    ],
)
def test_at_most_a_fifth_of_the_nodes_is_ejected(nodes: list[str], seen: int, kind: str) -> None:
    """More is the version's fault: level 1."""
    outcome = leaving(begin(SPEC_, None, start_us=0, evidence_from=0), ejecting(nodes, seen))
    assert outcome.kind == kind
    if kind == "eject":
        assert [one.value for one in outcome.memory.ejected] == nodes
        assert outcome.memory.state == "observing"
        assert outcome.memory.weights == {"v1": 99.0, "v2": 1.0}
    else:
        assert (outcome.memory.state, outcome.memory.level) == ("tripped", 1)
        assert outcome.memory.weights["v2"] == 0.0
        assert f"{len(nodes)} of {seen} nodes, at most 20 % may be left out" in outcome.reason


def test_earlier_ejections_count_and_nobody_is_ejected_twice() -> None:
    first = leaving(begin(SPEC_, None, start_us=0, evidence_from=0), ejecting(["c-3"], 10)).memory
    again = leaving(first, ejecting(["c-3"], 10))
    assert (again.kind, again.memory) == (None, again.memory)
    # c-3 sends nothing any more: it is one of the canary's nodes all the same.
    second = leaving(first, ejecting(["c-4"], 3))
    assert second.kind == "trip", "2 of 4 nodes"
    second = leaving(first, ejecting(["c-4"], 10))
    assert [one.value for one in second.memory.ejected] == ["c-3", "c-4"]
    assert leaving(second.memory, ejecting(["c-5"], 10)).kind == "trip"


def test_a_nodes_context_class_ejects_the_node() -> None:
    found = verdict(LEAVING["node"], "trip", [("node_context", "c|1|>2048"), ("node_context", "c|1|>512")])
    outcome = leaving(begin(SPEC_, None, start_us=0, evidence_from=0), found)
    assert [one.value for one in outcome.memory.ejected] == ["c|1"]


def test_narrowing_excludes_what_is_located_or_trips() -> None:
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    part = LEAVING["part"]
    outcome = leaving(memory, verdict(part, "trip", located=("context", ">2048")))
    assert (outcome.kind, outcome.memory.state) == ("narrow", "narrowed")
    assert outcome.memory.excluded == (Exclusion("context", ">2048", 51),)
    assert outcome.memory.weights == memory.weights
    everywhere = leaving(memory, verdict(part, "trip", located=None))
    assert (everywhere.kind, everywhere.memory.level) == ("trip", 1)
    assert "no class of traffic carries it" in everywhere.reason


@pytest.mark.parametrize(("held", "kind"), [(7, "narrow"), (8, "trip")])
def test_a_generation_loses_eight_segments_at_most(held: int, kind: str) -> None:
    memory = msgspec.structs.replace(
        begin(SPEC_, None, start_us=0, evidence_from=0),
        excluded=tuple(Exclusion("request_type", str(number), 5) for number in range(held)),
    )
    assert leaving(memory, verdict(LEAVING["part"], "trip", located=("context", ">512"))).kind == kind


def test_a_version_at_fault_is_severer_than_a_node() -> None:
    """A narrowing that finds no segment trips, though a node could be ejected in the same second."""
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    outcome = leaving(memory, ejecting(["c-1"], 10), verdict(LEAVING["part"], "trip", located=None))
    assert outcome.kind == "trip"


@pytest.mark.parametrize("state", ["narrowed", "paused"])
def test_a_narrowed_roll_out_holds_its_weight_and_still_trips(state: str) -> None:
    memory = msgspec.structs.replace(
        begin(SPEC_, None, start_us=0, evidence_from=0), state=state, step_start=0, step_pairs=1_000
    )
    passing = tuple(verdict(rule, "pass") for rule in POLICY.rules)
    assert leaving(memory, *passing).kind is None
    assert f"is {state}" in leaving(memory, *passing).reason
    assert leaving(memory, verdict(LEAVING["l1"], "trip")).kind == "trip"
    assert leaving(memory, ejecting(["c-1"], 10)).kind == "eject", "users are spared at once"
    further = leaving(memory, verdict(LEAVING["part"], "trip", located=("context", ">512")))
    assert (further.kind, further.memory.state) == ("narrow", state)


def test_a_canary_without_some_segments_is_promoted_by_an_operator_only() -> None:
    last = msgspec.structs.replace(
        begin(SPEC_, None, start_us=0, evidence_from=0), step=5, step_start=0, step_pairs=1_000
    )
    passing = tuple(verdict(rule, "pass") for rule in POLICY.rules)
    assert leaving(last, *passing).kind == "promote"
    ejected = msgspec.structs.replace(last, ejected=(Exclusion("node", "c-1", 5),))
    assert leaving(ejected, *passing).kind == "promote"
    narrowed = msgspec.structs.replace(last, excluded=(Exclusion("context", ">2048", 5),))
    outcome = leaving(narrowed, *passing)
    assert (outcome.kind, "an operator's" in outcome.reason) == (None, True)


def test_the_weights_are_1_5_10_25_50_100() -> None:
    """Each with its own least number of pairs: one less is not enough."""
    memory = begin(SPEC_, None, start_us=0, evidence_from=0)
    seen = [memory.weights["v2"]]
    passing = tuple(verdict(rule, "pass") for rule in POLICY.rules)
    while memory.state == "observing":
        settled = msgspec.structs.replace(memory, step_start=0, step_pairs=9)
        assert leaving(settled, *passing).kind is None
        outcome = leaving(msgspec.structs.replace(settled, step_pairs=10), *passing)
        assert outcome.kind in ("step", "promote")
        memory = outcome.memory
        assert memory.step_pairs == (0 if outcome.kind == "step" else 10)
        if outcome.kind == "step":
            seen.append(memory.weights["v2"])
    assert seen == [1, 5, 10, 25, 50, 100]
    assert memory.state == "promoted"


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
