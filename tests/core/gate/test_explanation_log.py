"""Which decision is explained, what stood before it, and the history of a verdict."""

from __future__ import annotations

import re
from dataclasses import replace as replace_account

import pytest
from msgspec.structs import replace

from pipeline.core.gate.explanation import explain
from pipeline.core.gate.explanation_log import ROWS_KEPT, DecisionLog, Wanted, in_force, telling
from schemas.buckets import PopulationCells
from schemas.control import Rollout
from tests.core.gate.build import (
    T0,
    Bench,
    canary,
    command,
    decisions,
    healthy_pairs,
    nats,
    pair_cell,
    shipped_without,
    us,
)
from tests.core.gate.test_anytime import POLICY as SEQUENTIAL
from tests.core.gate.test_anytime import fleet
from tests.core.gate.test_explanation import PAIRS, SLOW, THE_SPEC, TRIP
from tests.core.gate.test_left_out import EJECT, NARROW, prompts
from tests.core.gate.test_left_out import fleet as nodes


def faulty(_second: int) -> list[PopulationCells]:
    worst = [(nats(0.5), bytes.fromhex(PAIRS[1]))]
    ill = [0.14] * 10
    return [
        PopulationCells(
            canary(generation=None),
            [
                pair_cell([0.012] * 90 + ill, worst=worst),
                pair_cell(ill, "node_context", "gpu-3|>2048", worst=worst),
            ],
        )
    ]


def a_life() -> Bench:
    """Start, a refused step, a trip, a refused resume, a new generation, an abort, retired."""
    bench = Bench.started(shipped_without("G3-anytime"))
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.command(command("step", "a"), us(T0 + 22))
    bench.run(T0 + 6, T0 + 16, faulty)
    bench.command(command("resume", "b"), us(T0 + 60))
    bench.command(command("new_generation", "c"), us(T0 + 70))
    bench.command(command("abort", "d"), us(T0 + 80))
    bench.command(command("retire", "e"), us(T0 + 90))
    return bench


def logged(bench: Bench, wanted: Wanted, *, history: bool = False) -> DecisionLog:
    log = DecisionLog("chat", wanted, history)
    for one in decisions(bench.effects):
        log.take(one)
    return log


@pytest.mark.parametrize(
    ("wanted", "found", "standing"),
    [
        (Wanted(), "retire", "abort"),
        (Wanted(generation=1), "resume", "rollback_l1"),
        (Wanted(generation=2), "retire", "abort"),
        (Wanted(at_us=us(T0)), "start", None),
        (Wanted(at_us=us(T0 + 22)), "step", "start"),
        (Wanted(at_us=us(T0 + 59)), "rollback_l1", None),
        (Wanted(epoch=1), "start", None),
        (Wanted(generation=1, epoch=2), "rollback_l1", None),
        (Wanted(at_us=us(T0 - 1)), None, None),
        (Wanted(generation=3), None, None),
        (Wanted(epoch=0), None, None),
    ],
)
def test_the_decision_that_is_asked_for(wanted: Wanted, found: str | None, standing: str | None) -> None:
    log = logged(a_life(), wanted)
    names = [
        None if one is None else one.decision.reason.partition(":")[0] for one in (log.found, log.standing)
    ]
    assert names == [found, standing]
    assert (log.last_generation, log.first_us) == (2, us(T0))


def test_the_log_alone_says_what_stood_before() -> None:
    """Spec and policy from klaxon.rollouts, the weight from the decision before it."""
    bench = a_life()
    log = logged(bench, Wanted(at_us=us(T0 + 59)))
    assert log.found is not None
    rollout = in_force([bench.rollouts["chat"]], log.found.decision)
    assert rollout is None, "the spec of generation 2 did not hold then"
    text = explain(log.found).text
    assert "The canary `v2` was taken out of rotation (weight 1 % to 0) in generation 1" in text
    assert "node_context gpu-3|>2048" in text
    assert PAIRS[1] in text


def rollout_at(offset: int) -> Rollout:
    return Rollout(rollout="chat", spec=THE_SPEC, policy="", policy_hash=str(offset), command_offset=offset)


@pytest.mark.parametrize(("offset", "held"), [(3, None), (4, "4"), (8, "4"), (9, "9"), (99, "9")])
def test_spec_and_policy_of_that_time(offset: int, held: str | None) -> None:
    one = replace(TRIP, inputs=replace(TRIP.inputs, command_offset=offset))
    found = in_force([rollout_at(4), rollout_at(9)], one)
    assert (None if found is None else found.policy_hash) == held


def test_the_third_trip_in_a_row_says_so() -> None:
    bench = Bench.started()
    for number in range(3):
        first = T0 + 100 * number
        if number:
            bench.command(command("new_generation", f"n{number}"), us(first - 5))
        bench.run(first, first + 40, faulty)
    log = logged(bench, Wanted())
    assert log.found is not None
    assert "level 2" in log.found.decision.reason
    assert "It is trip 3 in a row, after generations 1 and 2." in explain(log.found).text


def test_a_history_holds_every_verdict_of_every_decision() -> None:
    bench = a_life()
    log = logged(bench, Wanted(), history=True)
    every = [one for decided in decisions(bench.effects) for one in decided.evaluations]
    assert len(log.rows) == len(every) > 0
    assert [(row.rule, row.scope, row.value, row.samples) for row in log.rows] == [
        (one.rule, one.scope, one.value, one.samples) for one in every
    ]
    assert log.rows_dropped == 0
    assert not logged(bench, Wanted()).rows


def test_a_history_shows_parts_only_where_they_were_over() -> None:
    rows = logged(a_life(), Wanted(), history=True).rows
    shown, left_out = telling(rows)
    scopes = {(row.rule, row.scope) for row in shown}
    assert ("G3-divergence", "rollout") in scopes
    assert ("G3-divergence", "node_context=gpu-3|>2048") in scopes
    assert left_out == 0
    quiet = [replace(row, verdict="pass", reason="") for row in rows]
    shown, left_out = telling(quiet)
    assert {row.scope for row in shown} == {"rollout"}
    assert left_out == len({(row.rule, row.scope) for row in rows if row.scope != "rollout"}) > 0


def test_a_history_has_a_bound() -> None:
    log = DecisionLog("chat", Wanted(), keeps_history=True)
    many = replace(TRIP, evaluations=(SLOW,) * 1000)
    for _ in range(ROWS_KEPT // 1000 + 2):
        log.take(many)
    assert (len(log.rows), log.rows_dropped) == (ROWS_KEPT, 2000)


def test_a_trip_by_sequential_evidence_is_told_as_one() -> None:
    bench = Bench.started(SEQUENTIAL)
    bench.run(T0, T0 + 60, fleet(0.012, bad=0.14))
    log = logged(bench, Wanted(), history=True)
    assert log.found is not None
    told = explain(replace_account(log.found, spec=THE_SPEC))
    assert log.found.decision.kind == "trip"
    (one,) = told.reasons
    assert one.evidence is not None
    assert one.evidence_bound == 20
    assert one.evidence >= one.evidence_bound
    assert "rule adds-up (G3) had its evidence together: " in told.text
    assert "It comes from node_context " in told.text
    assert "the chance that this rule ever trips is at most 5 %" in told.text
    shown, _ = telling(log.rows)
    assert {row.scope for row in shown if row.verdict == "trip"} == {"rollout", one.scope}


def test_an_ejected_node_and_an_excluded_segment_as_the_gate_tells_them() -> None:
    bench = Bench.started(EJECT)
    bench.run(T0, T0 + 10, healthy_pairs(), lambda second: nodes(second, ill={"c-3": 200_000}))
    log = logged(bench, Wanted())
    assert log.found is not None
    text = explain(log.found).text
    assert "Node `c-3` of the canary gets no traffic any more in generation 1" in text
    assert (
        "because rule ruler (G2) was over its limit: p99 of ttft_us (time to the first token), canary" in text
    )
    assert re.search(
        r"in node c-3 \(limit 1\.15 ×\): \d+ ms against \d+ ms, from \d+ requests against \d", text
    )
    assert "The weight stands at 1 %." in text
    bench = Bench.started(NARROW)
    bench.run(T0, T0 + 8, prompts(0.3))
    log = logged(bench, Wanted())
    assert log.found is not None
    text = explain(log.found).text
    assert "Context `>2048` of the canary gets no traffic any more in generation 1" in text
    assert "Out of rotation now: context `>2048`." in text
