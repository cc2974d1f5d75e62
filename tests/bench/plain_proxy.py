"""A plain pass-through proxy with aiohttp, as one is written in an hour: the gateway is measured against it.

`python -m tests.bench.plain_proxy http://127.0.0.1:PORT` prints its own port.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web

DROPPED = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host"})


async def _serve(upstream: str) -> None:
    connector = aiohttp.TCPConnector(limit=1_000)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def answer(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
            url = upstream + request.path_qs
            async with session.request(request.method, url, data=body, headers=headers) as engine:
                passed = {name: v for name, v in engine.headers.items() if name.lower() not in DROPPED}
                response = web.StreamResponse(status=engine.status, headers=passed)
                await response.prepare(request)
                async for part in engine.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
