"""Writing and reading topics in tests; of the pipeline's workers only what closes clients."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

from pipeline.workers import topics
from pipeline.workers.broker import admin_client, started
from schemas.topics import CONTENT_TYPE, JSON, Topic
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.waiting import eventually


@dataclass(frozen=True)
class Written:
    """A record a test wants in a topic."""

    topic: str
    value: bytes
    key: bytes | None = None
    partition: int | None = None
    content_type: str | None = JSON
    timestamp_ms: int | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    signed: bool = True
    """A command is signed as an operator's; no other record is."""


async def fresh_topics(broker: Broker) -> None:
    """Delete all our topics with their groups' offsets, and create them anew."""
    await delete_topics(broker)
    await topics.create(broker.config)


async def delete_topics(broker: Broker) -> None:
    """Delete all our topics with their groups' offsets."""
    async with admin_client(broker.config) as admin:
        ours = {topic.value for topic in Topic} & set(await admin.list_topics())
        if ours:
            await admin.delete_topics(sorted(ours))
            await eventually(lambda: _are_gone(admin, ours))


async def _are_gone(admin: AIOKafkaAdminClient, names: set[str]) -> bool:
    return not names & set(await admin.list_topics())


async def keep_producer_times(broker: Broker, topic: Topic) -> None:
    """Set a topic wrong: records keep their producer's time."""
    async with admin_client(broker.config) as admin:
        setting = ConfigResource(ConfigResourceType.TOPIC, topic, {"message.timestamp.type": "CreateTime"})
        await admin.alter_configs([setting])


@asynccontextmanager
async def producer(
    broker: Broker, *, transactional_id: str | None = None, linger_ms: int = 0
) -> AsyncIterator[AIOKafkaProducer]:
    """A started producer."""
    made = AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap, transactional_id=transactional_id, linger_ms=linger_ms
    )
    async with started(made) as client:
        yield client


async def produce(broker: Broker, records: Iterable[Written]) -> list[int]:
    """Write the records in order, each acknowledged before the next; returns their offsets."""
    async with producer(broker) as client:
        return await write(client, records)


async def write(client: AIOKafkaProducer, records: Iterable[Written]) -> list[int]:
    """The same, by a producer that stays connected."""
    offsets = []
    for record in records:
        headers = list(record.headers)
        if record.content_type is not None:
            headers.append((CONTENT_TYPE, record.content_type.encode()))
        if record.signed and record.topic == Topic.COMMANDS:
            headers.append(keys.command_header(record.key, record.value))
        sent = await client.send_and_wait(
            record.topic,
            record.value,
            key=record.key,
            partition=record.partition,
            timestamp_ms=record.timestamp_ms,
            headers=headers,
        )
        offsets.append(sent.offset)
    return offsets


async def dump(
    broker: Broker, topic: str, *, committed_only: bool = True
) -> list[ConsumerRecord[bytes, bytes]]:
    """Every record of a topic as it stands now, by partition and offset."""
    consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level=(
            "read_committed" if committed_only and broker.config.transactions else "read_uncommitted"
        ),
        fetch_max_wait_ms=50,
    )
    found: list[ConsumerRecord[bytes, bytes]] = []
    async with started(consumer):
        await consumer._client.force_metadata_update()
        places = [
            TopicPartition(topic, number)
            for number in sorted(consumer._client.cluster.partitions_for_topic(topic) or ())
        ]
        ends = await consumer.end_offsets(places)
        begins = await consumer.beginning_offsets(places)
        consumer.assign(places)
        for place in places:
            consumer.seek(place, begins[place])
        unread = {place for place in places if begins[place] < ends[place]}
        while unread:
            for place, records in (await consumer.getmany(*unread, timeout_ms=100)).items():
                found += [record for record in records if record.offset < ends[place]]
            for place in list(unread):
                if await consumer.position(place) >= ends[place]:
                    unread.discard(place)
    return sorted(found, key=lambda record: (record.partition, record.offset))


async def committed_offsets(broker: Broker, group: str, places: Sequence[TopicPartition]) -> dict[str, int]:
    """What a group has committed, as "topic/partition" → offset; partitions without a commit are left out.

    {} while the group has no coordinator: nobody has committed anything on this broker yet, or it moves.
    """
    async with admin_client(broker.config) as admin:
        try:
            found = await admin.list_consumer_group_offsets(group, partitions=list(places))
        except KafkaError as error:
            if not error.retriable:
                raise
            return {}
    return {f"{place.topic}/{place.partition}": at.offset for place, at in found.items() if at.offset >= 0}


def now_us() -> int:
    """Wall clock, in µs."""
    return time.time_ns() // 1000
