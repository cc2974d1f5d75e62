"""Whoever sends the gateway no HTTP is told so in OpenAI's error shape, and nothing else happens."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from agents.gateway.settings import MirrorSettings
from tests.agents.gateway.harness import Engine, Running, running, saying

SECRET = b"canary-4711"


async def sent(it: Running, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of what is answered until the connection is closed."""
    host, port = it.gateway.address or ("", 0)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00" + SECRET + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\n" + SECRET + b": x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nbad header " + SECRET + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: canary-4711\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nAccept: text/html\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
    ids=["tls", "version", "header", "length", "both-lengths", "long-path", "long-header"],
)
async def test_what_is_no_http_is_refused(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine("baseline", saying(200, b"{}"))
    async with running([engine], mirror=MirrorSettings(rate=0.0)) as it:
        head, body = await sent(it, request_)
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert b"application/json" in head
        assert b"Server: klaxon" in head
        assert json.loads(body)["error"] == {
            "message": "This is no HTTP request.", "type": "invalid_request_error", "param": None,
            "code": "invalid_request",
        }  # fmt: skip
        assert SECRET not in head + body
        assert SECRET.decode() not in caplog.text
        assert "Traceback" not in caplog.text
        assert it.counts("gateway_requests") == {"bad_request": 1}
        assert engine.seen == []
        assert (await it.ask())[0] == 200
