"""What is simulated: the rows of the tables, and one run of each kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import numpy as np

from pipeline.core.gate.policy import Family, Policy
from schemas.events import Arm
from tests.simulation import screen_requests
from tests.simulation.cells import node_names, pair_cells, request_cells
from tests.simulation.judged import Generation, Trip
from tests.simulation.scores import HEALTHY_MEAN, LIMIT
from tests.simulation.screen import may_trip
from tests.simulation.traffic import (
    NODES,
    Fault,
    Pairs,
    Requests,
    Sessions,
    Trace,
    affected,
    pairs,
    requests,
    seed,
)

ROLLOUT_PAIRS: Final = 10_000
HOUR_S: Final = 3_600
SIMULATED: Final = frozenset({"kl_lower", "excess", "ttft_us", "itl_us"})
"""Measures that the traffic has."""
CHUNK_S: Final = 300
QUEUE_RATE: Final = 10.0
"""Requests a second of one node, where requests queue."""


@dataclass(frozen=True, slots=True)
class AA:
    """Healthy roll-outs of so many pairs, looked at every second: which rules trip, once each."""

    name: str
    runs: int
    rate: float
    mean: float = HEALTHY_MEAN
    sessions: Sessions | None = None
    control: float | None = None
    """How far the control arm is from the baseline on average; None: as far as the canary."""
    pairs: int = ROLLOUT_PAIRS
    trace: Trace = "conv"


@dataclass(frozen=True, slots=True)
class Hours:
    """Healthy traffic of both arms without end: how often each rule trips, beginning anew each time."""

    name: str
    runs: int
    hours: int
    """Of one run."""
    rate: float
    """Requests a second of each arm; the canary's are all compared."""
    mean: float = HEALTHY_MEAN
    load: float | None = None
    sessions: Sessions | None = None


@dataclass(frozen=True, slots=True)
class Delay:
    """A fault from some pair on: how many affected pairs, and seconds, until each rule trips."""

    name: str
    runs: int
    rate: float
    fault: Fault
    nodes: int = NODES
    trace: Trace = "conv"
    most_pairs: int = ROLLOUT_PAIRS


Row: TypeAlias = AA | Hours | Delay
Many = TypeVar("Many", Pairs, Requests)


@dataclass(frozen=True, slots=True)
class Seen:
    """One trip: after so many affected pairs, and seconds since the first of them; where."""

    rule: str
    affected: int
    seconds: int
    scope: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a row gave."""

    row: str
    trips: tuple[Seen, ...]
    most: dict[str, int] = field(default_factory=dict)
    """Of the rulers the most samples they ever had on both sides of a scope."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs have in common. `rules`: judge these only, each with its share of alpha; None: all."""

    seed: int
    shared: Path
    policy: Policy
    rules: frozenset[str] | None = None

    def of(self, family: Family) -> frozenset[str]:
        """The judged rules that this family decides, of what is simulated."""
        return frozenset(
            rule.id
            for rule in self.policy.rules
            if rule.metric.family == family
            and rule.metric.measure in SIMULATED
            and (self.rules is None or rule.id in self.rules)
        )


def run(row: Row, index: int, setting: Setting) -> Outcome:
    """One run; its randomness depends on the seed, the row's name and its own number only."""
    draw_seed = (setting.seed, int.from_bytes(row.name.encode()[:8], "big") % 2**31, len(row.name), index)
    match row:
        case AA():
            return Outcome(row.name, _aa(row, draw_seed, setting))
        case Hours():
            return _hours(row, draw_seed, setting)
        case Delay():
            return Outcome(row.name, _delay(row, draw_seed, setting))


def _aa(row: AA, draw_seed: tuple[int, ...], setting: Setting) -> tuple[Seen, ...]:
    made = pairs(
        seed(*draw_seed),
        setting.shared,
        row.pairs,
        row.rate,
        mean=row.mean,
        trace=row.trace,
        sessions=row.sessions,
        control=row.mean if row.control is None else row.control,
    )
    trips = judge_pairs(made, NODES, setting)
    return tuple(
        Seen(trip.rule, int(np.searchsorted(made.second, trip.second, "right")), trip.second, trip.scope)
        for trip in trips
    )


def judge_pairs(made: Pairs, nodes: int, setting: Setting) -> list[Trip]:
    """Second by second; until every rule that can has tripped, or the pairs end."""
    generation = Generation(setting.policy, may_trip(made, nodes, setting.policy, setting.of("pairs")))
    if not generation.judged:
        return []
    cells = pair_cells(made, node_names("canary", nodes), generation.wanted("pairs"))
    trips: list[Trip] = []
    for second in range(int(made.second[-1]) + 1):
        trips += generation.fold(second, cells)
        if not generation.judged:
            break
    return trips


def _delay(row: Delay, draw_seed: tuple[int, ...], setting: Setting) -> tuple[Seen, ...]:
    fault = row.fault
    made = pairs(
        seed(*draw_seed),
        setting.shared,
        row.most_pairs + fault.onset,
        row.rate,
        trace=row.trace,
        nodes=row.nodes,
        fault=fault,
        control=HEALTHY_MEAN,
    )
    hit = np.cumsum(affected(fault, made.node, made.input_tokens))
    begins = int(made.second[int(np.argmax(hit > 0))])
    found = []
    for trip in judge_pairs(made, row.nodes, setting):
        through = int(np.searchsorted(made.second, trip.second, "right"))
        count = int(hit[through - 1]) if through else 0
        found.append(Seen(trip.rule, count, trip.second + 1 - begins, trip.scope))
    return tuple(found)


def _hours(row: Hours, draw_seed: tuple[int, ...], setting: Setting) -> Outcome:
    nodes = NODES if row.load is None else max(1, round(row.rate / QUEUE_RATE))
    length_s = row.hours * HOUR_S
    draw, shared = seed(*draw_seed), setting.shared
    n = int(draw.poisson(row.rate * length_s))
    made = pairs(
        draw, shared, n, row.rate, mean=row.mean, nodes=nodes, sessions=row.sessions, control=row.mean
    )
    made = dataclasses.replace(made, second=np.sort(draw.integers(0, length_s, n)))
    answered: dict[Arm, Requests] = {
        arm: requests(draw, shared, length_s, row.rate, nodes=nodes, load=row.load)
        for arm in ("baseline", "canary")
    }
    of_pairs = may_trip(made, nodes, setting.policy, setting.of("pairs"))
    asked_of = setting.of("requests") if row.mean == HEALTHY_MEAN else frozenset()
    of_requests = screen_requests.may_trip(answered, nodes, setting.policy, asked_of, length_s)
    most = {
        rule.id: screen_requests.most(answered, nodes, rule, length_s)
        for rule in setting.policy.rules
        if rule.id in asked_of and rule.relative_to is not None and not rule.sequential
    }
    if not of_pairs | of_requests:
        return Outcome(row.name, (), most)
    generation = Generation(setting.policy, of_pairs | of_requests, again=True)
    compared, asked = generation.wanted("pairs"), generation.wanted("requests")
    found: list[Trip] = []
    # A few minutes at a time: the cells of an hour at 200 requests/s are a million.
    for first in range(0, length_s, CHUNK_S):
        part = _between(made, first)
        cells = pair_cells(part, node_names("canary", nodes), compared) if of_pairs else {}
        both = {
            arm: request_cells(_between(one, first), node_names(arm, nodes), traffic, asked)
            for (arm, one), traffic in zip(answered.items(), ("user", "shadow"), strict=True)
            if of_requests
        }
        for second in range(first, first + CHUNK_S):
            found += generation.fold(second, cells, both)
    return Outcome(row.name, tuple(Seen(trip.rule, 0, trip.second, trip.scope) for trip in found), most)


def _between(made: Many, first: int) -> Many:
    """What falls into CHUNK_S seconds."""
    low, high = np.searchsorted(made.second, (first, first + CHUNK_S))
    columns = {each.name: getattr(made, each.name)[int(low) : int(high)] for each in dataclasses.fields(made)}
    return dataclasses.replace(made, **columns)


def long_rows(rollouts: int, share: float = 1.0) -> list[Row]:
    """The long form: `rollouts` A/A roll-outs, everything else in proportion to `share`."""

    def some(runs: int) -> int:
        return max(2, round(runs * share))

    few, some_aa = some(200), some(400)
    slow, medium = rollouts // 20, rollouts // 4
    found: list[Row] = [
        AA("aa 200/s", rollouts - slow - medium, 200.0),
        AA("aa 20/s", medium, 20.0, trace="code"),
        AA("aa 2/s", slow, 2.0),
        AA("mean 0.04", some_aa, 200.0, mean=0.04),
        AA("mean 0.049", some_aa, 200.0, mean=0.049),
        AA("mean at the limit", some(1000), 200.0, mean=LIMIT),
        AA("sessions of 20, ten at once", few, 20.0, sessions=Sessions(20, 10)),
        AA("sessions of 20, fifty at once", few, 20.0, sessions=Sessions(20, 50)),
        AA("sessions of 5, one after the other", few, 20.0, sessions=Sessions(5, 1)),
        AA("sessions of 20, one after the other", few, 20.0, sessions=Sessions(20, 1)),
        AA("0.04, sessions of 20, ten at once", few, 20.0, mean=0.04, sessions=Sessions(20, 10)),
        AA("0.04, sessions of 20, fifty at once", few, 20.0, mean=0.04, sessions=Sessions(20, 50)),
    ]
    # FP8 unscaled, beside a control that runs the baseline's engine.
    found.append(AA("0.0064, control at 0.0009", few, 20.0, mean=0.0064, control=0.0009))
    for rate, runs, hours in ((2.0, 30, 6), (20.0, 32, 3), (200.0, 24, 1)):
        found.append(Hours(f"{rate:g} requests/s", some(runs), hours, rate))
    for load in (0.3, 0.6, 0.8):
        found.append(Hours(f"queue, load {load:g}, 20/s", some(12), 2, 20.0, load=load))
    for mean in (0.02, 0.03, 0.04):
        found.append(Hours(f"healthy mean {mean:g}, 20/s", some(12), 2, 20.0, mean=mean))
    for rate in (2.0, 20.0):
        for onset in (0, 2000):
            for times in (1.5, 2.0, 2.8, 4.0):
                name = f"{times:g}x from {onset} at {rate:g}/s"
                found.append(Delay(name, some(40), rate, Fault(times * LIMIT, onset)))
    # Under the limit, and over the noise floor (X3).
    for onset in (0, 2000):
        found.append(Delay(f"0.03 from {onset} at 20/s", some(40), 20.0, Fault(0.03, onset)))
    for trace in ("code", "conv"):
        one_of_ten = Fault(0.14, nodes=1, over_tokens=2048)
        found.append(Delay(f"G6 {trace}", some(60), 60.0, one_of_ten, nodes=10, trace=trace, most_pairs=5000))
        five_of_fifty = Fault(0.14, 2000, nodes=5, over_tokens=2048)
        found.append(
            Delay(f"G6 {trace}, 5 of 50 nodes", some(60), 60.0, five_of_fifty, trace=trace, most_pairs=16_000)
        )
    return found
