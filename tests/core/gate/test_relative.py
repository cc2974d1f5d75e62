"""Rulers relative to the baseline (G2), like with like (G7): the numbers, the matching, a colder cache."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.bins import bin_count, bin_lower, bin_upper, latency_bin
from pipeline.core.gate.relative import baseline_scope, compare, held_as
from pipeline.core.measuring import MeasureSource
from pipeline.core.source import ContentSettings, RecordMeta
from pipeline.policy_file import parse_policy
from schemas.buckets import Cell, FinalBuckets, PopulationCells
from schemas.codec import Decoded, request_columns
from schemas.events import RequestEvent
from schemas.records import read_msgpack
from schemas.topics import Topic, gating_partition
from tests.core.gate.build import (
    HASH,
    LOGITS,
    NAME,
    REQUESTS,
    T0,
    TELEMETRY,
    Bench,
    canary,
    decisions,
    distribution,
    final,
    fresh,
    kinds,
    request_cell,
    us,
)

RULER = """
rules:
  - {id: ruler, capability: G2, metric: ttft_us, statistic: p99, relative_to: baseline, window: 60s,
     limit: 1.15, min_samples: 1000, hold: 30s, scope: [rollout], action: rollback_l1}
"""
ONCE = RULER.replace(", hold: 30s", "")
ANY = ONCE.replace("min_samples: 1000", "min_samples: 1")
MEDIAN = ONCE.replace("p99", "p50").replace("1000", "100")
BASELINE = canary("baseline", "v1", differs=0)
CANARY = canary(differs=0)


def both(baseline: list[Cell], mine: list[Cell]) -> list[PopulationCells]:
    return [PopulationCells(BASELINE, baseline), PopulationCells(CANARY, mine)]


def judged(policy: str, cells: list[PopulationCells]) -> Bench:
    bench = Bench.started(policy)
    bench.run(T0, T0, None, lambda _: cells)
    return bench


def evaluations(bench: Bench, rule: str = "ruler") -> dict[str, tuple[str, str]]:
    last = bench.core._runs[NAME].last
    assert last is not None
    (found,) = (one for one in last.verdicts if one.rule.id == rule)
    return {one.scope: (one.verdict, one.reason) for one in found.evaluations}


def bin_at(value: int) -> int:
    return int(latency_bin(np.array([value]))[0])


# --- the number 1.15 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart", "over"), [(6, False), (7, False), (8, True), (0, False), (-8, False)])
def test_1_15_is_seven_bins_and_the_eighth_is_over(apart: int, over: bool) -> None:
    """Seven bins apart the true ratio is 1.13 to 1.17: the histogram's resolution trips nothing."""
    base = bin_at(400_000)
    baseline, mine = bin_upper("latency", base), bin_upper("latency", base + apart)
    bench = judged(ONCE, both([request_cell([baseline] * 1000)], [request_cell([mine] * 1000)]))
    assert evaluations(bench)["rollout"][0] == ("trip" if over else "pass")
    assert ("trip" in kinds(bench.effects)) == over


@pytest.mark.parametrize("base_us", [2_000, 20_000, 175_000, 500_000, 3_000_000])
def test_at_just_under_and_just_over_in_values(base_us: int) -> None:
    """All of the baseline at one upper edge: what is up to 1.15 times that is never over, a bin more is."""
    (rule,) = parse_policy(ANY).rules
    edge = bin_upper("latency", bin_at(base_us))
    at = edge * 115 // 100
    sure = next(k for k in range(bin_count("latency")) if (bin_lower("latency", k) + 1) * 100 > edge * 115)

    def over(value: int) -> bool:
        held = {("all", ""): {bin_at(value): 1000}, held_as(("all", "")): {bin_at(edge): 1000}}
        return compare(rule, ("all", ""), lambda scope: held.get(scope, {})).over

    assert [over(value) for value in (at - 1, at, bin_lower("latency", sure))] == [False] * 3
    assert over(bin_lower("latency", sure) + 1)


def test_over_is_said_only_where_every_value_of_both_bins_is_over() -> None:
    """Every pair of bins that may decide, in exact arithmetic. From 1 ms on seven bins are 1.15: the eighth
    is over, except at the two places where the rounded edges leave a ratio of exactly 1.15 possible."""
    (rule,) = parse_policy(ANY).rules
    first = bin_at(1_000)
    differing = []
    for base in range(1, bin_count("latency") - 10):
        for apart in range(5, 11):
            mine = base + apart
            held = {("all", ""): {mine: 1}, held_as(("all", "")): {base: 1}}
            over = compare(rule, ("all", ""), lambda scope, held=held: held.get(scope, {})).over
            least, most = bin_lower("latency", mine) + 1, bin_upper("latency", base)
            assert over == (Fraction(least, most) > Fraction(23, 20))
            if base >= first and over != (apart >= 8):
                differing.append((apart, most, least))
    assert differing == [(8, 5_487, 6_310), (8, 3_609_200, 4_150_580)]


latencies = st.lists(st.integers(1, 3_000_000), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(latencies, latencies, st.sampled_from(["p50", "p90", "p99"]), st.booleans())
def test_never_over_where_the_true_quantiles_are_not(
    baseline: list[int], mine: list[int], statistic: str, speed: bool
) -> None:
    """Against sorted values: over means really over; far over is always said."""
    metric = "tokens_per_s" if speed else "ttft_us"
    (rule,) = parse_policy(ANY.replace("ttft_us", metric).replace("p99", statistic)).rules
    measure = rule.metric.measure

    def vec(values: list[int]) -> dict[int, int]:
        held = distribution(measure, values)
        return dict(zip(held.bins, held.counts, strict=True))

    held = {("all", ""): vec(mine), held_as(("all", "")): vec(baseline)}
    reading = compare(rule, ("all", ""), lambda scope: held.get(scope, {}))
    q = Fraction(statistic[1:]) / 100

    def quantile(values: list[int]) -> Fraction:
        """Nearest rank; of tokens per second by sorting those."""
        kept = sorted(Fraction(1, value) for value in values) if speed else sorted(map(Fraction, values))
        return kept[max(1, math.ceil(q * len(kept))) - 1]

    ratio = quantile(baseline) / quantile(mine) if speed else quantile(mine) / quantile(baseline)
    if reading.over:
        assert ratio > Fraction(23, 20)
    if min(*mine, *baseline) > 100 and ratio > Fraction(23, 20) * Fraction(1042, 1000):
        assert reading.over
    assert reading.bound is not None
    assert reading.bound <= ratio + Fraction(1, 10**6)


# --- 60 s, 30 s, 1,000 samples -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "mine", "verdict", "reason"),
    [
        (1000, 1000, "trip", ""),
        (1001, 1001, "trip", ""),
        (999, 1000, "not_enough_data", "not compared: 999 of 1000 samples of the baseline in rollout"),
        (1000, 999, "not_enough_data", "999 of 1000 samples"),
        (0, 1000, "not_enough_data", "not compared: 0 of 1000 samples of the baseline in rollout"),
        (1000, 0, "not_enough_data", "0 of 1000 samples"),
    ],
)
def test_both_arms_need_their_samples(baseline: int, mine: int, verdict: str, reason: str) -> None:
    cells = both([request_cell([100_000] * baseline)], [request_cell([300_000] * mine)])
    assert evaluations(judged(ONCE, cells))["rollout"] == (verdict, reason)


def slow_for(seconds: int) -> Bench:
    """1,000 requests a second and arm; the canary's are slow for so long. A window of one second shows it."""
    bench = Bench.started(RULER.replace("window: 60s", "window: 1s"))
    bench.run(
        T0,
        T0 + 50,
        None,
        lambda second: both(
            [request_cell([100_000] * 1000)],
            [request_cell([200_000 if T0 + 10 <= second < T0 + 10 + seconds else 100_000] * 1000)],
        ),
    )
    return bench


@pytest.mark.parametrize(("seconds", "trips"), [(1, False), (29, False), (30, True), (31, True)])
def test_over_it_for_30_seconds_without_a_break(seconds: int, trips: bool) -> None:
    """One spike alone is no verdict."""
    bench = slow_for(seconds)
    assert ("trip" in kinds(bench.effects)) == trips
    if trips:
        assert decisions(bench.effects)[-1].inputs.complete_through == T0 + 39


def test_a_break_of_one_second_begins_the_30_seconds_anew() -> None:
    bench = Bench.started(RULER.replace("window: 60s", "window: 1s"))
    pause = {T0 + 25}
    bench.run(
        T0,
        T0 + 54,
        None,
        lambda second: both(
            [request_cell([100_000] * 1000)],
            [request_cell([100_000 if second in pause else 200_000] * 1000)],
        ),
    )
    assert kinds(bench.effects) == ["command"]
    bench.run(
        T0 + 55,
        T0 + 55,
        None,
        lambda _: both([request_cell([100_000] * 1000)], [request_cell([200_000] * 1000)]),
    )
    assert kinds(bench.effects) == ["command", "trip"]


def test_the_window_is_60_seconds_on_both_sides() -> None:
    """A slow second is in the window for 60 s, and so is the baseline that it is compared with."""
    bench = Bench.started(ONCE.replace("rollback_l1", "advise"))
    bench.run(
        T0, T0, None, lambda _: both([request_cell([100_000] * 1000)], [request_cell([200_000] * 1000)])
    )
    for second, said in ((T0 + 59, "trip"), (T0 + 60, "not_enough_data")):
        bench.run(bench.core._runs[NAME].memory.folded + 1, second)
        assert evaluations(bench)["rollout"][0] == said


def test_p99_is_the_nearest_rank_on_both_sides() -> None:
    """Ten slow ones of 1,000 are the slowest 1 %, the eleventh is p99 itself."""
    for slow, over in ((10, False), (11, True)):
        cells = both(
            [request_cell([100_000] * 1000)], [request_cell([100_000] * (1000 - slow) + [900_000] * slow)]
        )
        assert ("trip" in kinds(judged(ONCE, cells).effects)) == over


def test_fresh_evidence_of_both_arms_trips_a_roll_out() -> None:
    bench = Bench.started(ONCE)
    bench.run(T0, T0)
    bench.core.on_fresh(
        fresh(REQUESTS, {T0 + 1: [PopulationCells(CANARY, [request_cell([300_000] * 1000)])]}, 1)
    )
    assert bench.core.judge_fresh(us(T0 + 2)) == []
    cells = both([request_cell([100_000] * 1000)], [request_cell([300_000] * 1000)])
    bench.core.on_fresh(fresh(REQUESTS, {T0 + 1: cells}, 2))
    (effect,) = bench.core.judge_fresh(us(T0 + 2))
    assert effect.directive is not None
    cause = effect.directive.cause
    assert cause is not None
    assert (cause.metric, cause.limit, cause.samples, cause.baseline_samples) == (
        "ttft_us p99: canary / baseline", 1.15, 1000, 1000,
    )  # fmt: skip
    assert cause.value == pytest.approx(3.0, rel=0.02)
    assert cause.level == pytest.approx(300_000, rel=0.011)
    assert cause.baseline == pytest.approx(100_000, rel=0.011)
    assert cause.bound is not None
    assert 2.9 < cause.bound < 3.0


def test_a_baseline_at_zero_is_no_level() -> None:
    cells = both([request_cell([0] * 1000)], [request_cell([300_000] * 1000)])
    assert evaluations(judged(ONCE, cells))["rollout"] == (
        "not_enough_data", "not compared: the baseline is at 0 in rollout",
    )  # fmt: skip


# --- tokens per second ---------------------------------------------------------------------------------


def itl_cell(values: list[int]) -> Cell:
    return Cell("all", "", {"requests": len(values)}, {"itl_us": distribution("itl_us", values)}, [])


@pytest.mark.parametrize(("apart", "over"), [(7, False), (8, True), (-20, False)])
def test_tokens_per_second_may_be_115_times_fewer_than_the_baselines(apart: int, over: bool) -> None:
    policy = ONCE.replace("ttft_us", "tokens_per_s").replace("p99", "p50")
    base = bin_at(20_000)
    baseline, mine = bin_upper("latency", base), bin_upper("latency", base + apart)
    bench = judged(policy, both([itl_cell([baseline] * 1000)], [itl_cell([mine] * 1000)]))
    assert ("trip" in kinds(bench.effects)) == over
    last = bench.core._runs[NAME].last
    assert last is not None
    evaluation = (bench.effects[-1].decision.evaluations if over else last.verdicts[0].evaluations)[0]  # type: ignore[union-attr]
    assert evaluation.metric == "tokens_per_s p50: baseline / canary"
    assert evaluation.level == pytest.approx(1e6 / mine, rel=0.02)
    assert evaluation.baseline == pytest.approx(1e6 / baseline, rel=0.02)


@pytest.mark.parametrize(("slow", "over"), [(9, False), (10, True)])
def test_the_slowest_percent_of_tokens_per_second(slow: int, over: bool) -> None:
    """p1 of 1,000 is the tenth from below."""
    policy = ONCE.replace("ttft_us", "tokens_per_s").replace("p99", "p1")
    cells = both([itl_cell([20_000] * 1000)], [itl_cell([20_000] * (1000 - slow) + [90_000] * slow)])
    assert ("trip" in kinds(judged(policy, cells).effects)) == over


# --- like with like ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "like"),
    [
        (("all", ""), ("all", "")),
        (("node", "c-1"), ("all", "")),
        (("node_context", "c|1|>2048"), ("context", ">2048")),
        (("context", ">512"), ("context", ">512")),
        (("stratum", "chat|<=512|greedy|none|H100"), ("stratum", "chat|<=512|greedy|none|H100")),
        (("request_type", "chat"), ("request_type", "chat")),
        (("traffic", "user"), ("traffic", "user")),
    ],
)
def test_what_a_scope_is_compared_with(mine: tuple[str, str], like: tuple[str, str]) -> None:
    assert baseline_scope(mine) == like


def test_a_nodes_long_prompts_are_compared_with_the_baselines_long_prompts() -> None:
    """A node that gets all the long prompts is slow on the whole, and does nothing wrong."""
    quick, long = [100_000] * 100, [900_000] * 100
    baseline = [request_cell(quick * 9 + long), request_cell(long, "context", ">2048")]
    mine = [
        request_cell(quick * 9 + long),
        request_cell(quick, "node", "c-0"),
        request_cell(long, "node", "c-1"),
        request_cell(long, "node_context", "c-1|>2048"),
        request_cell(long, "context", ">2048"),
    ]
    policy = ONCE.replace("1000", "100").replace("p99", "p50")
    alike = judged(policy.replace("[rollout]", "[node_context]"), both(baseline, mine))
    assert evaluations(alike) == {"node_context=c-1|>2048": ("pass", "")}
    unlike = judged(policy.replace("[rollout]", "[node]"), both(baseline, mine))
    assert evaluations(unlike)["node=c-1"][0] == "trip", "known bad: compared with everything, it is at fault"


def test_strata_without_a_match_are_not_compared_and_say_so() -> None:
    strata = ("chat|<=512|greedy|none|H100", "chat|<=512|greedy|most|H100", "chat|<=512|greedy|part|H100")
    alike, cold, rare = strata
    policy = ONCE.replace("1000", "100").replace("[rollout]", "[stratum]")
    cells = both(
        [request_cell([100_000] * 100, "stratum", alike), request_cell([50_000] * 99, "stratum", rare)],
        [
            request_cell([100_000] * 100, "stratum", alike),
            request_cell([900_000] * 5000, "stratum", cold),
            request_cell([900_000] * 5000, "stratum", rare),
        ],
    )
    bench = judged(policy, cells)
    assert evaluations(bench) == {
        f"stratum={alike}": ("pass", ""),
        f"stratum={cold}": (
            "not_enough_data", f"not compared: 0 of 100 samples of the baseline in stratum={cold}",
        ),
        f"stratum={rare}": (
            "not_enough_data", f"not compared: 99 of 100 samples of the baseline in stratum={rare}",
        ),
    }  # fmt: skip
    last = bench.core._runs[NAME].last
    assert last is not None
    assert last.verdicts[0].verdict == "pass", "what can be compared decides"


def test_one_stratum_over_is_a_trip_however_many_pass() -> None:
    policy = ONCE.replace("1000", "100").replace("[rollout]", "[stratum]")
    names = [f"chat|<=512|greedy|none|H{number}" for number in range(8)]
    baseline = [request_cell([100_000] * 100, "stratum", name) for name in names]
    mine = [request_cell([130_000 if name == names[5] else 100_000] * 100, "stratum", name) for name in names]
    bench = judged(policy, both(baseline, mine))
    directive = bench.control[NAME]
    assert directive.state == "tripped"
    assert directive.cause is not None
    assert directive.cause.scope == f"stratum={names[5]}"


# --- a colder cache, on a real trace -------------------------------------------------------------------

SHARE = 0.1
"""Of the requests that are mirrored."""


def served_requests(folder: Path, seed: int) -> list[RequestEvent]:
    """An hour of an online chat service pressed into one window: each arm has the prefix cache that its own
    requests fill, so the mirrored copies meet a colder one. Time to the first token is that of the tokens not
    cached, with the same noise on both arms: the canary is exactly as fast as the baseline."""
    rng = random.Random(seed)
    blocks: dict[str, set[int]] = {"baseline": set(), "canary": set()}
    events = []
    with (folder / "data/traces/mooncake_fast25_conversation.jsonl").open() as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            for arm in ("baseline", "canary") if rng.random() < SHARE else ("baseline",):
                hits = next(
                    (at for at, block in enumerate(row["hash_ids"]) if block not in blocks[arm]),
                    len(row["hash_ids"]),
                )
                blocks[arm].update(row["hash_ids"])
                cached = min(512 * hits, row["input_length"] - 1)
                ttft_us = (30_000 + 60 * (row["input_length"] - cached)) * math.exp(rng.gauss(0, 0.2))
                events.append(
                    {
                        "v": 1,
                        "rollout": NAME,
                        "arm": arm,
                        "signature": f"{number:032x}",
                        "pair_id": f"{number:032x}",
                        "model_version": "v1" if arm == "baseline" else "v2",
                        "node": f"{arm}-{number % 4}",
                        "request_type": "chat",
                        "hardware": "H100",
                        "temperature": 0.7,
                        "input_tokens": row["input_length"],
                        "cached_tokens": cached,
                        "output_tokens": row["output_length"],
                        "ttft_us": round(ttft_us),
                        "status": 200,
                        "duration_us": round(ttft_us),
                        "ts_us": us(T0 + 20) - round(ttft_us),
                        "shadow": arm == "canary",
                        "generation": 1,
                    }
                )
    return [msgspec.convert(event, RequestEvent) for event in events]


def judged_by_the_real_worker(policy: str, events: list[RequestEvent]) -> Bench:
    """Events through the measure worker's core into the gate's."""
    source = MeasureSource(Topic.REQUESTS, 0, ContentSettings())
    columns = request_columns(events)
    positions = np.arange(len(events), dtype=np.int64)
    source.read(RecordMeta(0, us(T0 + 21), 1), Decoded(columns, positions, (), None))
    source.read(RecordMeta(1, us(T0 + 60), 1), None)
    bench = Bench.started(policy)
    for record in source.take_flush().finals:
        found = read_msgpack(record.value, FinalBuckets)
        if found.gating_partition == gating_partition(NAME):
            bench.read(msgspec.structs.replace(found, settings_hash=HASH, gating_partition=0))
    for topic in (LOGITS, TELEMETRY):
        bench.read(final(topic, 0, T0 + 40))
    bench.write(bench.core.judge_complete(us(T0 + 60)))
    return bench


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_mirrored_copy_with_a_colder_cache_does_not_trip(shared_dir: Path, seed: int) -> None:
    events = served_requests(shared_dir, seed)
    alike = judged_by_the_real_worker(MEDIAN.replace("[rollout]", "[stratum]"), events)
    said = [verdict for verdict, _ in evaluations(alike).values()]
    assert kinds(alike.effects) == ["command"]
    assert said.count("pass") >= 4, evaluations(alike)
    # Known bad: the same requests compared without strata measure how warm the cache is.
    unlike = judged_by_the_real_worker(MEDIAN, events)
    assert kinds(unlike.effects) == ["command", "trip"]
    cause = unlike.control[NAME].cause
    assert cause is not None
    assert cause.value is not None
    assert cause.value > 1.8


def test_a_canary_that_is_slower_is_found_in_its_strata(shared_dir: Path) -> None:
    """The same trace with a canary that takes 1.3 times as long: strata hide nothing."""
    events = [
        msgspec.structs.replace(one, ttft_us=(one.ttft_us or 0) * 13 // 10) if one.arm == "canary" else one
        for one in served_requests(shared_dir, 1)
    ]
    bench = judged_by_the_real_worker(MEDIAN.replace("[rollout]", "[stratum]"), events)
    assert kinds(bench.effects) == ["command", "trip"]


# --- where it sits -------------------------------------------------------------------------------------


def test_location_is_the_excess_over_the_baselines_own_level() -> None:
    """Long prompts are slow on both arms: they are not what the canary does worse; its node c-3 is."""
    quick, long, ill = [100_000] * 90, [800_000] * 10, [400_000] * 90
    baseline = [request_cell((quick + long) * 10), request_cell(long * 10, "context", ">2048")]
    mine = [request_cell((quick + long) * 9 + ill + long), request_cell(long * 10, "context", ">2048")]
    for node in range(10):
        some = ill if node == 3 else quick
        mine += [
            request_cell(some + long, "node", f"c-{node}"),
            request_cell(long, "node_context", f"c-{node}|>2048"),
        ]
    bench = judged(MEDIAN.replace("p50", "p85"), both(baseline, mine))
    # p85 of the baseline is quick; of the canary 10 % + 9 % are over it.
    directive = bench.control[NAME]
    assert directive.cause is not None
    located = directive.cause.located
    assert located is not None
    assert (located.dimension, located.value) == ("node", "c-3")
    assert located.share_of_excess == pytest.approx(1.0)
    assert located.share_of_traffic == pytest.approx(0.1)
