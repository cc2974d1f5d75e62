"""The fake engine is what it stands for: its answers are read like real ones, and are the same every time."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from schemas.answers.bodies import read_body
from schemas.answers.positions import Answer, Skipped
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.fake_model import END, tokenize

KINDS = ("vllm", "llama.cpp", "llama-cpp-python", "sglang", "tgi")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 6}


async def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_answer_is_read_like_a_real_one(kind: str, stream: bool) -> None:
    asked = CHAT | {"stream": stream, "logprobs": True, "top_logprobs": 5}
    async with FakeEngine(kind).running() as server:
        status, body = await ask(server.url, "/v1/chat/completions", asked)
        assert (status, body) == await ask(server.url, "/v1/chat/completions", asked)
        plain = await ask(server.url, "/v1/chat/completions", CHAT | {"stream": stream})
    assert status == plain[0] == 200
    found = read_body(body)
    if kind in ("llama-cpp-python", "tgi"):
        assert found == Skipped("no_token_identity")
    else:
        assert isinstance(found, Answer)
        assert len(found.generated) == 6
        assert found.ended is False
        assert all(4 <= len(position.entries) <= 5 for position in found.generated)
    assert read_body(plain[1]) == Skipped("no_logprobs")
    assert b"top_logprobs" not in plain[1]


async def test_what_vllm_scores_is_what_it_generated() -> None:
    async with FakeEngine("vllm").running() as server:
        asked = {"prompt": "Tell me about the sea.", "max_tokens": 6, "logprobs": 5, "return_token_ids": True}
        _, body = await ask(server.url, "/v1/completions", asked)
        choice = json.loads(body)["choices"][0]
        ids = [*tokenize("Tell me about the sea."), *choice["token_ids"]]
        again = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 5}
        _, scored = await ask(server.url, "/v1/completions", again)
    places = json.loads(scored)["choices"][0]["prompt_logprobs"][-6:]
    values = [place[str(token)]["logprob"] for place, token in zip(places, choice["token_ids"], strict=True)]
    assert values == choice["logprobs"]["token_logprobs"]
    assert END not in choice["token_ids"]


async def test_damage_changes_log_probabilities_and_a_fault_breaks_the_stream() -> None:
    engine = FakeEngine("vllm")
    asked = CHAT | {"stream": True, "logprobs": True, "top_logprobs": 5}
    async with engine.running() as server:
        healthy = (await ask(server.url, "/v1/chat/completions", asked))[1]
        engine.damage = 1.0
        assert (await ask(server.url, "/v1/chat/completions", asked))[1] != healthy
        engine.fault = "cut"
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(server.url, "/v1/chat/completions", asked)
        engine.fault = "refuse"
        assert (await ask(server.url, "/v1/chat/completions", asked))[0] == 503
    assert len(engine.asked) == 4
