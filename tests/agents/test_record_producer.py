"""The record producer on aiokafka leaves nothing open, however it ends."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from agents.publish.kafka import KafkaRecordProducer
from tests.listening import listening
from tests.patience import patient


async def test_one_that_is_cancelled_while_it_connects_leaves_nothing_open() -> None:
    patient()
    came = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()

    async with listening(silent) as port:
        producer = KafkaRecordProducer(f"127.0.0.1:{port}")
        starting = asyncio.create_task(producer.start())
        await came.wait()
        starting.cancel()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(asyncio.CancelledError):
                await starting
            del starting
            gc.collect()
    assert [str(one.message) for one in said if one.category is ResourceWarning] == []
