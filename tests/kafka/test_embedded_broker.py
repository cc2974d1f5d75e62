"""The contract suite on the embedded broker: what every installation may rely on, without Java."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from pipeline.workers import topics
from pipeline.workers.records import Partition
from schemas.topics import GATING_PARTITIONS, JSON, Topic
from tests.kafka.broker import Broker
from tests.kafka.collector import running
from tests.kafka.records import Written, committed_offsets, dump, produce
from tests.kafka.waiting import eventually
from tests.workers.fleet import SEAT, decisions, fleet, send_pairs, start_rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLACE = Partition(Topic.REQUESTS, 0)


@pytest.fixture
async def broker(embedded: Broker) -> Broker:
    await topics.create(embedded.config)
    return embedded


async def test_topics_are_created_with_their_partitions(broker: Broker) -> None:
    assert await topics.create(broker.config) == ()
    assert await topics.check(broker.config) == ()


async def test_records_come_back_with_headers_and_the_producers_time(broker: Broker) -> None:
    await produce(
        broker, [Written(PLACE.topic, b"\x00\xff", key=b"k", partition=1, timestamp_ms=1_700_000_000_123)]
    )
    (record,) = await dump(broker, PLACE.topic)
    assert (record.partition, record.offset, record.key, record.value) == (1, 0, b"k", b"\x00\xff")
    assert record.timestamp == 1_700_000_000_123
    assert dict(record.headers) == {"content-type": JSON.encode()}


async def test_a_group_reads_commits_and_resumes(broker: Broker) -> None:
    await produce(broker, [Written(PLACE.topic, b"%d" % n, partition=0) for n in range(6)])
    async with running(broker) as first:
        await first.until(lambda records: len(records) == 6)
        assert first.counts[Topic.CONTROL] == GATING_PARTITIONS
        assert await first.link.commit({PLACE: 4})
        position = first.link.position(PLACE)
        assert position is not None
        assert position.at_end
    committed = await committed_offsets(broker, "klaxon-test", [TopicPartition(*PLACE)])
    assert committed == {"klaxon.requests/0": 4}
    async with running(broker) as second:
        await second.until(lambda records: len(records) == 2)
    assert [record.offset for record in second.records] == [4, 5]


async def test_sends_are_acknowledged(broker: Broker) -> None:
    async with running(broker) as collector:
        sent = await collector.link.send(Topic.CONTROL, b"v", key=b"k", content_type=JSON, partition=2)
        assert (await sent).offset == 0
    (record,) = await dump(broker, Topic.CONTROL)
    assert (record.partition, record.value) == (2, b"v")


async def test_bad_answers_trip_without_transactions_and_append_times(
    broker: Broker, log_folder: Path
) -> None:
    async with fleet(broker, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(broker)
        await send_pairs(broker, 20, bad=True)

        async def tripped() -> list[dict[str, Any]]:
            return await decisions(broker, "trip")

        (trip,) = await eventually(tripped)
    assert trip["directive"]["state"] == "tripped"
