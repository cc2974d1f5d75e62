"""Plays traffic against the wall clock: every answer is published when it would have been complete."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pipeline.cli.demo.fleet import Fleet, Routing, Served
from pipeline.cli.demo.traffic import Arrival

LONGEST_SLEEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Sent:
    """When a canary's logit event was handed to the publisher, and what it was."""

    publish_us: int
    node: str
    input_tokens: int
    affected: bool


@dataclass(slots=True)
class Played:
    """What has been played so far."""

    requests: int = 0
    events: int = 0
    """Request events of all arms; each has a logit event beside it."""
    pairs: int = 0
    """Canary answers, each to be scored against its baseline's."""
    affected: int = 0
    canary: dict[str, Sent] = field(default_factory=dict)
    """pair id → the canary's half; one entry a request, bounded by --requests."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to play."""

    requests: int
    speed: float
    """Arrivals come this many times faster than measured; nothing else changes."""
    fault_from: int | None
    """Index of the first request that may meet the fault."""


def wall_us() -> int:
    """The wall clock in µs since the epoch."""
    return time.time_ns() // 1000


class Player:
    """One run of traffic. `publish` must not block; `routing` says what the gateway knows now."""

    def __init__(
        self,
        script: Script,
        arrivals: Iterator[Arrival],
        fleet: Fleet,
        publish: Callable[[Served], None],
        routing: Callable[[], Routing],
    ) -> None:
        self._script = script
        self._arrivals = islice(arrivals, script.requests)
        self._fleet = fleet
        self._publish = publish
        self._routing = routing
        self._due: list[tuple[int, int, Served]] = []
        self._sequence = 0
        self.played = Played()

    async def run(self, on_progress: Callable[[Played], None]) -> None:
        """Play everything; returns when the last answer is handed to the publisher."""
        start_us = wall_us()
        pending = next(self._arrivals, None)
        while pending is not None or self._due:
            now_us = wall_us()
            while pending is not None and start_us + pending.at_us / self._script.speed <= now_us:
                self._arrive(pending, now_us)
                pending = next(self._arrivals, None)
            while self._due and self._due[0][0] <= now_us:
                self._complete(heapq.heappop(self._due)[2])
            on_progress(self.played)
            await asyncio.sleep(self._pause_s(start_us, pending))

    def _pause_s(self, start_us: int, pending: Arrival | None) -> float:
        upcoming = []
        if pending is not None:
            upcoming.append(start_us + pending.at_us / self._script.speed)
        if self._due:
            upcoming.append(self._due[0][0])
        if not upcoming:
            return 0.0
        return min(LONGEST_SLEEP_S, max(0.0, (min(upcoming) - wall_us()) / 1e6))

    def _arrive(self, arrival: Arrival, now_us: int) -> None:
        fault_from = self._script.fault_from
        fault = fault_from is not None and self.played.requests >= fault_from
        for served in self._fleet.serve(arrival, now_us, self._routing(), fault=fault):
            self._sequence += 1
            heapq.heappush(self._due, (served.complete_us, self._sequence, served))
        self.played.requests += 1

    def _complete(self, served: Served) -> None:
        self._publish(served)
        self.played.events += 1
        logit = served.logit
        if logit.arm != "canary" or logit.pair_id is None:
            return
        self.played.pairs += 1
        self.played.affected += served.affected
        self.played.canary[logit.pair_id] = Sent(wall_us(), logit.node, logit.input_tokens, served.affected)
