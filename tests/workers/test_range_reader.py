"""A reader that does not come to read leaves nothing open."""

from __future__ import annotations

import asyncio
import gc

import pytest
from aiokafka.errors import KafkaConnectionError

from pipeline.config import KafkaConfig
from pipeline.workers.broker import RangeReader


async def test_a_reader_that_is_given_up_while_it_connects_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    met = asyncio.Event()

    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
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


async def test_a_reader_that_is_refused_is_closed(
    caplog: pytest.LogCaptureFixture, unused_tcp_port: int
) -> None:
    with pytest.raises(KafkaConnectionError):
        await RangeReader(KafkaConfig(bootstrap=f"127.0.0.1:{unused_tcp_port}")).start()
    gc.collect()
    assert "Unclosed" not in caplog.text
