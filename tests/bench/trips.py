"""How long a trip takes: from `publish()` of the deciding event to a router that holds weight 0.

Real Kafka, one process of each worker and a router. A healthy roll-out gets 200 pairs/s throughout. Beside it
roll-outs are started, one after the other, under the shipped policy with `min_samples` lowered to SAMPLES;
each gets SAMPLES − 1 damaged pairs, which decide nothing, then one more baseline answer, and last the damaged
answer to it: without that event there is not enough data, with it there is a trip. All of it goes through our
publisher, whose batching is part of what is measured, and the wall clock of one machine reads both ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaProducer
from msgspec import Struct

from agents.publish import Publisher, PublisherSettings
from pipeline.policy_file import shipped_policy_text
from schemas.control import ArmSpec, Command, Directive, RolloutSpec
from schemas.events import Arm, LogitEvent, RequestEvent
from schemas.topics import CONTENT_TYPE, JSON, Topic, gating_partition, partition_of
from tests.bench.context import Context
from tests.bench.drain import cpu_s
from tests.bench.errors import BenchError
from tests.bench.rows import Row, row
from tests.bench.stages import STAGES, NotingProducer, Timed, stages
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import now_us

CEILING_MS: Final = 300.0
PARTITIONS: Final = 4
BACKGROUND_PER_S: Final = 200
BACKGROUND: Final = "background"
SAMPLES: Final = 20
POSITIONS, TOP = 64, 5
WORKERS: Final = ("measure", "pair", "gate", "archive")
NODES: Final = 8
WARM_UP, WARM_UP_QUICK = 14, 6
"""Trips that come first and do not count: meanwhile the new broker's Java still compiles itself, which takes
more of this machine than all that is measured."""
LANES: Final = 2
"""Roll-outs on their way to a trip at the same time."""
DUE_S: Final = 20.0
ARMS: Final[tuple[Arm, ...]] = ("baseline", "canary")
VERSIONS: Final[dict[Arm, str]] = {"baseline": "m1", "canary": "m2"}
DURATION_US: Final = 900_000


class _Effective(Struct, frozen=True):
    weights: dict[str, float]


class _Line(Struct, frozen=True):
    """A line of `klaxon router --json`, as far as it is used."""

    rollout: str
    changed_us: int
    effective: _Effective
    directive: Directive


@dataclass
class _Routed:
    """What the router has said."""

    started: dict[str, asyncio.Event] = field(default_factory=dict)
    tripped: dict[str, asyncio.Future[_Line]] = field(default_factory=dict)

    async def follow(self, worker: Worker) -> None:
        """Read the router's lines as they come."""
        seen = 0
        while True:
            text = worker.log
            for line in text[seen : text.rfind("\n") + 1].splitlines():
                if line.startswith("{"):
                    self._note(msgspec.json.decode(line, type=_Line))
            seen = text.rfind("\n") + 1
            await asyncio.sleep(0.05)

    def expect(self, rollout: str) -> asyncio.Future[_Line]:
        """Its trip, when it comes."""
        self.started[rollout] = asyncio.Event()
        self.tripped[rollout] = asyncio.get_running_loop().create_future()
        return self.tripped[rollout]

    def _note(self, line: _Line) -> None:
        if line.rollout not in self.started:
            return
        self.started[line.rollout].set()
        weight = line.effective.weights.get(VERSIONS["canary"], 0.0)
        trip = self.tripped[line.rollout]
        if line.directive.state == "tripped" and weight == 0.0 and not trip.done():
            trip.set_result(line)


class Answers:
    """Events of both arms: lists like those of the shared generator's traffic, or damaged ones."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._number = 0

    def pair(self, rollout: str, *, damaged: bool) -> list[tuple[RequestEvent, LogitEvent]]:
        """Baseline and canary of one prompt, completed now."""
        self._number += 1
        ids = [self._draw.randrange(9_000) * TOP for _ in range(POSITIONS)]
        lists = tuple(tuple(range(first, first + TOP)) for first in ids)
        sharp = (-0.2231, -2.3026, -3.2189, -4.6052, -5.2983)
        prompt: dict[str, Any] = {
            "v": 1,
            "rollout": rollout,
            "generation": 1,
            "pair_id": f"{self._draw.getrandbits(128):032x}",
            "signature": f"{self._draw.getrandbits(128):032x}",
            "ts_us": now_us() - DURATION_US,
            "duration_us": DURATION_US,
            "input_tokens": self._draw.randrange(50, 4_000),
            "request_type": "chat",
        }
        events = []
        for arm in ARMS:
            values = tuple(reversed(sharp)) if damaged and arm == "canary" else sharp
            labels = {
                **prompt,
                "arm": arm,
                "node": f"{arm}-{self._draw.randrange(NODES)}",
                "model_version": VERSIONS[arm],
            }
            request = RequestEvent(
                **labels, shadow=arm == "canary", status=200, ttft_us=120_000, output_tokens=POSITIONS
            )
            logit = LogitEvent(
                **labels,
                expected_arms=ARMS,
                definition="raw",
                source="generated",
                precision=4,
                tokens=tuple(ids),
                top_ids=lists,
                top_logprobs=(values,) * POSITIONS,
            )
            events.append((request, logit))
        return events


@dataclass
class _Fleet:
    """Everything that runs."""

    publisher: Publisher
    producer: NotingProducer
    commands: AIOKafkaProducer
    routed: _Routed
    workers: Sequence[Worker]
    broker_pid: int

    async def start(self, rollout: str) -> None:
        """Start a roll-out; returns once the router has its first directive."""
        arms = {arm: ArmSpec(model_version=version, nodes=(f"{arm}-*",)) for arm, version in VERSIONS.items()}
        policy = shipped_policy_text().replace("min_samples: 100\n", f"min_samples: {SAMPLES}\n")
        spec = RolloutSpec(rollout=rollout, arms=arms, fallback=VERSIONS["baseline"], policy=policy)
        command = Command(
            v=1,
            command_id=f"{rollout}/start",
            rollout=rollout,
            ts_us=now_us(),
            command="start",
            arguments={"spec": msgspec.to_builtins(spec)},
            by="bench",
        )
        key, value = rollout.encode(), msgspec.json.encode(command)
        await self.commands.send_and_wait(
            Topic.COMMANDS.value,
            value,
            key=key,
            partition=gating_partition(rollout),
            headers=[(CONTENT_TYPE, JSON.encode()), keys.command_header(key, value)],
        )
        try:
            await asyncio.wait_for(self.routed.started[rollout].wait(), DUE_S)
        except TimeoutError:
            raise BenchError(
                f"{rollout}: no directive within {DUE_S:g} s of its start\n{self.last_words()}"
            ) from None

    def last_words(self) -> str:
        """The ends of the workers' logs."""
        return "\n".join(f"--- {worker.kind}\n{worker.log[-1500:]}" for worker in self.workers)

    def cpu_s(self) -> dict[str, float]:
        """CPU time of every worker so far, of the broker, and of this process, which makes the traffic."""
        pids = {worker.kind: worker.pid for worker in self.workers} | {"broker": self.broker_pid}
        return {**{kind: cpu_s(pid) for kind, pid in pids.items()}, "bench": cpu_s(os.getpid())}

    async def background(self) -> None:
        """200 healthy pairs a second, requests and answers, as evenly as the machine allows."""
        answers = Answers(1)
        loop = asyncio.get_running_loop()
        started_s, sent = loop.time(), 0
        while True:
            due = int((loop.time() - started_s) * BACKGROUND_PER_S)
            for _ in range(sent, due):
                for request, logit in answers.pair(BACKGROUND, damaged=False):
                    self.publisher.publish(request)
                    self.publisher.publish(logit)
            sent = due
            await asyncio.sleep(0.01)

    async def trip(self, rollout: str, draw: random.Random) -> Timed:
        """One roll-out to its trip."""
        answers = Answers(draw.getrandbits(32))
        tripped = self.routed.expect(rollout)
        await self.start(rollout)
        for _ in range(SAMPLES - 1):
            for _, logit in answers.pair(rollout, damaged=True):
                self.publisher.publish(logit)
            await asyncio.sleep(0.01)
        # Long enough for all of it to be judged, and at no fixed point of a second, flush or evaluation.
        await asyncio.sleep(draw.uniform(1.0, 1.5))
        if tripped.done():
            raise BenchError(f"{rollout}: tripped by {SAMPLES - 1} pairs, its rule needs {SAMPLES}")
        baseline, canary = answers.pair(rollout, damaged=True)
        self.publisher.publish(baseline[1])
        await asyncio.sleep(draw.uniform(0.2, 0.4))
        deciding = msgspec.structs.replace(canary[1], ts_us=now_us() - canary[1].duration_us)
        self.producer.note(partition_of(deciding.signature.encode(), PARTITIONS))
        published_us = now_us()
        if not self.publisher.publish(deciding):
            raise BenchError(f"{rollout}: the deciding event was not accepted")
        try:
            line = await asyncio.wait_for(tripped, DUE_S)
        except TimeoutError:
            raise BenchError(
                f"{rollout}: no trip within {DUE_S:g} s of its deciding event\n{self.last_words()}"
            ) from None
        cause = line.directive.cause
        if cause is None or cause.samples != SAMPLES:
            raise BenchError(f"{rollout}: tripped for {cause}, not for {SAMPLES} pairs")
        return Timed(rollout, deciding.signature, published_us, line.directive, line.changed_us)

    async def trips(self, rollouts: Sequence[str], draws: Sequence[random.Random]) -> list[Timed]:
        """These roll-outs to their trips, as many at a time as there are draws."""
        waiting, done = iter(rollouts), list[Timed]()

        async def lane(draw: random.Random) -> None:
            for rollout in waiting:
                done.append(await self.trip(rollout, draw))

        await asyncio.gather(*map(lane, draws))
        return done


async def trips(context: Context) -> list[Row]:
    """p50 and p99 over at least 50 trips (quick: 12), and what their stages take."""
    count, warm_up = context.rounds(56, 12), context.rounds(WARM_UP, WARM_UP_QUICK)
    broker = await context.with_partitions(PARTITIONS, append_time=True)
    async with _fleet(context, broker) as fleet:
        fleet.routed.expect(BACKGROUND)
        await fleet.start(BACKGROUND)
        background = asyncio.create_task(fleet.background())
        try:
            await asyncio.sleep(3)
            draws = [random.Random(seed) for seed in range(LANES)]
            context.say(f"{warm_up} trips that do not count")
            await fleet.trips([f"warm-up-{number}" for number in range(warm_up)], draws)
            context.say(f"{count} trips")
            before_s, started_s = fleet.cpu_s(), time.monotonic()
            done = await fleet.trips([f"trip-{number}" for number in range(count)], draws)
        finally:
            background.cancel()
            with suppress(asyncio.CancelledError):
                await background
        wall_s = time.monotonic() - started_s
        cores = {kind: (spent - before_s[kind]) / wall_s for kind, spent in fleet.cpu_s().items()}
        stats = fleet.publisher.stats()
        if stats.dropped:
            raise BenchError(f"trips: the publisher dropped {stats.dropped}: this machine is too slow")
        found = await stages(broker, fleet.producer, done)
    return _rows(done, found, cores)


def _total_ms(trip: Timed) -> float:
    return (trip.applied_us - trip.published_us) / 1000


def _rows(
    done: Sequence[Timed], found: Sequence[Mapping[str, float]], cores: Mapping[str, float]
) -> list[Row]:
    applied = sorted(map(_total_ms, done))
    rows = [
        row("trip.p50", _quantile(applied, 0.5), "ms"),
        row("trip.p99", _quantile(applied, 0.99), "ms", ceiling=CEILING_MS),
        row("trip.greatest", applied[-1], "ms"),
        row("trip.count", len(applied), "trips"),
    ]
    for stage in STAGES[1:]:
        ordered = sorted(each[stage] for each in found)
        rows += [
            row(f"trip.until_{stage}_p50", _quantile(ordered, 0.5), "ms"),
            row(f"trip.until_{stage}_p99", _quantile(ordered, 0.99), "ms"),
        ]
    return [*rows, *(row(f"trip.{kind}_cpu", share, "cores") for kind, share in cores.items())]


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return ordered[max(ceil(q * len(ordered)) - 1, 0)]


@asynccontextmanager
async def _fleet(context: Context, broker: Broker) -> AsyncIterator[_Fleet]:
    dsn = {"KLAXON_CLICKHOUSE_DSN": f"chdb://{context.folder / 'trips'}"}
    async with AsyncExitStack() as exits:
        migrating = Worker("migrate", broker, context.folder, environment=dsn, command=(*KLAXON, "migrate"))
        async with migrating:
            if await migrating.until_ended() != 0:
                raise BenchError(f"klaxon migrate:\n{migrating.log}")
        workers = [Worker(kind, broker, context.folder, environment=dsn) for kind in WORKERS]
        router = Worker("router", broker, context.folder, command=(*KLAXON, "router", "--json"))
        for worker in (*workers, router):
            await exits.enter_async_context(worker)
        for worker in workers:
            await worker.until_log(f"{worker.kind}: ready")
        commands = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all")
        await commands.start()
        exits.push_async_callback(commands.stop)
        producer = NotingProducer(broker.bootstrap)
        publisher = Publisher(producer, PublisherSettings(f"bench-{time.monotonic_ns()}"))
        publisher.start()
        exits.push_async_callback(publisher.close, 5.0)
        routed = _Routed()
        following = asyncio.create_task(routed.follow(router))
        exits.callback(following.cancel)
        yield _Fleet(publisher, producer, commands, routed, (*workers, router), context.broker_pid)
