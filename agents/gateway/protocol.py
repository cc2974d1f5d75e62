"""What is said to whoever sends no HTTP: OpenAI's error shape, as of every other refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from agents.gateway.refusals import DEFECT, NOT_HTTP, Refusal, refuse


class Listener(web.Server):
    """aiohttp's server, whose own answers are refusals of ours. They quote nothing of what came, are counted
    by `told`, and close the connection. None is logged: whoever comes could fill the log."""

    def __init__(self, *arguments: Any, told: Callable[[Refusal], None], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._told = told

    def __call__(self) -> RequestHandler:
        return _Protocol(self, self._told, loop=self._loop, **self._kwargs)


class _Protocol(RequestHandler):
    __slots__ = ("_told",)

    def __init__(self, server: web.Server, told: Callable[[Refusal], None], **more: Any) -> None:
        super().__init__(server, **more)
        self._told = told

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,  # noqa: ARG002  (may quote what came)
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """In place of aiohttp's own page."""
        refusal = NOT_HTTP if status < 500 else DEFECT
        self._told(refusal)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = refuse(refusal)
        response.force_close()
        return response
