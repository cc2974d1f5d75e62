"""A TCP proxy before a broker: the broker listens on one port and advertises the proxy's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from tests.listening import listening

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
        """Serve one client's connection until either side ends it, or this is cancelled."""
        # An OSError: the broker is down, or a side is cut. The other one's connection ends, too.
        with contextlib.suppress(OSError):
            async with self._opened(writer):
                if self._mode != "down":
                    await self._pass_on(reader, writer)

    @asynccontextmanager
    async def _opened(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        self._open.add(writer)
        try:
            yield
        finally:
            self._open.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self._port)
        async with self._opened(to_broker):
            pumps = [
                asyncio.create_task(self._pump(reader, to_broker)),
                asyncio.create_task(self._pump(from_broker, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

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
    async with listening(made.connected, listen):
        yield made
