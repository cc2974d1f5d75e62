"""The gateway's own answers, in OpenAI's error shape. They name nothing behind the gateway."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from agents.gateway.counts import Request
from agents.gateway.upstream import REQUEST_ID


@dataclass(frozen=True, slots=True)
class Refusal:
    """One answer of the gateway's own."""

    status: int
    kind: str
    """OpenAI's `type`."""
    code: str
    message: str
    counts_as: Request


NOT_FOUND: Final = Refusal(
    404,
    "invalid_request_error",
    "unknown_url",
    "Unknown request URL: there are /v1/chat/completions, /v1/completions and /v1/models.",
    Request.NOT_FOUND,
)
WRONG_METHOD: Final = Refusal(
    405, "invalid_request_error", "method_not_allowed", "Not allowed with this method.", Request.WRONG_METHOD
)
TOO_LARGE: Final = Refusal(
    413, "invalid_request_error", "request_too_large", "The request's body is too large.", Request.TOO_LARGE
)
NOT_WHOLE: Final = Refusal(
    400,
    "invalid_request_error",
    "incomplete_request",
    "The request did not arrive whole.",
    Request.BAD_REQUEST,
)
NOT_HTTP: Final = Refusal(
    400, "invalid_request_error", "invalid_request", "This is no HTTP request.", Request.BAD_REQUEST
)
AWAY: Final = Refusal(
    502,
    "server_error",
    "upstream_unavailable",
    "The model could not be reached. Try again.",
    Request.ENGINE_AWAY,
)
SILENT: Final = Refusal(
    504,
    "server_error",
    "upstream_timeout",
    "The model did not answer in time. Try again.",
    Request.ENGINE_SILENT,
)
NO_ROUTE: Final = Refusal(
    503, "server_error", "unavailable", "No model can answer now. Try again.", Request.NO_ROUTE
)
FULL: Final = Refusal(
    503, "server_error", "overloaded", "Too many requests are under way. Try again.", Request.FULL
)
DEFECT: Final = Refusal(
    500, "server_error", "internal_error", "The request could not be handled. Try again.", Request.DEFECT
)


def refuse(refusal: Refusal, *, allowed: str | None = None, request_id: str | None = None) -> web.Response:
    """The response. `allowed`: the method that would be; `request_id`: the client's own."""
    error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
    headers = {"Server": "klaxon"}
    if allowed is not None:
        headers["Allow"] = allowed
    if request_id is not None:
        headers[REQUEST_ID] = request_id
    if refusal.status == 503:
        headers["Retry-After"] = "1"
    return web.Response(
        status=refusal.status,
        headers=headers,
        body=json.dumps({"error": error}).encode(),
        content_type="application/json",
    )
