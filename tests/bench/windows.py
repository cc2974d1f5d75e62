"""A 5-minute window that slides by one second, against merging its 300 seconds anew."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Final

import numpy as np

from pipeline.core.bins import latency_bin
from pipeline.core.gate.metrics import Vec, add_into
from pipeline.core.gate.windows import Scope, Window
from tests.bench.rows import Row, Spread, row

WINDOW_S: Final = 300
REQUESTS_PER_S: Final = 200
NODES: Final = 8
SLIDES: Final = 40
"""Seconds of each round."""
ROUNDS: Final = 7
QUICK_ROUNDS: Final = 3
FLOOR: Final = 40.0


def windows(quick: bool) -> list[Row]:
    """CPU µs of one second of a TTFT rule's histograms: the roll-out's, its nodes'."""
    seconds = [_content(random.Random(second)) for second in range(WINDOW_S + SLIDES)]
    rounds = [_round(seconds) for _ in range(QUICK_ROUNDS if quick else ROUNDS)]
    ratio = Spread(tuple(merged_us / slid_us for slid_us, merged_us in rounds))
    return [
        *ratio.rows("windows.merge_over_slide", floor=FLOOR),
        row("windows.slide", min(slid_us for slid_us, _ in rounds), "µs/second"),
        row("windows.merge", min(merged_us for _, merged_us in rounds), "µs/second"),
    ]


def _round(seconds: list[dict[Scope, Vec]]) -> tuple[float, float]:
    """CPU µs of one second: slid, merged anew. Both give the same histograms, else nothing is measured."""
    window = Window(WINDOW_S)
    for at in range(WINDOW_S):
        window.fold(at, seconds[at])
    started_ns = time.thread_time_ns()
    for at in range(WINDOW_S, WINDOW_S + SLIDES):
        window.fold(at, seconds[at])
    slid_ns = time.thread_time_ns() - started_ns
    started_ns = time.thread_time_ns()
    for at in range(WINDOW_S, WINDOW_S + SLIDES):
        merged = _merged(seconds[at - WINDOW_S + 1 : at + 1])
    merged_ns = time.thread_time_ns() - started_ns
    assert merged == window.totals, "sliding and merging differ"
    return slid_ns / SLIDES / 1000, merged_ns / SLIDES / 1000


def _merged(seconds: list[dict[Scope, Vec]]) -> dict[Scope, Vec]:
    totals: dict[Scope, Vec] = {}
    for content in seconds:
        for scope, vec in content.items():
            add_into(totals.setdefault(scope, {}), vec)
    return totals


def _content(draw: random.Random) -> dict[Scope, Vec]:
    """A second of log-normal times to the first token, by node and in all."""
    content: dict[Scope, Vec] = {}
    everything: Counter[int] = Counter()
    for node in range(NODES):
        times = np.array(
            [round(150_000 * draw.lognormvariate(0, 0.6)) for _ in range(REQUESTS_PER_S // NODES)]
        )
        held = Counter(latency_bin(times).tolist())
        everything += held
        content["node", f"c-{node}"] = dict(held)
    content["all", ""] = dict(everything)
    return content
