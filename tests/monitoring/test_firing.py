"""Alerts about what comes and what is stored, on real Kafka: nobody sends; an archive without ClickHouse."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from pipeline.workers.records import APPEND_TIME
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import Written, now_us, produce, producer
from tests.monitoring.firings import Moment, assert_fire, cases, seen, total
from tests.monitoring.installation import until_ready
from tests.monitoring.scraping import address_of
from tests.prometheus.promtool import check_alerts, promtool
from tests.workers.events import encoded, request
from tests.workers.fleet import QUICK

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

OLD_S = 40
"""How long ago requests came: over 30 s."""
OLDER_S = 310
"""Telemetry and answers: over 2 and over 5 minutes, and over half of the retention."""
RETENTION_S = 600
"""So long that the broker itself deletes nothing while the test runs."""
DELETED = 3
PASSWORD = "sk-4711-canary"
PROCESSED = (Topic.REQUESTS, Topic.TELEMETRY)
AS_SENT = {**QUICK, "KLAXON_KAFKA_APPEND_TIME": "false"}


async def keep_times(broker: Broker, *topics: Topic, retention_s: int | None = None) -> None:
    """Records of these keep the time that their producer says: it is how they get old at once."""
    settings = {"message.timestamp.type": "CreateTime"}
    if retention_s is not None:
        settings["retention.ms"] = str(retention_s * 1000)
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, one, settings) for one in topics])
    finally:
        await admin.close()


async def send_old(broker: Broker, topic: Topic, ago_s: int) -> None:
    """One event in each partition, appended so long ago as far as the record says."""
    then_ms = time.time_ns() // 1_000_000 - ago_s * 1000
    event = encoded(request(then_ms * 1000))
    async with producer(broker) as client:
        for at in range(2):
            taken_as_sent = False
            while not taken_as_sent:  # the setting may take effect a moment later
                sent = await client.send_and_wait(topic, event, partition=at, timestamp_ms=then_ms)
                taken_as_sent = sent.timestamp_type != APPEND_TIME


async def test_nobody_sends_and_a_transaction_hangs(kafka: Broker, log_folder: Path, tmp_path: Path) -> None:
    """Behind the only events somebody's transaction stays open: nothing after it can be read, no ticks."""
    promtool()
    await keep_times(kafka, *PROCESSED)
    async with Worker("measure", kafka, log_folder, environment=AS_SENT) as measure:
        at = {"measure": await address_of(measure)}
        await until_ready(at["measure"])  # however long that takes, what is sent now is new then
        for topic in PROCESSED:
            await produce(
                kafka, [Written(topic, encoded(request(now_us())), partition=number) for number in range(2)]
            )

        def ages(now: Moment, topic: Topic) -> list[float]:
            named = {"topic": topic.value}
            return [
                total(now, "measure", "klaxon_evidence_age_seconds", partition=str(number), **named) or 0
                for number in range(2)
            ]

        def log_age(now: Moment) -> float | None:
            return total(now, "measure", "klaxon_log_age_seconds", topic=Topic.REQUESTS.value, partition="0")

        def well(now: Moment) -> bool:
            of_all = [age for topic in PROCESSED for age in ages(now, topic)]
            return (log_age(now) or 99) < 10 and all(0 < age < 25 for age in of_all)

        good = await seen(at, well)
        await send_old(kafka, Topic.REQUESTS, OLD_S)
        await send_old(kafka, Topic.TELEMETRY, OLDER_S)
        async with producer(kafka, transactional_id="somebody") as hanging:
            await hanging.begin_transaction()
            for number in range(2):
                await hanging.send_and_wait(Topic.REQUESTS, b"", partition=number)
            bad = await seen(
                at,
                lambda now: (
                    min(ages(now, Topic.REQUESTS)) > 30
                    and min(ages(now, Topic.TELEMETRY)) > 120
                    and (log_age(now) or 0) > 30
                ),
            )
    film = [good, bad]
    named = ("KlaxonEvidenceSilent", "KlaxonTelemetrySilent", "KlaxonLagging")
    assert_fire("test_nobody_sends_and_a_transaction_hangs", dict.fromkeys(named, film), tmp_path)


async def delete_first(broker: Broker, topic: Topic, count: int) -> None:
    """As retention does, at once; the archive's group stood before them."""
    place = TopicPartition(topic, 0)
    member: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap, group_id="klaxon-archive", enable_auto_commit=False
    )
    await member.start()
    try:
        member.assign([place])
        await member.commit({place: 0})
    finally:
        await member.stop()
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        await admin.delete_records({place: RecordsToDelete(count)})
    finally:
        await admin.close()


async def test_an_archive_whose_clickhouse_is_away(kafka: Broker, log_folder: Path, tmp_path: Path) -> None:
    promtool()
    await keep_times(kafka, Topic.REQUESTS, retention_s=RETENTION_S)
    await keep_times(kafka, Topic.LOGITS)
    film: list[Moment] = []
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = {"KLAXON_CLICKHOUSE_DSN": f"http://klaxon:{PASSWORD}@127.0.0.1:{nobody.getsockname()[1]}"}
        for bad in (False, True):
            if bad:
                await send_old(kafka, Topic.REQUESTS, OLDER_S)
                await send_old(kafka, Topic.LOGITS, OLDER_S)
                await produce(kafka, [Written(Topic.TELEMETRY, b"{}", partition=0)] * (DELETED + 1))
                await delete_first(kafka, Topic.TELEMETRY, DELETED)
            async with Worker("archive", kafka, log_folder, environment=away) as archive:
                at = {"archive": await address_of(archive)}

                def told(now: Moment, bad: bool = bad) -> bool:
                    deleted = total(now, "archive", "klaxon_deleted_records")
                    return deleted == (DELETED if bad else 0)

                film.append(await seen(at, told))
                await archive.until_log("ClickHouse at http")
                assert PASSWORD not in archive.log
                assert await archive.stop() == 0  # it leaves its group, so that others may commit there
    named = ("KlaxonArchiveBehind", "KlaxonRetentionAtRisk", "KlaxonRecordsDeleted")
    assert_fire("test_an_archive_whose_clickhouse_is_away", dict.fromkeys(named, film), tmp_path)
    # Known-bad: what is not so does not fire, and the check says it.
    assert "KlaxonRecordsDeleted" in check_alerts(cases("KlaxonRecordsDeleted", film[:1] * 2), tmp_path)
