"""One worker under hostile load: its memory watched, everything it says counted.

`python -m tests.faults.load LIFTED KIND` is that worker with a bound lifted: what must then be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from pipeline.core import buckets, groups
from schemas.buckets import FinalBuckets
from schemas.topics import COLUMNS, CONTENT_TYPE, GATING_PARTITIONS, Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.waiting import eventually
from tests.system.stack import NOBODY_DIES
from tests.workers.events import AHEAD_S

MIB: Final = 1 << 20
LATENESS_S: Final = 1
JOIN_TIMEOUT_S: Final = 2
PARTITIONS: Final = 2
PATIENCE_S: Final = 300.0
LARGEST_REQUEST: Final = 256 * MIB
"""What our producer would send: only the broker refuses."""
SETTINGS: Final = {
    "KLAXON_CONTENT_LATENESS_S": str(LATENESS_S),
    "KLAXON_CONTENT_JOIN_TIMEOUT_S": str(JOIN_TIMEOUT_S),
    **NOBODY_DIES,
    **GAUGES_EVERY_SECOND,
}


def without_cap() -> None:
    """Every cell finds room."""
    place = buckets.Bucket.place

    def placed(self: Any, key: Any, _capacity: int) -> Any:
        return place(self, key, 1 << 30)

    buckets.Bucket.place = placed  # type: ignore[method-assign]


def without_bytes() -> None:
    """Halves wait for the join timeout, however much comes."""
    made = groups.Groups.__init__

    def init(self: groups.Groups, join_timeout_us: int, _waiting_bytes: int) -> None:
        made(self, join_timeout_us, 1 << 60)

    groups.Groups.__init__ = init  # type: ignore[method-assign]


LIFTED: Final[dict[str, Callable[[], None]]] = {"cap": without_cap, "bytes": without_bytes}


def lifted(bound: str, kind: str) -> tuple[str, ...]:
    """How a test starts a worker without this bound."""
    return (sys.executable, "-m", "tests.faults.load", bound, kind)


@dataclass
class Said:
    """What the worker has published: finals with every second once, and dead letters."""

    closed: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """(topic, partition, gating partition) → newest closed second."""
    seconds: dict[tuple[str, int, int, int], list[Any]] = field(default_factory=dict)
    """(topic, partition, gating partition, second) → (population, cell) of it."""
    letters: list[dict[str, Any]] = field(default_factory=list)

    def take(self, final: FinalBuckets) -> None:
        """A record of `klaxon.buckets`; parts of a statement add up."""
        place = (final.topic, final.partition, final.gating_partition)
        if final.part + 1 == final.parts:
            self.closed[place] = max(self.closed.get(place, -1), final.closed_through)
        for second in final.seconds:
            held = self.seconds.setdefault((*place, second.second), [])
            held += [(each.population, cell) for each in second.contents for cell in each.cells]

    def counted(self, topic: Topic) -> Counter[str]:
        """Counters of everything that entered: of the cells `all`, and of what had no population's room."""
        found: Counter[str] = Counter()
        for (name, _, gating, _), cells in self.seconds.items():
            for population, cell in cells if name == topic.value else ():
                if population is None and gating > 0:
                    continue  # telemetry goes to every gating partition
                homeless = cell.dimension == "other" and population is not None and not population.rollout
                if cell.dimension == "all" or homeless:
                    found.update(cell.counters)
        return found

    def overflow(self, topic: Topic) -> int:
        """Memberships of cells that found no room."""
        return sum(
            cell.counters.get("overflow", 0)
            for (name, *_), cells in self.seconds.items()
            if name == topic.value
            for _, cell in cells
        )

    def most_cells(self, topic: Topic) -> int:
        """Cells of the fullest second of one source, all gating partitions together; catch-alls left out."""
        found: Counter[tuple[int, int]] = Counter()
        for (name, partition, gating, second), cells in self.seconds.items():
            if name == topic.value:
                found[partition, second] += sum(
                    1
                    for population, _ in cells
                    if (gating == 0 if population is None else population.rollout)
                )
        return max(found.values(), default=0)


@dataclass
class Load:
    """A worker, its memory from the moment it idled, and traffic into it."""

    broker: Broker
    worker: Worker
    plain: AIOKafkaProducer
    compressing: AIOKafkaProducer
    said: Said
    process: psutil.Process
    base_bytes: int = 0
    """Before the scenario."""
    peak_bytes: int = 0
    last_us: dict[tuple[str, int], int] = field(default_factory=dict)
    """Append time of the newest record sent, by partition."""
    records: int = 0

    def begin(self) -> None:
        """A scenario begins: memory is measured from here."""
        self.base_bytes = self.peak_bytes = self.process.memory_info().rss

    async def send(
        self,
        topic: Topic,
        partition: int,
        value: bytes,
        content_type: str = COLUMNS,
        *,
        squeezed: bool = False,
    ) -> None:
        """One record, acknowledged. `squeezed`: compressed, so that the broker takes more than its limit."""
        headers = [(CONTENT_TYPE, content_type.encode())]
        producer = self.compressing if squeezed else self.plain
        sent = await producer.send_and_wait(topic.value, value, partition=partition, headers=headers)
        place = (topic.value, partition)
        self.last_us[place] = max(self.last_us.get(place, 0), sent.timestamp * 1000)
        self.records += 1

    def gauges(self, topic: Topic, partition: int) -> Mapping[str, int]:
        """Of one source."""
        return self.worker.gauges().get(f"{topic.value}/{partition}", {})

    async def until_counted(self, after_s: int = 0) -> None:
        """Wait until every record was read and its events' seconds closed, `after_s` later than that."""
        wanted = {place: at_us // 1_000_000 + AHEAD_S + 1 + after_s for place, at_us in self.last_us.items()}

        async def closed() -> bool:
            assert self.worker.running, self.worker.log[-3000:]
            return all(
                self.said.closed.get((*place, gating), -1) >= second
                for place, second in wanted.items()
                for gating in range(GATING_PARTITIONS)
            )

        await eventually(closed, timeout_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def load(
    broker: Broker,
    folder: Path,
    kind: str,
    *,
    settings: Mapping[str, str] = SETTINGS,
    command: tuple[str, ...] | None = None,
) -> AsyncIterator[Load]:
    """A started worker that owns every partition and idles; topics must be fresh."""
    async with contextlib.AsyncExitStack() as exits:
        producers = []
        for compression in (None, "lz4"):
            producer = AIOKafkaProducer(
                bootstrap_servers=broker.bootstrap,
                max_request_size=LARGEST_REQUEST,
                max_batch_size=LARGEST_REQUEST,
                compression_type=compression,
            )
            await producer.start()
            exits.push_async_callback(producer.stop)
            producers.append(producer)
        async with Worker(kind, broker, folder, environment=settings, command=command) as worker:
            await worker.until_log(f"{kind}: assigned klaxon.", timeout_s=PATIENCE_S)
            await worker.until_log(f"{kind}: gauges", timeout_s=PATIENCE_S)
            on = Load(broker, worker, *producers, Said(), psutil.Process(worker.pid))
            async with _following(broker, on.said):
                watching = asyncio.create_task(_watch(on))
                try:
                    yield on
                finally:
                    watching.cancel()
                    await asyncio.wait([watching])


async def _watch(on: Load) -> None:
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            on.peak_bytes = max(on.peak_bytes, on.process.memory_info().rss)
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _following(broker: Broker, said: Said) -> AsyncIterator[None]:
    """Reads finals and dead letters as they come."""
    consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap, enable_auto_commit=False, max_partition_fetch_bytes=8 * MIB
    )
    await consumer.start()
    await consumer._client.force_metadata_update()
    cluster = consumer._client.cluster
    places = [
        TopicPartition(topic.value, number)
        for topic in (Topic.BUCKETS, Topic.DEAD_LETTER)
        for number in sorted(cluster.partitions_for_topic(topic.value) or ())
    ]
    consumer.assign(places)
    await consumer.seek_to_beginning(*places)

    async def read() -> None:
        while True:
            for place, records in (await consumer.getmany(timeout_ms=200)).items():
                for record in records:
                    if place.topic == Topic.BUCKETS:
                        said.take(msgspec.msgpack.decode(record.value, type=FinalBuckets))
                    else:
                        said.letters.append(json.loads(record.value))

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        await consumer.stop()


def main() -> None:
    """Lift the bound, then be the worker."""
    bound, kind = sys.argv[1:]
    LIFTED[bound]()
    from pipeline.cli.main import main as klaxon

    sys.argv = ["klaxon", "worker", kind]
    klaxon()


if __name__ == "__main__":
    main()
