"""The numbers of G3, G5, B1 and coverage: at, just under and just over; and G5's worked example."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.core.bins import bin_lower, bin_upper, latency_bin
from pipeline.core.gate.metrics import KlError, kl
from pipeline.policy_file import shipped_policy_text
from schemas.buckets import PopulationCells
from tests.core.gate.build import T0, Bench, canary, decisions, kinds, nats, pair_cell, request_cell, us

G5_ONLY = """
rules:
  - {id: G5, capability: G5, metric: ttft_over_share, over: 500ms, window: 5m, limit: 5%, min_samples: 100,
     action: rollback_l1}
"""
B1_ENFORCED = shipped_policy_text().replace("mode: observe", "mode: enforce")


def verdicts(bench: Bench, rule: str) -> dict[str, str]:
    last = bench.core._runs["chat"].last
    assert last is not None
    (found,) = (one for one in last.verdicts if one.rule.id == rule)
    return {one.scope: one.verdict for one in found.evaluations}


def judged_pairs(scores: list[float], policy: str | None = None) -> Bench:
    bench = Bench.started(policy)
    bench.run(T0, T0, lambda _: [PopulationCells(canary(), [pair_cell(scores)])])
    return bench


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ([0.05] * 100, "pass"),
        ([0.05] * 99 + [0.0499], "pass"),
        ([0.05] * 99 + [0.0501], "trip"),
        ([0.0501] * 99, "not_enough_data"),
        ([0.0501] * 100, "trip"),
        ([0.0] * 64 + [0.14] * 36, "trip"),
        ([0.0] * 65 + [0.14] * 35, "pass"),
    ],
)
def test_g3_mean_divergence(scores: list[float], verdict: str) -> None:
    bench = judged_pairs(scores)
    assert verdicts(bench, "G3-divergence")["rollout"] == verdict
    assert ("trip" in kinds(bench.effects)) == (verdict == "trip")


def test_g3_limit_is_the_decimal_of_the_file_not_a_double() -> None:
    """100 scores of one unit under and over 0.05 nats."""
    limit = nats(0.05)
    for score, trips in ((limit, False), (limit + 1, True)):
        bench = Bench.started()
        cell = pair_cell([0.05] * 100)
        cell.measures["kl_lower"].sum = score * 100
        bench.run(T0, T0, lambda _, cell=cell: [PopulationCells(canary(), [cell])])
        assert ("trip" in kinds(bench.effects)) == trips


def test_g3_window_is_five_minutes() -> None:
    """100 ill pairs followed by silence are judged for 300 s and not for one more."""
    bench = Bench.started("rules: [{id: a, metric: kl_lower, window: 5m, limit: 0.3, action: pause}]")
    ill = [PopulationCells(canary(), [pair_cell([0.2] * 100)])]
    bench.run(T0, T0 + 299, lambda second: ill if second == T0 else None)
    assert verdicts(bench, "a")["rollout"] == "pass"
    bench.run(T0 + 300, T0 + 300)
    assert verdicts(bench, "a")["rollout"] == "not_enough_data"


def judged_requests(ttfts_us: list[int], policy: str = G5_ONLY) -> Bench:
    bench = Bench.started(policy)
    bench.run(T0, T0, None, lambda _: [PopulationCells(canary(differs=0), [request_cell(ttfts_us)])])
    return bench


@pytest.mark.parametrize(
    ("ttfts_us", "verdict"),
    [
        ([100_000] * 95 + [500_001] * 5, "pass"),
        ([100_000] * 94 + [500_001] * 6, "trip"),
        ([100_000] * 96 + [500_001] * 4, "pass"),
        ([500_000] * 100, "pass"),
        ([600_000] * 99, "not_enough_data"),
        ([600_000] * 100, "trip"),
    ],
)
def test_g5_share_of_slow_requests(ttfts_us: list[int], verdict: str) -> None:
    bench = judged_requests(ttfts_us)
    assert verdicts(bench, "G5")["rollout"] == verdict
    assert ("trip" in kinds(bench.effects)) == (verdict == "trip")


def test_g5_worked_example() -> None:
    """p=(.7,.2,.1), q=(.1,.3,.6); 105 samples at 600 ms against 500 ms: weight 0; 99: not enough data."""
    divergence = kl((0.7, 0.2, 0.1), (0.1, 0.3, 0.6))
    assert divergence == pytest.approx(
        0.7 * math.log(7) + 0.2 * math.log(2 / 3) + 0.1 * math.log(1 / 6), abs=1e-12
    )
    assert divergence > 0.08
    tripped = judged_requests([600_000] * 105)
    directive = tripped.control["chat"]
    assert directive.state == "tripped"
    assert directive.weights["v2"] == 0.0
    assert directive.cause is not None
    assert (directive.cause.samples, directive.cause.value, directive.cause.limit) == (105, 1.0, 0.05)
    waiting = judged_requests([600_000] * 99)
    assert waiting.control["chat"].state == "observing"
    assert verdicts(waiting, "G5")["rollout"] == "not_enough_data"


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((), ()),
        ((0.5, 0.5), (1.0,)),
        ((math.nan, 0.5), (0.5, 0.5)),
        ((math.inf, 0.5), (0.5, 0.5)),
        ((0.5,), (math.inf,)),
    ],
)
def test_kl_refuses_what_it_cannot_compare(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    with pytest.raises(KlError):
        kl(p, q)


def test_kl_floors_at_1e_9() -> None:
    assert kl((1.0, 0.0), (0.0, 1.0)) == pytest.approx(math.log(1e9))
    assert kl((0.5, 0.5), (0.5, 0.5)) == 0.0


def over_bin(limit_us: int) -> int:
    """The least latency that certainly is over: in the first bin that begins at or after the limit."""
    held = int(latency_bin(np.array([limit_us]))[0])
    return (
        bin_upper("latency", held) if bin_upper("latency", held) > limit_us else bin_lower("latency", held)
    ) + 1


@pytest.mark.parametrize(("percent_ms", "limit_us"), [("p99", 310_000), ("p50", 180_000)])
def test_b1_at_just_under_and_just_over(percent_ms: str, limit_us: int) -> None:
    for ttft_us, over in (
        (limit_us, False),
        (limit_us - 1, False),
        (over_bin(limit_us), True),
        (limit_us * 103 // 100, True),
    ):
        bench = Bench.started(
            f"rules: [{{id: b, metric: ttft_us, statistic: {percent_ms}, window: 60s, limit: {limit_us}us,"
            " action: fallback}]"
        )
        bench.run(
            T0, T0, None, lambda _, t=ttft_us: [PopulationCells(canary(differs=0), [request_cell([t] * 100)])]
        )
        assert ("trip" in kinds(bench.effects)) == over, ttft_us


@pytest.mark.parametrize(("slow", "over"), [(10, False), (11, True)])
def test_b1_p99_is_the_nearest_rank(slow: int, over: bool) -> None:
    """Of 1,000 requests the 990th: ten slow ones are 1 % and pass, eleven do not."""
    policy = "rules: [{id: b, metric: ttft_us, statistic: p99, window: 60s, limit: 310ms, action: fallback}]"
    bench = judged_requests([100_000] * (1000 - slow) + [900_000] * slow, policy)
    assert ("trip" in kinds(bench.effects)) == over


def user_requests(ttft_us: int, count: int = 20) -> list[PopulationCells]:
    return [PopulationCells(canary(differs=0), [request_cell([ttft_us] * count, "traffic", "user")])]


@pytest.mark.parametrize(("seconds", "trips"), [(29, False), (30, True)])
def test_b1_must_hold_for_30_seconds(seconds: int, trips: bool) -> None:
    policy = (
        "rules: [{id: b, metric: ttft_us, statistic: p99, window: 1s, limit: 310ms, min_samples: 10,"
        " hold: 30s, arm: any, traffic: user, action: fallback}]"
    )
    bench = Bench.started(policy)
    effects = bench.run(
        T0,
        T0 + 60,
        None,
        lambda second: user_requests(400_000 if T0 + 10 <= second < T0 + 10 + seconds else 100_000),
    )
    assert kinds(effects) == (["trip"] if trips else [])
    if trips:
        assert decisions(effects)[0].inputs.complete_through == T0 + 39


def test_b1_of_the_shipped_policy_enforced() -> None:
    """1,000 user requests over 310 ms for 30 s: everything on the fallback version."""
    bench = Bench.started(B1_ENFORCED)
    effects = bench.run(T0, T0 + 120, None, lambda _: user_requests(400_000))
    assert kinds(effects)[-1] == "trip"
    directive = bench.control["chat"]
    assert directive.cause is not None
    assert directive.cause.rule == "B1-p99"
    assert directive.weights == {"v1": 100.0, "v2": 0.0}
    # 1,000 samples at 20 a second are there after 50 s; 30 evaluations later it trips.
    assert decisions(effects)[-1].inputs.complete_through == T0 + 49 + 29


def test_too_few_samples_neither_confirm_nor_break_a_run() -> None:
    policy = (
        "rules: [{id: b, metric: ttft_us, statistic: p99, window: 5s, limit: 310ms, min_samples: 10,"
        " consecutive: 10, action: fallback}]"
    )

    def requests(quiet: range) -> object:
        return lambda second: (
            None
            if second - T0 in quiet
            else [PopulationCells(canary(differs=0), [request_cell([400_000] * 10)])]
        )

    short = Bench.started(policy)
    # Seconds 5 and 6 are silent, but the window still holds samples: nothing breaks.
    assert kinds(short.run(T0, T0 + 9, None, requests(range(5, 7)))) == ["trip"]
    long = Bench.started(policy)
    # From second 9 the window is empty; a gap longer than the window breaks the run.
    assert long.run(T0, T0 + 22, None, requests(range(5, 14))) == []
    assert kinds(long.run(T0 + 23, T0 + 23, None, requests(range(0)))) == ["trip"]


@pytest.mark.parametrize(
    ("scored", "lost", "low"),
    [(90, 10, False), (89, 11, True), (91, 9, False), (89, 10, False), (10, 89, False)],
)
def test_coverage_limit(scored: int, lost: int, low: bool) -> None:
    """0.9 is enough; below 100 mirrored requests nothing is said."""
    bench = Bench.started()
    bench.run(
        T0, T0, lambda _: [PopulationCells(canary(), [pair_cell([0.01] * scored, unmatched__no_canary=lost)])]
    )
    last = bench.core._runs["chat"].last
    assert last is not None
    assert last.coverage is not None
    assert last.coverage.low == low
    assert ("hold" in kinds(bench.effects)) == low
    assert (last.coverage.verdict == "pass") == (not low and scored + lost >= 100)


def test_duplicates_do_not_lower_coverage() -> None:
    bench = Bench.started()
    cell = pair_cell([0.01] * 100, unmatched__duplicate=50)
    bench.run(T0, T0, lambda _: [PopulationCells(canary(), [cell])])
    assert kinds(bench.effects) == ["command"]


def test_fresh_evidence_waits_for_the_hold_too() -> None:
    from tests.core.gate.build import REQUESTS, fresh

    policy = (
        "rules: [{id: b, metric: ttft_us, statistic: p99, window: 1s, limit: 310ms, min_samples: 10,"
        " hold: 5s, action: fallback}]"
    )
    slow = [PopulationCells(canary(differs=0), [request_cell([400_000] * 10)])]
    bench = Bench.started(policy)
    bench.run(T0, T0 + 1, None, lambda _: slow)
    for second in (T0 + 2, T0 + 3):
        bench.core.on_fresh(fresh(REQUESTS, {second: slow}, second))
        assert bench.core.judge_fresh(us(second + 1)) == []
    bench.core.on_fresh(fresh(REQUESTS, {T0 + 4: slow}, T0 + 4))
    assert kinds(bench.core.judge_fresh(us(T0 + 5))) == ["trip"]


@pytest.mark.parametrize(
    ("score", "count", "verdict"),
    [
        (None, 105, "trip"),
        (None, 99, "not_enough_data"),
        (None, 100, "trip"),
        # 0.08 nats lie between two units of the scores.
        (85_899_345 / 2**30, 105, "pass"),
        (85_899_346 / 2**30, 105, "trip"),
        (0.0799, 105, "pass"),
    ],
)
def test_g5_worked_divergence_against_a_limit_of_0_08(score: float | None, count: int, verdict: str) -> None:
    """`kl_floor` is its metric. None: p=(.7,.2,.1), q=(.1,.3,.6)."""
    value = kl((0.7, 0.2, 0.1), (0.1, 0.3, 0.6)) if score is None else score
    cell = pair_cell([value] * count)
    cell.measures["kl_floor"] = cell.measures.pop("kl_lower")
    bench = Bench.started(
        "rules: [{id: G5, metric: kl_floor, window: 5m, limit: 0.08, min_samples: 100, action: rollback_l1}]"
    )
    bench.run(T0, T0, lambda _: [PopulationCells(canary(), [cell])])
    assert verdicts(bench, "G5")["rollout"] == verdict
    assert (bench.control["chat"].weights["v2"] == 0.0) == (verdict == "trip")


@pytest.mark.parametrize(("last", "said"), [(299, "trip"), (300, "not_enough_data")])
def test_g5_window_is_five_minutes(last: int, said: str) -> None:
    bench = Bench.started(G5_ONLY.replace("rollback_l1", "advise"))
    slow = [PopulationCells(canary(differs=0), [request_cell([600_000] * 100)])]
    bench.run(T0, T0 + last, None, lambda second: slow if second == T0 else None)
    assert verdicts(bench, "G5")["rollout"] == said


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_mode_decides_whether_a_verdict_moves_anything(mode: str) -> None:
    bench = judged_requests([600_000] * 100, G5_ONLY.replace("rollback_l1}", f"rollback_l1, mode: {mode}}}"))
    assert verdicts(bench, "G5")["rollout"] == "trip"
    assert kinds(bench.effects) == ["command", "trip" if mode == "enforce" else "advise"]


@pytest.mark.parametrize(("scope", "trips"), [("rollout", False), ("node", True), ("[rollout, node]", True)])
def test_scope_decides_where_a_rule_looks(scope: str, trips: bool) -> None:
    """Two of ten nodes are slow, which is 4 % of everything."""
    cells = [
        request_cell([100_000] * 4800 + [600_000] * 200),
        request_cell([100_000] * 400 + [600_000] * 100, "node", "c-1"),
    ]
    bench = Bench.started(G5_ONLY.replace("action:", f"scope: {scope}, action:"))
    bench.run(T0, T0, None, lambda _: [PopulationCells(canary(differs=0), cells)])
    assert ("trip" in kinds(bench.effects)) == trips


@pytest.mark.parametrize(("held", "trips"), [(2, False), (3, True)])
def test_consecutive_evaluations(held: int, trips: bool) -> None:
    policy = G5_ONLY.replace("window: 5m", "window: 1s, consecutive: 3")
    bench = Bench.started(policy)
    bench.run(
        T0,
        T0 + 8,
        None,
        lambda second: [
            PopulationCells(
                canary(differs=0), [request_cell([600_000 if second < T0 + held else 100_000] * 100)]
            )
        ],
    )
    assert ("trip" in kinds(bench.effects)) == trips
