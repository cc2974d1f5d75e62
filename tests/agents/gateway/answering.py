"""A server that answers as a test says, by path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.patience import patient

Answer = Callable[[web.Request], Any]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[tuple[aiohttp.ClientSession, str, list[str]]]:
    """Its session, address, and the paths asked for so far. The loop's clock is patient from here on."""
    patient()
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.path_qs)
        answered: web.StreamResponse = await answer(request)
        return answered

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://{host}:{port}", asked
    finally:
        await runner.cleanup()


def saying(answers: Mapping[str, object]) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        said = answers.get(request.path_qs)
        return web.json_response(said) if said is not None else web.Response(status=404)

    return answer
