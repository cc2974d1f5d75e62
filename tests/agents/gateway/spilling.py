"""Users and engines that say secrets wherever there is room for one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web

from tests.agents.gateway.harness import CHAT, DONE, ROLE, Answer
from tests.monitoring.test_secrets import secret

COMPLETIONS = "/v1/completions"
PROMPTS = tuple(secret(f"prompt-{number}") for number in range(16))
ANSWERS = tuple(secret(f"answer-{number}") for number in range(16))
HEADERS = {
    "Authorization": f"Bearer {secret('authorization')}",
    "Proxy-Authorization": f"Basic {secret('proxy-authorization')}",
    "Cookie": f"session={secret('cookie')}",
    "X-Api-Key": secret("api-key"),
    "Api-Key": secret("azure-key"),
    "X-Request-Id": secret("request-id"),
    "User-Agent": secret("user-agent"),
    "Referer": f"https://example.org/{secret('referer')}",
    "X-Forwarded-For": secret("forwarded"),
    "X-Session-Id": secret("session"),
    "X-Klaxon-Tenant": secret("tenant"),
    "X-Klaxon-Consent": secret("consent"),
    "OpenAI-Organization": secret("organisation"),
    "Baggage": f"user={secret('baggage')}",
    "Traceparent": secret("traceparent"),
    "Tracestate": f"vendor={secret('tracestate')}",
    "X-Custom": secret("custom"),
    secret("header-name"): "1",
}
"""But for those whose values are labels by the configuration: prompt_version and its like."""
FIFTY = (*PROMPTS, *ANSWERS, *HEADERS)

IDS = {token: 90_000 + number for number, token in enumerate(ANSWERS)}
"""Token ids of an engine that has them."""


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Requests with secrets wherever a user may write one."""
    p = iter(PROMPTS)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": next(p)},
        {"role": "user", "name": next(p), "content": [
            {"type": "text", "text": next(p)},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{next(p)}"}}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": next(p)}}]},
        {"role": "tool", "tool_call_id": "c", "content": next(p)},
        {"role": "user", "content": next(p)},
    ]  # fmt: skip
    whole = {
        "model": next(p),
        "messages": messages,
        "stream": True,
        "user": next(p),
        "metadata": {"note": next(p)},
        "stop": [next(p)],
        "seed": 7,
        next(p): next(p),
    }
    chat = {"model": "m", "messages": [{"role": "user", "content": next(p)}], "stream": True}
    return [
        (CHAT, whole),
        (CHAT, chat),
        (CHAT, {**chat, "stream": False}),
        (COMPLETIONS, {"model": "m", "prompt": next(p), "suffix": next(p), "stream": True, "logprobs": 3}),
    ]


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def token_event(token: str, *, ids: bool, chat: bool = True) -> bytes:
    """One token in a stream of vLLM's, by its id or by its bytes."""

    def named(text: str) -> dict[str, Any]:
        if ids:
            return {"token": f"token_id:{IDS[text]}", "bytes": list(text.encode())}
        return {"token": text, "bytes": list(text.encode())}

    other = ANSWERS[(ANSWERS.index(token) + 1) % len(ANSWERS)]
    entries = [{**named(token), "logprob": -0.25}, {**named(other), "logprob": -2.5}]
    choice: dict[str, Any] = {"index": 0, "token_ids": [IDS[token]] if ids else None}
    if chat:
        choice["delta"] = {"content": token, "reasoning": token}
        choice["logprobs"] = {"content": [{**entries[0], "top_logprobs": entries}]}
    else:
        names = [one["token"] for one in entries]
        choice["text"] = token
        choice["logprobs"] = {
            "tokens": names[:1], "token_logprobs": [-0.25],
            "top_logprobs": [dict(zip(names, (-0.25, -2.5), strict=True))], "text_offset": [0],
        }  # fmt: skip
    told = {"id": secret("response-id"), "model": secret("model"), "system_fingerprint": secret("print")}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return sse({**told, "object": kind, "created": 1, "choices": [choice]})


def end(reason: str) -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": secret("stop-reason")}
    told = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ANSWERS), "total_tokens": 9}
    return sse(told) + sse({**told, "choices": [], "usage": usage})


def whole_answer() -> bytes:
    """Not streamed, with a tool's call."""
    entry = {"token": ANSWERS[0], "logprob": -0.25, "bytes": list(ANSWERS[0].encode())}
    message = {
        "role": "assistant", "content": ANSWERS[0], "reasoning_content": secret("reasoning"),
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": secret("c")}}],
    }  # fmt: skip
    choice = {
        "index": 0, "message": message, "finish_reason": "tool_calls",
        "logprobs": {"content": [{**entry, "top_logprobs": [entry]}]},
    }  # fmt: skip
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    told = {"id": secret("id"), "object": "chat.completion", "model": secret("m")}
    return json.dumps({**told, "choices": [choice], "usage": usage}).encode()


def answering(*, ids: bool, reason: str = "stop") -> Answer:
    """Says every secret, as its engine does."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {"Server": secret("server"), "Set-Cookie": secret("set-cookie"), "X-Engine": secret("x")}
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m"}], "version": "1.0"}, headers=headers)
        if not body.get("stream"):
            return web.Response(body=whole_answer(), content_type="application/json", headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        chat = request.path == CHAT
        parts = [token_event(token, ids=ids, chat=chat) for token in ANSWERS]
        for part in (ROLE if chat else b"", *parts, end(reason), DONE):
            await response.write(part)
        await response.write_eof()
        return response

    return answer


def failing(how: str) -> Answer:
    """Goes wrong, and says a secret with it."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": secret("error"), "type": secret("type"), "code": secret("code")}
        if how.isdecimal():
            return web.json_response({"error": error}, status=int(how), reason=secret("reason"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + token_event(ANSWERS[0], ids=False))
        if how == "event":
            await response.write(sse({"error": error}) + DONE)
        elif how == "garbage":
            await response.write(f"{secret('garbage')}\n\ndata: {{{secret('json')}\n\n".encode())
        if how == "cut":
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write_eof()
        return response

    return answer


FAULTS = ("400", "401", "429", "500", "503", "event", "garbage", "cut")


def broken_requests() -> list[bytes]:
    """What is no request, as it goes over a connection."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    said = secret("broken").encode()
    return [
        b"GET /" + said + b" HTTP/9.9\r\nX-Key: " + said + b"\r\n\r\n",
        said + b"\r\n\r\n",
        post + b"Content-Length: " + said + b"\r\n\r\n",
        post + b"Bad header " + said + b"\r\n\r\n",
        post + b"X-Long: " + said * 4_000 + b"\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\n" + said + b"\r\n",
        post + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(said) + said,
        post + b"Content-Length: 100000\r\n\r\n" + said,
    ]


async def send_broken(host: str, port: int) -> None:
    """Each on a connection of its own, which hangs up after a moment."""
    for sent in broken_requests():
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(sent)
            async with asyncio.timeout(0.3):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
