"""The gate as a whole: starting, tripping, climbing, pausing, leases, gaps."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.core.gate.state import PartitionMemory
from schemas.buckets import Cell, PopulationCells
from schemas.control import Expects
from tests.core.gate.build import (
    LATENESS_S,
    LOGITS,
    REQUESTS,
    SOURCES,
    SPEC,
    T0,
    TELEMETRY,
    Bench,
    canary,
    command,
    decisions,
    final,
    fresh,
    healthy_pairs,
    kinds,
    nats,
    pair_cell,
    quick_requests,
    request_cell,
    settings,
    shipped_without,
    start_command,
    us,
)


def ill_pairs(count: int = 10, score: float = 0.2) -> object:
    return healthy_pairs(count, score)


def test_start_publishes_directive_decision_state_and_rollout_together() -> None:
    (effect,) = Bench.started().effects
    assert effect.name == "chat"
    assert effect.directive is not None
    assert effect.decision is not None
    assert effect.rollout is not None
    assert effect.directive.weights == {"v1": 99.0, "v2": 1.0}
    assert effect.directive.last_promoted == {"v1": 100.0, "v2": 0.0}
    assert (effect.directive.generation, effect.directive.epoch) == (1, 1)
    assert effect.decision.command_id == "c0"
    assert effect.decision.directive == effect.directive
    assert effect.rollout.policy_hash == effect.directive.policy_hash != ""
    rules = {"chat/G3-anytime", "chat/G2-ttft-share", "chat/X3-noise-floor"}
    assert {state.key for state in effect.states} == {"chat/", "/", *rules}


def test_start_without_fallback_is_refused_and_recorded() -> None:
    bench = Bench.new()
    spec = {name: value for name, value in SPEC.items() if name != "fallback"}
    (effect,) = bench.command(command("start", "c0", arguments={"spec": spec}), us(T0))
    assert effect.decision is not None
    assert effect.decision.kind == "refused"
    assert "fallback" in effect.decision.reason
    assert effect.directive is None
    assert effect.decision.command_id == "c0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arms": {"baseline": {"model_version": "v1", "nodes": ["*"]}}}, "canary missing"),
        ({"fallback": "v2"}, "canary itself"),
        ({"steps": [5, 1]}, "rise"),
        ({"policy": "rules: 3"}, "rules"),
        ({"policy_hash": "0" * 64}, "policy_hash"),
        ({"surprise": 1}, "surprise"),
        ({"rollout": "other"}, "other"),
    ],
)
def test_bad_specs_are_refused(change: dict[str, object], words: str) -> None:
    bench = Bench.new()
    (effect,) = bench.command(command("start", "c0", arguments={"spec": {**SPEC, **change}}), us(T0))
    assert effect.decision is not None
    assert effect.decision.kind == "refused"
    assert words in effect.decision.reason


def test_same_versions_are_refused() -> None:
    arms = {name: {"model_version": "v1", "nodes": ["*"]} for name in ("baseline", "canary")}
    (effect,) = Bench.new().command(start_command(arms=arms), us(T0))
    assert kinds([effect]) == ["refused"]


def test_prompt_version_under_test_names_both_versions() -> None:
    arms = {
        "baseline": {"model_version": "v1", "prompt_version": "p1", "nodes": ["*"]},
        "canary": {"model_version": "v1", "prompt_version": "p2", "nodes": ["*"]},
    }
    (effect,) = Bench.new().command(start_command(arms=arms), us(T0))
    assert effect.directive is not None
    assert effect.directive.weights == {"v1/p1": 99.0, "v1/p2": 1.0}
    assert effect.directive.fallback == "v1/p1"


def test_a_bad_mean_trips_once_and_for_good() -> None:
    bench = Bench.started()
    effects = bench.run(T0, T0 + 60, ill_pairs())
    assert kinds(effects) == ["trip"]
    directive = effects[0].directive
    assert directive is not None
    assert directive.state == "tripped"
    assert directive.weights == {"v1": 100.0, "v2": 0.0} == directive.last_promoted
    assert directive.cause is not None
    assert directive.cause.rule == "G3-divergence"
    assert directive.cause.samples == 100
    assert directive.cause.value == pytest.approx(0.2)
    for name in ("resume", "pause", "step", "promote", "abort"):
        assert kinds(bench.command(command(name, name), us(T0 + 100))) == ["refused"]


def test_fresh_evidence_trips_long_before_the_second_is_complete() -> None:
    bench = Bench.started()
    cells = [PopulationCells(canary(), [pair_cell([0.2] * 99)])]
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: cells}, 7))
    assert bench.write(bench.core.judge_fresh(us(T0 + 1.5))) == []
    cells = [PopulationCells(canary(), [pair_cell([0.2] * 100)])]
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: cells}, 8))
    effects = bench.write(bench.core.judge_fresh(us(T0 + 1.55)))
    assert kinds(effects) == ["trip"]
    inputs = decisions(effects)[0].inputs
    assert inputs.offsets[f"~{LOGITS}/0"] == 8
    assert bench.run(T0, T0 + 30, ill_pairs()) == []


def test_the_newest_offset_of_a_fresh_cell_wins() -> None:
    bench = Bench.started()
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: [PopulationCells(canary(), [pair_cell([0.01] * 200)])]}, 9))
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: [PopulationCells(canary(), [pair_cell([0.2] * 150)])]}, 8))
    assert bench.core.judge_fresh(us(T0 + 2)) == []
    assert bench.core.gauges()["stale_cells"] == 1


def test_a_final_replaces_the_fresh_cells_of_its_source() -> None:
    bench = Bench.started()
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: [PopulationCells(canary(), [pair_cell([0.2] * 60)])]}, 9))
    bench.read(final(LOGITS, T0, T0 + 1, {T0 + 1: [PopulationCells(canary(), [pair_cell([0.2] * 60)])]}))
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: [PopulationCells(canary(), [pair_cell([0.2] * 60)])]}, 10))
    assert bench.core.judge_fresh(us(T0 + 20)) == []
    assert bench.core.gauges()["stale_cells"] == 1
    bench.core.on_fresh(fresh(LOGITS, {T0 + 2: [PopulationCells(canary(), [pair_cell([0.2] * 40)])]}, 11))
    assert kinds(bench.core.judge_fresh(us(T0 + 20))) == ["trip"]


def test_fresh_evidence_never_passes_or_pauses() -> None:
    bench = Bench.started("rules: [{id: a, metric: kl_lower, window: 10s, limit: 0.05, action: pause}]")
    bench.core.on_fresh(fresh(LOGITS, {T0 + 1: [PopulationCells(canary(), [pair_cell([0.2] * 500)])]}, 9))
    assert bench.core.judge_fresh(us(T0 + 2)) == []


def test_the_fault_of_one_node_on_long_prompts_is_found_in_its_cell() -> None:
    """G6: the roll-out's mean stays under the limit; the node × context cell does not."""
    bench = Bench.started(shipped_without("G3-anytime"))

    def pairs(second: int) -> list[PopulationCells]:
        cells = [pair_cell([0.012] * 40 + [0.14] * 2, worst=[(nats(0.14), b"p" * 16)])]
        for node in range(10):
            long = [0.14] * 2 if node == 3 else [0.012] * 2
            cells.append(pair_cell([0.012] * 2 + long, "node", f"c-{node}"))
            name = f"c-{node}|>2048"
            worst = [(nats(0.14), (second - T0).to_bytes(16, "big"))] if node == 3 else []
            cells.append(pair_cell(long, "node_context", name, worst=worst))
        cells.append(pair_cell([0.012] * 20 + [0.14] * 2, "context", ">2048"))
        return [PopulationCells(canary(), cells)]

    effects = bench.run(T0, T0 + 100, pairs)
    assert kinds(effects) == ["trip"]
    directive = effects[0].directive
    assert directive is not None
    assert directive.cause is not None
    located = directive.cause.located
    assert located is not None
    assert (located.dimension, located.value) == ("node_context", "c-3|>2048")
    assert located.share_of_excess == pytest.approx(1.0)
    assert located.share_of_traffic == pytest.approx(2 / 42, abs=1e-4)
    assert directive.cause.scope in ("node=c-3", "node_context=c-3|>2048")
    assert len(directive.cause.pair_ids) == 20
    assert len(set(directive.cause.pair_ids)) == 20


def test_it_climbs_on_pass_and_only_then() -> None:
    bench = Bench.started()
    effects = bench.run(T0, T0 + 1200, healthy_pairs(), quick_requests())
    assert kinds(effects) == ["step"] * 3
    first, second, _ = decisions(effects)
    assert first.inputs.complete_through == T0 + 60 + 300
    assert first.directive is not None
    assert first.directive.weights == {"v1": 95.0, "v2": 5.0}
    # A step taken on a second lasts from the log time at which that second was complete.
    assert second.inputs.complete_through == T0 + 360 + 1 + LATENESS_S + 360
    enforcing = ("G3-divergence", "G3-anytime", "G5-slow-share")
    assert {one.verdict for one in first.evaluations if one.scope == "rollout" and one.rule in enforcing} == {
        "pass"
    }


def test_all_steps_end_in_promotion() -> None:
    policy = (
        "rules: [{id: a, metric: kl_lower, window: 5s, limit: 0.05, min_samples: 10, action: rollback_l1}]\n"
        "coverage: {window: 5s, min_samples: 10}\nprogression: {min_pairs: 10}"
    )
    bench = Bench.started(policy, join_timeout_us=1_000_000)
    effects = bench.run(T0, T0 + 200, healthy_pairs())
    assert kinds(effects) == ["step"] * 5 + ["promote"]
    last = effects[-1].directive
    assert last is not None
    assert last.state == "promoted"
    assert last.weights == {"v1": 0.0, "v2": 100.0} == last.last_promoted


@pytest.mark.parametrize(
    "what", ["no requests", "no pairs", "low coverage", "unknown second", "foreign settings"]
)
def test_nothing_is_promoted_on_missing_evidence(what: str) -> None:
    bench = Bench.started()
    missing = {"unmatched__no_canary": 3} if what == "low coverage" else {}

    def pairs(_: int) -> list[PopulationCells]:
        return [PopulationCells(canary(), [pair_cell([0.012] * 10, **missing)])]

    for second in range(T0, T0 + 1000):
        odd = (second - T0) % 200 == 100
        bench.close(
            second,
            None if what == "no pairs" else pairs(second),
            None if what == "no requests" else quick_requests()(second),  # type: ignore[operator]
            whole_from=second + 1 if what == "unknown second" and odd else 0,
            settings_hash="other" if what == "foreign settings" and odd else "settings",
        )
        bench.judge(second)
    found = kinds(bench.effects)
    assert "step" not in found
    assert "trip" not in found
    assert bench.core.not_ready("chat", us(T0 + 1016)) != ""
    assert kinds(bench.command(command("step", "s1"), us(T0 + 1016))) == ["refused"]
    assert kinds(bench.command(command("promote", "s2"), us(T0 + 1016))) == ["refused"]
    if what == "low coverage":
        assert found == ["command", "hold"]


def test_manual_steps_need_the_pass() -> None:
    from pipeline.policy_file import shipped_policy_text

    bench = Bench.started(shipped_policy_text().replace("mode: auto", "mode: manual"))
    bench.run(T0, T0 + 300, healthy_pairs(), quick_requests())
    (early,) = bench.command(command("step", "s1"), us(T0 + 317))
    assert kinds([early]) == ["refused"]
    bench.run(T0 + 301, T0 + 400, healthy_pairs(), quick_requests())
    (late,) = bench.command(command("step", "s2"), us(T0 + 417))
    assert kinds([late]) == ["command"]
    assert late.directive is not None
    assert late.directive.weights["v2"] == 5.0


def test_coverage_that_pauses() -> None:
    bench = Bench.started(
        "rules: [{id: a, metric: kl_lower, window: 10s, limit: 0.05, action: pause}]\n"
        "coverage: {limit: 0.9, window: 10s, min_samples: 10, action: pause}"
    )
    effects = bench.run(
        T0, T0 + 20, lambda _: [PopulationCells(canary(), [pair_cell([0.01] * 8, unmatched__late=2)])]
    )
    assert kinds(effects) == ["pause"]
    assert kinds(bench.command(command("resume", "r"), us(T0 + 37))) == ["command"]


def test_hold_opens_and_closes_with_coverage() -> None:
    bench = Bench.started()

    def pairs(second: int) -> list[PopulationCells]:
        lost = {"unmatched__no_canary": 5} if second < T0 + 50 else {}
        return [PopulationCells(canary(), [pair_cell([0.01] * 10, **lost)])]

    assert kinds(bench.run(T0, T0 + 400, pairs)) == ["hold", "close"]


def test_versions_that_are_not_under_test_are_not_compared() -> None:
    """V1: another prompt version in one half, or a node that runs something else."""
    bench = Bench.started()
    odd = [
        PopulationCells(canary(differs=3), [pair_cell([0.5] * 50)]),
        PopulationCells(canary(version="v9"), [pair_cell([0.5] * 50)]),
    ]
    assert bench.run(T0, T0 + 60, lambda _: odd) == []
    assert bench.core.gauges()["version_mismatches"] == 61 * 100
    evidence = bench.core._runs["chat"].last
    assert evidence is not None
    assert evidence.coverage is not None
    assert "not compared" in evidence.coverage.reason


def test_a_version_compared_with_itself_is_no_evidence() -> None:
    """V1: both halves say the canary's version, or neither the prompt under test: that always passes."""
    bench = Bench.started()
    same = [PopulationCells(canary(differs=0), [pair_cell([0.0] * 50, unmatched__no_canary=2)])]
    assert kinds(bench.run(T0, T0 + 400, lambda _: same)) == ["hold"], "nothing was compared"
    assert bench.core.gauges()["version_mismatches"] == 401 * 50
    evidence = bench.core._runs["chat"].last
    assert evidence is not None
    assert {one.verdict for one in evidence.verdicts if one.rule.metric.family == "pairs"} == {
        "not_enough_data"
    }
    assert evidence.coverage is not None
    assert evidence.coverage.value == 0.0, "what stayed unmatched still counts"


def test_what_another_model_lost_is_no_evidence_of_this_one() -> None:
    """V1: pairs of a third model do not count as scored, so its lost halves do not count as missing."""
    bench = Bench.started()
    both = [
        PopulationCells(canary(), [pair_cell([0.001] * 50)]),
        PopulationCells(canary(version="v9"), [pair_cell([], unmatched__no_baseline=40)]),
    ]
    bench.run(T0, T0 + 60, lambda _: both)
    evidence = bench.core._runs["chat"].last
    assert evidence is not None
    assert evidence.coverage is not None
    assert evidence.coverage.value == 1.0


def test_a_policy_that_only_observes_raises_no_weight() -> None:
    bench = Bench.started(
        "rules: [{id: g3, metric: kl_lower, statistic: mean, window: 60s, limit: 0.05, min_samples: 10,"
        " action: rollback_l1, mode: observe}]"
    )
    good = [PopulationCells(canary(), [pair_cell([0.001] * 50)])]
    assert kinds(bench.run(T0, T0 + 400, lambda _: good)) == []
    assert "no rule enforces" in bench.core.not_ready("chat", us(T0 + 401))


def test_other_generations_and_earlier_seconds_do_not_count() -> None:
    bench = Bench.started()
    bad = [pair_cell([0.5] * 500)]
    effects = bench.run(
        T0 - 10,
        T0 - 1,
        lambda _: [PopulationCells(canary(generation=None), bad), PopulationCells(canary(generation=2), bad)],
    )
    assert effects == []
    effects = bench.run(T0, T0, lambda _: [PopulationCells(canary(generation=None), bad)])
    assert kinds(effects) == ["trip"]


def test_a_new_generation_begins_anew() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 20, ill_pairs())
    (effect,) = bench.command(command("new_generation", "g2"), us(T0 + 40))
    assert effect.directive is not None
    assert (effect.directive.generation, effect.directive.state) == (2, "observing")
    assert effect.directive.weights["v2"] == 1.0
    assert effect.directive.cause is None
    assert bench.run(T0 + 21, T0 + 80, ill_pairs()) == []
    again = bench.run(
        T0 + 81, T0 + 120, lambda _: [PopulationCells(canary(generation=2), [pair_cell([0.2] * 10)])]
    )
    assert kinds(again) == ["trip"]


def test_three_trips_in_a_row_are_level_2() -> None:
    bench = Bench.started()
    levels = []
    for generation in (1, 2, 3):
        cells = [PopulationCells(canary(generation=generation), [pair_cell([0.2] * 100)])]
        second = T0 + 30 * generation
        effects = bench.run(
            second - 29, second, lambda at, cells=cells, last=second: cells if at == last else None
        )
        assert kinds(effects) == ["trip"]
        assert effects[0].directive is not None
        levels.append(effects[0].directive.level)
        bench.command(command("new_generation", f"g{generation}"), us(second + 17))
    assert levels == [1, 1, 2]


@pytest.mark.parametrize("between", ["nothing", "abort"])
def test_a_generation_that_does_not_trip_breaks_the_row(between: str) -> None:
    """Three consecutive generations (R2). Known-bad: trips counted over whatever came between them."""
    bench = Bench.started()
    levels = []
    for generation in (1, 2, 3, 4):
        second = T0 + 30 * generation
        score = 0.001 if generation == 3 else 0.2
        cells = [PopulationCells(canary(generation=generation), [pair_cell([score] * 100)])]
        effects = bench.run(
            second - 29, second, lambda at, cells=cells, last=second: cells if at == last else None
        )
        levels += [one.directive.level for one in effects if one.directive is not None and one.decision]
        if generation == 3 and between == "abort":
            bench.command(command("abort", "a"), us(second + 16))
        bench.command(command("new_generation", f"g{generation}"), us(second + 17))
    assert levels == [1, 1, 1]


def test_policy_change_zeroes_the_windows() -> None:
    """R5: loading and zeroing are one change; epoch moves, generation does not."""
    bench = Bench.started()
    bench.run(T0, T0 + 8, ill_pairs())
    text = "rules: [{id: mine, metric: kl_lower, window: 60s, limit: 0.1, action: rollback_l1}]"
    (effect,) = bench.command(command("policy", "p", arguments={"policy": text}), us(T0 + 25))
    assert effect.rollout is not None
    assert effect.directive is not None
    assert effect.directive.generation == 1
    assert effect.rollout.policy == text
    effects = bench.run(T0 + 9, T0 + 40, ill_pairs())
    assert kinds(effects) == ["trip"]
    assert decisions(effects)[0].inputs.complete_through == T0 + 18


def test_a_command_sent_twice_is_obeyed_once() -> None:
    bench = Bench.started()
    assert kinds(bench.command(command("pause", "p"), us(T0 + 1))) == ["command"]
    assert bench.command(command("pause", "p"), us(T0 + 2)) == []
    assert kinds(bench.command(command("pause", "q"), us(T0 + 3))) == ["refused"]


def test_what_was_answered_is_not_read_again() -> None:
    """Turned away before the core, too: with other keys and clocks the same words may pass."""
    bench = Bench.started()
    assert bench.crash().core.read_from().command_offset == 0
    bench.core.answered(7)
    bench.core.answered(5)
    bench.write(bench.core.renew(us(T0 + 10)))
    assert bench.crash().core.read_from().command_offset == 8
    bench.core.on_command(command("pause", "p"), 9, us(T0 + 11))
    assert bench.core.read_from().command_offset == 9, "a record may hold several"


def test_without_a_roll_out_it_is_remembered_too_once_a_renewal() -> None:
    bench = Bench.new()
    written = []
    for tenth in range(100):
        bench.core.answered(tenth)
        written += bench.write(bench.core.renew(us(T0 + tenth / 10)))
    assert len(written) == 2, "ten seconds, renewed every five"
    assert {(one.directive, one.decision) for one in written} == {(None, None)}
    assert bench.crash().core.read_from().command_offset == 51
    assert bench.crash().core.renew(us(T0 + 20)) == []


def test_without_a_roll_out_a_gate_with_other_settings_says_so_too() -> None:
    """Known-bad: what its predecessor ran with stays in `klaxon.state`; status holds sources against it."""
    bench = Bench.new()
    bench.core.answered(0)
    bench.write(bench.core.renew(us(T0)))
    bench.settings = settings(settings_hash="others")
    heir = bench.crash()
    ((effect,), again) = heir.write(heir.core.renew(us(T0 + 6))), heir.core.renew(us(T0 + 12))
    (said,) = effect.states
    assert isinstance(said, PartitionMemory)
    assert (said.answered, said.content_hash, again) == (0, "others", [])


def test_compare_and_set() -> None:
    bench = Bench.started()
    stale = command("pause", "p", expects=Expects(generation=1, epoch=0))
    (effect,) = bench.command(stale, us(T0 + 1))
    assert kinds([effect]) == ["refused"]
    assert decisions([effect])[0].reason.startswith("pause: stale")
    right = command("pause", "q", expects=Expects(generation=1, epoch=1))
    assert kinds(bench.command(right, us(T0 + 2))) == ["command"]


def test_renewing_does_not_make_an_expectation_stale() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 2, healthy_pairs())
    assert len(bench.write(bench.core.renew(us(T0 + 20)))) == 1
    right = command("pause", "q", expects=Expects(generation=1, epoch=1))
    assert kinds(bench.command(right, us(T0 + 21))) == ["command"]


def test_roll_outs_are_renewed_in_step_and_none_too_late() -> None:
    bench = Bench.started()
    for number in range(1, 12):
        spec = {**SPEC, "rollout": f"r{number}"}
        started = command("start", f"s{number}", rollout=f"r{number}", arguments={"spec": spec})
        bench.command(started, us(T0 + number * 0.4))
    last = dict.fromkeys(bench.core.names(), us(T0))
    transactions = 0
    for tenth in range(50, 1_000):
        now_us = us(T0 + tenth / 10)
        renewed = bench.write(bench.core.renew(now_us))
        transactions += bool(renewed)
        for effect in renewed:
            assert now_us - last[effect.name] >= 2_500_000 or last[effect.name] == us(T0)
            last[effect.name] = now_us
        assert all(now_us - then_us < 5_000_000 + 4_400_000 for then_us in last.values())
        if tenth > 150:
            assert all(now_us - then_us < 5_000_000 for then_us in last.values())
    assert transactions <= 95 / 5 + 2


def test_leases_are_renewed_only_while_the_gate_sees() -> None:
    bench = Bench.started()
    start = bench.effects[0].directive
    assert start is not None
    assert start.lease_until_us == start.ts_us, "nothing was seen yet: no licence to raise anything"
    bench.run(T0, T0 + 2, healthy_pairs())
    (renewed,) = bench.write(bench.core.renew(us(T0 + 20)))
    assert renewed.decision is None
    assert renewed.directive is not None
    assert renewed.directive.epoch == start.epoch + 1
    assert renewed.directive.lease_until_us == us(T0 + 35)
    assert bench.core.renew(us(T0 + 24)) == []
    (blind,) = bench.write(bench.core.renew(us(T0 + 60)))
    assert blind.directive is None
    assert "old" in bench.core.blind("chat", us(T0 + 60))


def test_an_unknown_source_ends_the_sight() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 2, healthy_pairs())
    for topic in (REQUESTS, TELEMETRY):
        bench.read(final(topic, T0 + 3, T0 + 3))
    bench.read(final(LOGITS, T0 + 3, T0 + 3, whole_from=T0 + 50))
    bench.judge(T0 + 3)
    assert "unknown" in bench.core.blind("chat", us(T0 + 20))


def test_a_hole_without_a_reason_is_a_gap_that_waits_for_an_operator() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    effects = bench.run(T0 + 10, T0 + 12, healthy_pairs())
    assert kinds(effects) == ["gap"]
    assert bench.control["chat"].state == "paused"
    assert kinds(bench.command(command("resume", "r"), us(T0 + 30))) == ["command"]
    assert kinds(bench.run(T0 + 13, T0 + 20, healthy_pairs())) == []


def test_a_late_start_of_a_worker_is_unknown_but_no_gap() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.close(T0 + 10, whole_from=T0 + 10)
    assert bench.judge(T0 + 10) == []


def test_severest_action_wins_and_all_causes_are_listed() -> None:
    bench = Bench.started(
        """
rules:
  - {id: mild, metric: kl_lower, window: 10s, limit: 0.05, action: fallback}
  - {id: hard, metric: ttft_us, statistic: p50, window: 10s, limit: 180ms, action: rollback_l1}
"""
    )
    effects = bench.run(T0, T0, ill_pairs(100), quick_requests(100, 200_000))
    assert kinds(effects) == ["trip"]
    cause = effects[0].directive.cause if effects[0].directive else None
    assert cause is not None
    assert (cause.rule, cause.also) == ("hard", ("mild",))


def test_fallback_gives_everything_to_the_fallback_version() -> None:
    bench = Bench.new()
    policy = "rules: [{id: f, metric: kl_lower, window: 10s, limit: 0.05, action: fallback}]"
    bench.command(start_command(policy, fallback="small"), us(T0))
    (effect,) = bench.run(T0, T0, ill_pairs(100))
    assert effect.directive is not None
    assert effect.directive.weights == {"v1": 0.0, "v2": 0.0, "small": 100.0}
    assert effect.directive.last_promoted == effect.directive.weights


def test_observing_rules_are_told_once_and_move_nothing() -> None:
    bench = Bench.started(
        "rules: [{id: o, metric: kl_lower, window: 10s, limit: 0.05, action: rollback_l1, mode: observe}]"
    )
    effects = bench.run(T0, T0 + 60, ill_pairs())
    assert kinds(effects) == ["advise"]
    assert effects[0].directive is not None
    assert effects[0].directive.state == "observing"


def test_backlog_may_trip_but_never_raises_a_weight() -> None:
    bench = Bench.started()
    for second in range(T0, T0 + 1000):
        bench.close(second, healthy_pairs()(second), quick_requests()(second))  # type: ignore[operator]
    effects = bench.write(bench.core.judge_complete(us(T0 + 5000)))
    assert effects == []


def test_a_contradictory_cell_is_an_error_and_blocks() -> None:
    bench = Bench.started()
    cell = pair_cell([0.01] * 10)
    cell.measures["kl_lower"].counts.append(3)

    def pairs(second: int) -> list[PopulationCells]:
        return [PopulationCells(canary(), [cell if second == T0 + 300 else pair_cell([0.01] * 10)])]

    assert "step" not in kinds(bench.run(T0, T0 + 500, pairs, quick_requests()))
    assert "contradicts" in bench.core.not_ready("chat", us(T0 + 516))


def test_retire_and_start_again() -> None:
    bench = Bench.started()
    assert kinds(bench.command(command("retire", "r1"), us(T0 + 1))) == ["refused"]
    assert kinds(bench.command(command("abort", "a"), us(T0 + 2))) == ["command"]
    assert kinds(bench.command(command("retire", "r2"), us(T0 + 3))) == ["command"]
    (effect,) = bench.command(start_command(ident="again"), us(T0 + 4))
    assert effect.directive is not None
    assert effect.directive.generation == 2
    assert effect.directive.epoch > 3


def test_two_commands_of_one_record_are_both_obeyed() -> None:
    bench = Bench.started()
    assert kinds(bench.core.on_command(command("pause", "p"), 5, us(T0 + 1))) == ["command"]
    assert kinds(bench.core.on_command(command("resume", "r"), 5, us(T0 + 1))) == ["command"]
    assert bench.core.on_command(command("pause", "p"), 5, us(T0 + 1)) == []
    assert bench.core.on_command(command("pause", "x"), 4, us(T0 + 1)) == []


def test_dropped_halves_lower_coverage() -> None:
    bench = Bench.started()
    cells = [Cell("all", "", {"dropped": 1}, {}, [])]
    dropped = [
        PopulationCells(canary(arm=arm, version=None, generation=None, differs=0), cells)
        for arm in ("canary", "baseline")
    ]
    ours = [PopulationCells(canary(), [pair_cell([0.01] * 8)])]
    assert kinds(bench.run(T0, T0 + 20, lambda _: [*ours, *dropped])) == ["hold"]
    last = bench.core._runs["chat"].last
    assert last is not None
    assert last.coverage is not None
    assert last.coverage.value == pytest.approx(0.8)


def test_ttft_of_shadow_copies_is_not_what_users_get() -> None:
    bench = Bench.started(
        "rules: [{id: b, metric: ttft_us, statistic: p99, window: 60s, limit: 310ms, hold: 30s, arm: any,"
        " traffic: user, action: fallback}]"
    )
    slow = [
        PopulationCells(
            canary(differs=0),
            [
                request_cell([400_000] * 20),
                request_cell([400_000] * 10, "traffic", "shadow"),
                request_cell([100_000] * 10, "traffic", "user"),
            ],
        )
    ]
    assert bench.run(T0, T0 + 100, None, lambda _: slow) == []


def test_the_last_seconds_before_a_long_silence_are_kept() -> None:
    """The first record after hours closes all of them in one statement; the oldest hold the evidence."""
    bench = Bench.started()
    bad = [PopulationCells(canary(), [pair_cell([0.2] * 120)])]
    silence_s = 3 * 3600
    bench.run(T0 - 1, T0 - 1)
    for topic in SOURCES:
        contents = {T0: bad} if topic == LOGITS else {}
        bench.read(final(topic, T0, T0 + silence_s, contents))
    assert kinds(bench.judge(T0 + silence_s)) == ["trip"]


def test_a_histogram_that_lacks_values_is_no_pass() -> None:
    """Requests whose latencies are not in the histogram are unknown, not fast."""
    bench = Bench.started()
    cell = request_cell([100_000] * 200)
    torn = msgspec.structs.replace(cell.measures["ttft_us"], bins=[], counts=[])
    bench.close(
        T0,
        None,
        [PopulationCells(canary(differs=0), [msgspec.structs.replace(cell, measures={"ttft_us": torn})])],
    )
    bench.judge(T0)
    last = bench.core._runs["chat"].last
    assert last is not None
    assert {one.rule.id: one.verdict for one in last.verdicts}["G5-slow-share"] == "error"
