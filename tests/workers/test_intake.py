"""Records in order without gaps, on real Kafka, whatever is delivered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition

from pipeline.workers.intake import Intake, RetentionError
from pipeline.workers.records import Partition, Record
from pipeline.workers.transport import Link, Position
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.records import Written, produce, producer

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

PLACE = Partition(Topic.LOGITS, 0)
DECISIONS = Partition(Topic.DECISIONS, 0)


class FetchedUpTo:
    """Stands for the link: only the position is asked for."""

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset

    def position(self, _place: Partition) -> Position:
        return Position(self.next_offset, self.next_offset)


def _intake(broker: Broker, next_offset: int = 0, **options: bool) -> Intake:
    return Intake(cast("Link", FetchedUpTo(next_offset)), broker.config, **options)


def _delivered(offset: int) -> Record:
    return Record(Topic.LOGITS, 0, offset, 1, 1, {}, None, b"delivered")


async def _values(records: AsyncIterator[Record]) -> list[tuple[int, bytes]]:
    return [(record.offset, record.value) async for record in records]


async def test_the_first_record_is_taken_wherever_it_stands(kafka: Broker) -> None:
    intake = _intake(kafka)
    assert await _values(intake.take(_delivered(5))) == [(5, b"delivered")]
    assert await _values(intake.take(_delivered(6))) == [(6, b"delivered")]
    assert intake.expected(PLACE) == 7


async def test_what_was_read_before_is_skipped(kafka: Broker) -> None:
    intake = _intake(kafka)
    intake.expect(PLACE, 3)
    assert await _values(intake.take(_delivered(2))) == []
    assert await _values(intake.take(_delivered(3))) == [(3, b"delivered")]


async def test_records_that_were_left_out_are_read_in_place(kafka: Broker) -> None:
    await produce(kafka, [Written(PLACE.topic, b"%d" % number, partition=0) for number in range(5)])
    intake = _intake(kafka)
    intake.expect(PLACE, 1)
    found = await _values(intake.take(_delivered(4)))
    await intake.stop()
    assert found == [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"delivered")]
    assert (intake.recovered, intake.holes) == (3, 0)


async def test_a_hole_of_the_log_is_accepted_and_counted(kafka: Broker) -> None:
    async with producer(kafka, transactional_id="hole") as client:
        await client.begin_transaction()
        for number in range(3):
            await client.send_and_wait(PLACE.topic, b"aborted %d" % number, partition=0)
        await client.abort_transaction()
    # 3 or 4: the broker answers before it has written the marker.
    (offset,) = await produce(kafka, [Written(PLACE.topic, b"after", partition=0)])
    intake = _intake(kafka)
    intake.expect(PLACE, 0)
    found = await _values(intake.take(_delivered(offset)))
    await intake.stop()
    assert found == [(offset, b"delivered")]
    assert (intake.recovered, intake.holes) == (0, 1)


async def _decide(broker: Broker, transactions: list[list[bytes]]) -> None:
    """Decisions, as the gate writes them: a marker stands after each transaction."""
    async with producer(broker, transactional_id="markers") as client:
        for values in transactions:
            await client.begin_transaction()
            for value in values:
                await client.send_and_wait(Topic.DECISIONS, value, partition=0)
            await client.commit_transaction()


def _decision(offset: int) -> Record:
    return replace(_delivered(offset), topic=Topic.DECISIONS)


async def test_a_marker_is_told_from_a_record(kafka: Broker) -> None:
    await _decide(kafka, [[b"0"], [b"1"], [b"2", b"3"]])
    intake = _intake(kafka)
    intake.expect(DECISIONS, 1)
    assert await _values(intake.take(_decision(2))) == [(2, b"delivered")]
    assert intake.holes == 1
    # Its first record was left out: the gap of one looks like the marker's.
    intake.expect(DECISIONS, 4)
    assert await _values(intake.take(_decision(5))) == [(4, b"2"), (5, b"delivered")]
    await intake.stop()


async def test_the_last_decision_is_not_taken_for_a_marker(kafka: Broker) -> None:
    """The position stands right behind it where a poll ended with it."""
    await _decide(kafka, [[b"0"], [b"1"]])
    intake = _intake(kafka, next_offset=3)
    intake.expect(DECISIONS, 2)
    assert await _values(intake.left_behind(DECISIONS)) == []
    found = await _values(intake.left_behind(DECISIONS))
    await intake.stop()
    assert found == [(2, b"1")]


async def test_records_left_behind_at_the_end_are_found_at_the_second_look(kafka: Broker) -> None:
    await produce(kafka, [Written(PLACE.topic, b"%d" % number, partition=0) for number in range(3)])
    intake = _intake(kafka, next_offset=3)
    intake.expect(PLACE, 1)
    assert await _values(intake.left_behind(PLACE)) == []
    found = await _values(intake.left_behind(PLACE))
    assert found == [(1, b"1"), (2, b"2")]
    assert await _values(intake.left_behind(PLACE)) == []
    await intake.stop()
    assert intake.expected(PLACE) == 3


async def test_what_is_still_being_fetched_is_not_left_behind(kafka: Broker) -> None:
    await produce(kafka, [Written(PLACE.topic, b"%d" % number, partition=0) for number in range(4)])
    link = FetchedUpTo(2)
    intake = Intake(cast("Link", link), kafka.config)
    intake.expect(PLACE, 1)
    for next_offset in (2, 3, 4):
        link.next_offset = next_offset
        assert await _values(intake.left_behind(PLACE)) == []
    found = await _values(intake.left_behind(PLACE))
    await intake.stop()
    assert found == [(1, b"1"), (2, b"2"), (3, b"3")]


async def _delete_before(broker: Broker, offset: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(*PLACE): RecordsToDelete(before_offset=offset)})
    finally:
        await admin.close()


async def test_records_deleted_unread_end_the_process_or_are_said_to_be_lost(
    kafka: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await produce(kafka, [Written(PLACE.topic, b"%d" % number, partition=0) for number in range(5)])
    await _delete_before(kafka, 3)
    strict = _intake(kafka)
    strict.expect(PLACE, 1)
    with pytest.raises(RetentionError, match="offsets 1 to 2 were deleted unread"):
        await _values(strict.take(_delivered(4)))
    await strict.stop()
    lenient = _intake(kafka, skips_deleted=True)
    lenient.expect(PLACE, 1)
    assert await _values(lenient.take(_delivered(4))) == [(3, b"3"), (4, b"delivered")]
    await lenient.stop()
    assert "offsets 1 to 2 were deleted unread" in caplog.text
