"""`klaxon doctor` on a real broker: topics set wrong, and workers that are there or not."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from pipeline.cli.doctor import broker as doctor_broker
from pipeline.cli.doctor import workers as doctor_workers
from pipeline.cli.doctor.broker import broker_findings
from pipeline.cli.doctor.findings import Finding
from pipeline.cli.doctor.workers import worker_findings
from pipeline.config import Config, ContentConfig, GateConfig
from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON
from tests.kafka.records import Written, produce
from tests.kafka.waiting import eventually
from tests.workers.events import encoded, request
from tests.workers.fleet import QUICK, SEAT, fleet, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

LOOK_S = 0.5


def codes(found: list[Finding]) -> set[tuple[str, str]]:
    return {(one.code, one.where) for one in found}


async def test_topics_that_are_not_as_planned_and_a_clock_that_is_off(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await broker_findings(kafka.config) == []
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([Topic.APPLIED, Topic.PAIRS])
        await admin.create_topics([NewTopic(Topic.PAIRS, 3, 1)])
        for topic, setting in (
            (Topic.LOGITS, {"message.timestamp.type": "CreateTime"}),
            (Topic.REQUESTS, {"message.timestamp.type": "LogAppendTime", "retention.ms": "3600000"}),
        ):
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, setting)])
    finally:
        await admin.close()

    async def all_told() -> list[Finding]:  # the broker answers before it has applied
        found = await broker_findings(kafka.config)
        return found if len({one.code for one in found}) >= 4 else []

    found = await eventually(all_told)
    assert {
        ("topic_absent", "klaxon.applied"),
        ("topic_partitions", "klaxon.pairs"),
        ("topic_setting", "klaxon.logits"),
        ("topic_retention", "klaxon.requests"),
    } <= codes(found)
    remedies = {one.code: one.remedy for one in found}
    assert (
        "--entity-name klaxon.logits --add-config message.timestamp.type=LogAppendTime"
        in remedies["topic_setting"]
    )
    # Three replicas configured, one there.
    planned = msgspec.structs.replace(kafka.config, replication=3)
    safer = {one.code for one in await broker_findings(planned) if one.where == Topic.CONTROL}
    assert safer == {"topic_replication", "topic_min_insync"}
    true_time = doctor_broker.now_us
    monkeypatch.setattr(doctor_broker, "now_us", lambda: true_time() + 7_000_000)
    (clock,) = [one for one in await broker_findings(kafka.config) if one.code == "clock_skew"]
    assert (clock.severity, "s ahead of the broker's" in clock.what) == ("error", True)


async def test_workers_that_are_there_and_not(
    kafka: Broker, log_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        kafka=kafka.config,
        content=ContentConfig(lateness_s=1, join_timeout_s=3),
        gate=GateConfig(renew_s=1),
    )
    async with fleet(kafka, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(kafka)
        await produce(kafka, [Written(Topic.REQUESTS, encoded(request(1, status="x")), partition=0)])

        told: list[set[tuple[str, str]]] = []

        async def settled() -> bool:
            told.append(codes(await worker_findings(config, LOOK_S)))
            return told[-1] == {
                ("dead_letters", "klaxon.requests"),
                ("group_empty", "group klaxon-archive"),
                ("no_router", "roll-out r1"),
            }

        try:
            await eventually(settled)
        except AssertionError:
            raise AssertionError(f"the doctor found {told[-1]}") from None
        other = msgspec.structs.replace(config, gate=GateConfig(renew_s=2))

        async def differ() -> bool:
            return ("gates_differ", "group klaxon-gate") in codes(await worker_findings(other, LOOK_S))

        await eventually(differ)
        await gate.kill()

        async def away() -> bool:
            return ("lease_not_renewed", "roll-out r1") in codes(await worker_findings(config, LOOK_S))

        await eventually(away)
    await _commit(kafka, "klaxon-archive", TopicPartition(Topic.REQUESTS, 0), 0)
    monkeypatch.setattr(doctor_workers, "SLOW_US", 0)
    look = asyncio.create_task(worker_findings(config, 3))
    while not look.done():  # something comes between its two looks, however far apart they are
        await produce(kafka, [Written(Topic.REQUESTS, encoded(request(1)), partition=0)])
        await asyncio.sleep(0.2)
    lagging = {one.where: one.what for one in await look if one.code == "lag"}
    assert "records behind and growing" in lagging["group klaxon-archive"]
    process = await asyncio.create_subprocess_exec(
        *KLAXON, "doctor", "--json", "--look", "0.1", cwd=REPOSITORY, stdout=PIPE,
        env={**os.environ, **kafka.environment, **QUICK, "KLAXON_CLICKHOUSE_DSN": f"chdb://{tmp_path}/none"},
    )  # fmt: skip
    out, _ = await process.communicate()
    said = json.loads(out)
    assert (process.returncode, said["ok"]) == (3, False)
    severities = [one["severity"] for one in said["findings"]]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert all(one["remedy"] for one in said["findings"])


async def _commit(broker: Broker, group: str, place: TopicPartition, offset: int) -> None:
    consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap, group_id=group, enable_auto_commit=False
    )
    await consumer.start()
    try:
        consumer.assign([place])
        await consumer.commit({place: offset})
    finally:
        await consumer.stop()
