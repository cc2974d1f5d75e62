"""Two alerts on what real processes expose: nobody sends; retention overtakes a waiting archive."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from prometheus_client.parser import text_string_to_metric_families

from pipeline.workers.records import APPEND_TIME
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import producer
from tests.kafka.waiting import eventually
from tests.monitoring.scraping import address_of, samples_of, scrape
from tests.prometheus.promtool import Case, check_alerts, promtool
from tests.workers.events import encoded, request
from tests.workers.fleet import QUICK

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

OLD_S = 40
"""How long ago the only events came: over 30 s, and over half of the retention."""
RETENTION_S = 60
PASSWORD = "sk-4711-canary"


def series_of(text: str, process: str) -> dict[str, str]:
    """Every sample of a scrape, as a series that stays so."""
    found: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels, "process": process}
            said = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            found[f"{sample.name}{{{said}}}"] = f"{sample.value!r}x20"
    return found


async def _send_old_events(broker: Broker) -> None:
    """One event in each partition, appended OLD_S ago as far as the record says."""
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        settings = {"message.timestamp.type": "CreateTime", "retention.ms": str(RETENTION_S * 1000)}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, Topic.REQUESTS, settings)])
    finally:
        await admin.close()
    then_ms = time.time_ns() // 1_000_000 - OLD_S * 1000
    event = encoded(request(then_ms * 1000))
    async with producer(broker) as client:
        for at in range(2):
            taken_as_sent = False
            while not taken_as_sent:  # the setting may take effect a moment later
                sent = await client.send_and_wait(Topic.REQUESTS, event, partition=at, timestamp_ms=then_ms)
                taken_as_sent = sent.timestamp_type != APPEND_TIME


def _at_risk(text: str) -> bool:
    return any(value for _, value in samples_of(text, "klaxon_retention_at_risk"))


def _silent(text: str) -> bool:
    ages = samples_of(text, "klaxon_evidence_age_seconds")
    silent = [age > OLD_S for said, age in ages if said["topic"] == Topic.REQUESTS]
    return len(silent) == 2 and all(silent)


async def _once(worker: Worker, condition: Callable[[str], bool]) -> dict[str, str]:
    """A scrape of which this is so, as series."""
    address = await address_of(worker)

    async def seen() -> str:
        text = await scrape(address)
        return text if condition(text) else ""

    return series_of(await eventually(seen), worker.kind)


async def test_silence_and_retention_at_risk_fire_on_real_scrapes(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    promtool()
    await _send_old_events(kafka)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = {"KLAXON_CLICKHOUSE_DSN": f"http://klaxon:{PASSWORD}@127.0.0.1:{nobody.getsockname()[1]}"}
        series: dict[str, str] = {}
        # One after the other: what `measure` publishes the archive would have to look at, too.
        async with Worker("archive", kafka, log_folder, environment=away) as archive:
            series |= await _once(archive, _at_risk)
            assert "ClickHouse at http" in archive.log
            assert PASSWORD not in archive.log
        as_sent = {**QUICK, "KLAXON_KAFKA_APPEND_TIME": "false"}
        async with Worker("measure", kafka, log_folder, environment=as_sent) as measure:
            series |= await _once(measure, _silent)
    firing = [
        Case("KlaxonEvidenceSilent", series, 60, 1),  # not klaxon.telemetry, which nobody sends either
        Case("KlaxonRetentionAtRisk", series, 15, 1),
        Case("KlaxonRecordsDeleted", series, 15, 0),
        Case("KlaxonArchiveBehind", series, 60, 0),
        Case("KlaxonProcessRestarts", series, 60, 0),
    ]
    assert check_alerts(firing, tmp_path) == ""
