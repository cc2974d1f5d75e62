"""How long a restarted pair worker needs to be back at its newest seconds, at shares of its capacity."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from pipeline.workers import topics
from schemas import codec
from schemas.columns import BatchHeader, LogitColumns
from schemas.topics import COLUMNS, CONTENT_TYPE, GATING_PARTITIONS, JSON, Topic
from tests.faults.watched import Row
from tests.kafka.broker import Broker, apache_kafka
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.system.findings import Finding
from tests.system.judge import decode_final
from tests.system.stack import JOIN_TIMEOUT_S, LATENESS_S, now_us
from tests.system.workload import PARTITIONS

PER_RECORD: Final = 64
"""Responses per record, of T = 64 positions with their top five."""
POSITIONS: Final = 64
SHARES: Final = (0.01, 0.1, 0.5)
NORMAL_LAG_S: Final = 2.0
REREAD_S: Final = 3 * JOIN_TIMEOUT_S + LATENESS_S + 10
"""How far behind a pair worker commits."""
PATIENCE_S: Final = 240.0
SETTINGS: Final = {
    "KLAXON_CONTENT_LATENESS_S": str(LATENESS_S),
    "KLAXON_CONTENT_JOIN_TIMEOUT_S": str(JOIN_TIMEOUT_S),
    **GAUGES_EVERY_SECOND,
}
SECOND_US: Final = 1_000_000


class Answers:
    """Records of mirrored answers, both arms, made from one template: only names and times change."""

    def __init__(self) -> None:
        rng = np.random.default_rng(20260717)
        events = [self._event(rng) for _ in range(PER_RECORD)]
        decoded = codec.decode_logits(json.dumps(events).encode(), JSON)
        assert decoded.columns.n == PER_RECORD, decoded.rejected
        self._template: LogitColumns = decoded.columns
        self._made = 0

    @staticmethod
    def _event(rng: np.random.Generator) -> dict[str, Any]:
        ids = rng.integers(0, 9000, (POSITIONS, 5)).cumsum(axis=1)
        shares = -np.sort(-rng.dirichlet(np.full(6, 0.6), POSITIONS), axis=1)[:, :5]
        logprobs = np.minimum(np.round(np.log(np.maximum(shares, 1e-6)), 4), -0.0001)
        logprobs -= np.arange(5) * 1e-4
        return {
            "v": 1,
            "rollout": "catch-up",
            "signature": "0" * 32,
            "pair_id": "0" * 32,
            "ts_us": 1,
            "duration_us": 0,
            "arm": "baseline",
            "node": f"node-{rng.integers(16)}",
            "model_version": "m1",
            "input_tokens": int(rng.integers(50, 4000)),
            "request_type": "chat",
            "expected_arms": ["baseline", "canary"],
            "definition": "raw",
            "source": "generated",
            "tokens": ids[:, 0].tolist(),
            "top_ids": ids.tolist(),
            "top_logprobs": logprobs.tolist(),
        }

    def pair(self, at_us: int) -> tuple[bytes, bytes]:
        """The two records of PER_RECORD pairs, whose events are of this time."""
        self._made += 1
        names = np.zeros((PER_RECORD, 16), np.uint8)
        names[:, :8] = np.frombuffer(self._made.to_bytes(8, "big"), np.uint8)
        names[:, 15] = np.arange(PER_RECORD)
        named = replace(
            self._template, signature=names, pair_id=names, ts_us=np.full(PER_RECORD, at_us, np.int64)
        )
        first, second = (
            codec.encode_logits(
                replace(named, arm=np.full(PER_RECORD, arm, np.uint8)),
                BatchHeader(f"arm-{arm}", self._made, {}),
            )
            for arm in (0, 1)
        )
        return first, second


@dataclass
class Bench:
    """One broker with traffic into `klaxon.logits`, and what its pair workers have closed."""

    broker: Broker
    folder: Path
    producer: AIOKafkaProducer
    consumer: AIOKafkaConsumer[bytes, bytes]
    answers: Answers = field(default_factory=Answers)
    records: int = 0
    closed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(partition, gating partition) → newest second said to be closed."""

    async def watch(self) -> None:
        """Read finals until cancelled."""
        while True:
            for records in (await self.consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    final = decode_final(record.value)
                    if final.part + 1 == final.parts:
                        source = (final.partition, final.gating_partition)
                        self.closed[source] = max(self.closed.get(source, -1), final.closed_through)

    @property
    def lag_s(self) -> float:
        """How old the newest second is that is closed in every partition for every gating partition."""
        known = len(self.closed) == PARTITIONS * GATING_PARTITIONS
        return now_us() / SECOND_US - (min(self.closed.values()) + 1) if known else float("inf")

    async def send(self, number: int) -> Any:
        """PER_RECORD pairs of now; returns when both records are handed to the producer."""
        for value in self.answers.pair(now_us()):
            sent = await self.producer.send(
                Topic.LOGITS.value,
                value,
                partition=number % PARTITIONS,
                headers=[(CONTENT_TYPE, COLUMNS.encode())],
            )
            self.records += 1
        return sent

    @asynccontextmanager
    async def pair_worker(self) -> AsyncIterator[Worker]:
        """A pair worker while the body runs; killed at its end."""
        environment = {**SETTINGS}
        async with Worker("pair", self.broker, self.folder, environment=environment) as worker:
            yield worker

    @asynccontextmanager
    async def traffic(self, per_s: float) -> AsyncIterator[None]:
        """So many responses a second while the body runs."""

        async def run() -> None:
            began_s = time.monotonic()
            number = 0
            while True:
                due_s = began_s + number * 2 * PER_RECORD / per_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await self.send(number)
                number += 1

        task = asyncio.create_task(run())
        try:
            yield
            assert not task.done(), "the traffic ended"
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def until(self, done: Callable[[], bool], worker: Worker, what: str) -> None:
        """Wait; fails when the worker ends or it takes longer than PATIENCE_S."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not done():
            assert worker.running, worker.log[-1500:]
            assert time.monotonic() < deadline_s, (
                f"{what}: not within {PATIENCE_S:g} s; lag {self.lag_s:.0f} s"
            )
            await asyncio.sleep(0.05)


@asynccontextmanager
async def bench(broker: Broker, folder: Path) -> AsyncIterator[Bench]:
    """Topics and clients; needs a broker without topics of ours."""
    await topics.create(broker.config)
    async with AsyncExitStack() as exits:
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, linger_ms=5, max_batch_size=1 << 20)
        consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
            bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=50
        )
        for client in (producer, consumer):
            await client.start()
            exits.push_async_callback(client.stop)
        consumer.assign([TopicPartition(Topic.BUCKETS.value, number) for number in range(GATING_PARTITIONS)])
        made = Bench(broker, folder, producer, consumer)
        task = asyncio.create_task(made.watch())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])


async def row(folder: Path, long: bool) -> Row:
    """Capacity first, then a restart at each share of it. Short: at 10 %, and less to measure."""
    shares = SHARES if long else SHARES[1:2]
    took: list[str] = []
    findings: list[Finding] = []
    with apache_kafka(folder / "kafka") as broker:
        async with bench(broker, folder) as on:
            capacity = await _capacity(on, 40_000 if long else 10_000)
            print(f"catch-up: capacity {capacity:.0f} responses/s", flush=True)
            for share in shares:
                try:
                    took_s, normal_s = await _caught_up(on, capacity * share)
                except AssertionError as error:
                    findings.append(Finding("wrong", f"at {share:.0%}: {str(error)[:2000]}"))
                    continue
                took.append(f"at {share:.0%} {took_s:.1f} s (normal lag {normal_s:.1f} s)")
                print(f"catch-up {took[-1]}", flush=True)
    figures = (
        f"capacity {capacity:.0f} responses/s (T = {POSITIONS}, top 5; wall clock, broker and producer on "
        f"the same cores); a restarted pair worker reads {REREAD_S} s again, from its start until its newest "
        f"final is within {NORMAL_LAG_S:g} s of the normal lag: {', '.join(took)}"
    )
    return Row("catch-up of a pair worker", len(shares), len(took), figures, tuple(findings))


async def _capacity(on: Bench, responses: int) -> float:
    """Responses per second while a worker reads a backlog that was all there before it started."""
    for number in range(-(-responses // (2 * PER_RECORD))):
        last = await on.send(number)
    await last
    await on.producer.flush()
    read: list[tuple[float, int]] = []

    async with on.pair_worker() as pair:

        def all_read() -> bool:
            count = pair.gauges().get("process", {}).get("reads", 0)
            if count and (not read or read[-1][1] != count):
                read.append((time.monotonic(), count))
            return count >= on.records

        await on.until(all_read, pair, f"{on.records} records read")
        assert len(read) > 1, "read in less than a second: measure more"
    (from_s, first), (to_s, last_count) = read[0], read[-1]
    return (last_count - first) * PER_RECORD / (to_s - from_s)


async def _caught_up(on: Bench, per_s: float) -> tuple[float, float]:
    """Seconds from the start of a successor until it is back; and the normal lag, both in s."""
    async with on.traffic(per_s):
        async with on.pair_worker() as pair:
            # Long enough at this rate that what its successor reads again is all of this rate.
            full_s = time.monotonic() + REREAD_S + 5
            await on.until(
                lambda: on.lag_s < LATENESS_S + 5 and time.monotonic() > full_s, pair, "it keeps up"
            )
            normal_s, end_s = 0.0, time.monotonic() + 5
            while time.monotonic() < end_s:
                normal_s = max(normal_s, on.lag_s)
                await asyncio.sleep(0.05)
        began_s = time.monotonic()
        async with on.pair_worker() as pair:
            await pair.until_log("pair: assigned")
            closed = dict(on.closed)  # nothing of its predecessor's is under way any more
            await on.until(
                lambda: on.closed != closed and on.lag_s <= normal_s + NORMAL_LAG_S, pair, "caught up"
            )
            return time.monotonic() - began_s, normal_s
