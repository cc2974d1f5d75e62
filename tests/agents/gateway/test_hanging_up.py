"""Engines that hang up kept connections, as llama.cpp does now and then right after an answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from agents.gateway.settings import EngineSettings, PoolSettings
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.harness import Running, running, until
from tests.agents.gateway.wire import Answering, Asked, Reply, Server, serving


@pytest.fixture(autouse=True)
def _kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are hung up by engines here, never given up by the gateway for their age."""
    monkeypatch.setattr("agents.gateway.upstream.IDLE_S", 3600.0)


@asynccontextmanager
async def _before(server: Server) -> AsyncIterator[Running]:
    """A gateway before this engine, which is the baseline and, under another name, the canary."""
    pools = tuple(
        PoolSettings(
            arm=arm,
            kind="vllm",
            model_version=version,
            engines=(EngineSettings(node=f"{arm}-1", url=f"{server.url}{path}"),),
        )
        for arm, version, path in (("baseline", "v1", ""), ("canary", "v2", "/canary"))
    )
    async with running((), lambda: pools) as through:
        yield through


async def test_who_meets_a_closed_connection_is_answered_over_a_new_one() -> None:
    engine, answered = FakeEngine("vllm"), set[asyncio.StreamWriter]()

    async def answer(asked: Asked, reply: Reply) -> None:
        """Each connection answers once; on its next request it is closed without a byte."""
        if reply._writer in answered:
            reply.cut()
        answered.add(reply._writer)
        await engine.answer(Asked(asked.method, asked.path.removeprefix("/canary"), {}, asked.body), reply)

    async with serving(answer) as server, _before(server) as through:

        async def both_ended(number: int) -> None:
            await until(lambda: len(through.requests()) == 2 * number)

        for number in range(12):
            status, body = await through.ask(f"prompt {number}", model="fake-1")
            assert status == 200
            assert body.endswith(b"data: [DONE]\n\n")
            await both_ended(number + 1)  # the next copy finds this one's connection
        assert {event.error for event in through.requests()} == {None}
        assert len(through.logits()) == 24
        assert through.counts("gateway_notes")["hung_up"] >= 12


@pytest.mark.parametrize(("kept", "times"), [(False, 1), (True, 2)])
async def test_an_engine_that_hangs_up_a_new_connection_has_failed(kept: bool, times: int) -> None:
    """A kept one may have been closed before the request came; with a new one nothing else can be meant."""
    engine, asked_of, healthy = FakeEngine("vllm"), Counter[str](), kept

    async def answer(asked: Asked, reply: Reply) -> None:
        asked_of[f"{asked.method} {asked.path}"] += 1
        if not healthy:
            reply.cut()
        await engine.answer(Asked(asked.method, asked.path.removeprefix("/canary"), {}, asked.body), reply)

    async with serving(answer) as server, _before(server) as through:
        if kept:
            assert (await through.ask("before", model="fake-1"))[0] == 200
            await until(lambda: len(through.requests()) == 2)
        healthy = False
        asked_of.clear()
        status, _ = await through.ask("prompt", model="fake-1")
        assert status == 502
        await until(lambda: len(through.requests()) == 2 + 2 * kept)
        assert {event.error for event in through.requests()[-2:]} == {"cut"}
        assert asked_of["POST /v1/chat/completions"] == times
        assert asked_of["POST /canary/v1/chat/completions"] == times


async def test_a_request_that_ends_its_engine_is_sent_to_no_other() -> None:
    """Over a kept connection, too: it would end them one after the other."""
    engine, ended = FakeEngine("vllm"), list[Server]()

    def ending(at: int) -> Answering:
        async def answer(asked: Asked, reply: Reply) -> None:
            if b"poison" in asked.body:
                ended.append(servers[at])
                await servers[at].down()
            await engine.answer(asked, reply)

        return answer

    async with AsyncExitStack() as exits:
        servers = [await exits.enter_async_context(serving(ending(at))) for at in range(3)]
        engines = tuple(EngineSettings(node=f"b{at}", url=each.url) for at, each in enumerate(servers))
        pools = (PoolSettings(arm="baseline", kind="vllm", model_version="v1", engines=engines),)
        through = await exits.enter_async_context(running((), lambda: pools))
        for at in range(30):  # all of them have kept connections now
            assert (await through.ask(headers={"x-session-id": f"s{at}"}, model="fake-1"))[0] == 200
        assert len({event.node for event in through.requests()}) == 3
        assert (await through.ask("poison", model="fake-1"))[0] == 502
        assert len(ended) == 1
        event = through.requests()[-1]
        assert (event.status, event.error, event.node) == (502, "cut", f"b{servers.index(ended[0])}")
        assert "retried" not in through.counts("gateway_notes")
        assert through.counts("gateway")["engines_lost"] == through.counts("gateway")["engines_avoided"] == 1
        for at in range(30):  # and whoever has nothing to do with it is answered by the others
            assert (await through.ask(headers={"x-session-id": f"s{at}"}, model="fake-1"))[0] == 200


async def test_an_answer_that_breaks_off_is_asked_once() -> None:
    engine = FakeEngine("vllm", fault="cut")
    async with engine.running() as server, _before(server) as through:
        engine.faulty = lambda asked: True
        asking = asyncio.create_task(through.ask("prompt", model="fake-1"))
        await asyncio.wait([asking])
        assert asking.exception() is not None
        await until(lambda: any(not event.shadow for event in through.requests()))
        assert len([one for one in engine.asked if b"prompt" in one.body]) == 1
        assert "hung_up" not in through.counts("gateway_notes")
