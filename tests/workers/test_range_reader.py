"""A reader that does not come to read leaves nothing open; one that reads can be stopped at any moment."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest
from aiokafka.errors import KafkaConnectionError

from pipeline.config import KafkaConfig
from pipeline.workers.broker import RangeReader
from pipeline.workers.records import Partition
from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.records import Written, produce
from tests.listening import listening

PLACE = Partition(Topic.COMMANDS.value, 0)
MOMENTS = 8
"""Turns of the loop between a read's beginning and its reader's stop."""


async def test_a_reader_that_is_given_up_while_it_connects_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    met = asyncio.Event()

    async def says_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        met.set()
        await reader.read()

    async with listening(says_nothing) as port:
        starting = asyncio.create_task(RangeReader(KafkaConfig(bootstrap=f"127.0.0.1:{port}")).start())
        await met.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
    del starting
    gc.collect()
    assert "Unclosed" not in caplog.text


async def test_a_reader_that_is_refused_is_closed(caplog: pytest.LogCaptureFixture, nowhere: str) -> None:
    with pytest.raises(KafkaConnectionError):
        await RangeReader(KafkaConfig(bootstrap=nowhere)).start()
    gc.collect()
    assert "Unclosed" not in caplog.text


async def _stopped_at_every_moment(
    kafka: Broker, stop: Callable[[RangeReader], Awaitable[None]], within_s: float
) -> list[int]:
    """The moments in a second read at which a stop came to no end in time."""
    hung = []
    for moment in range(MOMENTS):
        reader = RangeReader(kafka.config)
        await reader.start()
        assert [record.offset async for record in reader.read({PLACE: (0, 2)})] == [0, 1]
        assert await reader.end_offsets([PLACE]) == {PLACE: 2}  # meanwhile it fetches on
        reading = asyncio.create_task(anext(reader.read({PLACE: (0, 2)})))  # type: ignore[arg-type]
        for _ in range(moment):
            await asyncio.sleep(0)
        stopping = asyncio.ensure_future(stop(reader))
        if not (await asyncio.wait([stopping], timeout=within_s))[0]:
            hung.append(moment)
            stopping.cancel()
        reading.cancel()
        await asyncio.gather(reading, stopping, return_exceptions=True)
    return hung


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_reader_is_stopped_whatever_its_fetcher_does(kafka: Broker) -> None:
    """A gate's seat was not taken once because its reader never stopped: aiokafka's own stop hangs."""
    await produce(kafka, [Written(Topic.COMMANDS, b"{}", partition=0) for _ in range(2)])
    assert await _stopped_at_every_moment(kafka, RangeReader.stop, 60) == []
    plain = await _stopped_at_every_moment(kafka, lambda reader: reader._consumer.stop(), 0.5)
    assert plain, "aiokafka's own stop hangs no longer: RangeReader.stop may be it again"
