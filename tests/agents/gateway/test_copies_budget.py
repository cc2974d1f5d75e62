"""The token budget is taken for every copy of a request, and settled for every one."""

from __future__ import annotations

import pytest

from agents.gateway import forwarding
from agents.gateway import running as gateway
from agents.gateway.settings import MirrorSettings
from tests.agents.gateway.harness import Engine, running, streaming, until

USED = 10
"""Tokens that an engine of the harness says it used."""


async def test_two_copies_cost_what_both_used() -> None:
    engines = [Engine(arm, streaming()) for arm in ("baseline", "canary", "control")]
    mirror = MirrorSettings(rate=1.0, tokens_per_s=1, per_signature_per_minute=1000)
    async with running(engines, mirror=mirror) as one:
        await one.ask()
        await until(lambda: len(one.requests()) == 3)
        left = one.gateway.gauges()["gateway"]["mirror_tokens_left"]
    assert left == 1 - 2 * USED, "whatever was promised for them is given back"


async def test_copies_that_are_dropped_or_stopped_give_back_what_was_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "mono_us", lambda: 1)  # nothing is refilled
    monkeypatch.setattr(gateway, "MIRRORS_END_S", 0.01)
    canary = Engine("canary", streaming(every_s=60))
    mirror = MirrorSettings(
        rate=1.0, tokens_per_s=100_000, per_signature_per_minute=1000, queue=1, concurrency=1
    )
    async with running([Engine("baseline", streaming()), canary], mirror=mirror) as one:
        for _ in range(3):
            await one.ask()
        assert one.gateway.gauges()["gateway"]["mirror_tokens_left"] < 100_000
        assert one.counts("gateway_mirrors") == {"mirrored": 3, "queue_full": 1}
        await one.stop()
        assert one.counts("gateway_mirrors") == {"mirrored": 3, "queue_full": 1, "stopped": 2}
        assert one.gateway.gauges()["gateway"]["mirror_tokens_left"] == 100_000
