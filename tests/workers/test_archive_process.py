"""The archive as a real process on real Kafka and chDB: every event once, whatever dies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from pipeline.store.client import connect
from pipeline.workers.runner import PATIENT_NICE
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import Written, committed_offsets, now_us, produce
from tests.kafka.waiting import eventually
from tests.store.folder import migrated
from tests.workers.events import encoded, request

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

PER_ROUND = 25


@pytest.fixture
def clickhouse(tmp_path: Path) -> dict[str, str]:
    return migrated(tmp_path)


def _stored(clickhouse: Mapping[str, str]) -> list[tuple[str, int]]:
    """pair id and number of rows, of everything in `inference_log`."""
    store = connect(clickhouse["KLAXON_CLICKHOUSE_DSN"], "klaxon")
    try:
        return store.rows(
            "SELECT prompt_id, count() FROM inference_log GROUP BY prompt_id ORDER BY prompt_id"
        )
    finally:
        store.close()


async def _publish(broker: Broker, first: int) -> None:
    events = [request(now_us(), prompt_id=f"{number:04d}") for number in range(first, first + PER_ROUND)]
    await produce(
        broker, [Written(Topic.REQUESTS, encoded(event), partition=at % 2) for at, event in enumerate(events)]
    )


def _expected(count: int) -> list[tuple[str, int]]:
    return [(f"{number:04d}", 1) for number in range(count)]


async def _until_committed(worker: Worker, broker: Broker, records: int) -> None:
    places = [TopicPartition(Topic.REQUESTS, number) for number in range(2)]

    async def all_committed() -> bool:
        assert worker.running, worker.log
        return sum((await committed_offsets(broker, "klaxon-archive", places)).values()) >= records

    await eventually(all_committed)


async def test_events_are_stored_once_across_a_clean_restart(
    kafka: Broker, log_folder: Path, clickhouse: dict[str, str]
) -> None:
    for number in range(2):
        await _publish(kafka, number * PER_ROUND)
        async with Worker("archive", kafka, log_folder, environment=clickhouse) as worker:
            await _until_committed(worker, kafka, (number + 1) * PER_ROUND)
            # To archive can wait: on a shared machine trips come first.
            assert psutil.Process(worker.pid).nice() == min(psutil.Process().nice() + PATIENT_NICE, 19)
            assert await worker.stop() == 0, worker.log
    assert await asyncio.to_thread(_stored, clickhouse) == _expected(2 * PER_ROUND)


@pytest.mark.parametrize("point", ["before_insert", "after_insert_before_commit", "after_insert_commit"])
async def test_events_are_stored_once_when_the_archive_dies_around_an_insert(
    kafka: Broker, log_folder: Path, clickhouse: dict[str, str], point: str
) -> None:
    await _publish(kafka, 0)
    async with Worker("archive", kafka, log_folder, environment=clickhouse, fault=f"{point}:2") as worker:
        await worker.until_fault(point)
    async with Worker("archive", kafka, log_folder, environment=clickhouse) as worker:
        # What was stored and not committed shows as no lag, although nothing new is to be stored.
        await _until_committed(worker, kafka, PER_ROUND)
        await _publish(kafka, PER_ROUND)
        await _until_committed(worker, kafka, 2 * PER_ROUND)
        assert await worker.stop() == 0, worker.log
    assert await asyncio.to_thread(_stored, clickhouse) == _expected(2 * PER_ROUND)


async def test_an_archive_without_tables_waits_and_says_what_to_do(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    nothing = {"KLAXON_CLICKHOUSE_DSN": f"chdb://{tmp_path}/empty"}
    async with Worker("archive", kafka, log_folder, environment=nothing) as worker:
        await worker.until_log("klaxon migrate")
        await worker.until_log("klaxon migrate")
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("answer", ["refuses", "hangs"])
async def test_an_archive_that_starts_without_clickhouse_tells_its_lag_and_the_risk(
    kafka: Broker, log_folder: Path, answer: str
) -> None:
    await _keep_for(kafka, seconds=6)
    await _publish(kafka, 0)
    async with _more_coming(kafka):
        await _tells_its_lag_and_the_risk(kafka, log_folder, answer)


async def _tells_its_lag_and_the_risk(kafka: Broker, log_folder: Path, answer: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answer == "hangs":
            server.listen()  # connected by the system, and never read from
        away = {
            "KLAXON_CLICKHOUSE_DSN": f"http://127.0.0.1:{server.getsockname()[1]}",
            "KLAXON_CLICKHOUSE_TIMEOUT_S": "3600",  # longer than any stop is waited for
            **GAUGES_EVERY_SECOND,
        }
        async with Worker("archive", kafka, log_folder, environment=away) as worker:
            await worker.until_log("bring ClickHouse back")

            async def shows_lag() -> bool:
                return worker.gauges().get("archive", {}).get("lag_records", 0) >= PER_ROUND

            async def refused() -> bool:
                return "cannot be reached" in worker.log

            await eventually(shows_lag)
            if answer == "refuses":
                await eventually(refused)
            assert await refused() == (answer == "refuses")
            # An opening without an answer holds no stop.
            assert await worker.stop() == 0, worker.log


@asynccontextmanager
async def _more_coming(broker: Broker) -> AsyncIterator[None]:
    """What is older than the retention stays, while newer records come into its segment."""

    async def publish() -> None:
        while True:
            await _publish(broker, 0)
            await asyncio.sleep(1)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _keep_for(broker: Broker, *, seconds: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        settings = {"retention.ms": str(seconds * 1000), "message.timestamp.type": "LogAppendTime"}
        topic = ConfigResource(ConfigResourceType.TOPIC, Topic.REQUESTS.value, settings)
        await admin.alter_configs([topic])
    finally:
        await admin.close()
