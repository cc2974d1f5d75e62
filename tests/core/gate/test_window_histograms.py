"""Windows of histograms: quantiles near the exact ones on real traffic, sums that never drift."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.bins import latency_bin
from pipeline.core.gate.metrics import Vec, add_into, read
from pipeline.core.gate.windows import Window
from pipeline.policy_file import parse_policy
from tests.core.gate.build import distribution

WHOLE = ("all", "")
RELATIVE_ERROR = 1.15 ** (1 / 14) - 1
"""From a bin's geometric middle to its edges: 1.003 %."""
FILES = ("azure_llm_2023_code.csv", "azure_llm_2023_conv.csv", "mooncake_fast25_conversation.jsonl")


def rule_of(statistic: str) -> object:
    text = f"metric: ttft_us, statistic: {statistic}, window: 5m, limit: 1s, action: advise"
    return parse_policy(f"rules: [{{id: a, {text}}}]").rules[0]


def arrivals(path: Path) -> Iterator[tuple[int, int]]:
    """Second and prompt tokens of each request of a trace, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".csv":
        for line in lines[1:]:
            time, prompt, _ = line.split(",")
            yield int(datetime.fromisoformat(time[:26] + "+00:00").timestamp()), int(prompt)
    else:
        for line in lines:
            one = json.loads(line)
            yield one["timestamp"] // 1000, one["input_length"]


def times_us(tokens: Iterable[int]) -> list[int]:
    """Times to the first token as lengths make them: 20 ms, and a prefill of 8,000 tokens/s."""
    return [20_000 + 125 * count for count in tokens]


def nearest_rank(values: list[int], share: float) -> int:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("statistic", "share"), [("p50", 0.5), ("p99", 0.99)])
def test_quantiles_of_bins_are_within_one_percent(
    shared_dir: Path, file: str, statistic: str, share: float
) -> None:
    """Every third 5-minute window of an hour of real arrivals, gaps and bursts included."""
    rule, window, kept = rule_of(statistic), Window(300), deque[tuple[int, list[int]]]()
    looked, worst = 0, 0.0
    for second, found in groupby(arrivals(shared_dir / "data" / "traces" / file), key=lambda one: one[0]):
        values = times_us(tokens for _, tokens in found)
        binned = distribution("ttft_us", values)
        window.fold(second, {WHOLE: dict(zip(binned.bins, binned.counts, strict=True))})
        kept.append((second, values))
        while kept[0][0] <= second - 300:
            kept.popleft()
        if second % 3:
            continue
        reading = read(rule, window.total(WHOLE))  # type: ignore[arg-type]
        everything = [value for _, held in kept for value in held]
        assert reading.samples == len(everything)
        assert reading.value is not None
        assert reading.bound is not None
        exact = nearest_rank(everything, share)
        assert reading.bound <= exact
        worst = max(worst, abs(reading.value / exact - 1))
        looked += 1
    assert looked > 150
    assert 0.005 < worst <= RELATIVE_ERROR + 1e-5, "the bound is nearly reached, and kept"


def test_recorded_times_to_the_first_token(shared_dir: Path) -> None:
    """Of real engines: every file's answers as one window."""
    for path in sorted((shared_dir / "data" / "pairs").glob("*.jsonl")):
        answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        values = [round(1000 * one["first_token_ms"]) for one in answers if one["first_token_ms"]]
        binned = distribution("ttft_us", values)
        reading = read(rule_of("p99"), dict(zip(binned.bins, binned.counts, strict=True)))  # type: ignore[arg-type]
        assert reading.value == pytest.approx(nearest_rank(values, 0.99), rel=RELATIVE_ERROR + 1e-5)


vecs = st.dictionaries(st.integers(0, 40), st.integers(1, 2**40), max_size=8)


@given(st.lists(vecs, max_size=12), st.data())
def test_adding_and_taking_away_in_any_order_leaves_the_merged_histogram(
    parts: list[Vec], data: st.DataObject
) -> None:
    """What stays in is exactly a fresh merge: no slot more, no zero left behind."""
    stays = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    steps = [(at, 1) for at in range(len(parts))] + [(at, -1) for at, stay in enumerate(stays) if not stay]
    total: Vec = {}
    for at, sign in data.draw(st.permutations(steps)):
        add_into(total, parts[at], sign)
    merged: Vec = {}
    for part, stay in zip(parts, stays, strict=True):
        if stay:
            add_into(merged, part)
    assert total == merged
    assert all(total.values())


def test_sums_of_doubles_would_drift() -> None:
    """Why everything is an integer: the same window of doubles does not come back to what it was."""
    draw = np.random.default_rng(1)
    scores = draw.lognormal(-5, 1.5, 5_000)
    total = float(sum(scores[:300]))
    for at in range(300, len(scores)):
        total += scores[at] - scores[at - 300]
    assert total != float(sum(scores[-300:]))
    units = [round(one * 2**30) for one in scores]
    exact = sum(units[:300])
    for at in range(300, len(units)):
        exact += units[at] - units[at - 300]
    assert exact == sum(units[-300:])


def test_an_hour_of_sliding_ends_at_a_fresh_merge() -> None:
    draw = np.random.default_rng(2)
    seconds: list[Vec] = []
    window = Window(300)
    for at in range(3_600):
        held, counts = np.unique(
            latency_bin(draw.lognormal(12, 0.7, 20).astype(np.int64)), return_counts=True
        )
        seconds.append(dict(zip(held.tolist(), counts.tolist(), strict=True)))
        window.fold(at, {WHOLE: seconds[-1]})
    merged: Vec = {}
    for vec in seconds[-300:]:
        add_into(merged, vec)
    assert window.total(WHOLE) == merged
