"""The proxy does to a connection what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipeline.cli.demo.ports import free_port
from tests.faults.proxy import Proxy, proxy
from tests.kafka.waiting import eventually
from tests.listening import listening


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(100):
        writer.write(chunk)


@asynccontextmanager
async def through() -> AsyncIterator[tuple[Proxy, int]]:
    port = free_port()
    async with listening(echo) as behind, proxy(port, behind) as made:
        yield made, port


async def closed(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def stalled(of: Proxy) -> bool:
    return of.stalled_bytes > 0


async def test_up_passes_both_ways_and_down_cuts_what_is_open_and_what_comes() -> None:
    async with through() as (made, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        made.set("down")
        assert await reader.read() == b""
        again, refused = await asyncio.open_connection("127.0.0.1", port)
        assert await again.read() == b""
        made.set("up")
        last, other = await asyncio.open_connection("127.0.0.1", port)
        other.write(b"two")
        assert await last.readexactly(3) == b"two"
        await closed(writer, refused, other)


async def test_a_stall_keeps_connections_and_every_byte_until_its_end() -> None:
    async with through() as (made, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"before ")
        assert await reader.readexactly(7) == b"before "
        made.set("stall")
        writer.write(b"during ")
        late_reader, late_writer = await asyncio.open_connection("127.0.0.1", port)
        late_writer.write(b"new")
        await eventually(lambda: stalled(made))
        answers = [
            asyncio.create_task(reader.readexactly(7)),
            asyncio.create_task(late_reader.readexactly(3)),
        ]
        done, _ = await asyncio.wait(answers, timeout=0.2)
        assert not done, "a byte passed during the stall"
        made.set("up")
        assert await asyncio.gather(*answers) == [b"during ", b"new"]
        await closed(writer, late_writer)


async def test_a_broker_that_is_down_ends_the_connection(nowhere: str) -> None:
    listen = free_port()
    async with proxy(listen, int(nowhere.rpartition(":")[2])):
        reader, writer = await asyncio.open_connection("127.0.0.1", listen)
        assert await reader.read() == b""
        await closed(writer)
