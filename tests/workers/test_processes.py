"""Worker processes from the outside: start, stop, a broker that is away, faults, wrong topics."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import msgspec
import pytest
from aiokafka import TopicPartition

from schemas.buckets import FinalBuckets, FreshCells
from schemas.topics import GATING_PARTITIONS, TICK, Topic
from tests.kafka.broker import Broker, broker_of
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import (
    Written,
    committed_offsets,
    dump,
    keep_producer_times,
    produce,
)
from tests.kafka.waiting import eventually
from tests.monitoring.scraping import address_of, get
from tests.workers.events import encoded, request, soon_us

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = {"KLAXON_CONTENT_LATENESS_S": "1", "KLAXON_CONTENT_JOIN_TIMEOUT_S": "3"}


async def test_a_worker_says_how_big_everything_is(kafka: Broker, log_folder: Path) -> None:
    environment = {**QUICK, **GAUGES_EVERY_SECOND}
    async with Worker("measure", kafka, log_folder, environment=environment) as worker:
        await worker.until_log("measure: assigned")
        await produce(kafka, [Written(Topic.REQUESTS, encoded(request(soon_us())))])

        async def read() -> bool:
            return worker.gauges().get("process", {}).get("reads", 0) > 0

        await eventually(read)
        gauges = worker.gauges()
    assert gauges["process"]["rss_bytes"] > 10_000_000
    sources = {f"klaxon.{name}/{number}" for name in ("requests", "telemetry") for number in range(2)}
    counts = {
        f"{what}/klaxon.{name}" for what in ("counted", "dead_letters") for name in ("requests", "telemetry")
    }
    assert set(gauges) == {"process"} | sources | counts


async def _finals(broker: Broker) -> list[FinalBuckets]:
    return [
        msgspec.msgpack.decode(record.value, type=FinalBuckets)
        for record in await dump(broker, Topic.BUCKETS)
    ]


def _counted(finals: list[FinalBuckets]) -> int:
    """Requests in the cells `all`, every second once."""
    counted = {
        (final.topic, final.partition, final.gating_partition, second.second): sum(
            cell.counters.get("requests", 0)
            for content in second.contents
            for cell in content.cells
            if cell.dimension == "all"
        )
        for final in finals
        for second in final.seconds
    }
    return sum(counted.values())


async def test_events_become_fresh_cells_and_then_final_buckets(kafka: Broker, log_folder: Path) -> None:
    async with Worker("measure", kafka, log_folder, environment=QUICK) as worker:
        await worker.until_log("measure: ready")
        for number in range(20):
            await produce(kafka, [Written(Topic.REQUESTS, encoded(request(soon_us(), pair_id=f"p{number}")))])

        async def all_counted() -> bool:
            return _counted(await _finals(kafka)) == 20

        await eventually(all_counted)
        fresh = [
            msgspec.msgpack.decode(record.value, type=FreshCells)
            for record in await dump(kafka, Topic.PARTIALS)
        ]
        assert {second.second for cells in fresh for second in cells.seconds} == {
            second.second for final in await _finals(kafka) for second in final.seconds
        }
        assert await worker.stop() == 0, worker.log
    finals = await _finals(kafka)
    assert {final.whole_from for final in finals} == {0}
    assert {final.gating_partition for final in finals} == set(range(GATING_PARTITIONS))


async def test_idle_partitions_close_their_seconds_by_ticks(kafka: Broker, log_folder: Path) -> None:
    async with Worker("measure", kafka, log_folder, environment=QUICK):
        sources = {(topic, number) for topic in (Topic.REQUESTS, Topic.TELEMETRY) for number in range(2)}

        async def all_close() -> bool:
            return {(final.topic, final.partition) for final in await _finals(kafka)} == sources

        await eventually(all_close)
    ticks = await dump(kafka, Topic.TELEMETRY)
    assert {(dict(tick.headers)["content-type"], tick.value) for tick in ticks} == {(TICK.encode(), b"")}
    # One at a time, and only when the last one was read.
    by_partition = [[tick.timestamp for tick in ticks if tick.partition == number] for number in range(2)]
    for times in by_partition:
        assert all(later - earlier >= 900 for earlier, later in itertools.pairwise(times))


async def test_bad_events_go_to_the_dead_letter_and_cost_only_themselves(
    kafka: Broker, log_folder: Path
) -> None:
    async with Worker("measure", kafka, log_folder, environment=QUICK) as worker:
        await worker.until_log("measure: ready")
        batch = [
            request(soon_us(), pair_id="a"),
            request(soon_us(), status="x"),
            request(soon_us(), pair_id="b"),
        ]
        await produce(kafka, [Written(Topic.REQUESTS, encoded(batch), partition=0)])
        await produce(kafka, [Written(Topic.REQUESTS, b"\xff{", partition=0)])

        async def settled() -> bool:
            letters = await dump(kafka, Topic.DEAD_LETTER)
            return len(letters) == 2 and _counted(await _finals(kafka)) == 2

        await eventually(settled)
    letters = [json.loads(record.value) for record in await dump(kafka, Topic.DEAD_LETTER)]
    assert (letters[0]["position"], letters[0]["field"]) == (1, "status")
    assert letters[1]["position"] is None
    assert "payload" not in letters[0]


async def test_a_worker_waits_for_the_broker_and_its_topics(
    kafka_session: Broker, log_folder: Path, nowhere: str
) -> None:
    away = broker_of(msgspec.structs.replace(kafka_session.config, bootstrap=nowhere))
    async with Worker("measure", away, log_folder) as worker:
        at = await address_of(worker)
        ready, healthy = [await asyncio.to_thread(get, f"{at}/{path}") for path in ("readyz", "healthz")]
        assert (ready.status, ready.json["missing"]) == (503, ["Kafka and its topics are waited for"])
        assert healthy.status == 200
        await worker.until_log(f"cannot reach Kafka at {nowhere}")
        await worker.until_log("trying again in")
        await worker.until_log("trying again in")
        assert "Traceback" not in worker.log
        assert await worker.stop() == 0, worker.log


async def test_producer_times_stop_the_worker_with_a_line_that_names_the_topic(
    kafka: Broker, log_folder: Path
) -> None:
    await keep_producer_times(kafka, Topic.REQUESTS)
    async with Worker("measure", kafka, log_folder) as worker:
        assert await worker.until_ended() == 1
    assert "klaxon.requests/" in worker.log
    assert "message.timestamp.type=LogAppendTime" in worker.log
    assert "Traceback" not in worker.log


async def test_a_fault_point_kills_and_the_successor_goes_on(kafka: Broker, log_folder: Path) -> None:
    async with Worker(
        "measure", kafka, log_folder, environment=QUICK, fault="flush_acked_before_commit:3"
    ) as worker:
        await worker.until_log("measure: ready")
        for number in range(10):
            await produce(
                kafka,
                [Written(Topic.REQUESTS, encoded(request(soon_us(), pair_id=f"p{number}")), partition=0)],
            )
            await asyncio.sleep(0.05)
        await worker.until_fault("flush_acked_before_commit")
    async with Worker("measure", kafka, log_folder, environment=QUICK):

        async def all_counted() -> bool:
            return _counted(await _finals(kafka)) == 10

        await eventually(all_counted)


async def test_offsets_are_committed_a_while_behind(kafka: Broker, log_folder: Path) -> None:
    places = [TopicPartition(Topic.REQUESTS, number) for number in range(2)]
    async with Worker("measure", kafka, log_folder, environment=QUICK):

        async def committed() -> dict[str, int]:
            return await committed_offsets(kafka, "klaxon-measure", places)

        found = await eventually(committed)
    ticks = await dump(kafka, Topic.REQUESTS)
    for place, offset in found.items():
        mine = [tick for tick in ticks if f"{tick.topic}/{tick.partition}" == place]
        assert mine[-1].timestamp - mine[offset].timestamp >= 10_000
