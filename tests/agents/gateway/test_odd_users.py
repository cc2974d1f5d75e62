"""Users who ask oddly, or take nothing of what they asked for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from agents.gateway.asking import COMPLETIONS, read_asked
from agents.gateway.relaying import Passed, Silence
from agents.gateway.settings import MirrorSettings
from tests.agents.gateway.harness import (
    CHAT,
    DONE,
    ROLE,
    Answer,
    Engine,
    Running,
    running,
    saying,
    streaming,
    until,
)

LONG = "x" * 3_900_000
WHOLE = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"content": LONG}, "logprobs": None, "finish_reason": "stop"}],
}
MUCH = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": LONG}}]}).encode() + b"\n\n"


def _sending(*parts: bytes, cut: bool = False) -> Answer:
    """These parts; the last of them at once with the answer's end, or with no end."""

    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if cut:
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write_eof()
        return response

    return answer


@asynccontextmanager
async def _taking_nothing(through: Running, **more: Any) -> AsyncIterator[socket.socket]:
    """A user who asks, and reads not a byte."""
    assert through.gateway.address is not None
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as user:
        user.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        user.setblocking(False)
        await loop.sock_connect(user, through.gateway.address)
        await loop.sock_sendall(user, head + body)
        yield user


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (saying(200, json.dumps(WHOLE).encode()), False),
        (saying(500, json.dumps(WHOLE).encode()), False),
        (_sending(ROLE, MUCH, DONE), True),
        (_sending(ROLE, MUCH.rstrip(), cut=True), True),
    ],
    ids=["whole", "error", "end-of-stream", "cut-inside-an-event"],
)
@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_who_takes_nothing_is_hung_up_on_wherever_the_answer_stands(
    answer: Answer, stream: bool, rate: float
) -> None:
    baseline, canary = Engine("baseline-1", answer), Engine("canary-1", streaming())
    mirror = MirrorSettings(rate=rate, tokens_per_s=10_000_000)
    async with running([baseline, canary], idle_timeout_s=0.2, mirror=mirror) as through:
        async with _taking_nothing(through, stream=stream):
            await until(lambda: through.counts("gateway_requests"))
            assert through.counts("gateway_requests") == {"client_gone": 1}
            assert through.gateway.gauges()["gateway"]["under_way"] == 0
        await until(lambda: [one.status for one in through.requests() if not one.shadow] == [499])


class _Connection:
    """A user's, who takes a byte between two looks until some are left."""

    def __init__(self, takes: int) -> None:
        self.unsent, self.takes, self.looks = 10, takes, 0
        self.aborted = asyncio.Event()

    @property
    def transport(self) -> _Connection:
        """As of a request."""
        return self

    def get_write_buffer_size(self) -> int:
        """What waits."""
        self.looks += 1
        self.unsent -= self.looks <= self.takes
        return self.unsent

    def abort(self) -> None:
        """Hang up."""
        self.aborted.set()


@pytest.mark.parametrize("takes", [0, 1, 5])
async def test_who_takes_something_at_every_look_is_waited_for(takes: int) -> None:
    user = _Connection(takes)
    silence = Silence(cast(Any, user), cast(Any, None), Passed(writing=True), 0.001)
    async with asyncio.timeout(60):
        await user.aborted.wait()
    silence.over()
    assert user.looks == max(takes, 1) + 1


@pytest.mark.parametrize("shape", ["content", "field"])
async def test_lists_in_lists_without_end_cost_no_answer(shape: str) -> None:
    """What one reader can just follow is too deep for the next one, some frames further in."""
    deepest = next(depth for depth in range(500, 2000) if not _can_be_read(_nested(shape, depth)))
    baseline, canary = Engine("baseline-1", streaming()), Engine("canary-1", streaming())
    async with running([baseline, canary]) as through:
        for depth in range(deepest - 40, deepest + 10):
            body = _nested(shape, depth)
            async with through.client.post(through.url + CHAT, data=body) as answer:
                assert (await answer.read()).endswith(DONE)
            assert _fields(body) <= _fields(baseline.raw[-1])
        assert through.counts("gateway_requests") == {"answered": 50}


@pytest.mark.parametrize(("depth", "understood"), [(253, True), (254, False)])
def test_lists_in_lists_are_understood_up_to_a_bound(depth: int, understood: bool) -> None:
    """Besides them there are the body, its messages and the message."""
    assert (read_asked(CHAT, _nested("content", depth)) is not None) is understood


@pytest.mark.parametrize("logprobs", [1, "true", 1.0, "on"])
async def test_what_an_engine_may_take_for_a_wish_for_logprobs_is_left_alone(logprobs: object) -> None:
    """Pydantic reads 1 and "true" as true: were ours asked for in its place, its user would lose his own."""
    baseline, canary = Engine("baseline-1", streaming()), Engine("canary-1", streaming())
    async with running([baseline, canary]) as through:
        _, body = await through.ask(logprobs=logprobs)
        assert body.count(b'"top_logprobs": [{') == 7
        assert baseline.bodies[0]["logprobs"] == logprobs
        asked = {"model": "m", "prompt": "a", "logprobs": "1", "stream": True}
        async with through.client.post(through.url + COMPLETIONS, json=asked) as answer:
            assert (await answer.read()).count(b'"top_logprobs": [{') == 7
        assert not canary.bodies


def _can_be_read(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except RecursionError:
        return False
    return True


def _nested(shape: str, depth: int) -> bytes:
    lists = b"[" * depth + b"]" * depth
    content, more = (lists, b"") if shape == "content" else (b'"hi"', b',"x":%b' % lists)
    return b'{"model":"m","messages":[{"role":"user","content":%b}]%b}' % (content, more)


def _fields(body: bytes) -> set[bytes]:
    """In a form that needs no nesting."""
    return set(body[1:-1].split(b',"'))


@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_a_whole_answer_has_its_length_mirrored_or_not(rate: float) -> None:
    said = json.dumps({**WHOLE, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
    baseline, canary = Engine("baseline-1", saying(200, said)), Engine("canary-1", streaming())
    mirror = MirrorSettings(rate=rate, tokens_per_s=10_000_000)
    async with running([baseline, canary], mirror=mirror) as through:
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with through.client.post(through.url + CHAT, json=asked) as answer:
            assert await answer.read() == said
            assert answer.headers["Content-Length"] == str(len(said))
            assert "Transfer-Encoding" not in answer.headers


async def _said(it: Running, request: bytes) -> bytes:
    """What is answered until the connection is closed."""
    assert it.gateway.address is not None
    reader, writer = await asyncio.open_connection(*it.gateway.address)
    writer.write(request)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("line", "body"),
    [(b"GET /v1/models", b""), (b"POST " + CHAT.encode(), b"no json"), (b"POST " + CHAT.encode(), b"")],
)
async def test_a_session_that_is_no_unicode_is_one_all_the_same(line: bytes, body: bytes) -> None:
    async with running([Engine("baseline", saying(200, b"{}"))]) as it:
        head = b" HTTP/1.1\r\nHost: g\r\nConnection: close\r\nX-Session-Id: caf\xe9\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        assert (await _said(it, line + head + length + body)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert "unmeasured" not in it.counts("gateway_notes")


@pytest.mark.parametrize(("version", "continues"), [(b"1.0", False), (b"1.1", True)])
async def test_who_cannot_know_what_continue_means_is_not_told(version: bytes, continues: bool) -> None:
    async with running([Engine("baseline", saying(200, b"{}"))]) as it:
        head = (
            b" HTTP/%b\r\nHost: g\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"
        )
        said = await _said(it, b"POST " + CHAT.encode() + head % version)
        assert said.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") is continues
        assert b"HTTP/%b 200 OK" % version in said


async def test_who_never_sends_the_body_takes_no_place_of_others() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n\r\n{"
    async with running([Engine("baseline", streaming())], connections=1, bodies_bytes=6_000) as it:
        host, port = it.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        for _, writer in slow:
            writer.write(head)
        await until(lambda: it.counts("gateway").get("bodies_coming") == 5)
        assert it.counts("gateway")["bodies_bytes"] == 5_000
        assert (await it.ask())[0] == 200
        assert (await it.ask("x" * 1_000))[0] == 503, "it may hold a thousand more at most"
        for _, writer in slow:
            writer.close()
        await until(lambda: "bodies_coming" not in it.counts("gateway"))
        assert (await it.ask("x" * 1_000))[0] == 200
        assert "bodies_bytes" not in it.counts("gateway")


async def test_a_body_that_does_not_come_in_time_is_refused() -> None:
    async with running([Engine("baseline", streaming())], body_timeout_s=0.2) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 10\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()
