"""The gate falls silent while a gateway serves: from the control topic's record through its router to users.

The router is the process' own; only its clock is the test's, and records are handed to it as they are read.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from agents.gateway.settings import MirrorSettings
from agents.router import runner
from agents.router.runner import Router, RouterSettings
from schemas.control import Directive, RolloutState
from schemas.topics import gating_partition
from tests.agents.gateway.harness import Engine, Running, running
from tests.agents.gateway.test_server import as_asked

S = 1_000_000
T = 1_700_000_000 * S
LEASE_US, DEAD_MAN_US = 15 * S, 60 * S
SESSIONS = 40


class Gate:
    """A gateway's router, and what a gate writes to it."""

    def __init__(self, it: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.it = it
        self.router = Router(RouterSettings("127.0.0.1:9", "g"), it.gateway.obey)
        self.router._caught_up = True
        self.now_us = T
        self._asked = 0
        monkeypatch.setattr(
            runner,
            "time",
            SimpleNamespace(time_ns=lambda: self.now_us * 1000, monotonic=lambda: self.now_us / 1e6),
        )

    def writes(self, epoch: int, canary: float, *, at_us: int = T, state: RolloutState = "observing") -> None:
        directive = Directive(
            rollout="r", generation=1, epoch=epoch, ts_us=at_us, lease_until_us=at_us + LEASE_US,
            dead_man_us=DEAD_MAN_US, state=state, weights={"v1": 100.0 - canary, "v2": canary},
            last_promoted={"v1": 75.0, "v2": 25.0}, fallback="v1",
        )  # fmt: skip
        value = msgspec.json.encode(directive)
        self.router._take(gating_partition("r"), b"r", value, self.now_us)

    async def split(self, at_us: int) -> set[str]:
        """Sessions that the canary answers at this time."""
        self.now_us = at_us
        self.router._tell(at_us)
        before = len(self.it.requests())
        for at in range(SESSIONS):
            assert (await self.it.ask(headers={"x-session-id": f"s{at}"}))[0] == 200
        events = self.it.requests()[before:]
        assert len(events) == SESSIONS
        return {str(event.session) for event in events if event.arm == "canary"}


async def test_a_silent_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine("baseline", as_asked()), Engine("canary", as_asked())]
    async with running(engines, mirror=MirrorSettings(rate=0.0)) as it:
        gate = Gate(it, monkeypatch)
        gate.writes(1, 60.0)
        half = await gate.split(T)
        assert 15 < len(half) < 33
        # The lease is over: what holds stays, and nothing rises any more.
        assert await gate.split(T + LEASE_US + 1) == half
        assert it.gateway.gauges()["gateway_routed"]["weights"] == 2 * SESSIONS
        gate.writes(2, 100.0)  # written at T, read late
        assert await gate.split(T + LEASE_US + 1) == half
        assert gate.router.gauges()["router"]["expired_leases"] == 1
        # A decrease is obeyed however late it is.
        gate.writes(3, 50.0)
        less = await gate.split(T + LEASE_US + 2)
        assert less < half
        # At the dead man's time it stays; just over it the last promoted split holds.
        assert await gate.split(T + DEAD_MAN_US) == less
        promoted = await gate.split(T + DEAD_MAN_US + 1)
        assert promoted < less
        assert 3 < len(promoted) < 18
        assert gate.router.gauges()["router"]["dead_man"] == 1
        # The gate is back.
        gate.now_us = T + DEAD_MAN_US + S
        gate.writes(4, 60.0, at_us=gate.now_us)
        assert await gate.split(gate.now_us) == half
        assert Counter(one.status for one in it.requests()) == {200: len(it.requests())}


async def test_a_trip_outlives_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine("baseline", as_asked()), Engine("canary", as_asked())]
    async with running(engines, mirror=MirrorSettings(rate=0.0)) as it:
        gate = Gate(it, monkeypatch)
        gate.writes(1, 0.0, state="tripped")
        for at_us in (T, T + LEASE_US + 1, T + DEAD_MAN_US + 1, T + 1_000 * DEAD_MAN_US):
            assert await gate.split(at_us) == set()
