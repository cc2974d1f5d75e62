"""The gate's writer on real Kafka: what is under way ends when the writer is closed."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import ProducerFenced

from pipeline.core.gate.settings import Effect
from pipeline.core.gate.state import Forgotten, PartitionMemory, RuleMemory, decode_state, encode_state
from pipeline.workers.broker import RangeReader
from pipeline.workers.gate_log import remembered
from pipeline.workers.gate_writer import FencedError, GateWriter
from schemas.control import Directive
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.records import dump
from tests.kafka.waiting import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

MOMENTS = 24
STEP_S = 0.004


async def test_a_write_ends_whenever_its_writer_is_closed(kafka: Broker) -> None:
    """What waited for ever would hold up every record that the worker reads."""
    ended = {"committed": 0, "given up": 0}
    for moment in range(MOMENTS):
        memory = PartitionMemory(partition=0, command_offset=moment)
        writer = GateWriter(kafka.config, 0)
        await writer.start()
        writing = asyncio.create_task(writer.write([Effect("r", None, None, (memory,))]))
        await asyncio.sleep(moment * STEP_S)
        await writer.close()

        async def done(writing: asyncio.Task[None] = writing) -> bool:
            return writing.done()

        await eventually(done, timeout_s=60)
        if isinstance(writing.exception(), FencedError):
            ended["given up"] += 1
        else:
            writing.result()
            ended["committed"] += 1
    print(ended)
    assert ended["given up"] > 0, "closed too late every time"
    await eventually(lambda: _holds(kafka, Topic.STATE, ended["committed"]))


async def test_a_writer_that_has_a_successor_says_why_it_may_have_been_fenced(kafka: Broker) -> None:
    """To a transaction that the broker timed out it says the same as to a predecessor: both are named."""
    first, second = GateWriter(kafka.config, 0), GateWriter(kafka.config, 0)
    effect = Effect("r", None, None, (PartitionMemory(partition=0, command_offset=1),))
    try:
        await first.start()
        await first.write([effect])
        await second.start()
        with pytest.raises(FencedError) as fenced:
            await first.write([effect])
        said = str(fenced.value)
        assert "0: another gate process has taken over, or its transaction took longer than 10 s" in said
        await second.write([effect])
    finally:
        await first.close()
        await second.close()


async def test_a_record_that_comes_too_late_for_a_fenced_transaction_does_not_hide_the_fencing(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second record waits for its topic's metadata until the first has met the successor."""
    first, second = GateWriter(kafka.config, 0), GateWriter(kafka.config, 0)
    effect = Effect("r", _directive("r"), None, (PartitionMemory(partition=0, command_offset=1),))
    hidden = 0
    try:
        await first.start()
        await first.write([effect])
        await second.start()
        assert first._producer is not None
        client, transaction = first._producer.client, first._producer._txn_manager
        known = client._wait_on_metadata

        async def late(topic: str) -> object:
            nonlocal hidden
            if topic == Topic.CONTROL:
                while transaction.is_in_transaction():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                hidden += 1
            return await known(topic)

        monkeypatch.setattr(client, "_wait_on_metadata", late)
        with pytest.raises(FencedError):
            await first.write([effect])
    finally:
        await first.close()
        await second.close()
    assert hidden == 1


async def test_effects_written_together_are_one_transaction_with_the_newest_state(kafka: Broker) -> None:
    writer = GateWriter(kafka.config, 0)
    await writer.start()
    try:
        await writer.write(
            [
                Effect(name, _directive(name), None, (PartitionMemory(partition=0, command_offset=offset),))
                for offset, name in enumerate(("a", "b", "c"))
            ]
        )
    finally:
        await writer.close()
    await eventually(lambda: _holds(kafka, Topic.CONTROL, 3))
    await eventually(lambda: _holds(kafka, Topic.STATE, 1))
    assert [record.key for record in await dump(kafka, Topic.CONTROL)] == [b"a", b"b", b"c"]
    (state,) = [decode_state(record.value or b"") for record in await dump(kafka, Topic.STATE)]
    assert isinstance(state, PartitionMemory)
    assert state.command_offset == 2
    markers = {place.topic: end for place, end in (await _ends(kafka)).items()}
    assert markers == {Topic.CONTROL.value: 3 + 1, Topic.STATE.value: 1 + 1}


async def test_what_is_forgotten_is_struck_off_the_topic(kafka: Broker) -> None:
    """A rule's record, and then its tombstone: who reads the topic to its end finds nothing of it."""
    rule = RuleMemory(rollout="r", rule="x", generation=1, policy_hash="", evidence_from=0, folded=0)
    gone = Forgotten(rollout="r", rule="x")
    writer = GateWriter(kafka.config, 0)
    await writer.start()
    try:
        await writer.write([Effect("r", None, None, (rule,))])
        await writer.write([Effect("r", None, None, (gone, PartitionMemory(partition=0, command_offset=1)))])
    finally:
        await writer.close()
    await eventually(lambda: _holds(kafka, Topic.STATE, 3))
    written = [(record.key, record.value) for record in await dump(kafka, Topic.STATE)]
    assert written[:2] == [(b"r/x", encode_state(rule)), (b"r/x", None)]
    reader = RangeReader(kafka.config)
    await reader.start()
    try:
        found = await remembered(reader, 0)
    finally:
        await reader.stop()
    assert [type(state) for state in found.states] == [PartitionMemory]


def _directive(rollout: str) -> Directive:
    return Directive(
        rollout=rollout,
        generation=1,
        epoch=1,
        ts_us=1,
        lease_until_us=2,
        dead_man_us=60_000_000,
        state="observing",
        weights={"m1": 95.0, "m2": 5.0},
        last_promoted={"m1": 100.0},
        level=0,
        fallback="m1",
        policy_hash="",
    )


async def _holds(broker: Broker, topic: Topic, records: int) -> bool:
    """Whether so many are committed: the broker says that a transaction is before it has marked it so."""
    return len(await dump(broker, topic)) >= records


async def _ends(broker: Broker) -> dict[TopicPartition, int]:
    places = [TopicPartition(topic.value, 0) for topic in (Topic.CONTROL, Topic.STATE)]
    async with AIOKafkaConsumer(bootstrap_servers=broker.bootstrap) as consumer:
        return await consumer.end_offsets(places)


async def test_closing_a_writer_whose_last_request_meets_its_successor_is_no_fencing(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = GateWriter(kafka.config, 0)
    await writer.start()
    assert writer._producer is not None
    sender = writer._producer._sender
    close = sender.close

    async def meets_its_successor() -> None:
        await close()
        raise ProducerFenced

    monkeypatch.setattr(sender, "close", meets_its_successor)
    await writer.close()
    assert not any(each.connected() for each in writer._producer.client._conns.values())
