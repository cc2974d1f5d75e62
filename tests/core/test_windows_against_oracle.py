"""Window values read off published cells equal the oracle's; the oracle's trips equal raw arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from pipeline.core.source import ContentSettings
from schemas.buckets import Cell, FinalBuckets
from schemas.topics import Topic
from tests.core import scenarios
from tests.core.merging import count_over, mean, merge_all, quantile
from tests.core.scenarios import Shape
from tests.core.test_content_against_oracle import expected, maker
from tests.oracle.bins import KINDS, bin_of
from tests.oracle.windows import coverage, divergence_trip, slow_share_trip, window

pytestmark = pytest.mark.slow

SETTINGS = ContentSettings(lateness_us=1_000_000, join_timeout_us=3_000_000)
LENGTH_S = 20


def is_canary(population: Any, _second: int) -> bool:
    """Everything of the canary of one roll-out."""
    return population is not None and population[0] == "chat" and population[2] == "canary"


def published(topic: Topic, seed: int) -> tuple[list[list[FinalBuckets]], Any]:
    """Finals of two partitions, and the oracle's contents of them."""
    finals: list[list[FinalBuckets]] = []
    contents = []
    shape = Shape(prompts_per_s=6, loss=0.05, late=0.02, early=0, duplicate=0.05)
    for records in scenarios.make_log(seed, topic, shape, SETTINGS, partitions=2):
        finals.append(scenarios.live(maker(topic, SETTINGS), topic, records, seed, restarts=1).finals)
        contents.append(expected(topic, records, SETTINGS, 256 << 20))
    return finals, contents


def cells_in(finals: list[list[FinalBuckets]], name: tuple[str, str], end: int) -> list[Cell]:
    """The canary's cells of this name in the window, each second of a source once."""
    once: dict[Any, Cell] = {}
    for partition, of_partition in enumerate(finals):
        for final in of_partition:
            for second in final.seconds:
                for cells in second.contents:
                    key = scenarios.population_key(cells.population)
                    if end - LENGTH_S < second.second <= end and is_canary(key, second.second):
                        for cell in cells.cells:
                            if (cell.dimension, cell.value) == name:
                                once[partition, second.second, key] = cell
    return list(once.values())


@pytest.mark.parametrize("name", [("all", ""), ("context", ">2048"), ("request_type", "chat")])
def test_windows_of_requests(name: tuple[str, str]) -> None:
    finals, contents = published(Topic.REQUESTS, seed=5)
    for end in range(scenarios.START_US // 10**6 + 5, scenarios.START_US // 10**6 + 60, 9):
        found = merge_all(cells_in(finals, name, end), *name)
        for measure in ("ttft_us", "duration_us"):
            want = window(contents, measure, name, end, LENGTH_S, is_canary)
            got = found.measures.get(measure)
            if got is None:
                assert want.count == 0
                continue
            assert (got.count, got.sum, mean(got)) == (want.count, want.total, want.mean)
            assert count_over(got, "latency", 500_000) == want.over(500_000)
            for q in (0.5, 0.99):
                low, high = want.quantile_bounds(q) or (0, 0)
                assert low <= (quantile(got, "latency", q) or 0) <= high


@pytest.mark.parametrize("name", [("all", ""), ("node", "canary-1"), ("node_context", "canary-1|>2048")])
def test_windows_of_pairs(name: tuple[str, str]) -> None:
    finals, contents = published(Topic.LOGITS, seed=6)
    for end in range(scenarios.START_US // 10**6 + 5, scenarios.START_US // 10**6 + 60, 9):
        found = merge_all(cells_in(finals, name, end), *name)
        want = window(contents, "kl_lower", name, end, LENGTH_S, is_canary)
        got = found.measures.get("kl_lower")
        assert (
            (got.count, got.sum, mean(got)) == (want.count, want.total, want.mean) if got else not want.count
        )
        if name == ("all", ""):
            counters = found.counters
            scored = counters.get("pairs", 0) + counters.get("renormalised", 0)
            missing = counters.get("dropped", 0) + sum(
                n for reason, n in counters.items()
                if reason.startswith("unmatched.") and reason != "unmatched.duplicate"
            )  # fmt: skip
            assert coverage(contents, end, LENGTH_S, is_canary) == Fraction(scored, scored + missing)


def a_cell(measure: str, values: list[int]) -> dict[str, Any]:
    """One oracle cell."""
    bins: dict[int, int] = {}
    for value in values:
        k = bin_of(KINDS[measure], value)
        bins[k] = bins.get(k, 0) + 1
    held = {"count": len(values), "sum": sum(values), "min": min(values), "max": max(values), "bins": bins}
    return {"counters": {}, "measures": {measure: held}, "worst": []}


CANARY = ("chat", 1, "canary", "m2", 1)


def test_the_divergence_rule_trips_at_the_first_second_with_enough_pairs_over_the_limit() -> None:
    just_over = round(0.05 * 2**30) + 1
    contents = {s: {CANARY: {("all", ""): a_cell("kl_lower", [just_over] * 10)}} for s in range(100, 130)}
    assert divergence_trip([contents], is_canary) == (109, [("all", "")])
    assert divergence_trip([contents], is_canary, min_samples=101) == (110, [("all", "")])
    assert divergence_trip([contents], is_canary, length_s=9) is None
    assert divergence_trip([contents], is_canary, limit="0.06") is None


def test_the_slow_share_rule_needs_more_than_the_share() -> None:
    mixed = [500_001] * 5 + [500_000] * 95
    contents = {100: {CANARY: {("all", ""): a_cell("ttft_us", mixed)}}}
    assert slow_share_trip([contents], is_canary) is None
    contents[101] = {CANARY: {("all", ""): a_cell("ttft_us", [600_000])}}
    assert slow_share_trip([contents], is_canary) == (101, [("all", "")])


def test_the_worked_value_of_g5_trips() -> None:
    contents = {100: {CANARY: {("all", ""): a_cell("ttft_us", [600_000] * 105)}}}
    assert slow_share_trip([contents], is_canary) == (100, [("all", "")])
