"""What every topic looks like on the broker, and making and checking it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code

from pipeline.config import KafkaConfig
from pipeline.workers.broker import BrokerError, admin_client, away, client_options
from pipeline.workers.records import APPEND_TIME
from schemas.topics import CONTENT_TYPE, GATING, GATING_PARTITIONS, INPUTS, TICK, Topic

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS

RETENTION_MS: Final[Mapping[Topic, int]] = {
    Topic.REQUESTS: 2 * DAY_MS,
    Topic.LOGITS: DAY_MS,
    Topic.TELEMETRY: 2 * DAY_MS,
    Topic.FEEDBACK: 7 * DAY_MS,
    Topic.PARTIALS: HOUR_MS,
    Topic.BUCKETS: 7 * DAY_MS,
    Topic.PAIRS: 2 * DAY_MS,
    Topic.COMMANDS: 180 * DAY_MS,
    Topic.DECISIONS: 180 * DAY_MS,
    Topic.APPLIED: 7 * DAY_MS,
    Topic.DEAD_LETTER: 2 * DAY_MS,
}
COMPACTED: Final = (Topic.CONTROL, Topic.ROLLOUTS, Topic.STATE)
BY_INPUT_PARTITIONS: Final = (*INPUTS, Topic.PAIRS)
"""Topics with as many partitions as the configuration says; the gate's have GATING_PARTITIONS, others one."""

TOPIC_EXISTS: Final = 36


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """How a topic is created. What the broker's defaults decide is not here."""

    topic: Topic
    partitions: int
    replication: int
    settings: Mapping[str, str] = field(default_factory=dict)


def plan(kafka: KafkaConfig) -> tuple[TopicPlan, ...]:
    """Every topic of ours as this configuration wants it."""
    return tuple(_plan(topic, kafka) for topic in Topic)


def _plan(topic: Topic, kafka: KafkaConfig) -> TopicPlan:
    if topic in BY_INPUT_PARTITIONS:
        partitions = kafka.partitions
    else:
        partitions = GATING_PARTITIONS if topic in GATING else 1
    settings: dict[str, str] = {}
    if topic in COMPACTED:
        settings |= {"cleanup.policy": "compact", "min.compaction.lag.ms": str(HOUR_MS)}
    else:
        settings |= {"cleanup.policy": "delete", "retention.ms": str(RETENTION_MS[topic])}
    if kafka.append_time and topic in INPUTS:
        settings["message.timestamp.type"] = "LogAppendTime"
    if kafka.replication >= 3:
        settings["min.insync.replicas"] = "2"
    return TopicPlan(topic, partitions, kafka.replication, settings)


async def create(kafka: KafkaConfig) -> tuple[Topic, ...]:
    """Create the topics that do not exist; returns those, once every topic has its leaders.

    Raises BrokerAwayError, BrokerError.
    """
    wanted = plan(kafka)
    async with admin_client(kafka) as admin:
        try:
            answer = await admin.create_topics(
                [
                    NewTopic(
                        name=item.topic.value,
                        num_partitions=item.partitions,
                        replication_factor=item.replication,
                        topic_configs=dict(item.settings),
                    )
                    for item in wanted
                ]
            )
            created = []
            for name, code, *message in answer.topic_errors:
                if code == 0:
                    created.append(Topic(name))
                elif code != TOPIC_EXISTS:
                    said = next((text for text in message if text), for_code(code).__name__)
                    raise BrokerError(f"topic {name} cannot be created at {kafka.bootstrap}: {said}")
            await _until_led(admin, kafka, {item.topic.value for item in wanted})
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    return tuple(created)


async def _until_led(admin: AIOKafkaAdminClient, kafka: KafkaConfig, names: set[str]) -> None:
    """Wait until the broker knows a leader for every partition: creation answers before that."""
    for _ in range(kafka.connect_timeout_s * 10):
        led = {
            topic["topic"]
            for topic in await admin.describe_topics(sorted(names))
            if topic["error_code"] == 0 and all(partition["leader"] >= 0 for partition in topic["partitions"])
        }
        if led == names:
            return
        await asyncio.sleep(0.1)
    raise BrokerError(f"no leader for {', '.join(sorted(names - led))} at {kafka.bootstrap}: see its log")


async def check(kafka: KafkaConfig) -> tuple[str, ...]:
    """Everything about the topics that is not as it must be, one line each; empty when all is well.

    Writes a probe (a tick, which everyone ignores) to every input topic and reads its timestamp back.
    Raises BrokerAwayError.
    """
    wanted = plan(kafka)
    async with admin_client(kafka) as admin:
        try:
            problems = [*await _shape_problems(admin, wanted), *await _setting_problems(admin, wanted, kafka)]
            if not problems:
                for topic in INPUTS:
                    problems += await _probe_problems(kafka, topic)
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    return tuple(problems)


async def _shape_problems(admin: AIOKafkaAdminClient, wanted: tuple[TopicPlan, ...]) -> list[str]:
    described = {
        topic["topic"]: len(topic["partitions"])
        for topic in await admin.describe_topics([item.topic.value for item in wanted])
        if topic["error_code"] == 0
    }
    problems = []
    for item in wanted:
        found = described.get(item.topic.value)
        if found is None:
            problems.append(f"{item.topic}: does not exist; run `klaxon topics create`")
        elif found != item.partitions:
            problems.append(
                f"{item.topic}: {found} partitions, the configuration says {item.partitions}; a partition "
                "count is fixed at creation: set kafka.partitions to it, or create the topics anew"
            )
    return problems


async def _setting_problems(
    admin: AIOKafkaAdminClient, wanted: tuple[TopicPlan, ...], kafka: KafkaConfig
) -> list[str]:
    if not kafka.append_time:
        return []  # the embedded broker keeps no settings
    problems = []
    resources = [ConfigResource(ConfigResourceType.TOPIC, item.topic.value) for item in wanted]
    found: dict[str, dict[str, str]] = {}
    for answer in await admin.describe_configs(resources):
        for code, _message, _kind, name, entries in answer.resources:
            if code == 0:
                found[name] = {entry[0]: entry[1] for entry in entries}
    for item in wanted:
        for key in ("cleanup.policy", "message.timestamp.type"):
            want, have = item.settings.get(key), found.get(item.topic.value, {}).get(key)
            if want is not None and have is not None and want != have:
                problems.append(f"{item.topic}: {key} is {have}, must be {want}; alter the topic's setting")
    return problems


async def _probe_problems(kafka: KafkaConfig, topic: Topic) -> list[str]:
    """Write a tick with a producer's time an hour old and see which time the broker keeps."""
    mark = uuid.uuid4().bytes
    producer = AIOKafkaProducer(**client_options(kafka))
    await producer.start()
    try:
        written = await producer.send_and_wait(
            topic.value,
            b"",
            partition=0,
            timestamp_ms=int(time.time() * 1000) - HOUR_MS if kafka.append_time else None,
            headers=[(CONTENT_TYPE, TICK.encode()), ("probe", mark)],
        )
    finally:
        await producer.stop()
    consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        **client_options(kafka), enable_auto_commit=False
    )
    await consumer.start()
    try:
        place = TopicPartition(topic.value, 0)
        consumer.assign([place])
        consumer.seek(place, written.offset)
        record = await consumer.getone(place)
    finally:
        await consumer.stop()
    if dict(record.headers).get("probe") != mark:
        return [f"{topic}: the probe written at offset {written.offset} was not read back there"]
    if kafka.append_time and record.timestamp_type != APPEND_TIME:
        return [f"{topic}: records carry their producer's time; set message.timestamp.type=LogAppendTime"]
    return []
