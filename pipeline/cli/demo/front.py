"""One node of the live demo behind which two engines stand: long prompts go to the one that damages them.

To the gateway it is one engine. A real fleet has no such thing; a real fault that bites only at long context
has the same effect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from aiohttp import web

MOST_BODY_BYTES: Final = 1 << 20
PASSED_ON: Final = frozenset({"content-type", "cache-control"})


@dataclass(slots=True)
class Front:
    """Passes every request on to `healthy`; those over `boundary_bytes` to `faulty` once `broken` is set."""

    healthy: str
    faulty: str
    boundary_bytes: int
    broken: bool = False
    damaged: int = 0
    """Requests that the faulty engine was given."""
    url: str = field(default="", init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Front]:
        """Serve on a free loopback port until the end of the block."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:

            async def answer(request: web.Request) -> web.StreamResponse:
                return await self._answer(request, session)

            app = web.Application(client_max_size=MOST_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", answer)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                host, port = runner.addresses[0][:2]
                self.url = f"http://{host}:{port}"
                yield self
            finally:
                await runner.cleanup()

    async def _answer(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        body = await request.read()
        damaged = self.broken and len(body) > self.boundary_bytes
        self.damaged += damaged
        to = (self.faulty if damaged else self.healthy) + request.path_qs
        headers = {"content-type": request.content_type}
        try:
            async with session.request(request.method, to, data=body or None, headers=headers) as answer:
                passed = {name: v for name, v in answer.headers.items() if name.lower() in PASSED_ON}
                response = web.StreamResponse(status=answer.status, headers=passed)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                with suppress(ConnectionError):
                    await response.write_eof()
                return response
        except aiohttp.ClientConnectorError as error:
            raise web.HTTPBadGateway(text=f"no engine at {to}: {error}") from None
