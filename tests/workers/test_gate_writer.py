"""The gate's writer on real Kafka: what is under way ends when the writer is closed."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.core.gate.settings import Effect
from pipeline.core.gate.state import PartitionMemory
from pipeline.workers.gate_writer import FencedError, GateWriter
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
        writing = asyncio.create_task(writer.write(Effect("r", None, None, (memory,))))
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
    assert len(await dump(kafka, Topic.STATE)) >= ended["committed"]


async def test_a_writer_that_has_a_successor_says_why_it_may_have_been_fenced(kafka: Broker) -> None:
    """To a transaction that the broker timed out it says the same as to a predecessor: both are named."""
    first, second = GateWriter(kafka.config, 0), GateWriter(kafka.config, 0)
    effect = Effect("r", None, None, (PartitionMemory(partition=0, command_offset=1),))
    try:
        await first.start()
        await first.write(effect)
        await second.start()
        with pytest.raises(FencedError) as fenced:
            await first.write(effect)
        said = str(fenced.value)
        assert "0: another gate process has taken over, or its transaction took longer than 10 s" in said
        await second.write(effect)
    finally:
        await first.close()
        await second.close()
