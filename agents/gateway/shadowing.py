"""Mirrored copies: asked of the other arms apart from users, read to the end, measured, and thrown away.

A mirrored request waits for its turn as a whole: either every copy of it is made, or none. One that is
dropped before its turn is reported for each pair that is lost with it, and then its primary's half is not
published either; so coverage falls by it exactly once. A copy that was made and failed says so in its request
event, and its half is missed by `expected_arms`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from agents.gateway.arrival import Arrival
from agents.gateway.asking import Added, shadow_body
from agents.gateway.capture import Capture, Captured
from agents.gateway.counts import Counts, Mirror
from agents.gateway.events import Exchange
from agents.gateway.forced import forced_request, read_forced
from agents.gateway.known import KnownEngines
from agents.gateway.mirroring import Mirroring
from agents.gateway.recording import Recording
from agents.gateway.relaying import HEAD_BYTES, mono_us
from agents.gateway.routing import Route
from agents.gateway.settings import MirrorSettings
from agents.gateway.upstream import (
    FAILURES,
    Asking,
    address,
    failure_class,
    status_class,
    to_shadow,
    unreachable,
)
from schemas.events import ARMS, Arm
from schemas.plain import Log

log: Log = logging.getLogger(__name__)

WAIT_S: Final = 10.0
"""How long a mirrored request waits for its turn: what comes much later is no half of a pair any more."""
EVENT_BYTES: Final = 256 << 10
"""Of one event of a copy's stream: a hundred times what any engine says of a token. Reading more would keep
users waiting, who are served by the same loop."""
QUEUE_BYTES: Final = 64 << 20
"""Of bodies that wait."""


@dataclass(slots=True, eq=False)
class Mirrored:
    """One mirrored request: who answers its user, and who is sent copies."""

    arrival: Arrival
    arms: tuple[Arm, ...]
    """All that answer, the user's among them, in ARMS' order."""
    primary: Arm
    copies: tuple[Route, ...]
    promised_tokens: int
    """Of all copies together."""
    forced: bool = False
    """The copies wait for the user's answer, and score it in place of writing their own, where they can."""
    offered_s: float = 0.0
    half: Exchange | None = None
    """The user's, until it is known whether there will be copies."""
    answered: Captured | None = None
    """The answer that is scored."""
    state: str = "decided"
    """`decided`, `waiting`, `made`, `dropped`."""
    running: int = 0
    used_tokens: int = 0


def arms_of(primary: Arm, copies: tuple[Route, ...]) -> tuple[Arm, ...]:
    """All arms that answer, in their order."""
    answering = {primary, *(route.arm for route in copies)}
    return tuple(arm for arm in ARMS if arm in answering)


class Shadowing:
    """Makes the copies. Use from one event loop. Nothing here blocks, raises at, or waits for a user."""

    def __init__(
        self,
        asking: Asking,
        settings: MirrorSettings,
        mirroring: Mirroring,
        recording: Recording,
        counts: Counts,
        engines: KnownEngines,
        *,
        credentials: Mapping[Arm, str | None],
        capture_bytes: int,
        top: int,
    ) -> None:
        """`asking`: of copies alone. `credentials`: a pool's `Authorization` for copies."""
        self._asking = asking
        self._settings = settings
        self._mirroring = mirroring
        self._recording = recording
        self._counts = counts
        self._engines = engines
        self._credentials = credentials
        self._capture_bytes = capture_bytes
        self._top = top
        self._queue: deque[Mirrored] = deque()
        self._queued_bytes = 0
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: asyncio.TimerHandle | None = None
        self._closed = False

    # --- what happens to a mirrored request -------------------------------------------------------------

    def offer(self, mirrored: Mirrored) -> None:
        """Before its user's engine is asked. Copies that score an answer wait for it first."""
        self._counts.mirrors[Mirror.MIRRORED] += 1
        if not mirrored.forced:
            self._enqueue(mirrored)

    def primary_ended(self, mirrored: Mirrored, half: Exchange | None) -> None:
        """Its user has been answered. `half` None: by nothing that could be a half of its pairs."""
        if mirrored.forced and mirrored.state == "decided":
            mirrored.answered = None if half is None else half.captured
            if mirrored.answered is None or mirrored.answered.answer is None:
                self._drop(mirrored, Mirror.UNSCORABLE)
                return
            self._enqueue(mirrored)
        if half is None:
            return
        if mirrored.state == "made":
            self._recording.logits(half)
        elif mirrored.state == "waiting":
            mirrored.half = half

    def gauges(self) -> dict[str, int]:
        """What waits and what is on its way."""
        return {
            "mirrors_waiting": len(self._queue),
            "mirrors_waiting_bytes": self._queued_bytes,
            "mirrors_running": self._running,
        }

    async def close(self, deadline_s: float) -> None:
        """Make no more copies; let those on their way end until the deadline, then give them up."""
        self._closed = True
        while self._queue:
            self._drop(self._take(), Mirror.STOPPED)
        if self._due is not None:
            self._due.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the queue --------------------------------------------------------------------------------------

    def _enqueue(self, mirrored: Mirrored) -> None:
        size = len(mirrored.arrival.asked.body)
        if self._closed:
            self._drop(mirrored, Mirror.STOPPED)
        elif len(self._queue) >= self._settings.queue or self._queued_bytes + size > QUEUE_BYTES:
            self._drop(mirrored, Mirror.QUEUE_FULL)
        else:
            mirrored.state = "waiting"
            mirrored.offered_s = time.monotonic()
            self._queue.append(mirrored)
            self._queued_bytes += size
            self._begin()

    def _take(self) -> Mirrored:
        mirrored = self._queue.popleft()
        self._queued_bytes -= len(mirrored.arrival.asked.body)
        return mirrored

    def _begin(self) -> None:
        """Begin as many as may run; see to it that what waits does not wait too long."""
        while self._queue:
            copies = len(self._queue[0].copies)
            if self._running and self._running + copies > self._settings.concurrency:
                break
            self._make(self._take())
        if self._queue and self._due is None:
            left_s = max(0.0, self._queue[0].offered_s + WAIT_S - time.monotonic())
            self._due = asyncio.get_running_loop().call_later(left_s, self._drop_overdue)

    def _drop_overdue(self) -> None:
        self._due = None
        oldest_s = time.monotonic() - WAIT_S
        while self._queue and self._queue[0].offered_s <= oldest_s:
            self._drop(self._take(), Mirror.OVERDUE)
        self._begin()

    def _drop(self, mirrored: Mirrored, reason: Mirror) -> None:
        mirrored.state = "dropped"
        mirrored.half = None
        self._counts.mirrors[reason] += 1
        self._recording.lost(mirrored.arms)
        self._mirroring.settle(mirrored.promised_tokens, 0)

    def _make(self, mirrored: Mirrored) -> None:
        mirrored.state = "made"
        mirrored.running = len(mirrored.copies)
        self._running += mirrored.running
        for route in mirrored.copies:
            task = asyncio.get_running_loop().create_task(self._copy(mirrored, route))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        half, mirrored.half = mirrored.half, None
        if half is not None:
            self._recording.logits(half)

    # --- one copy ---------------------------------------------------------------------------------------

    async def _copy(self, mirrored: Mirrored, route: Route) -> None:
        told = _Told(time.time_ns() // 1000, mono_us())
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._ask(mirrored, route, told)
        except FAILURES as error:
            told.error = failure_class(error)
            if unreachable(error):
                self._engines.lost(route.engine.node)
        except asyncio.CancelledError:
            told.error = "stopped"
            raise
        except Exception as error:  # noqa: BLE001  (a defect of ours may cost a copy, never more; counted)
            told.error = "defect"
            self._recording.defect(error)
        finally:
            self._ended(mirrored, route, told)

    def _ended(self, mirrored: Mirrored, route: Route, told: _Told) -> None:
        captured = told.result(mono_us())
        error = told.error or captured.error
        count = {"timeout": Mirror.TIMED_OUT, "stopped": Mirror.STOPPED, None: Mirror.ANSWERED}
        self._counts.mirrors[count.get(error, Mirror.FAILED)] += 1
        self._running -= 1
        mirrored.running -= 1
        mirrored.used_tokens += (captured.input_tokens or 0) + captured.output_tokens
        if mirrored.running == 0:
            self._mirroring.settle(mirrored.promised_tokens, mirrored.used_tokens)
        exchange = self._recording.exchange(
            mirrored.arrival,
            route,
            ts_us=told.ts_us,
            began_us=told.at_us,
            ended_us=mono_us(),
            status=told.status,
            error=told.error,
            captured=captured,
            shadow=True,
            arms=mirrored.arms,
            source="forced" if told.forced else "generated",
        )
        self._recording.request(exchange, mirrored.arrival.consented)
        if captured.answer is not None:
            self._recording.logits(exchange)
        if not self._closed:
            self._begin()

    async def _ask(self, mirrored: Mirrored, route: Route, told: _Told) -> None:
        asked, pool = mirrored.arrival.asked, route.pool
        baseline, scoring = mirrored.answered, None
        if baseline is not None:
            scoring = forced_request(asked, baseline, pool.kind, top=self._top, model=pool.model_name)
        if scoring is not None:
            told.forced = True
            path, body = scoring
        else:  # it writes its own, and so it does where it cannot score
            path, body = asked.path, shadow_body(asked, pool.kind, top=self._top, model=pool.model_name)
            told.capture = Capture(
                pool.kind, asked, FULL, most_bytes=self._capture_bytes, most_event_bytes=EVENT_BYTES
            )
        headers = to_shadow(self._credentials.get(pool.arm))
        url = address(route.engine.url, path)
        async with await self._asking.ask("POST", url, data=body, headers=headers) as answer:
            told.status = answer.status
            if answer.status != 200:
                told.capture = None
                told.error = status_class(answer.status, await answer.content.read(HEAD_BYTES)) or "refused"
            elif told.capture is not None:
                while data := await answer.content.readany():
                    told.capture.feed(data, mono_us())
                    if told.capture.given_up:
                        return  # what is not read to its end is hung up on
                told.whole = True
            elif baseline is not None:
                said = await _bounded(answer.content, self._capture_bytes)
                told.scored = read_forced(pool.kind, said, baseline)


FULL: Final = Added(level="full")
"""Of a copy's answer nothing has to be taken out again: nobody gets it."""


@dataclass(slots=True)
class _Told:
    """What one copy's engine has told so far."""

    ts_us: int
    at_us: int
    status: int = 0
    error: str | None = None
    forced: bool = False
    """It was asked to score."""
    capture: Capture | None = None
    scored: Captured | None = None
    whole: bool = False

    def result(self, now_us: int) -> Captured:
        if self.scored is not None:
            return self.scored
        if self.capture is None:
            return Captured()
        self.capture.end(now_us, cut=not self.whole)
        return self.capture.captured()


async def _bounded(content: aiohttp.StreamReader, most: int) -> bytes:
    """The body; cut at `most`, which no reader takes for a whole one."""
    parts: list[bytes] = []
    size = 0
    while size < most and (data := await content.readany()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)[:most]
