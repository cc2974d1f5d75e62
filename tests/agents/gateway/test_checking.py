"""`--check` against engines of every kind, and against each thing that may be wrong with one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agents.gateway.asking import CHAT, COMPLETIONS
from agents.gateway.checking import Checked, EngineChecked, check_engines
from agents.gateway.settings import (
    EngineKind,
    EngineSettings,
    GatewaySettings,
    MirrorPaths,
    MirrorSettings,
    PoolSettings,
)
from tests.agents.gateway.answering import answering, saying
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.test_facts import MODELS, VLLM
from tests.agents.gateway.wire import Asked, Reply
from tests.patience import patient

AWAY = "http://127.0.0.1:1"


def pool(url: str, kind: EngineKind = "vllm", arm: Any = "baseline", **more: Any) -> PoolSettings:
    engines = (EngineSettings(node=f"{arm}-0", url=url),)
    return PoolSettings(arm=arm, kind=kind, model_version=f"v-{arm}", engines=engines, **more)


def settings(*pools: PoolSettings, **mirror: Any) -> GatewaySettings:
    return GatewaySettings(rollout="r", pools=pools, mirror=MirrorSettings(**mirror))


async def check(
    *pools: PoolSettings, credentials: Any = None, timeout_s: float = 10, **mirror: Any
) -> Checked:
    return await check_engines(settings(*pools, **mirror), credentials or {}, timeout_s=timeout_s)


async def one(kind: EngineKind, engine: FakeEngine | None = None, **more: Any) -> EngineChecked:
    """A single engine of this kind."""
    patient()
    async with (engine or FakeEngine(kind)).running() as server:
        (checked,) = (await check(pool(server.url, kind), **more)).engines
    return checked


def codes(checked: EngineChecked) -> list[tuple[str, bool]]:
    return [(problem.code, problem.fatal) for problem in checked.problems]


@pytest.mark.parametrize(
    ("kind", "identity", "forced"),
    [("vllm", "ids", "yes"), ("llama.cpp", "ids", "no")],
)
async def test_engines_that_can_be_compared(kind: EngineKind, identity: str, forced: str) -> None:
    checked = await one(kind)
    assert codes(checked) == []
    assert [path.path for path in checked.paths] == [CHAT, COMPLETIONS]
    for path in checked.paths:
        assert path.candidates >= 5
        assert path.identity == identity
        assert path.ttft_us is not None
    assert checked.forced == forced


async def test_sglang_chat_has_bytes_and_its_completions_have_nothing() -> None:
    checked = await one("sglang")
    assert codes(checked) == [("path", False)]
    assert checked.problems[0].what.startswith(f"{COMPLETIONS}: tokens come with neither ids nor bytes")
    assert [path.identity for path in checked.paths] == ["bytes", "none"]


@pytest.mark.parametrize("kind", ["tgi", "llama-cpp-python"])
async def test_engines_without_ids_and_bytes_cannot(kind: EngineKind) -> None:
    checked = await one(kind)
    told = {problem.what for problem in checked.problems if problem.fatal}
    assert any("neither ids nor bytes" in what or "no log-probabilities" in what for what in told)


async def test_free_running_is_said_where_forced_scoring_is_wanted() -> None:
    (told,) = (await one("llama.cpp", forced=True)).problems
    assert (told.code, told.fatal) == ("forced", False)
    assert told.what == "free-running only: llama.cpp scores no given answer over HTTP"
    assert codes(await one("vllm", forced=True)) == []


async def test_paths_that_are_not_mirrored_are_not_asked() -> None:
    engine = FakeEngine("vllm")
    checked = await one("vllm", engine, paths=MirrorPaths(completions=False))
    assert [path.path for path in checked.paths] == [CHAT]
    bodies = [json.loads(asked.body) for asked in engine.asked if asked.path == CHAT]
    assert len(bodies) == 1
    assert (bodies[0]["max_tokens"], bodies[0]["temperature"], bodies[0]["stream"]) == (1, 0, True)


async def test_an_engine_that_is_away() -> None:
    (checked,) = (await check(pool(AWAY))).engines
    (told,) = checked.problems
    assert (told.code, told.fatal, told.what) == ("away", True, f"{CHAT}: no connection comes about")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("silent", f"{CHAT}: no answer within 1 s"),
        ("hang", f"{CHAT}: no answer within 1 s"),
        ("not_http", f"{CHAT}: the connection broke, or this is no HTTP"),
        ("refuse", f"{CHAT}: status 503 to what a copy asks"),
        ("garbage", "its answer holds no log-probabilities (garbled)"),
    ],
)
async def test_an_engine_that_answers_nothing_of_use(fault: Any, told: str) -> None:
    engine = FakeEngine("vllm", fault=fault)
    checked = await one("vllm", engine, timeout_s=1.0 if "within" in told else 60.0)
    first = checked.problems[0]
    assert first.fatal
    assert first.what == told


class Guarded(FakeEngine):
    """Wants a credential."""

    async def answer(self, asked: Asked, reply: Reply) -> None:
        if asked.headers.get("authorization") == "Bearer mirror":
            await super().answer(asked, reply)
            return
        reply.head(401, [("content-type", "application/json")], length=2)
        reply.write(b"{}")
        reply.end()


async def test_the_credential_of_copies() -> None:
    for credentials, told in [
        ({"baseline": "Bearer mirror"}, None),
        ({"baseline": "Bearer old"}, f"{CHAT}: status 401: the credential of copies is refused"),
        ({}, f"{CHAT}: status 401: it wants a credential, and copies carry none"),
        ({"canary": "Bearer mirror"}, f"{CHAT}: status 401: it wants a credential, and copies carry none"),
    ]:
        checked = await one("vllm", Guarded("vllm"), credentials=credentials)
        assert [problem.what for problem in checked.problems] == ([] if told is None else [told])
        assert all("mirror_authorization_file" in problem.remedy for problem in checked.problems)
        assert "Bearer" not in repr(checked)


def stream(*entries: dict[str, Any], role: bool = True) -> bytes:
    """A chat stream of one token with these candidates."""
    position = {**entries[0], "top_logprobs": list(entries)} if entries else None
    logprobs = {"content": [position]} if position else None
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]},
        {"choices": [{"index": 0, "delta": {"content": "Yes"}, "logprobs": logprobs}]},
    ]
    events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


def entry(at: int, logprob: float, **more: Any) -> dict[str, Any]:
    text = f"t{at}"
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), **more}


FIVE = [entry(at, -0.5 - at) for at in range(5)]


@asynccontextmanager
async def chat(body: bytes, content_type: str = "text/event-stream") -> AsyncIterator[str]:
    """An engine whose chat answers so."""
    from aiohttp import web

    facts = saying({"/v1/models": MODELS})

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await facts(request)  # type: ignore[no-any-return]
        if request.path != CHAT:
            return web.Response(status=404)
        return web.Response(body=body, headers={"content-type": content_type})

    async with answering(answer) as (_, url, _):
        yield url


@pytest.mark.parametrize(
    ("body", "fatal", "told"),
    [
        (stream(*FIVE), None, None),
        (stream(), True, "its answer holds no log-probabilities"),
        (stream(*FIVE[:4]), False, "4 of 5 candidates a position: divergence is bounded less closely"),
        (stream(*[one | {"bytes": None} for one in FIVE]), True, "tokens come with neither ids nor bytes"),
        (stream(*[entry(at, -9999.0) for at in range(5)]), True, "its log-probabilities are none"),
        (stream(*FIVE[:4], entry(9, 0.5)), True, "its log-probabilities are none"),
    ],
)
async def test_what_an_answer_lacks(body: bytes, fatal: bool | None, told: str | None) -> None:
    async with chat(body) as url:
        (checked,) = (await check(pool(url), paths=MirrorPaths(completions=False))).engines
    if told is None:
        assert codes(checked) == []
        return
    (problem,) = checked.problems
    assert problem.fatal is fatal
    assert problem.what.startswith(told)


async def test_an_answer_that_is_gathered_on_the_way_has_no_first_token() -> None:
    message = {"role": "assistant", "content": "Yes"}
    logprobs = {"content": [{**FIVE[0], "top_logprobs": FIVE}]}
    whole = {"choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "length"}]}
    async with chat(json.dumps(whole).encode(), "application/json") as url:
        (checked,) = (await check(pool(url), paths=MirrorPaths(completions=False))).engines
    assert codes(checked) == [("stream", False)]


async def test_one_path_that_works_is_enough_and_the_other_is_named() -> None:
    """TGI's legacy endpoint, say: what cannot be compared need not be mirrored."""
    async with chat(stream(*FIVE)) as url:
        (checked,) = (await check(pool(url))).engines
    (problem,) = checked.problems
    assert (problem.code, problem.fatal) == ("path", False)
    assert problem.what.startswith(COMPLETIONS)
    assert problem.remedy.endswith("mirror.paths.completions: false")


async def test_a_definition_that_the_engine_contradicts() -> None:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(chat(stream(*FIVE)))
        (checked,) = (await check(pool(url, definition="temperature"))).engines
        assert "definition" not in dict(codes(checked)), "it says nothing of it"
    async with answering(saying(VLLM)) as (_, url, _):
        (checked,) = (await check(pool(url, definition="temperature"))).engines
    assert ("definition", True) in codes(checked)
    assert "its log-probabilities are raw, and the pool states temperature" in {
        problem.what for problem in checked.problems
    }


async def test_no_such_path_or_model() -> None:
    async with answering(saying({"/v1/models": MODELS})) as (_, url, _):
        (checked,) = (await check(pool(url))).engines
    assert {problem.what for problem in checked.problems} == {
        f"{CHAT}: status 404: it serves no such path",
        f"{COMPLETIONS}: status 404: it serves no such path",
    }
    async with answering(saying({"/version": {"version": "1"}})) as (_, url, _):
        (checked,) = (await check(pool(url))).engines
    assert codes(checked) == [("model", True)]


async def test_arms_that_differ_are_told() -> None:
    other = json.loads(json.dumps(VLLM))
    other["/server_info?config_format=json"]["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logits"
    async with answering(saying(VLLM)) as (_, first, _), answering(saying(other)) as (_, second, _):
        checked = await check(pool(first), pool(second, arm="canary"))
    assert [(one.fatal, one.what) for one in checked.differences] == [
        (True, "logits in place of log-probabilities")
    ]
