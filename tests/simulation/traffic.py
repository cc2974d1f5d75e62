"""Traffic of a simulated roll-out: when, where, how long the prompts, how far apart the answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from pipeline.core.bins import EXCESS_SHIFT
from schemas.columns import F8, I8, Bool
from tests.simulation.scores import CONTROL, FAULTY, HEALTHY, HEALTHY_MEAN, pool

Trace: TypeAlias = Literal["conv", "code"]
Draw: TypeAlias = np.random.Generator

NODES: Final = 50
REQUEST_TYPES: Final = ("chat", "code")
TTFT_P99_US: Final = 175_000
TTFT_SIGMA: Final = 0.5
TTFT_MEDIAN_US: Final = TTFT_P99_US / float(np.exp(2.3263478740 * TTFT_SIGMA))
"""Log-normal, so that p99 is G6's 175 ms."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """n scored pairs in the order of their seconds, counted from 0."""

    second: I8
    score: I8
    """2⁻³⁰ nats."""
    node: I8
    input_tokens: I8
    request_type: I8
    excess: I8
    """Canary − control + c₀ of the same prompt in the same units; −1: no control arm, or left out."""

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.second)


@dataclass(frozen=True, slots=True)
class Requests:
    """n requests of one arm in the order of their seconds."""

    second: I8
    ttft_us: I8
    node: I8
    input_tokens: I8
    request_type: I8
    itl_us: I8


@dataclass(frozen=True, slots=True)
class Sessions:
    """Pairs of one session share a log-normal factor of mean 1 on their scores."""

    length: int
    """Pairs of one session."""
    at_once: int
    """Sessions that are open together, their pairs drawn in turn at random; 1: consecutive pairs."""
    sigma: float = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """From pair `onset` on, the affected pairs score `mean` nats on average."""

    mean: float
    onset: int = 0
    nodes: int = NODES
    """So many nodes have it, the first ones."""
    over_tokens: int = -1
    """Only prompts over so many tokens."""


def seed(*parts: int) -> Draw:
    """The generator of one roll-out: the same whatever process runs it, and in whatever order."""
    return np.random.default_rng(np.random.SeedSequence(parts))


@lru_cache(maxsize=4)
def context_lengths(shared: Path, trace: Trace) -> I8:
    """Prompt tokens of every row of an Azure trace."""
    path = shared / "data" / "traces" / f"azure_llm_2023_{trace}.csv"
    rows = path.read_text().splitlines()[1:]
    return np.array([int(row.split(",")[1]) for row in rows], dtype=np.int64)


def arrivals(draw: Draw, n: int, rate: float) -> I8:
    """Seconds of n Poisson arrivals at `rate` a second."""
    return np.cumsum(draw.exponential(1.0 / rate, n)).astype(np.int64)


def pairs(
    draw: Draw,
    shared: Path,
    n: int,
    rate: float,
    *,
    mean: float = HEALTHY_MEAN,
    trace: Trace = "conv",
    nodes: int = NODES,
    fault: Fault | None = None,
    sessions: Sessions | None = None,
    control: float | None = None,
) -> Pairs:
    """n pairs at `rate` a second; scores of the healthy variant at this mean, faulty ones of FAULTY.

    `control`: with a control arm, so far from the baseline on average: CONTROL's scores of the same positions
    of the same answers.
    """
    tokens = draw.choice(context_lengths(shared, trace), n)
    node = draw.integers(0, nodes, n)
    healthy = pool(shared, HEALTHY, mean)
    run = draw.integers(0, len(healthy), n)
    score = healthy[run]
    if sessions is not None:
        score = np.rint(score * _session_factors(draw, n, sessions)).astype(np.int64)
    if fault is not None:
        hit = affected(fault, node, tokens)
        faulty = pool(shared, FAULTY, fault.mean)
        bad_run = draw.integers(0, len(faulty), n)
        run, score = np.where(hit, bad_run, run), np.where(hit, faulty[bad_run], score)
    excess = np.full(n, -1, dtype=np.int64)
    if control is not None:
        # Recordings begin with the same greedy answers, position by position.
        beside = pool(shared, CONTROL, control)[run]
        excess = np.where(beside <= EXCESS_SHIFT, score - beside + EXCESS_SHIFT, -1)
    request_type = draw.integers(0, len(REQUEST_TYPES), n)
    return Pairs(arrivals(draw, n, rate), score, node, tokens, request_type, excess)


def affected(fault: Fault, node: I8, tokens: I8) -> Bool:
    """Which pairs the fault bites."""
    return (np.arange(len(node)) >= fault.onset) & (node < fault.nodes) & (tokens > fault.over_tokens)


def _session_factors(draw: Draw, n: int, sessions: Sessions) -> F8:
    """Every pair's factor: its session's."""
    lanes = draw.integers(0, sessions.at_once, n)
    session = np.zeros(n, dtype=np.int64)
    for lane in range(sessions.at_once):
        at = np.flatnonzero(lanes == lane)
        session[at] = lane + sessions.at_once * (np.arange(len(at)) // sessions.length)
    factors = draw.lognormal(-(sessions.sigma**2) / 2, sessions.sigma, int(session.max()) + 1)
    return factors[session]


def requests(
    draw: Draw,
    shared: Path,
    seconds: int,
    rate: float,
    *,
    trace: Trace = "conv",
    nodes: int = NODES,
    load: float | None = None,
    ratio: float = 1.0,
) -> Requests:
    """Requests of one arm for so many seconds; first tokens log-normal, or after a queue at this load.

    `load`: one server per node, service in proportion to the prompt; slow requests then come in bursts.
    """
    n = int(draw.poisson(rate * seconds))
    at_s = np.sort(draw.uniform(0, seconds, n))
    tokens = draw.choice(context_lengths(shared, trace), n)
    node = draw.integers(0, nodes, n)
    if load is None:
        ttft = draw.lognormal(np.log(TTFT_MEDIAN_US), TTFT_SIGMA, n)
    else:
        ttft = _queued_us(at_s, tokens, node, load, rate / nodes)
    ttft_us = np.maximum(np.rint(ttft * ratio), 1).astype(np.int64)
    done = (at_s + ttft_us / 1e6).astype(np.int64)
    order = np.argsort(done, kind="stable")
    request_type = draw.integers(0, len(REQUEST_TYPES), n)
    itl_us = times_between_tokens(draw, shared, n)
    return Requests(
        done[order], ttft_us[order], node[order], tokens[order], request_type[order], itl_us[order]
    )


def times_between_tokens(draw: Draw, shared: Path, n: int) -> I8:
    """Of n requests, µs: the recorded ones' distribution, straight between neighbours in the logarithm."""
    return np.rint(np.exp(np.quantile(np.log(recorded_speeds(shared)), draw.random(n)))).astype(np.int64)


@lru_cache(maxsize=4)
def recorded_speeds(shared: Path) -> F8:
    """Mean time between two tokens of every recorded answer of a real engine, µs: one and four at a time.

    A wrong rope base changes what is said, not how fast.
    """
    found = []
    for name in ("f16", "f16_concurrent4", "rope_base_10k"):
        for line in (shared / "data" / "pairs" / f"{name}.jsonl").read_text().splitlines():
            answer = json.loads(line)
            if (n := len(answer["tokens"])) > 1:
                found.append((answer["end_ms"] - answer["first_token_ms"]) * 1e3 / (n - 1))
    return np.array(found)


def _queued_us(at_s: F8, tokens: I8, node: I8, load: float, rate: float) -> F8:
    """Wait and service of each request at its node's single server (Lindley)."""
    service_s = (tokens + 100.0) * (load / rate / float((tokens + 100.0).mean()))
    found = np.zeros(len(at_s))
    for one in np.unique(node).tolist():
        at = np.flatnonzero(node == one)
        # Time until the server is free again: a running maximum of what came minus what was done.
        done = np.cumsum(service_s[at])
        free = np.maximum.accumulate(at_s[at] - (done - service_s[at])) + done
        found[at] = (free - at_s[at]) * 1e6
    return found
