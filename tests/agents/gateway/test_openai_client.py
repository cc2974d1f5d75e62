"""The official client is the user: through the gateway it gets what it would get without, byte for byte.

Every request that can be is mirrored, so that everything is captured that ever is: what was added for it must
be gone from the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from agents.gateway.settings import EngineSettings, PoolSettings
from tests.agents.gateway.fake_asked import MODEL
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.harness import Running, running, until

KINDS = ("vllm", "llama.cpp", "llama-cpp-python", "sglang", "tgi")
SEA: Any = [{"role": "user", "content": "Tell me about the sea."}]
TALK: Any = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Tell me about the sea."},
    {"role": "assistant", "content": "It is wet."},
    {"role": "user", "content": [{"type": "text", "text": "And the sky?"}]},
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@dataclass
class Sides:
    """The same engine twice: asked by itself, and through the gateway."""

    engine: FakeEngine
    canary: FakeEngine
    through: Running
    direct: AsyncOpenAI
    client: AsyncOpenAI
    urls: tuple[str, str]


def _client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-user", max_retries=0)


@pytest_asyncio.fixture(params=KINDS)
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    """An engine of each kind, and the gateway before it and a canary."""
    engine, canary = FakeEngine(request.param), FakeEngine(request.param, damage=0.3)
    async with AsyncExitStack() as exits:
        baseline = await exits.enter_async_context(engine.running())
        other = await exits.enter_async_context(canary.running())
        pools = tuple(
            PoolSettings(
                arm=arm,
                kind=request.param,
                model_version=version,
                engines=(EngineSettings(node=f"{arm}-1", url=url),),
            )
            for arm, version, url in (("baseline", "v1", baseline.url), ("canary", "v2", other.url))
        )
        through = await exits.enter_async_context(running((), lambda: pools))
        direct = await exits.enter_async_context(_client(baseline.url))
        client = await exits.enter_async_context(_client(through.url))
        yield Sides(engine, canary, through, direct, client, (baseline.url, through.url))


Call = Callable[[AsyncOpenAI], Awaitable[Any]]


def _chat(**asked: Any) -> Call:
    async def call(client: AsyncOpenAI) -> Any:
        return await client.chat.completions.create(**{"model": MODEL, "messages": SEA} | asked)

    return call


def _completion(**asked: Any) -> Call:
    async def call(client: AsyncOpenAI) -> Any:
        return await client.completions.create(
            **{"model": MODEL, "prompt": "Once upon a time", "max_tokens": 9} | asked
        )

    return call


async def _models(client: AsyncOpenAI) -> Any:
    return await client.models.list()


async def _outcome(call: Call, client: AsyncOpenAI) -> list[Any]:
    """Everything the client's user sees: objects, and the error that ended it."""
    seen: list[Any] = []
    try:
        answer = await call(client)
        if isinstance(answer, openai.AsyncStream):
            async for chunk in answer:
                seen.append(chunk.model_dump())
        else:
            seen.append(answer.model_dump())
    except openai.APIStatusError as error:
        seen.append((type(error).__name__, error.status_code, error.body))
        seen.append({name: error.response.headers.get(name) for name in ("retry-after", "content-type")})
    except openai.APIError as error:
        seen.append((type(error).__name__, error.message, error.body))
    return seen


USAGE: Any = {"include_usage": True}
CALLS: dict[str, Call] = {
    "chat": _chat(),
    "chat_stream": _chat(stream=True),
    "chat_stream_usage": _chat(stream=True, stream_options=USAGE),
    "chat_talk": _chat(messages=TALK, temperature=0.7, seed=11, max_tokens=20),
    "chat_talk_stream": _chat(messages=TALK, temperature=0.7, seed=11, max_tokens=20, stream=True),
    "chat_stop": _chat(stop=["ba", "lo"], max_tokens=30),
    "chat_stop_stream": _chat(stop=["ba", "lo"], max_tokens=30, stream=True),
    "chat_logprobs": _chat(logprobs=True, top_logprobs=2),
    "chat_logprobs_stream": _chat(logprobs=True, top_logprobs=2, stream=True),
    "chat_logprobs_no_top": _chat(logprobs=True),
    "chat_logprobs_five": _chat(logprobs=True, top_logprobs=5, stream=True, stream_options=USAGE),
    "chat_n2": _chat(n=2, temperature=1.0, seed=3),
    "chat_n2_stream": _chat(n=2, temperature=1.0, seed=3, stream=True),
    "chat_tools": _chat(tools=TOOLS),
    "chat_tools_stream": _chat(tools=TOOLS, stream=True),
    "completion": _completion(),
    "completion_stream": _completion(stream=True),
    "completion_stream_usage": _completion(stream=True, stream_options=USAGE),
    "completion_logprobs": _completion(logprobs=2),
    "completion_logprobs_stream": _completion(logprobs=2, stream=True),
    "completion_n2_stream": _completion(n=2, temperature=1.0, seed=5, stream=True),
    "completion_stop": _completion(stop="ki", max_tokens=30),
    "models": _models,
    "error_no_messages": _chat(messages=[]),
    "error_model": _chat(model="gpt-none"),
    "error_400": _chat(messages=[{"role": "user", "content": "please fail 400"}]),
    "error_401": _chat(messages=[{"role": "user", "content": "please fail 401"}]),
    "error_429": _chat(messages=[{"role": "user", "content": "please fail 429"}], stream=True),
    "error_500": _chat(messages=[{"role": "user", "content": "please fail 500"}]),
    "error_mid_stream": _chat(messages=[{"role": "user", "content": "please fail mid-stream"}], stream=True),
    "error_top": _chat(logprobs=True, top_logprobs=50),
    "error_options": _chat(stream_options=USAGE),
}


async def test_the_client_sees_the_same_objects_and_errors(sides: Sides) -> None:
    for name, call in CALLS.items():
        expected = await _outcome(call, sides.direct)
        assert expected, name
        assert await _outcome(call, sides.client) == expected, name


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (path, prompt | {"max_tokens": 12} | shape | more)
    for path, prompt, mores in (
        (
            "/v1/chat/completions",
            {"model": MODEL, "messages": SEA},
            ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 1},
             {"logprobs": True, "top_logprobs": 5}, {"stop": ["lo"]}, {"tools": TOOLS},
             {"n": 2, "temperature": 0.9, "seed": 1}),
        ),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "Once upon a time"},
            ({}, {"logprobs": 1}, {"logprobs": 5}, {"n": 2, "temperature": 0.9, "seed": 1}),
        ),
    )
    for shape in ({}, {"stream": True}, {"stream": True, "stream_options": USAGE})
    for more in mores
]  # fmt: skip


async def test_the_bytes_are_the_engines_own(sides: Sides) -> None:
    async with aiohttp.ClientSession() as session:

        async def raw(url: str) -> tuple[int, str | None, bytes]:
            async with session.post(url + path, json=body) as answer:
                return answer.status, answer.headers.get("content-type"), await answer.read()

        for path, body in REQUESTS:
            assert await raw(sides.urls[1]) == await raw(sides.urls[0]), (path, body)
    await until(lambda: not sides.through.counts("gateway").get("mirrors_running"))
    if sides.engine.kind == "llama-cpp-python":
        return  # its log-probabilities name no token, so they are not asked for
    # Nothing of this is worth anything where nothing was captured.
    assert len(sides.canary.asked) > len(REQUESTS) / 2
    assert any(b"logprobs" in one.body for one in sides.canary.asked)
    added = [one for one in sides.engine.asked if b'"logprobs"' in one.body]
    asked = 2 * sum("logprobs" in body for _, body in REQUESTS)
    assert len(added) > asked
