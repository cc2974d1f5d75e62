"""Where a worker goes on after an assignment, on real Kafka, whatever is delivered first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition

from pipeline.config import Config
from pipeline.core.source import Flush, RecordMeta
from pipeline.workers.records import Partition, Record
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import SourceKind
from pipeline.workers.transport import Link
from schemas.topics import TICK, Topic
from tests.kafka.broker import Broker
from tests.kafka.records import Written, produce

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

PLACE = Partition(Topic.LOGITS, 0)


@dataclass
class Reads:
    """Stands for the core object: remembers the offsets it was given."""

    offsets: list[int] = field(default_factory=list)
    has_given_back: bool = False

    @property
    def next_offset(self) -> int | None:
        return self.offsets[-1] + 1 if self.offsets else None

    def read(self, meta: RecordMeta, _decoded: object) -> None:
        self.offsets.append(meta.offset)

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        return Flush()

    def give_back(self) -> None:
        self.has_given_back = True

    def gauges(self) -> dict[str, int]:
        return {}

    @property
    def counted(self) -> dict[str, int]:
        return {}


@dataclass
class GroupOnly:
    """Stands for the link: nothing is sent here, the group alone is asked for."""

    group: str


class Bench:
    """A worker of one partition whose deliveries the test makes up."""

    def __init__(self, broker: Broker, group: str) -> None:
        self.made: list[Reads] = []
        kind = SourceKind(lambda *_: cast("Any", None), self._make)
        self._worker = SourceWorker(
            cast("Link", GroupOnly(group)), Config(kafka=broker.config), {Topic.LOGITS: kind}
        )

    def _make(self, _topic: Topic, _partition: int) -> Reads:
        self.made.append(Reads())
        return self.made[-1]

    async def assigned(self) -> None:
        await self._worker.assigned(frozenset({PLACE}))

    async def revoked(self) -> None:
        await self._worker.revoked(frozenset({PLACE}))

    async def delivered(self, offset: int) -> None:
        tick = {"content-type": TICK.encode()}
        await self._worker.read(Record(Topic.LOGITS, 0, offset, 1_000_000, 1, tick, None, b""))

    async def stop(self) -> None:
        await self._worker.stop()


async def commit(broker: Broker, group: str, offset: int) -> None:
    consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap, group_id=group, enable_auto_commit=False
    )
    await consumer.start()
    try:
        place = TopicPartition(*PLACE)
        consumer.assign([place])
        await consumer.commit({place: offset})
    finally:
        await consumer.stop()


async def ten_ticks(broker: Broker) -> None:
    ticks = [Written(PLACE.topic, b"", partition=0, content_type=TICK) for _ in range(10)]
    await produce(broker, ticks)


async def test_a_new_group_begins_at_the_beginning_whatever_comes_first(kafka: Broker) -> None:
    await ten_ticks(kafka)
    bench = Bench(kafka, "resume-new")
    await bench.assigned()
    await bench.delivered(4)
    await bench.stop()
    assert bench.made[-1].offsets == [0, 1, 2, 3, 4]


async def test_a_successor_begins_at_the_commit_whatever_comes_first(kafka: Broker) -> None:
    await ten_ticks(kafka)
    await commit(kafka, "resume-commit", 2)
    bench = Bench(kafka, "resume-commit")
    await bench.assigned()
    await bench.delivered(5)
    await bench.stop()
    assert bench.made[-1].offsets == [2, 3, 4, 5]


async def test_state_that_nobody_has_overtaken_goes_on_without_a_gap(kafka: Broker) -> None:
    await ten_ticks(kafka)
    await commit(kafka, "resume-kept", 1)
    bench = Bench(kafka, "resume-kept")
    await bench.assigned()
    await bench.delivered(1)
    await bench.delivered(2)
    await bench.revoked()
    await bench.assigned()
    await bench.delivered(6)
    await bench.stop()
    assert len(bench.made) == 1, "its state was kept"
    assert bench.made[0].offsets == [1, 2, 3, 4, 5, 6]


async def test_state_that_was_overtaken_is_dropped_for_the_commit(kafka: Broker) -> None:
    await ten_ticks(kafka)
    bench = Bench(kafka, "resume-overtaken")
    await bench.assigned()
    await bench.delivered(1)
    await bench.revoked()
    await commit(kafka, "resume-overtaken", 5)
    await bench.assigned()
    await bench.delivered(8)
    await bench.stop()
    assert [made.offsets for made in bench.made] == [[0, 1], [5, 6, 7, 8]]
    assert [made.has_given_back for made in bench.made] == [True, False]
