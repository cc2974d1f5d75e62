"""What the whole gate does under sequential rules, against the definitions evaluated the slow way.

The oracle shares nothing with the pipeline but the bins: it sums over all restart times and all pairs anew at
every second (statistics.md §0.1, §0.2), and counts coverage and unknown seconds from what was fed in.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipeline.core.bins import bin_lower, bin_upper, score_bin
from schemas.buckets import SCORE_ONE, PopulationCells
from tests.core.gate.build import (
    LOGITS,
    REQUESTS,
    T0,
    TELEMETRY,
    Bench,
    canary,
    command,
    decisions,
    final,
    nats,
    pair_cell,
    us,
)

ALPHA, LIMIT, WINDOW_S, LEAST, LENGTH_S = 0.5, 0.1, 8, 12, 50
POLICY = f"""
rules:
  - {{id: adds-up, metric: kl_lower, evidence: anytime, window: {WINDOW_S}s, limit: {LIMIT},
     min_samples: {LEAST}, scope: [rollout, node], action: rollback_l1}}
sequential: {{alpha: {ALPHA}}}
coverage: {{limit: 0.8, window: {WINDOW_S}s, min_samples: 8}}
progression: {{min_pairs: 20}}
"""
GRID = (0.8, 0.4, 0.2, 0.1, 0.05, 0.02)


@dataclass
class Told:
    """What one second held."""

    scores: dict[str, list[float]]
    lost: int
    known: bool


@dataclass
class Oracle:
    seconds: dict[int, Told] = field(default_factory=dict)
    step_start: int = T0
    generation_start: int = T0

    def scope(self, name: str | None, second: int) -> list[float]:
        held = self.seconds[second].scores
        return [score for node, scores in held.items() if name in (None, node) for score in scores]

    def evidence(self, name: str | None, through: int) -> float:
        """Σ over restart times j of w_j · Π from bucket j on, per bet; only non-empty buckets count."""
        buckets = [
            scores
            for second in range(self.generation_start, through + 1)
            if (scores := self.scope(name, second))
        ]
        total = 0.0
        for bet in GRID:
            logs = [math.fsum(growth(bet, score) for score in bucket) for bucket in buckets]
            total += math.fsum(weight(at + 1) * math.exp(math.fsum(logs[at:])) for at in range(len(logs)))
        return total / len(GRID)

    def terms(self, through: int) -> list[tuple[float, int]]:
        """Weighted evidence and pairs of every scope: two levels, nodes by order of appearance."""
        order: list[str] = []
        for second in range(self.generation_start, through + 1):
            order += sorted(
                node for node, scores in self.seconds[second].scores.items() if scores and node not in order
            )
        ranked: list[tuple[int, str | None]] = [(1, None), *enumerate(order, 1)]
        return [
            (weight(rank) / 2 * self.evidence(name, through), self.pairs(name, through))
            for rank, name in ranked
        ]

    def pairs(self, name: str | None, through: int) -> int:
        return sum(len(self.scope(name, at)) for at in range(self.generation_start, through + 1))

    def passing(self, through: int) -> float:
        logs = [0.0, 0.0]
        for second in range(max(self.step_start, self.generation_start), through + 1):
            for score in self.scope(None, second):
                step = (LIMIT - min(upper(score), 4.0)) / (4.0 - LIMIT)
                logs[0] += math.log1p(0.9 * step)
                logs[1] += math.log1p(0.5 * step)
        return 0.75 * math.exp(logs[0]) + 0.25 * math.exp(logs[1])

    def window(self, through: int) -> list[Told]:
        first = max(self.generation_start, through - WINDOW_S + 1)
        return [self.seconds[second] for second in range(first, through + 1)]

    def coverage(self, through: int) -> tuple[int, float]:
        held = self.window(through)
        scored = sum(len(scores) for one in held for scores in one.scores.values())
        expected = scored + sum(one.lost for one in held)
        return expected, scored / expected if expected else 0.0


@lru_cache
def growth(bet: float, score: float) -> float:
    return math.log1p(bet * (edge(score) / LIMIT - 1))


@lru_cache
def weight(rank: int) -> float:
    return math.log(2) * (1 / math.log(rank + 1) - 1 / math.log(rank + 2))


def edge(score: float) -> float:
    return bin_lower("score", int(score_bin([nats(score)])[0])) / SCORE_ONE  # type: ignore[arg-type]


@lru_cache
def upper(score: float) -> float:
    return bin_upper("score", int(score_bin([nats(score)])[0])) / SCORE_ONE  # type: ignore[arg-type]


def content(rng: random.Random, mood: str) -> Told:
    healthy = {"calm": (0.005, 0.02, 0.03), "near": (0.05, 0.09, 0.12), "ill": (0.02, 0.03)}[mood]
    scores = {node: [rng.choice(healthy) for _ in range(rng.randrange(4))] for node in ("a", "b")}
    if mood == "ill" and scores["b"]:
        scores["b"] = [rng.choice((0.3, 0.5, 2.5)) for _ in scores["b"]]
    lost = rng.randrange(4) if rng.random() < 0.15 else 0
    return Told(scores, lost, known=rng.random() > 0.02)


def cells(told: Told, generation: int) -> list[PopulationCells]:
    everything = [score for scores in told.scores.values() for score in scores]
    found = [pair_cell(everything, unmatched__no_canary=told.lost)]
    found += [pair_cell(scores, "node", node) for node, scores in told.scores.items() if scores]
    return [PopulationCells(canary(generation=generation), found)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 100_000))
def test_every_decision_is_what_the_definitions_say(seed: int) -> None:
    play(seed)


def play(seed: int) -> list[str]:
    rng = random.Random(seed)
    bench = Bench.started(POLICY, join_timeout_us=1_000_000)
    # The generation's evidence begins as far back as its first second can be open.
    first = bench.core._runs["chat"].memory.evidence_from
    oracle = Oracle(generation_start=first)
    mood, kinds = rng.choice(("calm", "calm", "near", "ill")), []
    for second in range(first, T0 + LENGTH_S):
        if rng.random() < 0.04:
            mood = rng.choice(("calm", "near", "ill"))
        told = content(rng, mood)
        oracle.seconds[second] = told
        closed_from = 0 if second == first else second
        if told.known:
            generation = bench.core._runs["chat"].memory.generation
            bench.read(final(LOGITS, closed_from, second, {second: cells(told, generation)}))
        else:
            oracle.seconds[second] = Told({}, 0, known=False)
            bench.read(final(LOGITS, closed_from, second, whole_from=second + 1))
        for topic in (REQUESTS, TELEMETRY):
            bench.read(final(topic, closed_from, second))
        step_start = bench.core._runs["chat"].memory.step_start
        oracle.step_start = step_start
        made = decisions(bench.judge(second))
        kinds += [one.kind for one in made]
        terms = oracle.terms(second)
        evidence, enough = math.fsum(term for term, _ in terms), oracle.pairs(None, second) >= LEAST
        if any(one.kind == "trip" for one in made):
            assert evidence >= (1 / ALPHA) * (1 - 1e-9)
            assert enough
            command_made = bench.command(command("new_generation", f"n{second}"), us(second + 16))
            assert command_made[0].decision is not None
            memory = bench.core._runs["chat"].memory
            first = oracle.generation_start = memory.evidence_from
            for at in range(second + 1, first):
                oracle.seconds.setdefault(at, Told({}, 0, known=True))
            continue
        if enough and max(terms)[1] >= 10:
            assert evidence < (1 / ALPHA) * (1 + 1e-9), "it should have tripped"
        if any(one.kind in ("step", "promote") for one in made):
            expected, coverage = oracle.coverage(second)
            held = oracle.window(second)
            scores = [score for one in held for node in one.scores.values() for score in node]
            assert oracle.passing(second) >= (1 / ALPHA) * (1 - 1e-9)
            assert all(oracle.evidence(node, second) < 1 / ALPHA for node in (None, "a", "b"))
            assert all(one.known for one in held)
            assert expected >= 8
            assert coverage >= 0.8
            assert len(scores) >= LEAST
            assert math.fsum(scores) / len(scores) <= LIMIT + 1e-9
            assert second >= step_start + 1 + WINDOW_S
    assert second == T0 + LENGTH_S - 1
    return kinds


def test_the_scripts_reach_trips_steps_and_holds() -> None:
    """The property above is worth what its scripts do."""
    seen = [kind for seed in range(14) for kind in play(seed)]
    assert seen.count("trip") >= 3, seen
    assert seen.count("step") >= 5, seen
    assert seen.count("hold") >= 3, seen


def test_known_bad_evidence_without_restarts_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle tells processes apart that differ only after the first bucket."""
    from pipeline.core.statistics import betting

    monkeypatch.setattr(betting, "restart_weight", lambda bucket: 1.0 if bucket == 1 else 0.0)
    with pytest.raises(AssertionError, match="tripped"):
        [play(seed) for seed in range(14)]
