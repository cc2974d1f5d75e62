"""Servers of a test's own on loopback that leave no connection behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

TURNS = 10
"""Of the loop, in which a connection that was accepted reaches its handler."""


@asynccontextmanager
async def listening(handler: Handler, port: int = 0) -> AsyncIterator[int]:
    """A server that handles every connection so, and closes it then; yields its port (0: any).

    At the end every handler is cancelled and every connection closed, before the loop is.
    """
    handling: set[asyncio.Task[Any] | None] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handling.add(asyncio.current_task())
        try:
            await handler(reader, writer)
            writer.close()
            await writer.wait_closed()  # cancelled here, too, where its peer does not read what is left
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        tasks = [task for task in handling if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
