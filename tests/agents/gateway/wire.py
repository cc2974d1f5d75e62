"""HTTP by hand: servers whose every byte, pause and broken connection is the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.listening import TURNS

MOST_BODY_BYTES = 64 << 20
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came. Names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Reply:
    """Where an answer goes. Raises ConnectionError once the client is gone."""

    _writer: asyncio.StreamWriter
    chunked: bool = False
    begun: bool = False

    def head(self, status: int, headers: Sequence[tuple[str, str]], *, length: int | None = None) -> None:
        """Status line and headers; chunked unless a length is given."""
        self.chunked = length is None
        self.begun = True
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self._writer.write("\r\n".join((*lines, framing, "", "")).encode())

    def write(self, data: bytes) -> None:
        """A part of the body, as one chunk of its own."""
        if data:
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    async def send(self, data: bytes) -> None:
        """`write`, and wait until the system has taken it."""
        self.write(data)
        await self._writer.drain()
        if self._writer.transport.is_closing():
            raise ConnectionResetError

    def end(self) -> None:
        """The body is whole."""
        if self.chunked:
            self._writer.write(b"0\r\n\r\n")

    def raw(self, data: bytes) -> None:
        """Bytes with no framing at all."""
        self.begun = True
        self._writer.write(data)

    def cut(self) -> None:
        """Break the connection off here."""
        raise CutError


class CutError(Exception):
    """The server breaks the connection off, as told."""


Answering = Callable[[Asked, Reply], Awaitable[None]]


@dataclass(slots=True)
class Server:
    """A running server on a loopback port."""

    port: int
    _listening: asyncio.Server
    _answering: Answering
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _handling: set[asyncio.Task[Any] | None] = field(default_factory=set)

    @property
    def url(self) -> str:
        """`http://127.0.0.1:port`."""
        return f"http://127.0.0.1:{self.port}"

    async def down(self) -> None:
        """Refuse connections from here on and break those that there are; `up` listens again."""
        self._listening.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for writer in list(self._open):
            writer.transport.abort()

    async def up(self) -> None:
        """Listen again on the same port."""
        self._listening = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self._handling.add(asyncio.current_task())
        try:
            while (asked := await _read(reader)) is not None:
                await self._answering(asked, Reply(writer))
                await writer.drain()
        except CutError:
            with suppress(ConnectionError):
                await writer.drain()
            writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._open.discard(writer)
            self._handling.discard(asyncio.current_task())
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Asked(method, path, headers, await _chunks(reader))
    length = int(headers.get("content-length", "0"))
    assert length <= MOST_BODY_BYTES
    return Asked(method, path, headers, await reader.readexactly(length) if length else b"")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(parts)


@asynccontextmanager
async def serving(answering: Answering, port: int = 0) -> AsyncIterator[Server]:
    """A server that answers every request by `answering`, one after the other on each connection."""
    server: Server | None = None

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert server is not None
        await server._connected(reader, writer)

    listening = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 20)
    server = Server(listening.sockets[0].getsockname()[1], listening, answering)
    try:
        yield server
    finally:
        await server.down()
        tasks = [task for task in server._handling if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
