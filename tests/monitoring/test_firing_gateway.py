"""Alerts about gateways: one is brought through fault after fault, and its endpoint scraped at each."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agents.gateway.settings import MirrorSettings
from pipeline.cli.monitored import monitored
from pipeline.config import MonitoringConfig
from tests.agents.fakes import FakeProducer
from tests.agents.gateway.harness import Answer, Engine, pool, running, saying, streaming, until, weighing
from tests.agents.gateway.test_facts import VLLM
from tests.kafka.waiting import eventually
from tests.monitoring.firings import Moment, answered, assert_fire, cases, total
from tests.prometheus.promtool import check_alerts, promtool

TEST = "test_a_gateway_brought_through_faults"
MIRROR = MirrorSettings(
    rate=1.0, tokens_per_s=10_000_000, per_signature_per_minute=1000, queue=1, concurrency=1
)


def of_vllm(answer: Answer, mode: str = "raw_logprobs") -> Answer:
    """An engine that says what it is, and answers requests so."""
    said: dict[str, Any] = json.loads(json.dumps(VLLM))
    said["/server_info?config_format=json"]["vllm_config"]["model_config"]["logprobs_mode"] = mode

    async def answering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        found = said.get(request.path_qs)
        return await answer(request, body) if found is None else web.json_response(found)

    return answering


@pytest.mark.slow
async def test_a_gateway_brought_through_faults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    promtool()
    released = asyncio.Event()

    async def hang(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    films: dict[str, list[Moment]] = {}
    producer = FakeProducer()
    baseline = Engine("baseline", of_vllm(streaming()))
    canary = Engine("canary", of_vllm(streaming()))
    async with AsyncExitStack() as stack, AsyncExitStack() as engines:
        for engine in (baseline, canary):
            await engines.enter_async_context(engine.running())
        one = await stack.enter_async_context(
            running(
                [],
                lambda: (pool(baseline), pool(canary)),
                producer=producer,
                publishing={"queue_events": 100, "flush_age_us": 1000},
                mirror=MIRROR,
            )
        )
        gauges = one.gateway.gauges
        with caplog.at_level("INFO", "klaxon.monitoring"):
            config = MonitoringConfig(gateway_port=0)
            await stack.enter_async_context(monitored("gateway", config, gauges=gauges, missing=tuple))

            async def listening() -> bool:
                return "metrics at" in caplog.text

            await eventually(listening)
        url = caplog.text.partition("metrics at ")[2].partition("/metrics")[0]

        async def now() -> Moment:
            return await answered({"gateway": url})

        def copies(outcome: str) -> int:
            return one.gateway.gauges()["gateway_mirrors"][outcome]

        async def ask(times: int, outcome: str | None = None) -> None:
            """One after the other. `outcome`: each when the copy of the one before has ended so."""
            for at in range(times):
                ended = copies(outcome) if outcome else 0
                await one.ask(f"question {at}")
                if outcome:
                    await until(lambda so_far=ended: copies(outcome) > so_far)

        def keys_end_in(days: int) -> None:
            ends_us = time.time_ns() // 1_000 + days * 86_400_000_000
            one.gateway._keys = replace(one.gateway._keys, valid_until_us={"text": ends_us})

        await until(lambda: gauges()["gateway"]["engines_known"] == 2)
        await ask(3, "answered")
        keys_end_in(90)
        healthy = await now()
        assert total(healthy, "gateway", "klaxon_gateway_requests_total", outcome="answered") == 3
        assert total(healthy, "gateway", "klaxon_gateway_engine_differences") == 0

        keys_end_in(13)
        films["KlaxonSecretKeyEnds"] = [healthy, await now()]

        one.gateway.forget()
        await ask(3)
        first = await now()
        await ask(3)
        films["KlaxonWithoutDirective"] = [healthy, first, await now()]
        one.gateway.obey(weighing(0))

        canary.answer = of_vllm(saying(500, b"{}"))
        await ask(8, "failed")
        films["KlaxonCopiesFail"] = [healthy, await now()]

        canary.answer = of_vllm(hang)
        await ask(8)
        await until(lambda: copies("queue_full") >= 4)
        films["KlaxonMirrorsDropped"] = [healthy, await now()]
        released.set()
        canary.answer = of_vllm(streaming(), "raw_logits")
        assert one.gateway._engines is not None
        await one.gateway._engines.read_all()
        films["KlaxonEnginesDiffer"] = [healthy, await now()]

        producer.open.clear()  # Kafka takes nothing any more
        await ask(60)
        await until(lambda: gauges()["gateway_dropped"]["queue_full"] > 0)
        films["KlaxonEventsDropped"] = [healthy, await now()]
        producer.open.set()

        await engines.aclose()
        await ask(6)
        lost = await now()
        assert (total(lost, "gateway", "klaxon_gateway_requests_total", outcome="engine_away") or 0) >= 6
        films["KlaxonUsersRefused"] = [healthy, lost]
        films["KlaxonEnginesLost"] = [healthy, lost]
    assert_fire(TEST, films, tmp_path)
    # Known-bad: what is not so does not fire, and the check says it.
    said = check_alerts([case for alert in films for case in cases(alert, [healthy, healthy])], tmp_path)
    assert all(alert in said for alert in films)
