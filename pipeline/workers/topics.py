"""What every topic looks like on the broker, and making and checking it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidReplicationFactorError,
    KafkaError,
    TopicAuthorizationFailedError,
    for_code,
)

from pipeline.config import KafkaConfig
from pipeline.workers.broker import BrokerError, admin_client, away, client_options, started
from pipeline.workers.records import APPEND_TIME
from pipeline.workers.rights import who
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
ADMIN: Final = "run this as a super user of the brokers"


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


def _remedy(kafka: KafkaConfig, code: int) -> str:
    """What to do about a topic that the broker did not make, where the configuration is at fault."""
    if for_code(code) is not InvalidReplicationFactorError:
        return ""
    told = f"kafka.replication (KLAXON_KAFKA_REPLICATION) is {kafka.replication}"
    return f"; {told}: set at most as many as there are brokers"


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
                    if for_code(code) in (TopicAuthorizationFailedError, ClusterAuthorizationFailedError):
                        raise BrokerError(f"{who(kafka)} may not create topics at {kafka.bootstrap}: {ADMIN}")
                    said = next((text for text in message if text), for_code(code).__name__)
                    raise BrokerError(
                        f"topic {name} cannot be created at {kafka.bootstrap}: {said}{_remedy(kafka, code)}"
                    )
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
    problems = [str(problem) for problem in await topic_problems(kafka)]
    if not problems:
        try:
            for topic in INPUTS:
                problems += await _probe_problems(kafka, topic)
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class TopicProblem:
    """One thing about a topic that is not as it must be."""

    topic: Topic
    code: Literal["absent", "partitions", "setting", "retention", "replication", "min_insync", "replicas"]
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.what}; {self.remedy}"


async def topic_problems(kafka: KafkaConfig) -> list[TopicProblem]:
    """What the broker says of its topics, against the plan. Only reads; raises BrokerAwayError."""
    wanted = plan(kafka)
    async with admin_client(kafka) as admin:
        try:
            # All of them: a broker that creates topics on demand creates those that a request names.
            described = {
                topic["topic"]: topic["partitions"]
                for topic in await admin.describe_topics()
                if topic["error_code"] == 0
            }
            there = [item for item in wanted if item.topic.value in described]
            settings = await topic_settings(admin, there) if kafka.append_time else {}
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    problems: list[TopicProblem] = []
    for item in wanted:
        problems += _shape_problems(item, described.get(item.topic.value), kafka)
        problems += _setting_problems(item, settings.get(item.topic.value, {}), kafka)
    return problems


async def topic_settings(
    admin: AIOKafkaAdminClient, wanted: Sequence[TopicPlan]
) -> dict[str, dict[str, str]]:
    """Topic → setting → value, of those that exist. Raises aiokafka's KafkaError."""
    found: dict[str, dict[str, str]] = {}
    resources = [ConfigResource(ConfigResourceType.TOPIC, item.topic.value) for item in wanted]
    for answer in await admin.describe_configs(resources) if resources else ():
        for code, _message, _kind, name, entries in answer.resources:
            if code == 0:
                found[name] = {entry[0]: entry[1] for entry in entries}
    return found


def _shape_problems(
    item: TopicPlan, partitions: Sequence[Mapping[str, Any]] | None, kafka: KafkaConfig
) -> Iterator[TopicProblem]:
    if partitions is None:
        yield TopicProblem(item.topic, "absent", "does not exist", "run `klaxon topics create`")
        return
    if len(partitions) != item.partitions:
        yield TopicProblem(
            item.topic,
            "partitions",
            f"{len(partitions)} partitions, the configuration says {item.partitions}",
            "a partition count is fixed at creation: set kafka.partitions to it, or create the topics anew",
        )
    fewest = min(len(partition["replicas"]) for partition in partitions)
    if kafka.append_time and fewest < item.replication:
        yield TopicProblem(
            item.topic,
            "replication",
            f"replication {fewest}, the configuration says {item.replication}",
            "move it with `kafka-reassign-partitions.sh`, or set kafka.replication to what you want",
        )
    lagging = sum(len(partition["isr"]) < len(partition["replicas"]) for partition in partitions)
    if kafka.append_time and lagging:
        yield TopicProblem(
            item.topic,
            "replicas",
            f"{lagging} of {len(partitions)} partitions lack an in-sync replica",
            "start the brokers that hold the others",
        )


def _setting_problems(
    item: TopicPlan, settings: Mapping[str, str], kafka: KafkaConfig
) -> Iterator[TopicProblem]:
    for key in ("cleanup.policy", "message.timestamp.type"):
        want, have = item.settings.get(key), settings.get(key)
        if want is not None and have is not None and want != have:
            yield TopicProblem(
                item.topic,
                "setting",
                f"{key} is {have}, must be {want}",
                _alter(item, kafka, f"{key}={want}"),
            )
    want, have = item.settings.get("retention.ms"), settings.get("retention.ms")
    if want is not None and have is not None and 0 <= int(have) < int(want):
        yield TopicProblem(
            item.topic,
            "retention",
            f"retention.ms is {have}, shorter than the {want} that Klaxon counts on",
            _alter(item, kafka, f"retention.ms={want}"),
        )
    want, have = item.settings.get("min.insync.replicas"), settings.get("min.insync.replicas")
    if want is not None and have is not None and int(have) < int(want):
        yield TopicProblem(
            item.topic,
            "min_insync",
            f"min.insync.replicas is {have}, must be {want}: an acknowledged record may be lost",
            _alter(item, kafka, f"min.insync.replicas={want}"),
        )


def _alter(item: TopicPlan, kafka: KafkaConfig, setting: str) -> str:
    return (
        f"`kafka-configs.sh --bootstrap-server {kafka.bootstrap} --alter --entity-type topics"
        f" --entity-name {item.topic} --add-config {setting}`"
    )


async def _probe_problems(kafka: KafkaConfig, topic: Topic) -> list[str]:
    """Write a tick with a producer's time an hour old and see which time the broker keeps."""
    mark = uuid.uuid4().bytes
    try:
        async with started(AIOKafkaProducer(**client_options(kafka))) as producer:
            written = await producer.send_and_wait(
                topic.value,
                b"",
                partition=0,
                timestamp_ms=int(time.time() * 1000) - HOUR_MS if kafka.append_time else None,
                headers=[(CONTENT_TYPE, TICK.encode()), ("probe", mark)],
            )
    except TopicAuthorizationFailedError:
        return [f"{topic}: not probed for its record times, {who(kafka)} may not write it: {ADMIN}"]
    place = TopicPartition(topic.value, 0)
    async with started(AIOKafkaConsumer(**client_options(kafka), enable_auto_commit=False)) as consumer:
        consumer.assign([place])
        consumer.seek(place, written.offset)
        record = await consumer.getone(place)
    if dict(record.headers).get("probe") != mark:
        return [f"{topic}: the probe written at offset {written.offset} was not read back there"]
    if kafka.append_time and record.timestamp_type != APPEND_TIME:
        return [f"{topic}: records carry their producer's time; set message.timestamp.type=LogAppendTime"]
    return []
