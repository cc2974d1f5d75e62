"""Whether an event costs the same however many partitions and roll-outs there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

from schemas.topics import Topic
from tests.bench.backlog import Backlog
from tests.bench.context import Context
from tests.bench.drain import Drain, draining
from tests.bench.rows import Row, row

PARTITIONS: Final = (1, 4, 16)
ROLLOUTS: Final = (1, 5, 20)
MIDDLE: Final = 4
"""Partitions among which 5 and 20 roll-outs are measured, and at which the traffic is as generated."""
CEILING: Final = 1.3
PAIRS: Final = 6_000
REQUESTS: Final = 60_000
KINDS: Final = {"pair": Topic.LOGITS, "measure": Topic.REQUESTS}

Traffic: TypeAlias = Literal["grown", "spread"]
"""grown: each partition and each roll-out brings the same traffic, so there is more with more of them; the
ceiling holds for this. spread: the same traffic is spread thinner, so that every second has more cells for
the same events; printed beside it."""
Shape: TypeAlias = tuple[str, Traffic, int, int]
"""Kind, traffic, partitions, roll-outs."""


async def scaling(context: Context) -> list[Row]:
    """µs of CPU time per event over 1, 4, 16 partitions and 1, 5, 20 roll-outs, the least of the rounds."""
    costs: dict[Shape, float] = {}
    for partitions in PARTITIONS:
        backlogs = {
            "pair": await context.pairs(partitions=partitions, pairs=PAIRS),
            "measure": await context.requests(partitions=partitions, most=REQUESTS),
        }
        broker = await context.with_partitions(partitions)
        for kind in KINDS:
            async with draining(kind, broker, context.folder) as drain:
                for number in range(context.rounds(2, 1)):
                    await _round(kind, drain, backlogs[kind], costs, spread=number == 0 and not context.quick)
                    context.say(f"scaling: {kind}, {partitions} partitions, round {number + 1}")
    return [each for kind in KINDS for each in _rows(kind, costs)]


async def _round(
    kind: str, drain: Drain, backlog: Backlog, costs: dict[Shape, float], *, spread: bool
) -> None:
    """Every shape that this number of partitions serves."""
    partitions = backlog.partitions
    for rollouts in ROLLOUTS if partitions == MIDDLE else (1,):
        speed = partitions / MIDDLE * rollouts
        grown = (kind, "grown", partitions, rollouts)
        spent = (await drain.cost(backlog.paced(speed), rollouts)).us_per_event
        costs[grown] = min(spent, costs.get(grown, spent))
        if speed == 1.0:
            costs[kind, "spread", partitions, rollouts] = costs[grown]
        elif spread:
            costs[kind, "spread", partitions, rollouts] = (await drain.cost(backlog, rollouts)).us_per_event


def _rows(kind: str, costs: Mapping[Shape, float]) -> list[Row]:
    rows: list[Row] = []
    axes = {
        "partitions": {count: (count, 1) for count in PARTITIONS},
        "rollouts": {count: (MIDDLE, count) for count in ROLLOUTS},
    }
    kept: dict[Traffic, float | None] = {"grown": CEILING, "spread": None}
    for axis, shapes in axes.items():
        for traffic, ceiling in kept.items():
            found = {
                count: costs[kind, traffic, *shape]
                for count, shape in shapes.items()
                if (kind, traffic, *shape) in costs
            }
            if len(found) < len(shapes):
                continue  # not measured
            name = f"{kind}.{axis}"
            rows += [row(f"{name}_{count}.{traffic}", cost, "µs/event") for count, cost in found.items()]
            ratio = max(found.values()) / found[1]
            rows.append(row(f"{name}.{traffic}.dearest_over_one", ratio, "ratio", ceiling=ceiling))
    return rows
