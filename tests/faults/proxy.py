"""A TCP proxy before a broker: the broker listens on one port and advertises the proxy's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Mode = Literal["up", "down", "stall"]
CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes connections to `port` of this machine on; `await set(…)` changes what becomes of all of them.

    `up`: everything passes. `down`: connections are cut, new ones too. `stall`: connections stay and new ones
    are taken, but no byte passes either way until the next change.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._mode: Mode = "up"
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self.stalled_bytes = 0
        """Bytes that have waited for the end of a stall: proof that it was felt."""

    def set(self, mode: Mode) -> None:
        """Take effect at once."""
        self._mode = mode
        if mode == "down":
            self.cut()
        if mode == "stall":
            self._flowing.clear()
        else:
            self._flowing.set()

    def cut(self) -> None:
        """End every connection there is."""
        for writer in self._open:
            writer.close()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client's connection until either side ends it."""
        if self._mode == "down":
            writer.close()
            return
        self._open.add(writer)
        try:
            with contextlib.suppress(OSError):  # the broker is down: the client's connection ends, too
                await self._pass_on(reader, writer)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self._port)
        self._open.add(to_broker)
        try:
            pumps = [
                asyncio.create_task(self._pump(reader, to_broker)),
                asyncio.create_task(self._pump(from_broker, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._open.discard(to_broker)
            to_broker.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if not self._flowing.is_set():
                self.stalled_bytes += len(chunk)
                await self._flowing.wait()
            writer.write(chunk)
            await writer.drain()


@asynccontextmanager
async def proxy(listen: int, port: int) -> AsyncIterator[Proxy]:
    """A proxy from `listen` to `port`, both of this machine; at the end every connection is cut."""
    made = Proxy(port)
    server = await asyncio.start_server(made.connected, "127.0.0.1", listen)
    try:
        yield made
    finally:
        server.close()
        made.set("down")
        await asyncio.sleep(0)
