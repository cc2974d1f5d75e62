"""What a worker spends on a backlog: a real process, frozen while its backlog is written.

It has joined its group and stands idle at the end of its partitions before it is frozen, so nothing of its
start is counted, and nothing of the backlog was fetched ahead. Thawed, it reads; measured is the CPU time of
the process, all threads, until every second of the backlog is closed and published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from msgspec import Struct

from pipeline.config import ContentConfig
from pipeline.core.pairing import JOIN_MEMORY
from schemas.buckets import FinalBuckets
from schemas.topics import CONTENT_TYPE, GATING_PARTITIONS, Topic
from tests.bench.backlog import Backlog, Out, SingleEvents
from tests.bench.errors import BenchError
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import now_us

SECOND_US: Final = 1_000_000
CONTENT: Final = ContentConfig()
LATENESS_US: Final = CONTENT.lateness_s * SECOND_US
GAP_US: Final = JOIN_MEMORY * CONTENT.join_timeout_s * SECOND_US
"""Log time between two backlogs: whatever a pair worker remembers of the first is forgotten by then. A broker
refuses records that are more than an hour ahead of its clock, so there is room for some 18 of them."""
PATIENCE_S: Final = 240.0
FROZEN_SAFELY: Final = {
    # Frozen for as long as a backlog takes to write, it must still be a member of its group.
    "KLAXON_KAFKA_SESSION_TIMEOUT_MS": "60000",
    "KLAXON_KAFKA_REBALANCE_TIMEOUT_MS": "12000",
    "KLAXON_KAFKA_APPEND_TIME": "false",
}
COUNTER: Final = {Topic.LOGITS: "pairs", Topic.REQUESTS: "requests"}
"""What a final counts once per event (requests) or pair (logits), in the cell `all`."""


class _FinalHead(Struct, frozen=True, array_like=True):
    """The first fields of a FinalBuckets."""

    v: int
    topic: str
    partition: int
    gating_partition: int
    closed_from: int
    closed_through: int
    whole_from: int
    offset: int
    settings_hash: str
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What one backlog took."""

    events: int
    cpu_s: float
    wall_s: float
    counted: int
    """Pairs or requests in the finals."""

    @property
    def events_per_cpu_s(self) -> float:
        """Events per second of the process's CPU time."""
        return self.events / self.cpu_s

    @property
    def us_per_event(self) -> float:
        """CPU time per event, in µs."""
        return self.cpu_s * 1e6 / self.events


@dataclass
class _Finals:
    """Reads `klaxon.buckets` and knows how far every source is closed."""

    consumer: AIOKafkaConsumer
    closed: dict[tuple[str, int, int], int] = field(default_factory=dict)
    values: list[bytes] = field(default_factory=list)

    async def until_closed(self, topic: Topic, partitions: int, second: int, worker: Worker) -> None:
        """Until every partition of this topic has closed this second for every gating partition."""
        wanted = [(topic.value, p, g) for p in range(partitions) for g in range(GATING_PARTITIONS)]
        deadline_s = time.monotonic() + PATIENCE_S
        while any(self.closed.get(source, -1) < second for source in wanted):
            if time.monotonic() > deadline_s or not worker.running:
                raise BenchError(
                    f"{worker.kind}: its backlog is not closed after {PATIENCE_S:g} s:\n{worker.log[-2000:]}"
                )
            for records in (await self.consumer.getmany(timeout_ms=100)).values():
                for record in records:
                    self._note(record.value)

    def _note(self, value: bytes) -> None:
        head = msgspec.msgpack.decode(value, type=_FinalHead)
        self.values.append(value)
        if head.part + 1 == head.parts:
            source = (head.topic, head.partition, head.gating_partition)
            self.closed[source] = max(self.closed.get(source, -1), head.closed_through)

    def count(self, topic: Topic) -> int:
        """Pairs or requests counted in everything noted since the last call."""
        values, self.values = self.values, []
        finals = (msgspec.msgpack.decode(value, type=FinalBuckets) for value in values)
        return sum(
            cell.counters.get(COUNTER[topic], 0)
            for final in finals
            if final.topic == topic
            for second in final.seconds
            for held in second.contents
            for cell in held.cells
            if cell.dimension == "all"
        )


class Drain:
    """One worker and the means to give it backlogs, one after the other."""

    def __init__(self, worker: Worker, finals: _Finals, producer: AIOKafkaProducer) -> None:
        self.worker = worker
        self._finals = finals
        self._producer = producer
        self._next_us = 0

    async def cost(self, backlog: Backlog | SingleEvents, rollouts: int = 1) -> Cost:
        """Write the backlog in front of the frozen worker, thaw it, and wait until all is published."""
        # Ahead of the clock, so that the ticks of an idle worker never stand later in log time.
        start_us = max(self._next_us, now_us() + SECOND_US)
        end_us = start_us + backlog.last_us - backlog.first_us
        self._next_us = end_us + GAP_US
        # One by one: a large backlog does not fit into memory beside what it is made of.
        records = chain(backlog.records(start_us, rollouts), backlog.ticks(start_us, LATENESS_US))
        self.worker.freeze()
        try:
            await write(self._producer, backlog.topic.value, records)
            self._finals.values.clear()
            before_s, started_s = cpu_s(self.worker.pid), time.monotonic()
        finally:
            self.worker.thaw()
        await self._finals.until_closed(backlog.topic, backlog.partitions, end_us // SECOND_US, self.worker)
        spent_s, wall_s = cpu_s(self.worker.pid) - before_s, time.monotonic() - started_s
        return Cost(backlog.events, spent_s, wall_s, self._finals.count(backlog.topic))


@asynccontextmanager
async def draining(
    kind: str, broker: Broker, folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Drain]:
    """A worker that stands idle at the end of its topics, which are fresh."""
    async with AsyncExitStack() as exits:
        consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap, fetch_max_wait_ms=50)
        await consumer.start()
        exits.push_async_callback(consumer.stop)
        places = [TopicPartition(Topic.BUCKETS.value, number) for number in range(GATING_PARTITIONS)]
        consumer.assign(places)
        await consumer.seek_to_end(*places)
        producer = await exits.enter_async_context(loader(broker))
        made = {**FROZEN_SAFELY, **(environment or {})}
        worker = await exits.enter_async_context(Worker(kind, broker, folder, environment=made))
        await worker.until_log(f"{kind}: assigned klaxon.")
        finals = _Finals(consumer)
        # Its first ticks close the seconds of an empty log: from then on it is idle.
        await asyncio.sleep(2)
        yield Drain(worker, finals, producer)


@asynccontextmanager
async def loader(broker: Broker) -> AsyncIterator[AIOKafkaProducer]:
    """A producer for backlogs, set as that of `bare.py load`."""
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, linger_ms=20, max_request_size=1_000_000)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def write(producer: AIOKafkaProducer, topic: str, records: Iterable[Out]) -> None:
    """Write records in order; returns once all are acknowledged. Raises BenchError when one is refused."""
    sent = [
        await producer.send(
            topic,
            record.value,
            partition=record.partition,
            timestamp_ms=record.timestamp_ms,
            headers=[(CONTENT_TYPE, record.content_type.encode())],
        )
        for record in records
    ]
    try:
        await asyncio.gather(*sent)
    except KafkaError as error:
        raise BenchError(f"{topic}: not all of a backlog was taken: {error!r}") from None


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, user and system, all its threads."""
    # Its clock: what is counted in ticks of 10 ms is too coarse for a short backlog. This is how Linux names
    # it (clock_getcpuclockid(3), which Python has for threads only).
    return time.clock_gettime(~pid << 3 | 2)
