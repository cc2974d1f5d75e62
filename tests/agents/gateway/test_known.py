"""Facts of all engines: read at the start, again when one comes back; who differs; what a request meets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agents.gateway.facts import ASKED, facts_of
from agents.gateway.known import KnownEngines, Precheck, stated
from agents.gateway.settings import EngineKind, EngineSettings, PoolSettings
from schemas.events import Arm, Definition
from tests.agents.gateway.answering import Answer, answering, saying
from tests.agents.gateway.test_facts import LLAMA_CPP, SGLANG, TGI, VLLM

AWAY = "http://127.0.0.1:1"


def pool(
    arm: Arm, *urls: str, kind: EngineKind = "vllm", definition: Definition | None = None
) -> PoolSettings:
    engines = tuple(EngineSettings(node=f"{arm}-{at}", url=url) for at, url in enumerate(urls))
    return PoolSettings(arm=arm, kind=kind, model_version=f"v-{arm}", engines=engines, definition=definition)


class Clock:
    def __init__(self) -> None:
        self.us = 0

    def __call__(self) -> int:
        return self.us


@asynccontextmanager
async def known(*pools: PoolSettings, clock: Clock | None = None, **more: Any) -> AsyncIterator[KnownEngines]:
    async with aiohttp.ClientSession() as session:
        yield KnownEngines(pools, session, clock or Clock(), **more)


def vllm(mode: str = "raw_logprobs", **changes: Any) -> dict[str, Any]:
    said: dict[str, Any] = deepcopy(VLLM)
    info = said["/server_info?config_format=json"]
    info["vllm_config"]["model_config"] |= {"logprobs_mode": mode} | changes
    return said


async def differences(*said: tuple[PoolSettings, Mapping[str, Any]]) -> list[str]:
    """Of pools, each with an engine that answers so; its address is filled in here."""
    async with aiohttp.ClientSession() as session:
        pools = []
        stack = []
        for one, answers in said:
            server = answering(saying(answers))
            _, url, _ = await server.__aenter__()
            stack.append(server)
            pools.append(pool(one.arm, url, kind=one.kind, definition=one.definition))
        try:
            engines = KnownEngines(pools, session, Clock())
            await engines.read_all()
            assert engines.gauges()["engine_differences"] == len(list(engines.differences()))
            return [f"{'fatal ' if one.fatal else ''}{one}" for one in engines.differences()]
        finally:
            for server in stack:
                await server.__aexit__(None, None, None)


async def test_equal_arms_do_not_differ() -> None:
    assert await differences((pool("baseline"), vllm()), (pool("canary"), vllm())) == []


async def test_arms_of_two_definitions_cannot_be_compared() -> None:
    told = await differences((pool("baseline"), vllm()), (pool("canary"), vllm("processed_logprobs")))
    assert told == ["fatal definition of log-probabilities: raw (baseline-0) against processed (canary-0)"]
    told = await differences((pool("baseline"), vllm()), (pool("canary"), vllm("raw_logits")))
    assert told == ["fatal logits in place of log-probabilities: no (baseline-0) against yes (canary-0)"]


async def test_what_kinds_answer_counts_where_none_says() -> None:
    arms = ((pool("baseline"), vllm()), (pool("canary", kind="sglang"), SGLANG))
    told = await differences(*arms)
    assert told == [
        "fatal definition of log-probabilities: raw (baseline-0) against temperature (canary-0)",
        "determinism: no (baseline-0) against yes (canary-0)",
    ]
    stated = (arms[0], (pool("canary", kind="sglang", definition="raw"), SGLANG))
    assert await differences(*stated) == ["determinism: no (baseline-0) against yes (canary-0)"]


async def test_most_candidates() -> None:
    told = await differences((pool("baseline"), vllm()), (pool("canary"), vllm(max_logprobs=5)))
    assert told == ["most candidates a position: 20 (baseline-0) against 5 (canary-0)"]


async def test_what_an_engine_does_not_say_is_no_difference() -> None:
    silent = {"/version": {"version": "0.32.1"}}
    assert await differences((pool("baseline"), vllm()), (pool("canary"), silent)) == []
    assert await differences((pool("baseline", kind="tgi"), TGI), (pool("canary", kind="tgi"), {})) == []


async def test_a_pool_is_of_one_kind_and_arms_may_differ() -> None:
    """Another version or KV type between arms is what a roll-out is about; inside an arm it is a mistake."""
    other = vllm()
    other["/version"] = {"version": "0.33.0"}
    other["/server_info?config_format=json"]["vllm_config"]["cache_config"]["cache_dtype"] = "auto"
    assert await differences((pool("baseline"), vllm()), (pool("canary"), other)) == []
    async with (
        answering(saying(vllm())) as (_, first, _),
        answering(saying(other)) as (_, second, _),
        known(pool("baseline", first, second)) as engines,
    ):
        await engines.read_all()
        told = list(engines.differences())
    assert [(str(one), one.between_arms, one.fatal) for one in told] == [
        ("version: 0.32.1 (baseline-0) against 0.33.0 (baseline-1)", False, False),
        ("KV type: fp8_e4m3 (baseline-0) against auto (baseline-1)", False, False),
    ]


async def test_a_difference_is_said_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    canary = vllm("processed_logprobs")
    async with (
        answering(saying(vllm())) as (_, first, _),
        answering(saying(canary)) as (_, second, _),
        known(pool("baseline", first), pool("canary", second)) as engines,
    ):
        with caplog.at_level(logging.WARNING):
            await engines.read_all()
            await engines.read_all()
            assert len(caplog.records) == 1
            assert "processed (canary-0)" in caplog.text
            canary["/server_info?config_format=json"]["vllm_config"]["model_config"] |= {"max_logprobs": 5}
            await engines.read_all()
        assert [record.getMessage().split(":")[0] for record in caplog.records[1:]] == [
            "engines differ, most candidates a position"
        ]


async def test_an_engine_that_is_away_is_of_its_kind() -> None:
    async with known(pool("baseline", AWAY, kind="sglang")) as engines:
        await engines.read_all()
        assert engines.of("baseline-0").label == "sglang"
        assert engines.gauges() == {
            "engines": 1,
            "engines_known": 0,
            "engines_lost": 0,
            "engine_loads": 0,
            "engine_differences": 0,
        }
        assert engines.precheck("baseline-0", None, "v1") == Precheck(hot_updated=False, load_us=None)


async def test_what_an_engine_does_not_say_the_configuration_may() -> None:
    """llama.cpp does not say its KV type, nor vLLM unless it is in development mode; what is said wins."""
    engines = (EngineSettings(node="canary-0", url=AWAY),)
    facts: dict[str, Any] = {"kv_type": "q8_0", "deterministic": True}
    one = PoolSettings(arm="canary", kind="llama.cpp", model_version="v2", engines=engines, **facts)
    async with known(one) as known_engines:
        assert known_engines.of("canary-0").label == "llama.cpp kv=q8_0 deterministic=yes"
    assert stated(facts_of("llama.cpp", LLAMA_CPP), one).label == (
        "llama.cpp b11434-0a1b2c3 mode=raw kv=q8_0 deterministic=yes"
    )
    assert stated(facts_of("vllm", VLLM), one).label == facts_of("vllm", VLLM).label


async def test_what_was_known_of_an_engine_stays_while_it_is_away() -> None:
    said = vllm()
    async with answering(saying(said)) as (_, url, _), known(pool("baseline", url)) as engines:
        await engines.read_all()
        label = engines.of("baseline-0").label
        said.clear()
        await engines.read_all()
        assert engines.of("baseline-0").label == label


def by_round(said: Mapping[str, Any]) -> Answer:
    """As `saying`, but what is said changes between two readings of it, never inside one."""
    held: dict[str, Any] = {}
    answer = saying(held)

    async def answered(request: web.Request) -> web.StreamResponse:
        if request.path_qs == ASKED["vllm"][0]:
            held.clear()
            held.update(said)
        answered: web.StreamResponse = await answer(request)
        return answered

    return answered


async def test_an_engine_that_comes_back_is_asked_again_and_its_load_measured() -> None:
    clock = Clock()
    said = vllm()
    async with (
        answering(by_round(said)) as (_, url, asked),
        known(pool("baseline", url), clock=clock, retry_s=0.01) as engines,
    ):
        await engines.read_all()
        assert engines.precheck("baseline-0", 1, "v1") == Precheck(hot_updated=False, load_us=0)
        first = len(asked)
        keeps = asyncio.create_task(engines.keep())
        label = engines.of("baseline-0").label
        back = dict(said)
        said.clear()
        clock.us = 1_000_000
        engines.lost("baseline-0")
        clock.us = 5_000_000
        engines.lost("baseline-0")
        async with asyncio.timeout(60):
            while len(asked) < 3 * first:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.01)
        assert engines.gauges()["engines_lost"] == 1
        assert engines.of("baseline-0").label == label, "what was known stays"
        said |= back | {"/version": {"version": "0.33.0"}}
        async with asyncio.timeout(60):
            while engines.of("baseline-0").version != "0.33.0":  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.01)
        assert engines.gauges()["engines_lost"] == 0
        much = len(asked)
        await asyncio.sleep(0.05)
        assert len(asked) == much, "no more than until it answers"
        assert engines.precheck("baseline-0", 1, "v1") == Precheck(hot_updated=True, load_us=4_000_000)
        assert engines.precheck("baseline-0", 1, "v1") == Precheck(hot_updated=False, load_us=4_000_000)
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)


async def test_a_change_that_nobody_missed_is_found_now_and_then() -> None:
    """SGLang exchanges weights while it serves: no connection fails."""
    said: dict[str, Any] = deepcopy(SGLANG)
    async with (
        answering(saying(said)) as (_, url, _),
        known(pool("canary", url, kind="sglang"), again_s=0.02, retry_s=0.02) as engines,
    ):
        await engines.read_all()
        engines.precheck("canary-0", 1, "v2")
        keeps = asyncio.create_task(engines.keep())
        said["/server_info"]["weight_version"] = "step-1300"
        async with asyncio.timeout(60):
            while engines.of("canary-0").weights != "step-1300":  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.01)
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)
        assert engines.precheck("canary-0", 1, "v2").hot_updated


async def test_a_new_generation_or_version_is_a_hot_update_for_the_next_request() -> None:
    async with known(pool("canary", AWAY, AWAY)) as engines:
        met = [
            engines.precheck("canary-0", generation, version).hot_updated
            for generation, version in zip((None, 1, 1, 2, 2, 2, 2), "aaaabba", strict=True)
        ]
        assert met == [False, True, False, True, True, False, True]
        assert not engines.precheck("canary-1", 2, "a").hot_updated, "each engine for itself"


async def test_engines_are_shown_the_gateways_own_credential() -> None:
    seen: list[str | None] = []

    async def answer(request: Any) -> Any:
        seen.append(request.headers.get("authorization"))
        return await saying(vllm())(request)

    async with (
        answering(answer) as (_, url, _),
        known(pool("canary", url), credentials={"canary": "Bearer mirror"}) as engines,
    ):
        await engines.read_all()
        assert set(seen) == {"Bearer mirror"}
        assert "Bearer" not in repr(engines)
