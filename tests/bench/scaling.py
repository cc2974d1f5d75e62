"""Whether an event costs the same however its topic is cut and however many roll-outs there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.topics import Topic
from tests.bench.backlog import Backlog
from tests.bench.context import Context
from tests.bench.drain import Drain, draining
from tests.bench.rows import Row, row

PARTITIONS: Final = (1, 4, 16)
ROLLOUTS: Final = (1, 5, 20)
WITH_ROLLOUTS: Final = 4
"""Partitions among which 5 and 20 roll-outs are measured."""
CEILING: Final = 1.3
PAIRS: Final = 10_000
REQUESTS: Final = 100_000
KINDS: Final = {"pair": Topic.LOGITS, "measure": Topic.REQUESTS}


async def scaling(context: Context) -> list[Row]:
    """µs of CPU time per event over 1, 4, 16 partitions and 1, 5, 20 roll-outs, the least of several rounds.

    The same events throughout: with more partitions or roll-outs each gets fewer of them.
    """
    costs: dict[tuple[str, int, int], float] = {}
    for partitions in PARTITIONS:
        backlogs = {
            "pair": await context.pairs(partitions=partitions, pairs=PAIRS),
            "measure": await context.requests(partitions=partitions, most=REQUESTS),
        }
        broker = await context.with_partitions(partitions)
        rollouts = ROLLOUTS if partitions == WITH_ROLLOUTS else (1,)
        for kind in KINDS:
            async with draining(kind, broker, context.folder) as drain:
                for number in range(context.rounds(3, 2)):
                    for count in rollouts:
                        key = (kind, partitions, count)
                        spent = await _us_per_event(drain, backlogs[kind], count)
                        costs[key] = min(spent, costs.get(key, spent))
                    context.say(f"scaling: {kind}, {partitions} partitions, round {number + 1}")
    return [each for kind in KINDS for each in _rows(kind, costs)]


async def _us_per_event(drain: Drain, backlog: Backlog, rollouts: int) -> float:
    return (await drain.cost(backlog, rollouts)).us_per_event


def _rows(kind: str, costs: Mapping[tuple[str, int, int], float]) -> list[Row]:
    by_partitions = {count: costs[kind, count, 1] for count in PARTITIONS}
    by_rollouts = {count: costs[kind, WITH_ROLLOUTS, count] for count in ROLLOUTS}
    rows = [row(f"{kind}.partitions_{count}", cost, "µs/event") for count, cost in by_partitions.items()]
    rows.append(_ratio(f"{kind}.partitions", by_partitions))
    rows += [row(f"{kind}.rollouts_{count}", cost, "µs/event") for count, cost in by_rollouts.items()]
    rows.append(_ratio(f"{kind}.rollouts", by_rollouts))
    return rows


def _ratio(name: str, costs: Mapping[int, float]) -> Row:
    return row(
        f"{name}.dearest_over_cheapest", max(costs.values()) / min(costs.values()), "ratio", ceiling=CEILING
    )
