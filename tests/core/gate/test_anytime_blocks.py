"""Slow requests per block, through the gate: like with like, what trips, what passes, what is remembered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.core.gate.anytime import SequentialRule
from pipeline.core.gate.anytime_blocks import Blocks
from pipeline.core.gate.relative import baseline_scope, held_as
from pipeline.core.gate.state import encode_state
from pipeline.core.statistics.slow_share import Block
from pipeline.policy_file import PolicyError, parse_policy
from schemas.buckets import PopulationCells
from schemas.control import Evaluation
from tests.core.gate.build import T0, Bench, canary, kinds, request_cell, us

RULE = """{id: share, capability: G2, metric: ttft_us, statistic: p99, relative_to: baseline, limit: 1.15,
     evidence: anytime, window: 5m, min_samples: 100, scope: stratum, action: rollback_l1}"""
POLICY = f"rules:\n  - {RULE}\n"
WARM, COLD = "chat|<=512|greedy|most|h100", "chat|<=512|greedy|none|h100"
Requests = Callable[[int], list[PopulationCells]]


def arms(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> Requests:
    """Every second the same requests: TTFTs in µs of canary and baseline by stratum."""

    def cells(held: dict[str, list[int]]) -> list[object]:
        everything = [one for values in held.values() for one in values]
        return [
            request_cell(everything),
            *(request_cell(values, "stratum", at) for at, values in held.items()),
        ]

    return lambda _: [
        PopulationCells(canary(differs=0), cells(ours)),  # type: ignore[arg-type]
        PopulationCells(canary("baseline", "v1", differs=0), cells(theirs)),  # type: ignore[arg-type]
    ]


def rule_of(bench: Bench) -> SequentialRule:
    (run,) = bench.core._runs.values()
    return run.evidence.sequential[0]


def said(bench: Bench) -> Evaluation:
    (run,) = bench.core._runs.values()
    assert run.last is not None
    return run.last.verdicts[0].evaluations[0]


EVEN = [100_000] * 99 + [300_000]
"""One in a hundred is slow."""


def some(second: int, values: list[int], count: int = 20) -> list[int]:
    at = second * count % len(values)
    return (values + values)[at : at + count]


def test_arms_alike_never_trip_and_pass_once_they_were_compared() -> None:
    bench = Bench.started(POLICY)
    for second in range(T0, T0 + 180):
        same = some(second, EVEN)
        bench.run(second, second, None, arms({WARM: same}, {WARM: same}))
        if second == T0 + 20:
            assert said(bench).reason == "0 of 100 requests in blocks that both arms have; E 0 of 20"
    assert said(bench).verdict == "pass"
    assert said(bench).reason.startswith("E ")
    assert rule_of(bench).evidence < 1
    assert rule_of(bench).pairs_left() == 0


def test_a_slower_tail_trips_within_minutes_and_names_the_stratum() -> None:
    bench = Bench.started(POLICY)
    slow = [100_000] * 94 + [400_000] * 6
    for second in range(T0, T0 + 600):
        like = {WARM: some(second, EVEN), COLD: some(second, EVEN)}
        ours = {WARM: some(second, EVEN), COLD: some(second, slow)}
        made = bench.run(second, second, None, arms(ours, like))
        if "trip" in kinds(made):
            break
    cause = made[-1].directive.cause  # type: ignore[union-attr]
    assert cause is not None
    assert (cause.rule, cause.scope) == ("share", f"stratum={COLD}")
    assert 60 <= second - T0 <= 300
    assert second % 30 == 29, "at the end of a block"


def test_a_colder_cache_is_no_slower_canary() -> None:
    """Mirrored copies meet a colder cache: slow as they are, there is nothing like them to compare with."""
    bench = Bench.started(POLICY)
    bench.run(T0, T0 + 300, None, arms({COLD: [900_000] * 20}, {WARM: [100_000] * 20}))
    assert rule_of(bench).processes.bets == {}
    assert said(bench).verdict == "not_enough_data"
    assert said(bench).reason.startswith("0 of 100 requests in blocks that both arms have")
    whole = Bench.started(POLICY.replace("scope: stratum", "scope: rollout"))
    whole.run(T0, T0 + 300, None, arms({COLD: [900_000] * 20}, {WARM: [100_000] * 20}))
    assert "trip" in kinds(whole.effects), "known bad: everything against everything measures the cache"


def test_the_ratio_itself_is_not_over_it_and_one_bin_more_is() -> None:
    """All of the canary 1.15 times slower: no request is beyond the threshold."""
    for factor, trips in ((1.15, False), (1.19, True)):
        bench = Bench.started(POLICY)
        bench.run(T0, T0 + 240, None, arms({WARM: [round(100_000 * factor)] * 20}, {WARM: [100_000] * 20}))
        assert ("trip" in kinds(bench.effects)) == trips


@pytest.mark.parametrize(("before", "blocks"), [(99, 0), (100, 1)])
def test_a_threshold_needs_a_hundred_requests_of_the_baseline_before_the_block(
    before: int, blocks: int
) -> None:
    scope = ("stratum", WARM)
    like = held_as(baseline_scope(scope))
    held = Blocks(7, 300, lambda at: held_as(baseline_scope(at)))
    held.fold(59, {like: {10: before}}, lambda at: at == scope)
    found = [
        buckets
        for second in range(60, 90)
        if (buckets := held.fold(second, {scope: {20: 1}, like: {10: 1}}, lambda at: at == scope))
    ]
    assert len(found) == blocks
    assert held.compared == 30 * blocks
    for second in range(90, 120):
        held.fold(second, {scope: {20: 1}}, lambda at: at == scope)
    # Known-bad: a pass on a canary beside which there is no baseline any more.
    assert held.compared == 30 * blocks


def test_the_threshold_is_of_the_300_seconds_before_the_block_only() -> None:
    scope = ("stratum", WARM)
    like = held_as(baseline_scope(scope))
    held = Blocks(7, 300, lambda at: held_as(baseline_scope(at)))
    held.fold(0, {like: {10: 1000}}, lambda at: at == scope)
    for second in range(1, 300):
        held.fold(second, {}, lambda at: at == scope)
    for second in range(300, 330):  # the block of second 0 is the tenth before this one
        found = held.fold(second, {scope: {20: 2, 10: 2}, like: {10: 8, 11: 2}}, lambda at: at == scope)
    ((growth, requests),) = found.values()
    from pipeline.core.statistics.betting import growth_of

    assert requests == 120
    assert growth == growth_of([Block(60, 120, 60, 300).ratio])
    for second in range(330, 360):
        found = held.fold(second, {scope: {20: 2}, like: {30: 3}}, lambda at: at == scope)
    ((growth, _),) = found.values()
    # By now 300 values, a fifth of them in bin 11: that is the p99.
    assert growth == growth_of([Block(60, 60, 90, 90).ratio])


def test_after_a_crash_at_any_second_the_blocks_go_on_with_the_same_bits() -> None:
    def second_of(second: int) -> list[PopulationCells]:
        slow = EVEN if second < T0 + 200 else [100_000] * 97 + [200_000] * 3
        return arms({WARM: some(second, slow), COLD: some(second, EVEN, 2)}, {WARM: some(second, EVEN)})(
            second
        )

    whole = Bench.started(POLICY)
    whole.run(T0, T0 + 400, None, second_of)
    assert rule_of(whole).processes.bets
    for crash in (T0 + 95, T0 + 129, T0 + 387):
        bench = Bench.started(POLICY)
        bench.run(T0, crash, None, second_of)
        bench.write(bench.core.renew(us(crash + 16)))
        heir = bench.crash()
        heir.core.judge_complete(us(crash + 17))
        heir.run(crash + 1, T0 + 400, None, second_of)
        assert encode_state(rule_of(heir).memory) == encode_state(rule_of(whole).memory)
        assert said(heir) == said(whole)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("statistic: p99", "statistic: p95", "use point"),
        ("relative_to: baseline, limit: 1.15", "limit: 300ms", "use point"),
        ("metric: ttft_us", "metric: duration_us", "use point"),
        ("limit: 1.15", "limit: 1", "above 1"),
    ],
)
def test_what_cannot_be_judged_by_blocks_is_refused(before: str, after: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        parse_policy(POLICY.replace(before, after))
