"""A decision in plain words: every kind, every cause, whatever an older gate left out; and its history."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.core.gate.answer import Obstacle
from pipeline.core.gate.explanation import explain, waiting_text
from pipeline.core.gate.explanation_numbers import amount, counted_as, metric_words, moment, share_words
from pipeline.core.gate.explanation_reasons import Account
from pipeline.policy_file import parse_policy, shipped_policy_text
from schemas.control import (
    Cause,
    Decision,
    DecisionKind,
    Directive,
    Evaluation,
    Inputs,
    Located,
    RolloutSpec,
    Segment,
)
from schemas.records import read_json
from tests.core.gate.build import (
    SPEC,
)

AT_US = 1_796_126_584_000_000
"""2026-12-01 12:03:04 UTC."""
POLICY = parse_policy(shipped_policy_text())
THE_SPEC = msgspec.convert(SPEC, RolloutSpec)
PAIRS = tuple(f"{number:032x}" for number in range(3))
CAUSE = Cause(
    rule="G3-divergence", capability="G3", metric="kl_lower mean", value=0.1412, bound=0.1412, limit=0.05,
    window_us=300_000_000, samples=112, coverage=0.98, scope="node_context=gpu-3|>2048",
    located=Located(
        dimension="node_context", value="gpu-3|>2048", share_of_excess=0.97, share_of_traffic=0.04
    ),
    pair_ids=PAIRS,
)  # fmt: skip
SLOW = Evaluation(
    rule="G5-slow-share", scope="rollout", verdict="trip", metric="ttft_over_share 500 ms", value=0.0724,
    limit=0.05, samples=1204,
)  # fmt: skip
DIVERGED = Evaluation(
    rule="G3-divergence", scope="rollout", verdict="trip", metric="kl_lower mean", value=0.06, limit=0.05
)
COVERED = Evaluation(
    rule="coverage", scope="rollout", verdict="pass", metric="coverage", value=0.98, limit=0.9, samples=812
)


def directive(**fields: object) -> Directive:
    values: dict[str, object] = {
        "rollout": "chat", "generation": 3, "epoch": 17, "ts_us": AT_US, "lease_until_us": AT_US,
        "dead_man_us": 60_000_000, "state": "observing", "weights": {"v1": 75.0, "v2": 25.0},
        "last_promoted": {"v1": 100.0, "v2": 0.0}, "fallback": "v1",
    }  # fmt: skip
    return Directive(**{**values, **fields})  # type: ignore[arg-type]


def tripped(**fields: object) -> Directive:
    values: dict[str, object] = {
        "state": "tripped", "weights": {"v1": 100.0, "v2": 0.0}, "level": 1, "cause": CAUSE,
    }  # fmt: skip
    return directive(**{**values, **fields})


def decision(kind: str, reason: str = "", said: Directive | None = None, **fields: object) -> Decision:
    inputs = Inputs(
        offsets={"klaxon.logits/0": 1},
        command_offset=0,
        complete_through=AT_US // 1_000_000 - 17,
        now_us=AT_US,
    )
    return Decision(kind=kind, directive=said, inputs=inputs, reason=reason, **fields)  # type: ignore[arg-type]


ALL_ON_V2 = {"v1": 0.0, "v2": 100.0}
LOW = replace(COVERED, value=0.81)
TAIL = replace(SLOW, rule="B1-p99", metric="ttft_us p99", value=340e3, limit=310e3)
ABORTED = Cause(rule="abort", also=("by alice",))
LONG = Segment(dimension="context", value=">2048")
SLOW_NODE = replace(CAUSE, rule="G2-ttft", capability="G2")
BEFORE = decision("step", "pass at 10 %: now 25 %", directive(epoch=12))


def told(one: Decision, before: Decision | None = BEFORE, **known: object) -> str:
    values: dict[str, object] = {"spec": THE_SPEC, "policy": POLICY, **known}
    return explain(Account("chat", one, before, **values)).text  # type: ignore[arg-type]


TRIP = decision("trip", "rollback_l1: G3-divergence", tripped())


def test_a_trip_names_everything() -> None:
    assert told(TRIP) == (
        "The canary `v2` was taken out of rotation (weight 25 % to 0) in generation 3 at 2026-12-01 12:03:04"
        " UTC because rule G3-divergence (G3) was over its limit: mean kl_lower 0.141 nats over 5 min in"
        " node_context gpu-3|>2048 (limit 0.05 nats), from 112 pairs at coverage 0.98."
        " That cell carries 97 % of the excess on 4 % of the traffic."
        f" Pairs that prove it, the worst first: {', '.join(PAIRS)}."
        " Every value is a certified lower bound, so truncated candidate lists cannot have caused it."
        " It fell on complete seconds, up to 12:02:48 UTC."
        " That is final in generation 3: `klaxon rollout new-generation chat` begins anew."
    )


def test_what_the_reasons_hold_is_the_cause() -> None:
    (one,) = explain(Account("chat", TRIP, BEFORE, (), THE_SPEC, POLICY)).reasons
    held = msgspec.to_builtins(one)
    for name, value in msgspec.to_builtins(CAUSE).items():
        assert held[name] == value
    assert (held["action"], held["hold_s"]) == ("rollback_l1", None)


def test_no_more_pairs_than_a_cause_may_name() -> None:
    many = replace(CAUSE, pair_ids=tuple(f"{number:032x}" for number in range(50)))
    text = told(replace(TRIP, directive=tripped(cause=many)))
    assert len(re.findall(r"[0-9a-f]{32}", text)) == 20


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            replace(CAUSE, located=None, scope="rollout"),
            (
                "in the whole roll-out",
                "not confined to one class of traffic: none carries 80 %",
            ),
        ),
        (
            replace(CAUSE, scope="rollout"),
            ("The deviation sits in node_context gpu-3|>2048, which",),
        ),
        (replace(CAUSE, pair_ids=PAIRS[:1]), ("The pair that proves it: 0",)),
        (replace(CAUSE, value=0.0500001), ("0.0500001 nats over", "(limit 0.05 nats)")),
        (
            replace(
                CAUSE, metric="ttft_us p99", value=312_000.0, bound=309_000.0, limit=300_000.0, pair_ids=()
            ),
            (
                "p99 of ttft_us (time to the first token) 312 ms over 5 min",
                "(limit 300 ms), from 112 requests",
                "It is certainly not below 309 ms: the histogram's resolution did not cause it.",
            ),
        ),
        (
            replace(CAUSE, metric="ttft_over_share 500 ms", value=0.072, limit=0.05, pair_ids=()),
            ("share of requests over 500 ms to the first token 7.2 %", "(limit 5 %)"),
        ),
        (replace(CAUSE, metric="kl_floor mean"), ("mean kl_floor 0.141 nats",)),
        (replace(CAUSE, metric="something new"), ("something new 0.141 over", "from 112 samples")),
    ],
)
def test_numbers_and_places(said: Cause, words: tuple[str, ...]) -> None:
    text = told(replace(TRIP, directive=tripped(cause=said)))
    for part in words:
        assert part in text
    assert ("certified" in text) == (said.metric == "kl_lower mean")


def test_several_causes_at_once() -> None:
    """The severest is the cause; the others' numbers come from evaluations. What observes is none."""
    quiet = replace(SLOW, rule="B1-p50", metric="ttft_us p50")
    both = decision(
        "trip",
        "rollback_l1: G3-divergence, G5-slow-share",
        tripped(cause=replace(CAUSE, also=("G5-slow-share",))),
        evaluations=(
            Evaluation(
                rule="G3-divergence", scope="rollout", verdict="trip", metric="kl_lower mean", value=0.06
            ),
            Evaluation(
                rule="G3-divergence", scope="node_context=gpu-3|>2048", verdict="trip", metric="kl_lower mean"
            ),
            SLOW,
            quiet,
        ),
    )
    text = told(both)
    assert "It was over in the whole roll-out too." in text
    assert (
        "At the same moment rule G5-slow-share (G5) was over its limit: share of requests over 500 ms to"
        " the first token 7.24 % over 5 min in the whole roll-out (limit 5 %), from 1,204 requests."
    ) in text
    assert "B1" not in text


WON = replace(CAUSE, rule="G3-anytime", evidence=45.31, evidence_bound=40.0, value=0.041)


def test_sequential_evidence_is_no_value_over_a_limit() -> None:
    """The window's value may be under the limit by then; what tripped is the evidence."""
    part = replace(
        DIVERGED, rule="G3-anytime", scope="node_context=gpu-3|>2048", reason="E 900, 45 of the sum"
    )
    whole = replace(DIVERGED, rule="G3-anytime", reason="E 45.3 of 40, K 0.2 of 20")
    text = told(decision("trip", "rollback_l1: G3-anytime", tripped(cause=WON), evaluations=(whole, part)))
    assert (
        "because rule G3-anytime (G3) had its evidence together: 45.3 where 40 trips. It comes from"
        " node_context gpu-3|>2048, with mean kl_lower 0.041 nats over 5 min (limit 0.05 nats), from 112"
        " pairs at coverage 0.98. Evidence adds up over the generation, however often it is looked at: while"
        " nothing is over the limit, the chance that this rule ever trips is at most 2.5 %. That cell carries"
    ) in text
    assert "too." not in text
    assert "was over its limit" not in text


def test_sequential_evidence_beside_another_cause_comes_from_its_evaluation() -> None:
    whole = replace(DIVERGED, rule="G3-anytime", reason="E 1.2e+07 of 40, K 0.2 of 20", samples=500)
    both = tripped(cause=replace(CAUSE, also=("G3-anytime",)))
    text = told(decision("trip", "rollback_l1: G3-divergence, G3-anytime", both, evaluations=(whole,)))
    assert (
        "At the same moment rule G3-anytime (X4) had its evidence together: 1.2e+07 where 40 trips. It"
        " comes from the whole roll-out, with mean kl_lower 0.06 nats"
    ) in text


@pytest.mark.parametrize("bound", ["20", "2e+04", "1e+12"])
def test_sequential_evidence_of_a_rule_that_observes_comes_from_the_scope_that_carries_it(bound: str) -> None:
    """Known-bad: said to come from the whole roll-out, whose mean is far under the limit; and a bound that is
    cut off before its exponent (alpha is small, or earlier policies spent of it)."""
    whole = replace(
        DIVERGED, rule="X3-noise-floor", metric="excess mean", value=0.002, limit=0.01, samples=500,
        reason=f"E 1.4e+13 of {bound}, K 61.1 of 20",
    )  # fmt: skip
    part = replace(whole, scope="node=c-1", value=0.5, samples=10, reason="E 7.4e+13, 1.4e+13 of the sum")
    one = decision("advise", "over the limit: X3-noise-floor", directive(), evaluations=(whole, part))
    assert (
        f"Rule X3-noise-floor (X3) had its evidence together: 1.4e+13 where {float(bound):.3g} trips. It"
        " comes from node c-1, with mean excess 0.5 nats over 5 min (limit 0.01 nats), from 10 pairs."
    ) in told(one)


def test_where_it_sits_is_not_said_of_traffic_that_is_judged_as_one() -> None:
    """Its cells have no nodes and no classes: that none of them carries it was never looked at."""
    users = replace(CAUSE, rule="B1-p99", metric="ttft_us p99", located=None, scope="rollout", pair_ids=())
    text = told(decision("trip", "fallback: B1-p99", tripped(cause=users)))
    assert "No place is known of it: the rule judges user traffic as one." in text
    assert "not confined" not in text


def test_level_two_and_fallback() -> None:
    earlier = tuple(replace(TRIP, directive=tripped(generation=number, cause=CAUSE)) for number in (1, 2))
    escalated = decision(
        "trip", "rollback_l1: G3-divergence; level 2 after 3 trips in a row", tripped(level=2)
    )
    assert (
        "The roll-back is of level 2: the weight alone is not enough, roll the image back. It is trip 3 in a"
        " row, after generations 1 and 2."
    ) in told(escalated, trips=earlier)
    assert "It is trip 3 in a row." in told(escalated, trips=())
    asked = told(decision("trip", "rollback_l2: G3-divergence", tripped(level=2)))
    assert "roll the image back." in asked
    assert "in a row" not in asked
    moved = decision(
        "trip", "fallback: B1-p99", tripped(weights={"v1": 0.0, "v2": 0.0, "v0": 100.0}, fallback="v0")
    )
    assert "(weight 25 % to 0), everybody moved to the fallback version `v0` in generation 3" in told(moved)


def test_a_ratio_is_told_with_both_sides() -> None:
    ratio = replace(
        SLOW_NODE, metric="ttft_us p99: canary / baseline", value=1.3204, bound=1.29, limit=1.15,
        samples=1204, level=412e3, baseline=312e3, baseline_samples=5000, scope="node=gpu-3", located=None,
        pair_ids=(), window_us=60_000_000,
    )  # fmt: skip
    ejected = directive(ejected_nodes=("gpu-3",), cause=ratio)
    text = told(decision("eject", "eject_node: gpu-3 (G2-ttft)", ejected))
    assert (
        "because rule G2-ttft (G2) was over its limit: p99 of ttft_us (time to the first token), canary over"
        " baseline, 1.32 × over 1 min in node gpu-3 (limit 1.15 ×): 412 ms against 312 ms, from 1,204"
        " requests against 5,000 at coverage 0.98. It is certainly not below 1.29 ×"
    ) in text
    assert "confined" not in text
    speed = replace(
        ratio, metric="tokens_per_s p50: baseline / canary", level=20.0, baseline=41.25, value=2.06
    )
    text = told(decision("pause", "over the limit: G2-ttft", directive(state="paused", cause=speed)))
    assert "p50 of tokens_per_s, baseline over canary, 2.06 × over 1 min" in text
    assert "(limit 1.15 ×): 20 tokens/s against 41.2 tokens/s" in text


def test_what_a_trip_says_beside_its_rules() -> None:
    reason = (
        "rollback_l1: G2-ttft; eject_node: c-1, c-2: 2 of 4 nodes: the version is at fault; level 2 after 3"
    )
    text = told(decision("trip", f"{reason} trips in a row", tripped(level=2)))
    assert "Eject_node: c-1, c-2: 2 of 4 nodes: the version is at fault. That is final" in text
    assert text.count("in a row") == 1


def test_fresh_evidence_is_told_apart() -> None:
    fresh = replace(TRIP, inputs=replace(TRIP.inputs, offsets={"klaxon.logits/0": 1, "~klaxon.logits/0": 4}))
    assert "It fell on fresh evidence; complete was everything before 12:02:48 UTC." in told(fresh)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            decision(
                "step",
                "pass at 10 %: now 25 %",
                directive(),
                evaluations=(replace(SLOW, value=0.004, verdict="pass"), COVERED),
            ),
            (
                "The weight of the canary `v2` rose from 10 % to 25 % in generation 3 at",
                "every rule that enforces passed",
                "G5-slow-share: share of requests over 500 ms to the first token 0.4 % (limit 5 %)"
                " from 1,204 requests; coverage: coverage 0.98 (limit 0.9) from 812 mirrored requests.",
            ),
        ),
        (
            decision("promote", "pass at 100 %", directive(state="promoted", weights=ALL_ON_V2)),
            ("The canary `v2` was promoted in generation 3", "it gets all traffic now"),
        ),
        (
            decision("pause", "over the limit: G3-divergence", directive(state="paused", cause=CAUSE)),
            (
                "The weight of the canary `v2` was held at 25 % in generation 3",
                "because rule G3-divergence (G3) was over its limit",
                "`klaxon rollout resume chat`",
            ),
        ),
        (
            decision("pause", "coverage 0.810 is below 0.9", directive(state="paused"), evaluations=(LOW,)),
            ("12:03:04 UTC: coverage 0.810 is below 0.9.", "Of 812 mirrored requests 81 % could be compared"),
        ),
        (
            decision("hold", "coverage 0.810 is below 0.9", directive(), evaluations=(LOW,)),
            ("Weight steps were suspended in generation 3", "They go on by themselves once coverage is back"),
        ),
        (
            decision("close", "coverage is back", directive()),
            ("possible again in generation 3", "coverage is back."),
        ),
        (
            decision("advise", "over the limit, observed only: B1-p99", directive(), evaluations=(TAIL,)),
            (
                "Nothing was moved in generation 3",
                "Rule B1-p99 (B1) was over its limit, for 30 s without a break: p99 of ttft_us (time to"
                " the first token) 340 ms over 1 min in the whole roll-out (limit 310 ms), from 1,204",
            ),
        ),
        (
            decision(
                "gap", "seconds 1..9 of klaxon.logits/0 are no longer retained", directive(state="paused")
            ),
            (
                "Evidence is missing for good",
                "held at 25 %. It stays there until an operator has looked: `klaxon",
            ),
        ),
        (
            decision("eject", "eject_node: G2-ttft", directive(ejected_nodes=("gpu-3",), cause=SLOW_NODE)),
            (
                "Node `gpu-3` of the canary gets no traffic any more in generation 3",
                "because rule G2-ttft (G2) was over its limit",
                "Out of rotation now: node `gpu-3`.",
                "The weight stands at 25 %.",
            ),
        ),
        (
            decision(
                "eject", "narrow: G3-divergence", directive(state="narrowed", excluded_segments=(LONG,))
            ),
            ("Context `>2048` of the canary gets no traffic any more", ": narrow: G3-divergence."),
        ),
        (
            decision("reassert", "a foreign directive used up numbers", directive()),
            ("The gate said its directive again", "used up numbers", "find out who else may write"),
        ),
        (
            decision("command", "abort: aborted by an operator", tripped(cause=ABORTED)),
            ("(weight 25 % to 0) in", "because an operator aborted it (`alice`). No rule is behind it."),
        ),
        (
            decision("command", "start: started at 1 %", directive(generation=1)),
            (
                "`start` was obeyed in generation 1",
                "It is judged by G3-divergence, G3-anytime and G5-slow-share.",
            ),
        ),
        (
            decision("command", "retire: retired", tripped()),
            ("An operator's `retire` was obeyed", "What had ended it: G3-divergence."),
        ),
        (
            decision("refused", "step: no pass: a: 40 of 100 samples", directive()),
            (
                "An operator's `step` was refused at 2026-12-01 12:03:04 UTC: no pass: a: 40 of 100 samples."
                " Nothing was moved: generation 3 is observing at `v1` 75 % and `v2` 25 %.",
            ),
        ),
        (
            decision("refused", "pause: there is no roll-out 'chat'; start it first", None),
            ("there is no roll-out 'chat'; start it first. Nothing was moved.",),
        ),
    ],
)
def test_every_kind_of_decision(one: Decision, words: tuple[str, ...]) -> None:
    before = decision("step", "", directive(epoch=9, weights={"v1": 90.0, "v2": 10.0}))
    if one.kind == "command":
        before = BEFORE
    text = told(one, before)
    for part in words:
        assert part in text
    assert "None" not in text
    assert ".." not in text.replace("1..9", "")
    assert "  " not in text


def test_a_cause_of_an_earlier_decision_is_not_blamed() -> None:
    """A node was ejected before; coverage pauses now. `a` stands in the word coverage, and names no rule."""
    for name in ("G2-ttft", "a"):
        stands = directive(state="paused", ejected_nodes=("gpu-3",), cause=replace(SLOW_NODE, rule=name))
        text = told(decision("pause", "coverage 0.810 is below 0.9", stands, evaluations=(LOW,)))
        assert "because" not in text
        assert ": coverage 0.810 is below 0.9." in text


def test_a_node_that_comes_back() -> None:
    before = decision("eject", "", directive(ejected_nodes=("gpu-3", "gpu-4")))
    text = told(
        decision("eject", "gpu-4 is within its limit again", directive(ejected_nodes=("gpu-3",))), before
    )
    assert text.startswith("Node `gpu-4` of the canary gets traffic again in generation 3 at")
    assert "Out of rotation now: node `gpu-3`." in text


# --- records of other releases -------------------------------------------------------------------------

OLDEST = b"""{"kind": "%s", "directive": {"rollout": "chat", "generation": 1, "epoch": 2, "ts_us": 1,
 "lease_until_us": 1, "dead_man_us": 1, "state": "tripped", "weights": {"v1": 100, "v2": 0},
 "last_promoted": {}, "fallback": "v1"%s}, "inputs": {"offsets": {}, "command_offset": 0,
 "complete_through": -1, "now_us": 1}, "news": [1]}"""


@pytest.mark.parametrize("kind", get_args(DecisionKind))
@pytest.mark.parametrize(
    "cause", [b"", b', "cause": {"rule": "G3"}', b', "cause": {"rule": "G3", "value": 1}']
)
def test_a_decision_without_the_fields_of_today(kind: str, cause: bytes) -> None:
    one = read_json(OLDEST % (kind.encode(), cause), Decision)
    for known in ({}, {"spec": THE_SPEC, "policy": POLICY}):
        text = explain(Account("chat", one, None, **known)).text  # type: ignore[arg-type]
        assert "None" not in text
        assert "1970-01-01 00:00:00 UTC" in text
    if kind == "trip":
        assert text.startswith("The canary `v2` was taken out of rotation (weight 0) in generation 1 at")
        assert ("because rule G" in text) == bool(cause)


numbers = st.none() | st.floats()
words = st.none() | st.text(max_size=12)


@given(
    st.builds(
        Cause, rule=st.text(max_size=8), capability=words, metric=words, value=numbers, bound=numbers,
        limit=numbers, window_us=st.none() | st.integers(0, 10**15), samples=st.none() | st.integers(),
        coverage=numbers, scope=words,
        located=st.none() | st.builds(
            Located, dimension=st.text(max_size=4), value=st.text(max_size=4),
            share_of_excess=st.floats(), share_of_traffic=st.floats(),
        ),
        pair_ids=st.lists(st.text(max_size=4), max_size=3).map(tuple), also=st.just(()),
    ),
    st.sampled_from(["trip", "pause", "eject", "advise", "command", "refused"]),
    st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_no_record_that_can_be_read_ends_it(cause: Cause, kind: str, now_us: int) -> None:
    one = decision(kind, "over the limit", tripped(cause=cause))
    told(replace(one, inputs=replace(one.inputs, now_us=now_us, complete_through=now_us)))


# --- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "value", "limit", "text"),
    [
        ("kl_lower mean", 0.1412, 0.05, "0.141 nats"),
        ("kl_lower mean", 0.05, 0.05, "0.05 nats"),
        ("kl_lower mean", 0.05 + 1e-12, 0.05, "0.050000000001 nats"),
        ("kl_lower mean", 0.0, 0.05, "0 nats"),
        ("kl_lower mean", 12.345, None, "12.3 nats"),
        ("ttft_us p99", 310_500.0, 310_000.0, "310.5 ms"),
        ("ttft_us p99", 1_234_567.0, None, "1,230 ms"),
        ("ttft_over_share 500 ms", 0.05001, 0.05, "5.001 %"),
        ("coverage", 0.8999, 0.9, "0.8999"),
        ("tv_lower mean", 0.25, 0.1, "0.25"),
        ("ttft_us p99: canary / baseline", 1.3214, 1.15, "1.32 ×"),
        ("tokens_per_s p50", 41.26, None, "41.3 tokens/s"),
        ("excess mean", 0.0123, 0.01, "0.0123 nats"),
        ("anything", float("nan"), 1.0, "nan"),
        ("anything", float("inf"), 1.0, "inf"),
    ],
)
def test_amounts(label: str, value: float, limit: float | None, text: str) -> None:
    assert amount(label, value, limit) == text


def test_words_for_metrics_counts_shares_and_times() -> None:
    assert metric_words("kl_lower mean") == "mean kl_lower"
    assert metric_words("itl_us p99.9") == "p99.9 of itl_us (time between tokens)"
    assert metric_words("duration_over_share 2000 ms") == "share of requests over 2000 ms of whole duration"
    assert metric_words("ttft_us p99: canary / baseline") == (
        "p99 of ttft_us (time to the first token), canary over baseline,"
    )
    assert metric_words(None) == "metric"
    assert counted_as("kl_lower mean", 1) == "1 pair"
    assert counted_as("ttft_us p99", 12_345) == "12,345 requests"
    assert [share_words(one) for one in (0.0, 0.001, 0.01, 0.995, 1.0)] == [
        "0 %", "under 1 %", "1 %", "100 %", "100 %",
    ]  # fmt: skip
    assert moment(AT_US) == "2026-12-01 12:03:04 UTC"
    assert moment(2**63 - 1) == "9223372036854775807 µs"


# --- what is missing, and a canary that has nothing ----------------------------------------------------


def test_what_is_missing_and_how_long_it_takes() -> None:
    short = Obstacle(
        code="too_few_samples", sentence="a: 3 of 9 samples; about 4 s at 2/s", remedy="wait", ready_in_s=4
    )
    assert waiting_text([short], "1 % to 5 %, in about 4 s if all goes on as now") == (
        "The next weight step waits for this: a: 3 of 9 samples; about 4 s at 2/s."
        " All in all: 1 % to 5 %, in about 4 s if all goes on as now."
    )
    assert waiting_text([]) == "Nothing is in the way of the next weight step."
