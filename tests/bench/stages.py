"""Where a trip's time goes: one stamp a stage, read off the records that a trip leaves in the log.

Nothing is added to the workers for it. All clocks are one machine's; what Kafka stamps is in whole ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import RecordMetadata
from msgspec import Struct

from agents.publish import KafkaRecordProducer
from agents.publish.producer import DeliveryError
from schemas.control import Directive
from schemas.topics import Topic, gating_partition, partition_of
from tests.bench.errors import BenchError
from tests.kafka.broker import Broker
from tests.kafka.records import dump, now_us

STAGES: Final = ("published", "appended", "counted", "judged", "written", "applied")
"""Each named by what ends it: publish() called; its batch appended to `klaxon.logits`; the pair worker's
fresh cells sent; the gate's judgement begun; its directive sent, in the transaction; the router's weight 0.
"""
READ_BACK_MS: Final = 100
READ_WITHIN_S: Final = 10.0


class _FreshHead(Struct, frozen=True, array_like=True):
    """The first fields of FreshCells."""

    v: int
    topic: str
    partition: int
    gating_partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Sent:
    began_us: int
    offset: int
    appended_us: int


class NotingProducer(KafkaRecordProducer):
    """Remembers where the batches of answers went that were sent while somebody wanted to know."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._noted: dict[int, list[_Sent]] = {}

    def note(self, partition: int) -> None:
        """Remember batches of this partition of `klaxon.logits` from now on."""
        self._noted.setdefault(partition, [])

    def batch_of(self, partition: int, published_us: int) -> _Sent:
        """The first batch sent since: what was published then is in it."""
        for sent in self._noted[partition]:
            if sent.began_us >= published_us:
                return sent
        raise BenchError("the batch of a deciding event was not noted")

    async def send(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes,
        headers: Any,
    ) -> None:
        """As KafkaRecordProducer's, which returns nothing."""
        began_us = now_us()
        try:
            sent: RecordMetadata = await self._started().send_and_wait(
                topic, value=value, key=key, partition=partition, headers=list(headers)
            )
        except (KafkaError, OSError) as error:
            raise DeliveryError(f"topic {topic}: {error!r}") from error
        if topic == Topic.LOGITS and partition in self._noted:
            self._noted[partition].append(_Sent(began_us, sent.offset, sent.timestamp * 1000))


@dataclass(frozen=True, slots=True)
class Timed:
    """One trip, from the call of `publish` to the router."""

    rollout: str
    signature: str
    published_us: int
    directive: Directive
    applied_us: int


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads `klaxon.partials` from a time on."""

    consumer: AIOKafkaConsumer

    async def counted_us(self, gating: int, source: int, offset: int, since_us: int) -> int:
        """When fresh cells that hold this offset of `klaxon.logits` were sent to a gating partition."""
        place = TopicPartition(Topic.PARTIALS.value, gating)
        found = await self.consumer.offsets_for_times({place: since_us // 1000 - READ_BACK_MS})
        start = found[place]
        if start is None:
            raise BenchError(f"nothing in {place} since a trip")
        self.consumer.assign([place])
        self.consumer.seek(place, start.offset)
        while records := await self.consumer.getmany(place, timeout_ms=int(READ_WITHIN_S * 1000)):
            for record in records[place]:
                head = msgspec.msgpack.decode(record.value or b"", type=_FreshHead)
                if (head.topic, head.partition) == (Topic.LOGITS, source) and head.offset >= offset:
                    return record.timestamp * 1000
        raise BenchError(f"no fresh cells of {Topic.LOGITS}/{source} from offset {offset} on")


async def stages(broker: Broker, producer: NotingProducer, trips: Sequence[Timed]) -> list[dict[str, float]]:
    """Per trip the ms that every stage after the first took."""
    written = {
        (directive.rollout, directive.generation, directive.epoch): record.timestamp * 1000
        for record in await dump(broker, Topic.CONTROL)
        for directive in [msgspec.json.decode(record.value or b"", type=Directive)]
    }
    consumer = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap, enable_auto_commit=False, fetch_max_wait_ms=50
    )
    await consumer.start()
    try:
        reader = _Reader(consumer)
        return [await _stages(reader, broker, producer, written, trip) for trip in trips]
    finally:
        await consumer.stop()


async def _stages(
    reader: _Reader,
    broker: Broker,
    producer: NotingProducer,
    written: dict[tuple[str, int, int], int],
    trip: Timed,
) -> dict[str, float]:
    source = partition_of(trip.signature.encode(), broker.config.partitions)
    batch = producer.batch_of(source, trip.published_us)
    counted_us = await reader.counted_us(
        gating_partition(trip.rollout), source, batch.offset, trip.published_us
    )
    directive = trip.directive
    stamps = (
        trip.published_us,
        batch.appended_us,
        counted_us,
        directive.ts_us,
        written[directive.rollout, directive.generation, directive.epoch],
        trip.applied_us,
    )
    return {
        stage: (end - start) / 1000 for stage, start, end in zip(STAGES[1:], stamps, stamps[1:], strict=False)
    }
