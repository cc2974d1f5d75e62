"""Plays traffic against the wall clock: every answer is published when it would have been complete."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from pipeline.cli.demo.fleet import Fleet, Routing, Served
from pipeline.cli.demo.traffic import Arrival
from schemas.events import Arm

LONGEST_SLEEP_S: Final = 0.05
OVERDUE_US: Final = 200_000
"""An answer that is handed over so much too late says that this process gets too little of the machine."""
MOST_BACKLOG: Final = 200
HOLD_UP_US: Final = 20_000
"""How long no request arrives before looking again."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A mirrored pair whose two halves were handed to the publisher."""

    complete_us: int
    """When the later half was."""
    later_half: Arm
    node: str
    """The canary's."""
    input_tokens: int
    affected: bool


@dataclass(slots=True)
class Played:
    """What has been played so far."""

    requests: int = 0
    events: int = 0
    """Request events of all arms; each has a logit event beside it."""
    pairs: int = 0
    """Pairs of baseline and canary whose halves are both out."""
    affected: int = 0
    """Those with an answer that the fault damaged."""
    controls: int = 0
    """Pairs of baseline and control, likewise."""
    sent: dict[str, Sent] = field(default_factory=dict)
    """pair id → pair of baseline and canary; one entry a request, bounded by --requests."""


class Tally:
    """Counts what was handed to the publisher, pair by pair."""

    def __init__(self) -> None:
        self.played = Played()
        self._halves: dict[str, dict[Arm, Served]] = {}

    def add(self, served: Served) -> None:
        """An answer that was just handed over."""
        played, logit = self.played, served.logit
        played.events += 1
        assert logit.pair_id is not None
        halves = self._halves.setdefault(logit.pair_id, {})
        halves[logit.arm] = served
        if "baseline" in halves and "canary" in halves and logit.arm != "control":
            canary = halves["canary"]
            played.pairs += 1
            played.affected += canary.affected
            played.sent[logit.pair_id] = Sent(
                wall_us(), logit.arm, canary.logit.node, canary.logit.input_tokens, canary.affected
            )
        if "baseline" in halves and "control" in halves and logit.arm != "canary":
            played.controls += 1
        if len(halves) == len(logit.expected_arms):
            del self._halves[logit.pair_id]


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
    """One run of traffic. `publish` must not block; `routing` says what the gateway knows now.

    `backlog`: events handed to `publish` that are not out yet. While there are many, or answers are overdue,
    no request arrives: a slow machine stretches the traffic, it does not make its events late.
    """

    def __init__(
        self,
        script: Script,
        arrivals: Iterator[Arrival],
        fleet: Fleet,
        publish: Callable[[Served], None],
        routing: Callable[[], Routing],
        backlog: Callable[[], int],
    ) -> None:
        self._script = script
        self._arrivals = islice(arrivals, script.requests)
        self._fleet = fleet
        self._publish = publish
        self._routing = routing
        self._backlog = backlog
        self._due: list[tuple[int, int, Served]] = []
        self._sequence = 0
        self._tally = Tally()

    @property
    def played(self) -> Played:
        """What has been played so far; changes while it runs."""
        return self._tally.played

    async def run(self, on_progress: Callable[[Played], None]) -> None:
        """Play everything; returns when the last answer is handed to the publisher."""
        start_us = wall_us()
        pending = next(self._arrivals, None)
        while pending is not None or self._due:
            now_us = wall_us()
            overdue_us = now_us - self._due[0][0] if self._due else 0
            while self._due and self._due[0][0] <= now_us:
                self._complete(heapq.heappop(self._due)[2])
            held_up = overdue_us > OVERDUE_US or self._backlog() > MOST_BACKLOG
            while pending is not None and (behind_us := now_us - self._at_us(start_us, pending)) >= 0:
                if held_up:
                    start_us += behind_us + HOLD_UP_US
                    break
                self._arrive(pending, now_us)
                pending = next(self._arrivals, None)
            on_progress(self.played)
            await asyncio.sleep(self._pause_s(start_us, pending))

    def _at_us(self, start_us: int, arrival: Arrival) -> int:
        return start_us + int(arrival.at_us / self._script.speed)

    def _pause_s(self, start_us: int, pending: Arrival | None) -> float:
        upcoming = []
        if pending is not None:
            upcoming.append(self._at_us(start_us, pending))
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
        self._tally.add(served)
