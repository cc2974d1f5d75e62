"""The publisher on Apache Kafka: idempotent, compressed, and patient with a broker that goes away."""

from __future__ import annotations

import pytest

from agents.publish import KafkaRecordProducer, Publisher, PublisherSettings
from schemas import codec
from schemas.topics import COLUMNS, Topic, partition_of
from tests.agents.test_publisher import logits, request
from tests.kafka.broker import Broker
from tests.kafka.records import dump

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


@pytest.mark.parametrize("compression", [None, "snappy", "zstd"])
async def test_everything_arrives_once_and_numbered(kafka: Broker, compression: str | None) -> None:
    producer = KafkaRecordProducer(kafka.bootstrap, compression=compression)
    publisher = Publisher(producer, PublisherSettings(producer_id=f"p-{compression}"))
    publisher.start()
    for i in range(2_000):
        assert publisher.publish(request(i))
    for i in range(50):
        assert publisher.publish(logits(i, positions=200))
    # Neither refused by the reader nor over the broker's limit: the longest answer there is, cut to a record.
    assert publisher.publish(logits(50, positions=65_535, k=20))
    stats = await publisher.close(60)
    assert (stats.acknowledged, stats.dropped, stats.cut) == (2_051, {}, 1)

    numbers: dict[int, list[int]] = {}
    tokens: list[int] = []
    for record in await dump(kafka, Topic.REQUESTS):
        decoded = codec.decode_requests(record.value, COLUMNS)
        assert decoded.rejected == ()
        assert decoded.header is not None
        numbers.setdefault(record.partition, []).append(decoded.header.sequence)
        tokens += decoded.columns.input_tokens.tolist()
        for row in decoded.columns.signature:
            assert record.partition == partition_of(row.tobytes().hex().encode(), kafka.config.partitions)
    assert sorted(tokens) == list(range(2_000))
    for sequence in numbers.values():
        assert sequence == list(range(len(sequence)))
    answers = [codec.decode_logits(r.value, COLUMNS) for r in await dump(kafka, Topic.LOGITS)]
    assert sum(answer.columns.n for answer in answers) == 51
    assert all(answer.rejected == () for answer in answers)
