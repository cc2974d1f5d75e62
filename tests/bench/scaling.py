"""Whether an event costs the same however many partitions and roll-outs there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Literal, TypeAlias

from schemas.topics import Topic
from tests.bench.backlog import Backlog
from tests.bench.context import Context, started_broker
from tests.bench.drain import Drain, draining
from tests.bench.rows import Row, row
from tests.kafka.broker import Broker

Axis: TypeAlias = Literal["partitions", "rollouts"]
Traffic: TypeAlias = Literal["grown", "short", "spread"]
"""grown: each partition and each roll-out brings the same traffic for the same time, so there is more with
more of them; the ceiling holds for this. short: at the same pace, but only until there are as many events as
one brings: what a worker does per flush and partition is then spread over few of them. spread: the events of
one for the same time, so that every second has more cells for them. Both are printed beside it."""

COUNTS: Final[Mapping[Axis, tuple[int, ...]]] = {"partitions": (1, 4, 16), "rollouts": (1, 5, 20)}
MIDDLE: Final = 4
"""Partitions among which 5 and 20 roll-outs are measured, and at which the traffic is as generated."""
CEILINGS: Final[Mapping[Traffic, float | None]] = {"grown": 1.3, "short": None, "spread": None}
PAIRS: Final = 4_000
REQUESTS: Final = 40_000
"""What one brings: of the partitions in 48 s (requests: 24), of the roll-outs, on four, in a quarter."""
KINDS: Final = {"pair": Topic.LOGITS, "measure": Topic.REQUESTS}


@dataclass(frozen=True, slots=True)
class Shape:
    """One backlog: the generated events `speed` times as fast, so many times one after the other."""

    partitions: int
    rollouts: int
    speed: float
    times: int

    @staticmethod
    def of(axis: Axis, count: int, traffic: Traffic) -> Shape:
        """The traffic of so many partitions or roll-outs."""
        partitions, rollouts = (count, 1) if axis == "partitions" else (MIDDLE, count)
        speed = 1.0 if traffic == "spread" else partitions / MIDDLE * rollouts
        return Shape(partitions, rollouts, speed, count if traffic == "grown" else 1)


Costs: TypeAlias = Mapping[Shape, Sequence[float]]
"""µs of CPU time per event, one a round; fewer of shapes that are only printed."""


async def scaling(context: Context) -> list[Row]:
    """µs of CPU time per event over 1, 4, 16 partitions and 1, 5, 20 roll-outs, in turn in every round."""
    rows: list[Row] = []
    async with AsyncExitStack() as exits:
        brokers: dict[int, Broker] = {}
        for partitions in COUNTS["partitions"]:
            own = exits.enter_context(started_broker(context.folder / f"partitions-{partitions}"))
            brokers[partitions] = await replace(context, broker=own).with_partitions(partitions)
        for kind in KINDS:
            rows += _rows(kind, await _costs(context, kind, brokers))
    return rows


async def _costs(context: Context, kind: str, brokers: Mapping[int, Broker]) -> Costs:
    """One worker for each count of partitions, which wait for their turns idle."""
    costs: dict[Shape, list[float]] = {}
    async with AsyncExitStack() as exits:
        drains: dict[int, tuple[Drain, Backlog]] = {}
        for partitions, broker in brokers.items():
            backlog = await _backlog(context, kind, partitions)
            drain = await exits.enter_async_context(draining(kind, broker, context.folder))
            await drain.cost(backlog)  # the first takes memory that the next ones find
            drains[partitions] = drain, backlog
        for number in range(context.rounds(2, 1)):
            for shape in _shapes("grown") if number or context.quick else _shapes(*CEILINGS):
                drain, backlog = drains[shape.partitions]
                read = backlog.paced(shape.speed).repeated(shape.times)
                costs.setdefault(shape, []).append((await drain.cost(read, shape.rollouts)).us_per_event)
            context.say(f"scaling: {kind}, round {number + 1}")
    return costs


async def _backlog(context: Context, kind: str, partitions: int) -> Backlog:
    if KINDS[kind] is Topic.LOGITS:
        return await context.pairs(partitions=partitions, pairs=PAIRS)
    return await context.requests(partitions=partitions, most=REQUESTS)


def _shapes(*traffics: Traffic) -> list[Shape]:
    """All there are, each once."""
    shapes = (Shape.of(axis, n, each) for each in traffics for axis, counts in COUNTS.items() for n in counts)
    return list(dict.fromkeys(shapes))


def _rows(kind: str, costs: Costs) -> Iterator[Row]:
    """Of each count the median; and what the dearest costs over one, in the same round."""
    for axis, counts in COUNTS.items():
        for traffic, ceiling in CEILINGS.items():
            shapes = {count: Shape.of(axis, count, traffic) for count in counts}
            if any(shape not in costs for shape in shapes.values()):
                continue  # not measured
            for count, shape in shapes.items():
                yield row(f"{kind}.{axis}_{count}.{traffic}", median(costs[shape]), "µs/event")
            over_one = [
                [cost / one for cost, one in zip(costs[shape], costs[shapes[1]], strict=False)]
                for shape in shapes.values()
            ]
            dearest = max(over_one, key=median)
            name = f"{kind}.{axis}.{traffic}.dearest_over_one"
            yield row(name, median(dearest), "ratio", ceiling=ceiling)
            if len(dearest) > 1:
                yield row(f"{name}.lowest", min(dearest), "ratio")
                yield row(f"{name}.highest", max(dearest), "ratio")
