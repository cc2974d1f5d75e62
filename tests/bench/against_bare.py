"""Pair and measure workers against hand-written loops, and columns against JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.bench.backlog import Backlog
from tests.bench.context import PAIRS, Context
from tests.bench.drain import Cost, Drain, draining, loader, write
from tests.bench.errors import BenchError
from tests.bench.peers import Peer
from tests.bench.rows import Row, Spread, row
from tests.kafka.records import now_us

PARTITIONS: Final = 4
PAIR_FLOOR: Final = 0.5
MEASURE_FLOOR: Final = 0.5
COLUMNS_FLOOR: Final = 40.0
SINGLE_EVENTS: Final = 10_000
BARE_MEASURE: Final = Peer(Path(__file__).with_name("bare_measure.py"))


async def pair(context: Context) -> list[Row]:
    """Logit events, 64 a record: decoded, matched, scored, bucketed, published; against `bare.py run`."""
    file = await context.file("pairs", "make", PAIRS)
    backlog = await context.pairs(partitions=PARTITIONS)
    await context.bare.run("load", context.broker.bootstrap, "bench.logits", file)
    ours: list[Cost] = []
    bare: list[float] = []
    async with _draining(context, "pair") as drain:
        for number in range(context.rounds(5, 2)):
            said = await context.bare.measured(
                "run", context.broker.bootstrap, "bench.logits", str(PAIRS), events=backlog.events
            )
            bare.append(said.events_per_cpu_s)
            ours.append(await _cost(drain, backlog, PAIRS))
            _tell(context, "pair", number, ours, bare)
    return _rows("pair", ours, bare, PAIR_FLOOR)


async def measure(context: Context) -> list[Row]:
    """Request events, 100 a record: decoded, bucketed, published; against a loop with the same arithmetic.

    Beside it, without a floor, the shared `bare.py requests-run`: one histogram per second, arm and node.
    """
    backlog = await context.requests(partitions=PARTITIONS)
    file = await context.file("requests", "requests-make", backlog.events)
    await context.bare.run("requests-load", context.broker.bootstrap, "bench.requests", file)
    await _copy(context, backlog, "bench.columns")
    ours: list[Cost] = []
    bare: list[float] = []
    one_histogram: list[float] = []
    async with _draining(context, "measure") as drain:
        for number in range(context.rounds(5, 2)):
            where = (context.broker.bootstrap, "bench.columns", str(backlog.events))
            said = await BARE_MEASURE.measured("run", *where, events=backlog.events)
            bare.append(said.events_per_cpu_s)
            ours.append(await _cost(drain, backlog, backlog.events))
            where = (context.broker.bootstrap, "bench.requests", str(backlog.events))
            said = await context.bare.measured("requests-run", *where, events=backlog.events)
            one_histogram.append(said.events_per_cpu_s)
            _tell(context, "measure", number, ours, bare)
    smaller = Spread(tuple(o.events_per_cpu_s / b for o, b in zip(ours, one_histogram, strict=True)))
    return [
        *_rows("measure", ours, bare, MEASURE_FLOOR),
        row("measure.over_bare_one_histogram", smaller.median, "ratio"),
    ]


async def json(context: Context) -> list[Row]:
    """Columnar batches of 100 requests against one JSON event a record, the same worker."""
    columns = await context.requests(partitions=PARTITIONS)
    single = await context.single_requests(most=SINGLE_EVENTS, partitions=PARTITIONS)
    ratios: list[float] = []
    costs: list[Cost] = []
    async with _draining(context, "measure") as drain:
        for number in range(context.rounds(3, 1)):
            batched = await _cost(drain, columns, columns.events)
            costs.append(await _cost(drain, single, single.events))
            ratios.append(batched.events_per_cpu_s / costs[-1].events_per_cpu_s)
            context.say(f"json: round {number + 1}: columns are {ratios[-1]:.1f} times cheaper")
    fastest = max(cost.events_per_cpu_s for cost in costs)
    return [
        *Spread(tuple(ratios)).rows("columns.over_json", floor=COLUMNS_FLOOR),
        row("json.events_per_cpu_s", fastest, "events/s"),
    ]


@asynccontextmanager
async def _draining(context: Context, kind: str) -> AsyncIterator[Drain]:
    broker = await context.with_partitions(PARTITIONS)
    async with draining(kind, broker, context.folder) as drain:
        yield drain


async def _cost(drain: Drain, backlog: object, counted: int) -> Cost:
    cost = await drain.cost(backlog)  # type: ignore[arg-type]
    if cost.counted != counted:
        raise BenchError(f"{drain.worker.kind}: {cost.counted} counted in its finals, {counted} were sent")
    return cost


async def _copy(context: Context, backlog: Backlog, topic: str) -> None:
    """The same records in a topic of their own."""
    await context.topic(topic, backlog.partitions)
    async with loader(context.broker) as producer:
        await write(producer, topic, backlog.records(now_us()))


def _tell(context: Context, name: str, number: int, ours: list[Cost], bare: list[float]) -> None:
    ratio = ours[-1].events_per_cpu_s / bare[-1]
    context.say(
        f"{name}: round {number + 1}: {ours[-1].events_per_cpu_s:,.0f} events per CPU second, "
        f"bare {bare[-1]:,.0f}, ratio {ratio:.2f}"
    )


def _rows(name: str, ours: list[Cost], bare: list[float], floor: float) -> list[Row]:
    ratios = tuple(cost.events_per_cpu_s / loop for cost, loop in zip(ours, bare, strict=True))
    return [
        *Spread(ratios).rows(f"{name}.over_bare", floor=floor),
        row(f"{name}.events_per_cpu_s", max(cost.events_per_cpu_s for cost in ours), "events/s"),
        row(f"{name}.bare_events_per_cpu_s", max(bare), "events/s"),
    ]
