"""One run of the demo, from an empty folder to a result."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from agents.publish import KafkaRecordProducer, Publisher, PublisherSettings
from pipeline.cli.demo.fleet import FAULTY_NODE, ROLLOUT, Fleet, Routing, Served, rollout_spec
from pipeline.cli.demo.live import Engines, LivePlayer, engines
from pipeline.cli.demo.observe import (
    RouterView,
    deciding_publish_us,
    find_decision,
    sources_closed,
)
from pipeline.cli.demo.play import Played, Player, Script
from pipeline.cli.demo.recording import Recording
from pipeline.cli.demo.report import (
    COUNTS,
    WORST,
    Archived,
    Fault,
    Result,
    RouterSeen,
    cause_line,
    problems_of,
)
from pipeline.cli.demo.stage import GATEWAY, Stage, StageError, stage
from pipeline.cli.demo.story import Story
from pipeline.cli.demo.traffic import Arrival
from pipeline.cli.demo.witness import Witness
from pipeline.cli.printing import counted
from pipeline.config import Config
from pipeline.policy_file import parse_policy
from pipeline.store.errors import StoreError
from pipeline.store.queries import query_endpoint
from schemas.topics import SOURCES

FAULT_AT: Final = 0.4
"""Share of the requests after which the node goes wrong."""
READY_TIMEOUT_S: Final = 60.0
LAST_WORDS_S: Final = 15.0
"""After the last answer: how long a trip, or a step, may still take."""
ARCHIVE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """Answers from a recording, arrivals as measured."""

    recording: Recording
    arrivals: Iterator[Arrival]
    speed: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    traffic: Recorded | None
    """None: engines answer live, as fast as they can."""
    requests: int
    fault: Fault
    seed: int
    policy: str
    """The policy's text."""
    config: Config
    """Its sections content and gate are used."""
    stay: bool = False
    """Whether everything runs on once the result is known."""
    folder_stays: bool = False
    """Whether somebody can look into the folder."""

    @property
    def fault_from(self) -> int | None:
        """Index of the first request that may meet the fault."""
        return int(self.requests * FAULT_AT) if self.fault != "none" else None


async def run(plan: Plan, folder: Path, story: Story, show: Callable[[Result], None]) -> Result:
    """Run the whole demo in `folder`; takes a minute or two. Raises StageError and EmbeddedBrokerError.

    `show` is called with the result; with `plan.stay` everything runs on after that until this task is
    cancelled, which then is a good end."""
    started = time.monotonic_ns()
    content = plan.config.content
    story.say(
        f"the demo's own settings: lateness {content.lateness_s} s, join timeout {content.join_timeout_s} s, "
        f"windows of {parse_policy(plan.policy).window_s} s (elsewhere 15 s, 60 s, 5 min)"
    )
    view = RouterView()
    async with AsyncExitStack() as running:
        live = None
        if plan.traffic is None:
            live = await running.enter_async_context(engines(fault=plan.fault != "none", say=story.say))
        pools = () if live is None else live.pools
        made = await running.enter_async_context(stage(folder, plan.config, story.say, pools))
        await running.enter_async_context(router(made, view))
        await _ready(plan, made, view, story.say)
        async with _traffic(plan, live, made, view) as player:
            await _play(plan, player, made, view, story)
        await _settle(plan, made, view)
        result = await _result(plan, made, view, player.played, started)
        show(result)
        if plan.stay:
            await made.until_interrupted()
    return result


async def _result(plan: Plan, made: Stage, view: RouterView, played: Played, started_ns: int) -> Result:
    archive, table = await _archived(made, played)
    directive, latency_us = await _decision(made, view, played)
    trip = view.trip
    latest = view.latest
    seen = RouterSeen(0.0 if latest is None else latest.canary_percent, tuple(view.steps))
    problems = problems_of(
        fault=plan.fault,
        tripped=None if trip is None else trip.directive,
        router=seen,
        archive=archive,
        events=played.events,
        scored=played.pairs + played.controls,
    )
    located = None if directive is None or directive.cause is None else directive.cause.located
    return Result(
        outcome="no_trip" if trip is None else "tripped",
        expected="no_trip" if plan.fault == "none" else "tripped",
        as_expected=not problems,
        problems=problems,
        fault=plan.fault,
        seed=plan.seed,
        requests=played.requests,
        events=played.events,
        pairs=played.pairs,
        control_pairs=played.controls,
        affected_pairs=played.affected,
        directive=directive,
        located=located,
        decision_latency_us=latency_us,
        router=seen,
        archive=archive,
        table=table,
        elapsed_us=(time.monotonic_ns() - started_ns) // 1000,
    )


@asynccontextmanager
async def router(made: Stage, view: RouterView) -> AsyncIterator[None]:
    """The router as a process, its lines in `view`."""
    process = await made.start("router", "router", "--json", piped=True)
    assert process.stdout is not None
    reading = asyncio.create_task(view.follow(process.stdout))
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _ready(plan: Plan, made: Stage, view: RouterView, say: Callable[[str], None]) -> None:
    """Every partition is read, the roll-out has begun, the router has its first directive."""
    partitions = made.config.kafka.partitions
    sources = [f"{topic}/{partition}" for topic in SOURCES for partition in range(partitions)]
    missing = await sources_closed(made.config.kafka.bootstrap, sources, READY_TIMEOUT_S)
    made.check()
    if missing:
        raise StageError(
            f"no final bucket of {', '.join(sorted(missing))} within {READY_TIMEOUT_S:.0f} s; "
            f"measure said:\n{made.last_words('measure')}\npair said:\n{made.last_words('pair')}"
        )
    spec = made.folder / "rollout.yaml"
    # JSON is YAML: the command reads it like any spec an operator writes.
    spec.write_bytes(msgspec.json.format(msgspec.json.encode(rollout_spec(plan.policy))))
    await made.command("rollout", "start", str(spec))
    if view.latest is None and not await view.more(READY_TIMEOUT_S):
        made.check()
        raise StageError(f"no directive reached the router; gate said:\n{made.last_words('gate')}")
    logs = f" (logs in {made.folder / 'logs'})" if plan.folder_stays else ""
    gateway = ", a router and a gateway" if made.gateway else " and a router"
    say(f"four workers{gateway} run; roll-out {ROLLOUT} started{logs}")


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where answers go."""

    publish: Callable[[Served], None]
    backlog: Callable[[], int]
    """Events that are accepted and not acknowledged yet."""


@asynccontextmanager
async def outlet(made: Stage) -> AsyncIterator[Outlet]:
    """Hands both events of an answer to agents/publish; everything is sent before it ends."""
    kafka = made.config.kafka
    producer = KafkaRecordProducer(kafka.bootstrap, idempotent=kafka.transactions)
    sender = Publisher(producer, PublisherSettings(f"demo-{os.getpid()}-{time.time_ns()}"))
    sender.start()

    def publish(served: Served) -> None:
        sender.publish(served.request)
        sender.publish(served.logit)

    try:
        yield Outlet(publish, lambda: sender.stats().queued_events)
    finally:
        stats = await sender.close(deadline_s=10.0)
    dropped = sum(stats.dropped.values())
    if dropped:
        raise StageError(f"the publisher dropped {dropped} of {stats.accepted} events: {dict(stats.dropped)}")


@asynccontextmanager
async def _traffic(
    plan: Plan, live: Engines | None, made: Stage, view: RouterView
) -> AsyncIterator[Player | LivePlayer]:
    """Whoever plays: recorded answers are published by this process, live ones by the gateway."""

    def routing() -> Routing:
        line = view.latest
        return Routing(None, 0.0) if line is None else Routing(line.generation, line.canary_percent)

    traffic = plan.traffic
    if traffic is not None:
        script = Script(plan.requests, traffic.speed, plan.fault_from)
        fleet = Fleet(traffic.recording, plan.seed)
        async with outlet(made) as out:
            yield Player(script, traffic.arrivals, fleet, out.publish, routing, out.backlog)
        return
    assert live is not None
    witness = Witness(GATEWAY)
    async with witness.watching(made.config.kafka.bootstrap):
        if not await witness.until(applied=1, timeout_s=READY_TIMEOUT_S):
            made.check()
            raise StageError(f"the gateway obeys no directive; it said:\n{made.last_words('gateway')}")
        yield LivePlayer(Script(plan.requests, 1.0, plan.fault_from), live, plan.seed, made.gateway, witness)


async def _play(plan: Plan, player: Player | LivePlayer, made: Stage, view: RouterView, story: Story) -> None:
    told = 0
    fault = "" if plan.fault_from is None else f"; from request {plan.fault_from} on {FAULTY_NODE} is faulty"
    story.say(f"playing {counted(plan.requests, 'request')}{fault}")
    with story.progress(plan.requests) as progress:

        def show(played: Played) -> None:
            nonlocal told
            made.check()
            progress(played.requests, _state(plan, view, played))
            for line in view.lines[told:]:
                if line.reason == "applied":
                    story.say(_router_text(line), dim=False)
            told = len(view.lines)

        await player.run(show)


def _state(plan: Plan, view: RouterView, played: Played) -> str:
    """What holds now, short enough for a terminal of 80 columns."""
    line = view.latest
    weight = "" if line is None else f"canary {line.canary_percent:g} % · "
    if plan.fault_from is not None and played.requests >= plan.fault_from:
        return f"{weight}{FAULTY_NODE} damaged {counted(played.affected, 'pair')}"
    return f"{weight}{counted(played.pairs, 'pair')}"


def _router_text(line: Any) -> str:
    head = f"router   epoch {line.epoch}: {line.directive.state}, canary {line.canary_percent:g} %"
    return f"{head} · {cause_line(line.directive)}" if line.directive.cause is not None else head


async def _settle(plan: Plan, made: Stage, view: RouterView) -> None:
    """Wait for what must still come out of the last answers."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LAST_WORDS_S
    while loop.time() < deadline:
        made.check()
        if view.trip is not None or (plan.fault == "none" and view.promoted_a_step):
            return
        await view.more(1.0)


async def _archived(made: Stage, played: Played) -> tuple[Archived, tuple[dict[str, Any], ...]]:
    """Counts and the table, once ClickHouse holds what was published, or no more for ARCHIVE_TIMEOUT_S."""
    loop = asyncio.get_running_loop()
    deadline, before = loop.time() + ARCHIVE_TIMEOUT_S, None
    while True:
        made.check()
        counts = await _query(made, COUNTS)
        archive = msgspec.convert(counts[0], Archived, strict=False)
        whole = archive.requests == played.events and archive.pairs == played.pairs + played.controls
        if archive != before:
            deadline, before = loop.time() + ARCHIVE_TIMEOUT_S, archive
        if (whole and archive.decisions > 0) or loop.time() > deadline:
            return archive, tuple(await _query(made, WORST))
        await asyncio.sleep(0.5)


async def _query(made: Stage, sql: str) -> list[dict[str, Any]]:
    try:
        result = await asyncio.to_thread(query_endpoint, made.query_listen, sql)
    except StoreError as error:
        raise StageError(f"archive query: {error}; archive said:\n{made.last_words('archive')}") from None
    return [dict(zip(result.names, row, strict=True)) for row in result.rows]


async def _decision(made: Stage, view: RouterView, played: Played) -> tuple[Any, int | None]:
    """The trip's directive (else the router's last) and, for a trip, how long it took."""
    trip = view.trip
    if trip is None:
        return (None if view.latest is None else view.latest.directive), None
    bootstrap = made.config.kafka.bootstrap
    decision = await find_decision(bootstrap, trip.directive)
    if decision is None:
        return trip.directive, None
    located = None if trip.directive.cause is None else trip.directive.cause.located
    publish_us = await deciding_publish_us(bootstrap, decision, played.sent, located)
    return trip.directive, None if publish_us is None else trip.changed_us - publish_us
