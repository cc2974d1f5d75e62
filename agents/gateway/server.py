"""The HTTP server's side: which requests there are, which are taken in, and what became of each."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final

from aiohttp import HttpVersion11, web

from agents.gateway import refusals
from agents.gateway.admission import Admission, Place
from agents.gateway.arrival import Arrivals
from agents.gateway.asking import read_asked
from agents.gateway.counts import Counts, Note, Request
from agents.gateway.forwarding import CLIENT_GONE, Forwarding
from agents.gateway.recording import Recording
from agents.gateway.refusals import Refusal, refuse
from agents.gateway.relaying import Passed, UserGoneError, mono_us
from agents.gateway.settings import CHAT, COMPLETIONS, GatewaySettings
from agents.gateway.upstream import REQUEST_ID

MODELS: Final = "/v1/models"


class Gateway:
    """Handles requests. Use from one event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        arrivals: Arrivals,
        forwarding: Forwarding,
        recording: Recording,
        counts: Counts,
    ) -> None:
        self._settings = settings
        self._arrivals = arrivals
        self._forwarding = forwarding
        self._recording = recording
        self._counts = counts
        self._admission = Admission(answered=2 * settings.connections, bodies_bytes=settings.bodies_bytes)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request. Cancelled when its user hangs up, which is counted where the request is."""
        path, method = request.path, request.method
        if path in (CHAT, COMPLETIONS):
            wanted = "POST"
        elif path == MODELS or _names_model(path):
            wanted = "GET"
        else:
            return self._refused(request, refusals.NOT_FOUND)
        if method != wanted:
            return self._refused(request, refusals.WRONG_METHOD, allowed=wanted)
        length = request.content_length if request.content_length is not None else self._settings.body_bytes
        if wanted == "GET":
            length = 0
        if length > self._settings.body_bytes:
            return self._refused(request, refusals.TOO_LARGE)
        place = self._admission.come(length)
        if place is None:
            return self._refused(request, refusals.FULL)
        passed = Passed()
        try:
            if wanted == "POST":
                answer = await self._complete(request, path, passed, place)
            elif self._admission.answer(place, 0):
                answer = await self._forwarding.untouched(request, request.rel_url.raw_path, b"", passed)
            else:
                answer = refusals.FULL
            if isinstance(answer, Refusal):
                return self._refused(request, answer)
            self._counts.requests[Request.ANSWERED if passed.error is None else Request.CUT] += 1
            return answer
        except UserGoneError:
            self._counts.requests[Request.CLIENT_GONE] += 1
            return web.Response(status=CLIENT_GONE)  # nobody hears it
        except asyncio.CancelledError:
            gone = request.transport is None or request.transport.is_closing()
            self._counts.requests[Request.CLIENT_GONE if gone else Request.STOPPED] += 1
            raise
        except Exception as error:  # noqa: BLE001  (a defect of ours costs one request; counted, and said)
            self._recording.defect(error)
            if passed.response is None:
                return self._refused(request, refusals.DEFECT)
            self._counts.requests[Request.DEFECT] += 1
            if request.transport is not None:
                request.transport.close()
            return passed.response
        finally:
            self._admission.leave(place)

    def gauges(self) -> dict[str, int]:
        """What is under way."""
        return {**self._admission.gauges(), **self._forwarding.gauges()}

    def _refused(
        self, request: web.BaseRequest, refusal: Refusal, *, allowed: str | None = None
    ) -> web.Response:
        self._counts.requests[refusal.counts_as] += 1
        return refuse(refusal, allowed=allowed, request_id=request.headers.get(REQUEST_ID))

    async def _complete(
        self, request: web.BaseRequest, path: str, passed: Passed, place: Place
    ) -> web.StreamResponse | Refusal:
        ts_us, at_us = time.time_ns() // 1000, mono_us()
        body = await self._body(request)
        if isinstance(body, Refusal):
            return body
        if not self._admission.answer(place, len(body)):
            return refusals.FULL
        asked = read_asked(path, body)
        arrival = None if asked is None else self._arrivals.of(asked, request.headers, ts_us, at_us)
        if arrival is None:
            self._counts.notes[Note.NOT_UNDERSTOOD] += 1
            return await self._forwarding.untouched(request, path, body, passed)
        return await self._forwarding.measured(request, arrival, passed)

    async def _body(self, request: web.BaseRequest) -> bytes | Refusal:
        knows = request.version >= HttpVersion11  # before 1.1 it would be taken for the answer
        if knows and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            if request.content.is_eof():
                return await request.read()  # it is here: nothing is waited for
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            return refusals.TOO_LARGE
        except (TimeoutError, web.RequestPayloadError):
            return refusals.NOT_WHOLE


def _names_model(path: str) -> bool:
    """Whether it is /v1/models/{id}; an id may hold slashes, but leads nowhere else."""
    name = path.removeprefix(MODELS + "/")
    return name != path and all(part not in ("", ".", "..") for part in re.split(r"[/\\]", name))
