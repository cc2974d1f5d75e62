"""Parts of the gateway's measurement: what users count, what the plain proxy passes, how rows are made."""

from __future__ import annotations

import aiohttp
import pytest

from tests.agents.gateway.fake_engine import FakeEngine
from tests.bench.errors import BenchError
from tests.bench.gateway import CPU_FLOOR, FAULTS, _ask, _cost_rows, _program


async def test_users_count_what_they_were_answered_and_what_failed() -> None:
    engine = FakeEngine("vllm", first_token_s=0.02)
    async with engine.running() as server:
        users = await _ask(server.url, 20, 4)
        assert (users.answered, users.failed, engine.count) == (20, 0, 20)
        assert len(users.ttft_ms) == len(users.total_ms) == 20
        assert all(20 <= first <= whole for first, whole in zip(users.ttft_ms, users.total_ms, strict=True))
        engine.first_token_s, engine.token_s = 0.0, 0.001
        gone = await _ask(server.url, 5, 1, "--hang-up")
        assert (gone.answered, gone.failed) == (0, 5)
        engine.fault = "cut"
        with pytest.raises(BenchError, match="answered nothing"):
            await _ask(server.url, 3, 1)


@pytest.mark.slow
async def test_the_plain_proxy_passes_everything_on() -> None:
    engine = FakeEngine("vllm")
    asked = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with engine.running() as server, _program("tests.bench.plain_proxy", server.url) as proxy:
        async with aiohttp.ClientSession() as session:
            bodies = []
            for url in (server.url, proxy.url):
                async with session.post(f"{url}/v1/chat/completions", json=asked) as answer:
                    bodies.append((answer.status, await answer.read()))
        assert bodies[0] == bodies[1]
        assert bodies[0][0] == 200


def test_ratios_are_taken_within_a_round_and_judged_by_the_median() -> None:
    per_cpu_s = {"gateway": [60.0, 59.0, 61.0], "proxy": [100.0, 100.0, 100.0], "bare": [600.0, 590.0, 610.0]}
    ttft_ms = {"gateway": [2.0] * 99 + [9.0], "proxy": [1.5] * 100, "bare": [1.0] * 100}
    rows = {one.name: one for one in _cost_rows("", per_cpu_s, ttft_ms, 0.05)}
    judged = rows["gateway.cpu_against_plain_proxy"]
    assert (judged.value, judged.floor, judged.ok) == (0.6, CPU_FLOOR, True)
    assert rows["gateway.cpu_against_plain_proxy.lowest"].value == 0.59
    assert rows["gateway.cpu_against_bare_engine"].value == pytest.approx(0.1)
    assert rows["gateway.added_ttft_to_bare_p50"].value == 1.0
    assert rows["gateway.added_ttft_to_proxy_p99"].value == 0.5
    worse = _cost_rows("", {**per_cpu_s, "gateway": [59.9] * 3}, ttft_ms, 0.05)
    assert not next(one for one in worse if one.name == judged.name).ok
    at_once = {one.name: one for one in _cost_rows("_at_once", per_cpu_s, ttft_ms, 0.05)}
    assert at_once["gateway.cpu_against_plain_proxy_at_once"].floor is None


def test_every_fault_has_a_name_of_its_own_and_the_first_is_none() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert names[0] == "none"
