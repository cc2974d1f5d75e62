"""An engine's answer on its way to the user: as it comes, at the user's pace, cut where the engine's is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import aiohttp
from aiohttp import web
from aiohttp.http import StreamWriter
from multidict import CIMultiDict

from agents.gateway.capture import Capture
from agents.gateway.upstream import FAILURES, failure_class, to_user

HEAD_BYTES = 4096
"""Of an error's body: what its class is told by."""


def mono_us() -> int:
    """The clock of durations."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class Passed:
    """How far an answer came. Filled while it passes, so that a cancelled one says it, too."""

    response: web.StreamResponse | None = None
    """None: nothing was sent to the user."""
    last_us: int = 0
    """When the last of it came."""
    error: str | None = None
    """What cut it: `cut`, `timeout`, `garbled`."""
    head: bytes = b""
    whole: bool = False
    writing: bool = False
    """The user is waited for."""


class UserGoneError(Exception):
    """Nobody takes the answer any more."""


async def relay(
    request: web.BaseRequest,
    answer: aiohttp.ClientResponse,
    capture: Capture | None,
    request_id: str | None,
    passed: Passed,
    idle_s: float,
) -> None:
    """Pass the answer on. `capture` None: byte for byte as it is, with its length.

    Raises UserGoneError. Where the engine's answer breaks off it returns with `passed.error`; what was sent
    so far has then no clean end. `idle_s`: the longest silence of the engine.
    """
    passed.last_us = mono_us()
    silence = Silence(request, answer, passed, idle_s)
    try:
        if capture is None:
            await _as_it_is(request, answer, request_id, passed)
        elif answer.content_type == "text/event-stream":
            await _stream(request, answer, capture, request_id, passed)
        else:
            await _at_once(request, answer, capture, request_id, passed)
    finally:
        silence.over()


class Silence:
    """Hangs up on an engine that falls silent, and on a user who takes nothing any more. Looks now and then,
    so it costs nothing at a read."""

    def __init__(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, passed: Passed, idle_s: float
    ) -> None:
        self._request = request
        self._answer = answer
        self._passed = passed
        self._idle_us = round(idle_s * 1e6)
        self._unsent: int | None = None
        """What waited for the user at the last look; None: he was not waited for."""
        self._timer = asyncio.get_running_loop().call_later(idle_s, self._look)

    def over(self) -> None:
        """The answer is over."""
        self._timer.cancel()

    def _look(self) -> None:
        left_us = self._passed.last_us + self._idle_us - mono_us()
        if left_us > 0:
            self._unsent = None
        elif self._passed.writing:
            transport = self._request.transport
            unsent = 0 if transport is None else transport.get_write_buffer_size()
            if self._unsent is not None and unsent >= self._unsent:
                if transport is not None:
                    transport.abort()
                return
            self._unsent, left_us = unsent, self._idle_us
        else:
            self._passed.error = self._passed.error or "timeout"
            self._answer.close()
            left_us = self._idle_us  # what was captured goes to the user yet
        self._timer = asyncio.get_running_loop().call_later(left_us / 1e6, self._look)


class _WithFirst(web.StreamResponse):
    """Its head leaves with its first bytes: at once, where those are at hand. One packet in place of two."""

    _send_headers_immediately = False


async def _as_it_is(
    request: web.BaseRequest, answer: aiohttp.ClientResponse, request_id: str | None, passed: Passed
) -> None:
    headers = to_user(answer.headers, request_id, same_length=True)
    kept = answer.status >= 400
    try:
        response = await _begin(request, answer, headers, passed, web.StreamResponse)
        while data := await answer.content.readany():
            passed.last_us = mono_us()
            if kept and len(passed.head) < HEAD_BYTES:
                passed.head += data[:HEAD_BYTES]
            await _write(response, data, passed)
    except FAILURES as error:
        _broken(request, error, passed)
        return
    await _end(response, b"", passed)


async def _stream(
    request: web.BaseRequest,
    answer: aiohttp.ClientResponse,
    capture: Capture,
    request_id: str | None,
    passed: Passed,
) -> None:
    content, feed = answer.content, capture.feed
    headers = to_user(answer.headers, request_id, same_length=not capture.takes_out)
    ready = b""
    try:
        data = content.read_nowait()
        kind = _WithFirst if data else web.StreamResponse
        response = await _begin(request, answer, headers, passed, kind)
        while data or (data := await content.readany()):
            passed.last_us = now_us = mono_us()
            ready = feed(data, now_us)
            if content.at_eof():
                break  # the last of it leaves with the end
            data = b""
            if ready:
                passed.writing = True
                await response.write(ready)
                passed.writing = False
                ready = b""
    except FAILURES as error:
        await _cut_off(request, error, capture, passed)
        return
    await _end(response, ready + capture.end(passed.last_us), passed)


async def _at_once(
    request: web.BaseRequest,
    answer: aiohttp.ClientResponse,
    capture: Capture,
    request_id: str | None,
    passed: Passed,
) -> None:
    """An answer that is no stream is held until it is whole, where something may have to be taken out of it;
    one over the capture's limit begins then."""
    headers = to_user(answer.headers, request_id, same_length=not capture.takes_out)
    try:
        while data := await answer.content.readany():
            passed.last_us = now_us = mono_us()
            if ready := capture.feed(data, now_us):
                begun = passed.response or await _begin(request, answer, headers, passed, _WithFirst)
                await _write(begun, ready, passed)
    except FAILURES as error:
        await _cut_off(request, error, capture, passed)
        return
    rest = capture.end(passed.last_us)
    response = passed.response
    if response is None:
        headers["Content-Length"] = str(len(rest))
        response = await _begin(request, answer, headers, passed, _WithFirst)
    await _end(response, rest, passed)


async def _begin(
    request: web.BaseRequest,
    answer: aiohttp.ClientResponse,
    headers: CIMultiDict[str],
    passed: Passed,
    kind: type[web.StreamResponse],
) -> web.StreamResponse:
    try:
        response = kind(status=answer.status, reason=answer.reason, headers=headers)
        await response.prepare(request)
    except OSError as error:
        raise UserGoneError from error
    except ValueError as error:  # a control character, say, which no head may hold
        writer = cast(StreamWriter, request.writer)
        writer.length, writer.chunked = None, False  # nothing was sent: another answer may follow
        raise aiohttp.ClientResponseError(answer.request_info, answer.history) from error
    passed.response = response
    return response


async def _write(response: web.StreamResponse, data: bytes, passed: Passed) -> None:
    """Returns when the user has room for more."""
    passed.writing = True
    await response.write(data)
    passed.writing = False


async def _end(response: web.StreamResponse, rest: bytes, passed: Passed) -> None:
    passed.whole = passed.writing = True
    try:
        await response.write_eof(rest)
    except OSError as error:
        raise UserGoneError from error


async def _cut_off(request: web.BaseRequest, error: BaseException, capture: Capture, passed: Passed) -> None:
    """What was captured goes out first, unless nothing did yet: then the user is told in another way."""
    if passed.response is not None and not passed.writing and (rest := capture.end(mono_us(), cut=True)):
        try:
            await _write(passed.response, rest, passed)
        except OSError as gone:
            raise UserGoneError from gone
    _broken(request, error, passed)


def _broken(request: web.BaseRequest, error: BaseException, passed: Passed) -> None:
    """Cut the user's answer as the engine's was: what was written goes out, an end does not.

    Raises UserGoneError where it was not the engine that hung up.
    """
    if passed.writing:
        raise UserGoneError from error
    passed.error = passed.error or failure_class(error)
    if passed.response is not None and request.transport is not None:
        request.transport.close()
