"""A user's request on its way to an engine: routed, mirrored, asked, tried elsewhere, relayed, measured."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import web

from agents.gateway import refusals
from agents.gateway.arrival import Arrival
from agents.gateway.asking import NOTHING_ADDED, Added, can_be_full, with_capture
from agents.gateway.capture import Capture, Captured
from agents.gateway.counts import Counts, Note
from agents.gateway.events import Exchange
from agents.gateway.forced import may_be_forced
from agents.gateway.known import KnownEngines
from agents.gateway.mirroring import Mirroring, NotMirrored
from agents.gateway.recording import Recording
from agents.gateway.refusals import Refusal
from agents.gateway.relaying import Passed, UserGoneError, mono_us, relay
from agents.gateway.routing import NoRoute, Route, Routing
from agents.gateway.segments import TokenEstimates, Traffic
from agents.gateway.settings import GatewaySettings
from agents.gateway.shadowing import Mirrored, Shadowing, arms_of
from agents.gateway.spans import Answered, RequestSpan, Spans
from agents.gateway.unreached import Unreached
from agents.gateway.upstream import (
    FAILURES,
    REQUEST_ID,
    Asking,
    address,
    as_asked,
    failure_class,
    not_connected,
    status_class,
    to_primary,
    unreachable,
)

CLIENT_GONE: Final = 499
"""A request event's status where its user hung up first, as nginx logs it."""
ASKED_AGAIN: Final = (400, 422)
"""Answers to a request that asks for more than its user did, after which it is asked as the user had."""
TRIED_FOR: Final = 1.5
"""Of gateway.connect_timeout_s: how long a request that reached no engine may still try another one."""
_NONE: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Parts:
    """What requests are forwarded with."""

    settings: GatewaySettings
    routing: Routing
    mirroring: Mirroring
    estimates: TokenEstimates
    users: Asking
    """Of users' requests alone."""
    engines: KnownEngines
    shadowing: Shadowing
    recording: Recording
    spans: Spans
    counts: Counts


@dataclass(slots=True)
class _Way:
    """One user's request on its way, as far as it has come: what is said of it however it ends."""

    arrival: Arrival
    mirrored: Mirrored | None = None
    added: Added = NOTHING_ADDED
    capture: Capture | None = None
    status: int = 0


@dataclass(frozen=True, slots=True)
class _End:
    """How an exchange ended: its event's status, and the class of what went wrong."""

    status: int
    error: str | None


class Forwarding:
    """Forwards requests. Use from one event loop.

    What it returns is an answer that was passed on, as far as `passed` says, or a Refusal where nothing was
    sent to the user yet. It raises UserGoneError, and what cancels it; each is recorded then, too.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._counts = parts.counts
        self._load: Counter[str] = Counter()
        self._unreached = Unreached()
        headers = parts.settings.headers
        self._ours = frozenset(getattr(headers, name) for name in headers.__struct_fields__)

    def gauges(self) -> dict[str, int]:
        """Engines that are tried last."""
        return self._unreached.gauges(mono_us())

    # --- a request that is measured ---------------------------------------------------------------------

    async def measured(
        self, request: web.BaseRequest, arrival: Arrival, passed: Passed
    ) -> web.StreamResponse | Refusal:
        """A request that is understood: its exchange becomes events, and half of its pairs if mirrored."""
        way = _Way(arrival)
        with self._parts.spans.request(
            request.headers,
            path=arrival.asked.path,
            fields=arrival.asked.fields,
            session=arrival.session,
            pair_id=arrival.pair_id,
        ) as span:
            with span.routed():
                route = self._route(arrival.key, arrival.traffic, _NONE)
                if isinstance(route, NoRoute):
                    span.answered(Answered(status=refusals.NO_ROUTE.status))
                    return refusals.NO_ROUTE
                way.mirrored = self._mirrored(way, route)
                self._goes_to(way, route, span)
            return await self._forward(request, way, route, span, passed)

    def _goes_to(self, way: _Way, route: Route, span: RequestSpan) -> None:
        span.goes_to(
            arm=route.arm,
            model_id=route.pool.model_version,
            node=route.engine.node,
            generation=route.generation,
            mirrored=() if way.mirrored is None else way.mirrored.arms,
            model=route.pool.model_name or self._parts.engines.of(route.engine.node).model,
            why=route.why.value,
        )

    def _mirrored(self, way: _Way, route: Route) -> Mirrored | None:
        """Decide, and offer the copies. A defect here costs the copies."""
        parts, arrival = self._parts, way.arrival
        try:
            possible: tuple[Route, ...] = ()
            compared = can_be_full(arrival.asked, route.pool.kind)
            if compared and parts.mirroring.sampled(arrival.pair_id):
                possible = parts.routing.shadows(
                    route, arrival.key, arrival.traffic, self._load_of, self._unreached.avoided(mono_us())
                )
            expected = parts.estimates.expected_tokens(way.arrival.traffic, arrival.asked.max_tokens)
            arms = parts.mirroring.decide(
                arrival.pair_id,
                arrival.signature,
                arrival.asked.path,
                route.arm,
                [shadow.arm for shadow in possible],
                expected,
                mono_us(),
            )
            if isinstance(arms, NotMirrored):
                return None
            copies = tuple(shadow for shadow in possible if shadow.arm in arms)
            forced = (
                self._settings.mirror.forced
                and route.arm == "baseline"
                and any(may_be_forced(arrival.asked, route.pool.kind, copy.pool.kind) for copy in copies)
            )
            promised = expected * len(copies)
            mirrored = Mirrored(arrival, arms_of(route.arm, copies), route.arm, copies, promised, forced)
            parts.shadowing.offer(mirrored)
        except Exception as error:  # noqa: BLE001  (a defect of ours may cost copies, no request; counted)
            parts.recording.defect(error)
            return None
        return mirrored

    def _load_of(self, node: str) -> int:
        return self._load[node]

    def _route(self, key: bytes, traffic: Traffic | None, tried: Set[str]) -> Route | NoRoute:
        now_us = mono_us()
        route = self._parts.routing.route(key, traffic, self._load_of, tried, self._unreached.avoided(now_us))
        if isinstance(route, Route):
            self._unreached.tries(route.engine.node, now_us)
        return route

    def _may_try_again(self, error: BaseException, began_us: int) -> bool:
        """Whether no byte was sent and there is time: of engines that refuse at once all are tried, of those
        that say nothing two."""
        limit_us = began_us + round(TRIED_FOR * self._settings.connect_timeout_s * 1e6)
        return not_connected(error) and mono_us() < limit_us

    async def _forward(
        self, request: web.BaseRequest, way: _Way, route: Route, span: RequestSpan, passed: Passed
    ) -> web.StreamResponse | Refusal:
        """Ask the engine; where it cannot be reached others, as long as `_may_try_again`."""
        began_us, tried = mono_us(), set[str]()
        while True:
            node = route.engine.node
            self._load[node] += 1
            try:
                precheck = self._parts.engines.precheck(node, route.generation, route.pool.model_version)
                with span.prechecked(hot_updated=precheck.hot_updated, load_us=precheck.load_us):
                    answer = await self._ask(request, way, route, span)
                return await self._relayed(request, way, route, span, answer, passed)
            except FAILURES as error:
                tried.add(node)
                other = None
                if self._may_try_again(error, began_us):
                    other = self._other(way, tried, span)
                if other is None:
                    return self._unanswered(way, route, span, failure_class(error))
                if other.arm != route.arm:
                    self._record(way, route, _End(502, failure_class(error)), span=None)
                self._counts.notes[Note.RETRIED] += 1
                route = other
            except (UserGoneError, asyncio.CancelledError):
                self._record(way, route, _End(CLIENT_GONE, "client"), span)
                raise
            finally:
                self._load[node] -= 1
                if not self._load[node]:
                    del self._load[node]

    def _other(self, way: _Way, tried: Set[str], span: RequestSpan) -> Route | None:
        with span.routed():
            other = self._route(way.arrival.key, way.arrival.traffic, tried)
            if isinstance(other, NoRoute):
                return None
            self._goes_to(way, other, span)
        return other

    def _unanswered(self, way: _Way, route: Route, span: RequestSpan, kind: str) -> Refusal:
        refusal = _refusal(kind)
        self._record(way, route, _End(refusal.status, kind), span)
        return refusal

    async def _ask(
        self, request: web.BaseRequest, way: _Way, route: Route, span: RequestSpan
    ) -> aiohttp.ClientResponse:
        """The engine's answer, its head at least. Raises one of FAILURES."""
        asked, pool = way.arrival.asked, route.pool
        full = way.mirrored is not None and way.mirrored.primary == route.arm
        body, way.added = with_capture(
            asked,
            pool.kind,
            top=self._settings.top,
            level="full" if full else "timing",
            model=pool.model_name,
        )
        headers = to_primary(request.headers, self._ours, span.headers())
        answer = await self._post(request, route, asked.path, body, headers)
        if answer.status in ASKED_AGAIN and way.added != NOTHING_ADDED:
            plain = as_asked(asked, pool.model_name)
            if plain != body:
                answer.close()
                self._counts.notes[Note.ASKED_PLAIN] += 1
                way.added = NOTHING_ADDED
                answer = await self._post(request, route, asked.path, plain, headers)
        way.status = answer.status
        way.capture = None
        if answer.status == 200:
            most = self._settings.capture_bytes
            way.capture = Capture(pool.kind, asked, way.added, most_bytes=most)
        return answer

    async def _post(
        self, request: web.BaseRequest, route: Route, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        url = address(route.engine.url, path, request.rel_url.raw_query_string)
        try:
            async with asyncio.timeout(self._settings.first_byte_timeout_s):
                answer = await self._parts.users.ask(request.method, url, data=body or None, headers=headers)
        except FAILURES as error:
            if unreachable(error):
                self._parts.engines.lost(route.engine.node)
                self._unreached.failed(route.engine.node, mono_us())
            raise
        self._unreached.reached(route.engine.node)
        return answer

    async def _relayed(
        self,
        request: web.BaseRequest,
        way: _Way,
        route: Route,
        span: RequestSpan,
        answer: aiohttp.ClientResponse,
        passed: Passed,
    ) -> web.StreamResponse | Refusal:
        request_id = request.headers.get(REQUEST_ID)
        try:
            await relay(request, answer, way.capture, request_id, passed, self._settings.idle_timeout_s)
        finally:
            if not passed.whole:
                answer.close()
        if passed.error is not None and passed.response is None:
            return self._unanswered(way, route, span, passed.error)
        error = passed.error or status_class(way.status, passed.head)
        self._record(way, route, _End(way.status, error), span)
        assert passed.response is not None
        return passed.response

    # --- what is said of it -----------------------------------------------------------------------------

    def _record(self, way: _Way, route: Route, end: _End, span: RequestSpan | None) -> None:
        """Events of one engine's answer, whole or not. `span` None: another engine is asked yet."""
        parts, now_us = self._parts, mono_us()
        try:
            captured = Captured()
            if way.capture is not None:
                if end.error is not None:
                    way.capture.end(now_us, cut=True)
                captured = way.capture.captured()
            exchange = parts.recording.exchange(
                way.arrival,
                route,
                ts_us=way.arrival.ts_us,
                began_us=way.arrival.at_us,
                ended_us=now_us,
                status=end.status,
                error=end.error,
                captured=captured,
                shadow=False,
                arms=() if way.mirrored is None else way.mirrored.arms,
            )
            parts.recording.request(exchange, way.arrival.consented)
            if span is not None:
                span.answered(_answered(exchange, captured))
                if way.mirrored is not None:
                    its_own = way.mirrored.primary == route.arm
                    parts.shadowing.primary_ended(way.mirrored, exchange if its_own else None)
            if captured.input_tokens is not None:
                parts.estimates.learn(
                    way.arrival.traffic, captured.input_tokens, captured.output_tokens, now_us
                )
        except Exception as error:  # noqa: BLE001  (a defect of ours may cost an event, no answer; counted)
            parts.recording.defect(error)

    # --- a request that is not measured -----------------------------------------------------------------

    async def untouched(
        self, request: web.BaseRequest, path: str, body: bytes, passed: Passed
    ) -> web.StreamResponse | Refusal:
        """Passed on as it is to one of the engines that answer users."""
        session = request.headers.get(self._settings.headers.session) or os.urandom(8).hex()
        key = session.encode("utf-8", "surrogatepass")  # as of a request that is measured
        headers = to_primary(request.headers, self._ours, {})
        began_us, tried = mono_us(), set[str]()
        while True:
            route = self._route(key, None, tried)
            if isinstance(route, NoRoute):
                return refusals.AWAY if tried else refusals.NO_ROUTE
            try:
                answer = await self._post(request, route, path, body, headers)
            except FAILURES as error:
                if self._may_try_again(error, began_us):
                    self._counts.notes[Note.RETRIED] += 1
                    tried.add(route.engine.node)
                    continue
                return _refusal(failure_class(error))
            try:
                request_id = request.headers.get(REQUEST_ID)
                await relay(request, answer, None, request_id, passed, self._settings.idle_timeout_s)
            finally:
                if not passed.whole:
                    answer.close()
            return _refusal(passed.error or "cut") if passed.response is None else passed.response


def _answered(exchange: Exchange, captured: Captured) -> Answered:
    """What a request's span says of its end."""
    return Answered(
        status=exchange.status,
        error=exchange.error or captured.error,
        ttft_us=exchange.ttft_us,
        input_tokens=captured.input_tokens,
        output_tokens=captured.output_tokens,
        cached_tokens=captured.cached_tokens,
        finish_reason=captured.finish_reason,
        response_id=captured.response_id,
        response_model=captured.model,
    )


def _refusal(kind: str) -> Refusal:
    """What a user is told whose engine failed in this way."""
    return refusals.SILENT if kind == "timeout" else refusals.AWAY
