"""Running processes on real Kafka: what they expose is what is declared, and means what was done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.monitoring.exposition import thing_of
from pipeline.monitoring.metrics import CLOSED, LOG_ONLY, OTHER, WORKERS, Thing, metrics_of
from schemas.topics import GATING_PARTITIONS, Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import Written, now_us, produce
from tests.kafka.waiting import eventually
from tests.monitoring.firings import Moment, seen, total
from tests.monitoring.installation import STARTED, everything, until_ready
from tests.monitoring.scraping import address_of, families_of, get, samples_of
from tests.workers.events import encoded, request
from tests.workers.fleet import send_pairs, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]


def done(now: Moment) -> bool:
    """Whether everybody shows what was done: 20 pairs, the trip, 2 events."""
    complete = samples_of(now["gate"] or "", "klaxon_complete_age_seconds")
    return (
        all(total(now, kind, "klaxon_ready") == 1 for kind in (*WORKERS, "notify"))
        and len(list(complete)) == GATING_PARTITIONS
        and (total(now, "gate", "klaxon_decisions_total", kind="trip") or 0) > 0
        and (total(now, "pair", "klaxon_counted_total", outcome="pairs") or 0) >= 20
        and (total(now, "measure", "klaxon_counted_total", outcome="requests") or 0) > 0
        and (total(now, "measure", "klaxon_dead_letters_total") or 0) > 0
        and (total(now, "archive", "klaxon_archived_rows_total") or 0) > 20
        and total(now, "archive", "klaxon_archive_lag_records") is not None
        and (total(now, "router", "klaxon_router_changes_total") or 0) >= 2
        and (total(now, "notify", "klaxon_notifications_retried_total") or 0) >= 1
        and (total(now, "notify", "klaxon_notification_wait_seconds") or 0) > 0
    )


def events() -> Iterator[Written]:
    """A good one and a bad one in one record, made when it is sent, and ahead: it is not late."""
    yield Written(Topic.REQUESTS, encoded([request(now_us() + 2_000_000), request(0, status="x")]))


async def test_what_is_exposed_is_what_is_declared(kafka: Broker, log_folder: Path, tmp_path: Path) -> None:
    async with everything(kafka, log_folder, tmp_path) as running:
        at = {kind: await address_of(worker) for kind, worker in running.items()}
        assert all(address.startswith("http://127.0.0.1:") for address in at.values())
        for address in at.values():
            await until_ready(address)
        await start_rollout(kafka)
        await produce(kafka, events())
        await send_pairs(kafka, 20, bad=True)
        now = await seen(at, done)
        texts = {kind: text or "" for kind, text in now.items()}

        async def logged_by_all() -> bool:
            return all(running[kind].gauges() for kind in WORKERS)

        await eventually(logged_by_all)
        logged = {kind: running[kind].gauges() for kind in WORKERS}
        health = [(await asyncio.to_thread(get, f"{address}/healthz")).json for address in at.values()]
        assert running["gate"].running, running["gate"].log
    assert [each["healthy"] for each in health] == [True] * len(STARTED)
    for kind, text in texts.items():
        families = families_of(text)
        declared = metrics_of(kind)
        assert {name: each.type for name, each in families.items()} == {
            metric.name: metric.kind for metric in declared
        }, kind
        for metric in declared:
            samples = families[metric.name].samples
            assert samples or metric.name in SOMETIMES, f"{kind}: {metric.name} has no value"
            for sample in samples:
                assert set(sample.labels) - {"le"} == set(metric.labels), sample
                assert_bounded(metric.thing, sample.labels)
    for kind, gauges in logged.items():
        assert_declared(kind, gauges)
    assert_counted(texts)


SOMETIMES = {
    "klaxon_retention_left_seconds",
    "klaxon_rollout_coverage_ratio",
    "klaxon_rollout_expected_pairs",
    "klaxon_signing_key_valid_seconds",
}
"""Absent where a topic keeps everything; before a second was judged; of a key without end."""


def assert_bounded(thing: Thing, labels: Mapping[str, str]) -> None:
    """Every label has one of its stated values."""
    topics = {topic.value for topic in Topic}
    if "topic" in labels:
        assert labels["topic"] in topics
    if "partition" in labels:
        assert int(labels["partition"]) < max(GATING_PARTITIONS, 2)
    if "gating_partition" in labels:
        assert int(labels["gating_partition"]) < GATING_PARTITIONS
    for name in ("outcome", "reason", "kind"):
        if name in labels:
            assert labels[name] in CLOSED[thing], f"{labels[name]} is not declared"
            assert labels[name] != OTHER
    assert labels.get("rollout", "r1") == "r1"


def assert_declared(kind: str, gauges: Mapping[str, Mapping[str, int]]) -> None:
    """Every gauge of the log line is a metric, or said to be none."""
    declared = {(metric.thing, metric.gauge) for metric in metrics_of(kind)}
    for key, said in gauges.items():
        thing, _ = thing_of(key)
        for name in said:
            known = (thing, name) in declared or (thing in CLOSED and name in CLOSED[thing])
            assert known or name in LOG_ONLY.get(thing, ()), f"{kind}: {key} {name}"


def assert_counted(texts: Mapping[str, str]) -> None:
    """The numbers mean what was done."""

    def total(process: str, name: str, **labels: str) -> float:
        found = samples_of(texts[process], name)
        return sum(value for said, value in found if labels.items() <= said.items())

    assert total("measure", "klaxon_dead_letters_total", reason="value") == 1
    assert total("measure", "klaxon_counted_total", outcome="requests") == 1
    assert total("pair", "klaxon_counted_total", outcome="pairs") == 20
    assert total("gate", "klaxon_decisions_total", kind="trip") == 1
    assert total("gate", "klaxon_decisions_total", kind="command") == 1
    assert total("gate", "klaxon_decision_seconds_count") == total("gate", "klaxon_decisions_total") >= 2
    assert total("gate", "klaxon_seat_taken") == GATING_PARTITIONS
    assert total("gate", "klaxon_rollout_tripped", rollout="r1") == 1
    assert total("gate", "klaxon_rollout_canary_ratio", rollout="r1") == 0
    assert total("router", "klaxon_router_rollouts") == 1
    assert total("router", "klaxon_router_changes_total") >= 2
    assert total("notify", "klaxon_notifications_retried_total") >= 1
    assert total("notify", "klaxon_notifications_delivered_total") == 0
    assert total("notify", "klaxon_ready") == 1
    for kind in WORKERS:
        assert total(kind, "klaxon_assigned_partitions") > 0
        assert total(kind, "klaxon_ready") == 1
        assert total(kind, "klaxon_resident_bytes") > 10_000_000
    assert total("pair", "klaxon_flush_seconds_count") > 0


async def test_a_worker_without_its_port_works_all_the_same(kafka: Broker, log_folder: Path) -> None:
    async with Worker("measure", kafka, log_folder) as first:
        port = (await address_of(first)).rpartition(":")[2]
        taken = {"KLAXON_MONITORING_PAIR_PORT": port}
        async with Worker("pair", kafka, log_folder, environment=taken) as second:
            await second.until_log("no /metrics: port")
            await second.until_log("pair: ready")
            assert second.log.count(" WARNING klaxon.monitoring: ") == 1
            assert await second.stop() == 0, second.log
