"""The transport on real Kafka: committed reads, bytes as they are, own commits, positions, life cycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import faust
import pytest
from aiokafka import TopicPartition

from pipeline.workers.records import APPEND_TIME, Partition
from pipeline.workers.transport import KlaxonApp
from schemas.topics import COLUMNS, JSON, Topic
from tests.kafka.broker import Broker
from tests.kafka.collector import TIMEOUT_S, running
from tests.kafka.records import Written, committed_offsets, dump, produce, producer
from tests.kafka.waiting import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

PLACE = Partition(Topic.REQUESTS, 0)


async def _committed_aborted_open(broker: Broker) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Writes `first`, `aborted`, `second`, and returns a context that holds `open` in an open transaction."""
    async with producer(broker, transactional_id="isolation") as client:
        for value, commits in ((b"first", True), (b"aborted", False), (b"second", True)):
            await client.begin_transaction()
            await client.send_and_wait(PLACE.topic, value, partition=0)
            await (client.commit_transaction() if commits else client.abort_transaction())

    @asynccontextmanager
    async def left_open() -> AsyncIterator[None]:
        async with producer(broker, transactional_id="isolation-open") as client:
            await client.begin_transaction()
            await client.send_and_wait(PLACE.topic, b"open", partition=0)
            yield
            await client.abort_transaction()

    return left_open


async def test_only_committed_records_are_read(kafka: Broker) -> None:
    left_open = await _committed_aborted_open(kafka)
    async with left_open(), running(kafka) as collector:
        await collector.until(lambda records: len(records) >= 2)
        position = collector.link.position(PLACE)
        assert position is not None
        assert position.at_end
    assert [record.value for record in collector.records] == [b"first", b"second"]


async def test_a_stock_faust_app_reads_all_four(kafka: Broker) -> None:
    """The control: without our transport the same records end otherwise."""
    left_open = await _committed_aborted_open(kafka)
    seen: asyncio.Queue[bytes] = asyncio.Queue()
    ours = KlaxonApp("stock", kafka.config)
    app = faust.App("stock", **{**ours._default_options[1], "datadir": "/nonexistent"})
    app._create_directories = lambda: None

    async def read_all(stream: faust.Stream) -> None:
        async for event in stream.noack().events():
            await seen.put(event.message.value)

    app.agent(app.topic(PLACE.topic))(read_all)
    async with left_open():
        await app.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                values = [await seen.get() for _ in range(4)]
        finally:
            await app.stop()
    assert values == [b"first", b"aborted", b"second", b"open"]


async def test_bytes_headers_and_append_time_arrive_as_they_are(kafka: Broker) -> None:
    value = bytes(range(256))
    await produce(
        kafka,
        [
            Written(
                PLACE.topic, value, key=b"\xff\x00", partition=0, content_type=COLUMNS, timestamp_ms=1000
            ),
            Written(PLACE.topic, b"", partition=0, content_type=None),
        ],
    )
    async with running(kafka) as collector:
        await collector.until(lambda records: len(records) == 2)
    first, second = collector.records
    assert (first.value, first.key, first.content_type, first.offset) == (value, b"\xff\x00", COLUMNS, 0)
    assert first.timestamp_type == APPEND_TIME
    assert first.append_us > 1_000_000_000_000_000
    assert (second.value, second.key, second.content_type) == (b"", None, None)


async def test_commits_are_ours_alone_and_resume_where_they_say(kafka: Broker) -> None:
    await produce(kafka, [Written(PLACE.topic, b"%d" % n, partition=0) for n in range(10)])
    async with running(kafka) as collector:
        await collector.until(lambda records: len(records) == 10)
        assert await collector.link.commit({PLACE: 4, Partition(Topic.REQUESTS, 99): 7})
    committed = await eventually(lambda: committed_offsets(kafka, "klaxon-test", [TopicPartition(*PLACE)]))
    assert committed == {"klaxon.requests/0": 4}
    async with running(kafka) as again:
        await again.until(lambda records: len(records) == 6)
    assert [record.offset for record in again.records] == [4, 5, 6, 7, 8, 9]


async def test_sends_are_acknowledged_and_carry_their_content_type(kafka: Broker) -> None:
    async with running(kafka) as collector:
        sent = [
            await collector.link.send(Topic.CONTROL, b"%d" % n, key=b"k", content_type=JSON, partition=3)
            for n in range(3)
        ]
        assert [(await acknowledged).offset for acknowledged in sent] == [0, 1, 2]
        assert collector.counts[Topic.CONTROL] == 4
    records = await dump(kafka, Topic.CONTROL)
    assert [(record.partition, record.value) for record in records] == [(3, b"0"), (3, b"1"), (3, b"2")]
    assert dict(records[0].headers) == {"content-type": JSON.encode()}
