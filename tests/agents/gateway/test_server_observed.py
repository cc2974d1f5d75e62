"""Through the gateway: spans of real requests, what engines are said to be, embeddings in events."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from opentelemetry.trace import StatusCode

from agents.gateway.embedding import HttpEmbedder
from agents.gateway.settings import EmbeddingSettings
from tests.agents.gateway.answering import answering
from tests.agents.gateway.harness import WORDS, Engine, pool, running, streaming, until, weighing
from tests.agents.gateway.test_facts import VLLM
from tests.agents.gateway.test_spans import PARENT, Seen


def asked(engine: Engine) -> list[web.Request]:
    """Requests for answers, without those for facts."""
    return [request for request in engine.seen if request.method == "POST"]


def of_vllm(**changes: Any) -> Any:
    """An engine that says what it is, and streams."""
    stream = streaming()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        said = ({**VLLM, **changes}).get(request.path_qs)
        return await stream(request, body) if said is None else web.json_response(said)

    return answer


async def test_a_request_is_one_trace_and_goes_on_at_the_primary_alone() -> None:
    seen = Seen()
    baseline, canary = Engine("baseline", of_vllm()), Engine("canary", of_vllm())
    async with running([baseline, canary], spans=seen.spans) as one:
        await until(lambda: one.counts("gateway").get("engines_known") == 2)
        came = {"traceparent": PARENT, "tracestate": "vendor=of-the-client"}
        status, _ = await one.ask("tell nobody", headers=came, temperature=0.5, stop=["a secret stop"])
        assert status == 200
        await until(lambda: asked(canary))
    names = [span.name for span in seen.exporter.get_finished_spans()]
    assert names == ["model.route.grayscale", "model.infer.precheck", "chat"]
    route, check, request = map(seen.attributes, names)
    assert (route["ab_group"], route["model_id"], route["klaxon.why"]) == ("baseline", "v1", "weights")
    assert check["is_hot_updated"] is False
    assert check["load_duration_ms"] > 0, "reading its facts took some time"
    assert request["gen_ai.request.model"] == "smollm2-135m-instruct"
    assert request["gen_ai.request.temperature"] == 0.5
    assert request["gen_ai.usage.output_tokens"] == len(WORDS)
    assert request["gen_ai.response.time_to_first_chunk"] > 0
    assert request["klaxon.mirrored"] == ("baseline", "canary")
    (event,) = [event for event in one.requests() if not event.shadow]
    assert request["klaxon.pair_id"] == event.pair_id
    for word in ("tell nobody", "a secret stop", "of-the-client", "mat"):
        assert word not in seen.text()
    (primary,) = asked(baseline)
    context = seen.of("chat").context
    assert context is not None
    assert primary.headers["traceparent"] == f"00-{PARENT.split('-')[1]}-{context.span_id:016x}-01"
    assert primary.headers["tracestate"] == "vendor=of-the-client"
    (copy,) = asked(canary)
    assert not {"traceparent", "tracestate"} & {name.lower() for name in copy.headers}


async def test_without_spans_the_clients_trace_passes_on() -> None:
    engine = Engine("baseline", streaming())
    async with running([engine]) as one:
        await one.ask(headers={"traceparent": PARENT, "tracestate": "a=b"})
    (request,) = asked(engine)
    assert (request.headers["traceparent"], request.headers["tracestate"]) == (PARENT, "a=b")


async def test_a_new_generation_is_a_hot_update_once() -> None:
    seen = Seen()
    engine = Engine("baseline", streaming())
    async with running([engine], spans=seen.spans) as one:
        for generation in (1, 2, 2):
            one.gateway.obey(weighing(0, generation=generation))
            await one.ask()
    checks = [span for span in seen.exporter.get_finished_spans() if span.name == "model.infer.precheck"]
    assert [(span.attributes or {})["is_hot_updated"] for span in checks] == [False, True, False]


async def test_an_engine_that_is_away_and_another_that_answers_are_two_decisions() -> None:
    seen = Seen()
    baseline = Engine("baseline", streaming())
    away = Engine("canary", streaming(), url="http://127.0.0.1:1")
    async with running(
        [baseline], lambda: (pool(baseline), pool(away)), spans=seen.spans, canary=100.0
    ) as one:
        status, _ = await one.ask()
        assert status == 200
    routes = [span for span in seen.exporter.get_finished_spans() if span.name == "model.route.grayscale"]
    assert [(span.attributes or {})["ab_group"] for span in routes] == ["canary", "baseline"]
    assert seen.attributes("chat")["klaxon.arm"] == "baseline"
    assert seen.of("chat").status.status_code is StatusCode.UNSET


async def test_what_engines_say_stands_in_every_event() -> None:
    baseline, canary = Engine("baseline", of_vllm()), Engine("canary", of_vllm())
    label = "vllm 0.32.1 mode=raw kv=fp8_e4m3 deterministic=no top=20"
    async with running([baseline, canary]) as one:
        await until(lambda: one.counts("gateway").get("engines_known") == 2)
        await one.ask()
        await until(lambda: len(one.logits()) == 2)
    events = [*one.requests(), *one.logits()]
    assert {event.engine for event in events} == {label}
    assert {event.model_name for event in events} == {"smollm2-135m-instruct"}
    assert {event.definition for event in one.logits()} == {"raw"}


async def test_both_answers_of_a_pair_get_embeddings() -> None:
    seen: list[str] = []

    async def embed(request: web.Request) -> web.Response:
        seen.append((await request.json())["input"])
        return web.json_response({"data": [{"embedding": [0.6, 0.8]}]})

    baseline, canary = Engine("baseline", streaming()), Engine("canary", streaming())
    async with answering(embed) as (_, url, _):
        embedder = HttpEmbedder(EmbeddingSettings(url=url, model="bge", rate=1.0, trusted=True))
        async with running([baseline, canary], embedder=embedder) as one:
            await one.ask()
            await until(lambda: len(one.requests()) == 2)
    assert {(event.arm, event.embedding) for event in one.requests()} == {
        ("baseline", (0.6, 0.8)),
        ("canary", (0.6, 0.8)),
    }
    assert seen == ["".join(WORDS)] * 2


async def test_an_endpoint_that_hangs_costs_events_nothing_but_their_embedding() -> None:
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    engine, canary = Engine("baseline", streaming()), Engine("canary", streaming())
    async with answering(hang) as (_, url, _):
        settings = EmbeddingSettings(url=url, model="bge", rate=1.0, trusted=True, timeout_s=0.1)
        embedder = HttpEmbedder(settings)
        async with running([engine, canary], embedder=embedder) as one:
            status, _ = await one.ask()
            assert status == 200
            await until(lambda: len(one.requests()) == 2)
            assert {event.embedding for event in one.requests()} == {None}
            assert one.counts("gateway")["embeddings_timed_out"] == 2
        released.set()


async def test_without_consent_no_text_goes_outside_the_trust_boundary() -> None:
    async def never(_: web.Request) -> web.Response:
        raise AssertionError("asked")

    engine, canary = Engine("baseline", streaming()), Engine("canary", streaming())
    async with answering(never) as (_, url, asked_paths):
        embedder = HttpEmbedder(EmbeddingSettings(url=url, model="bge", rate=1.0))
        async with running([engine, canary], embedder=embedder) as one:
            await one.ask()
            await until(lambda: len(one.requests()) == 2)
        assert asked_paths == []
