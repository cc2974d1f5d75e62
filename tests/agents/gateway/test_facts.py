"""What engines say of themselves, as each kind answers, and what hostile ones say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any, get_args

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.facts import ASKED, DEFINITIONS, MOST_BYTES, EngineFacts, facts_of, read_facts
from agents.gateway.settings import EngineKind
from tests.agents.gateway.answering import Answer, answering, saying

MODELS = {
    "object": "list",
    "data": [{"id": "smollm2-135m-instruct", "object": "model", "max_model_len": 8192}],
}
VLLM = {
    "/version": {"version": "0.32.1"},
    "/v1/models": MODELS,
    "/server_info?config_format=json": {
        "vllm_config": {
            "model_config": {
                "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
                "max_model_len": 8192,
                "max_logprobs": 20,
                "logprobs_mode": "raw_logprobs",
                "dtype": "torch.bfloat16",
            },
            "cache_config": {"block_size": 16, "cache_dtype": "fp8_e4m3", "enable_prefix_caching": True},
        },
        "vllm_env": {"VLLM_BATCH_INVARIANT": False, "VLLM_SERVER_DEV_MODE": True},
        "system_env": {"torch_version": "2.11.0", "pip_packages": "numpy==2.3.4\n" * 500},
    },
}
SGLANG = {
    "/server_info": {
        "model_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "kv_cache_dtype": "auto",
        "context_length": 32_800,
        "enable_deterministic_inference": True,
        "weight_version": "step-1200",
        "api_key": "sk-engine",
        "max_total_num_tokens": 981_125,
        "internal_states": [{"avg_spec_accept_length": 3.75}],
        "version": "0.5.23",
    },
    "/v1/models": MODELS,
}
LLAMA_CPP = {
    "/props": {
        "default_generation_settings": {
            "params": {
                "temperature": 0.800000011920929,
                "n_probs": 0,
                "post_sampling_probs": False,
                "lora": [],
            },
            "n_ctx": 512,
        },
        "total_slots": 1,
        "model_alias": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "chat_template": "{% for message in messages %}…{% endfor %}",
        "build_info": "b11434-0a1b2c3",
    },
    "/v1/models": {"models": [{"name": "SmolLM2"}], "object": "list", "data": [{"id": "SmolLM2-135M"}]},
}
TGI = {
    "/info": {
        "model_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "model_dtype": "torch.float16",
        "max_total_tokens": 2048,
        "version": "3.3.6",
        "sha": None,
    },
    "/v1/models": MODELS,
}


def test_vllm_in_development_mode_says_all() -> None:
    assert facts_of("vllm", VLLM) == EngineFacts(
        kind="vllm",
        version="0.32.1",
        model="smollm2-135m-instruct",
        definition="raw",
        deterministic=False,
        kv_type="fp8_e4m3",
        max_logprobs=20,
        context_tokens=8192,
        complete=True,
    )
    assert facts_of("vllm", VLLM).label == "vllm 0.32.1 mode=raw kv=fp8_e4m3 deterministic=no top=20"


def test_vllm_as_it_is_served_says_version_and_model() -> None:
    said = {path: answer for path, answer in VLLM.items() if "server_info" not in path}
    facts = facts_of("vllm", said)
    assert (facts.version, facts.model, facts.context_tokens) == ("0.32.1", "smollm2-135m-instruct", 8192)
    assert (facts.definition, facts.deterministic, facts.kv_type, facts.max_logprobs) == (None,) * 4
    assert facts.label == "vllm 0.32.1"
    assert facts.complete


@pytest.mark.parametrize(
    ("mode", "definition", "logits"),
    [
        ("raw_logprobs", "raw", False),
        ("processed_logprobs", "processed", False),
        ("raw_logits", "raw", True),
        ("processed_logits", "processed", True),
        ("of_tomorrow", None, False),
        (None, None, False),
    ],
)
def test_vllm_modes(mode: str | None, definition: str | None, logits: bool) -> None:
    info = {"vllm_config": {"model_config": {"logprobs_mode": mode}}}
    facts = facts_of("vllm", {"/server_info?config_format=json": info})
    assert (facts.definition, facts.logits) == (definition, logits)


@pytest.mark.parametrize(
    ("told", "read"), [(20, 20), (1, 1), (0, None), (-1, None), (2**31, None), (True, None)]
)
def test_most_candidates(told: Any, read: int | None) -> None:
    info = {"vllm_config": {"model_config": {"max_logprobs": told}}}
    assert facts_of("vllm", {"/server_info?config_format=json": info}).max_logprobs == read


def test_sglang() -> None:
    facts = facts_of("sglang", SGLANG)
    assert facts.label == "sglang 0.5.23 kv=auto deterministic=yes"
    assert (facts.weights, facts.context_tokens) == ("step-1200", 32_800)
    assert "sk-engine" not in repr(facts)
    older = {"/get_server_info": SGLANG["/server_info"], "/v1/models": MODELS}
    assert facts_of("sglang", older) == facts


def test_llama_cpp() -> None:
    facts = facts_of("llama.cpp", LLAMA_CPP)
    assert facts.label == "llama.cpp b11434-0a1b2c3 mode=raw"
    assert (facts.model, facts.context_tokens, facts.kv_type) == ("SmolLM2-135M", 512, None)


def test_llama_cpp_that_answers_after_the_sampler() -> None:
    props = {"default_generation_settings": {"params": {"post_sampling_probs": True}}}
    assert facts_of("llama.cpp", {"/props": props}).definition == "processed"


def test_tgi_and_llama_cpp_python() -> None:
    assert facts_of("tgi", TGI).label == "tgi 3.3.6"
    assert facts_of("llama-cpp-python", {"/v1/models": MODELS}).label == "llama-cpp-python"


@pytest.mark.parametrize("kind", ASKED)
def test_an_engine_that_is_away_says_nothing(kind: str) -> None:
    assert facts_of(kind, {}) == EngineFacts(kind=kind)


def test_every_kind_has_a_definition() -> None:
    assert set(DEFINITIONS) == set(ASKED) == set(get_args(EngineKind))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "data", "id", "version", "vllm_config", "vllm_env", "model_config", "cache_config",
                    "cache_dtype", "logprobs_mode", "max_logprobs", "VLLM_BATCH_INVARIANT", "kv_cache_dtype",
                    "default_generation_settings", "params", "n_ctx", "build_info", "context_length",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=16,
)  # fmt: skip


@given(st.sampled_from(sorted(ASKED)), st.data())
def test_whatever_is_answered_is_read(kind: str, data: st.DataObject) -> None:
    facts = facts_of(kind, {path: data.draw(JSON) for path in ASKED[kind]})
    assert facts.label.isascii()
    assert facts.label.isprintable()
    assert len(facts.label) <= 256


def test_long_and_strange_texts_are_cut() -> None:
    facts = facts_of("vllm", {"/version": {"version": "0.32\n\x1b[2J" + "9" * 100_000}})
    assert facts.version == "0.32[2J" + "9" * 57


@pytest.mark.parametrize(
    ("kind", "answers"),
    [("vllm", VLLM), ("sglang", SGLANG), ("llama.cpp", LLAMA_CPP), ("tgi", TGI), ("vllm", {})],
)
@pytest.mark.parametrize("path", ["", "/", "/v1"])
async def test_engines_are_asked(kind: str, answers: Mapping[str, Any], path: str) -> None:
    async with answering(saying(answers)) as (session, url, asked):
        assert await read_facts(session, kind, url + path) == facts_of(kind, answers)
        assert asked == list(ASKED[kind])


async def test_an_engine_with_a_key_is_shown_it() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        allowed = request.headers.get("authorization") == "Bearer mirror"
        return web.json_response(MODELS) if allowed else web.Response(status=401)

    async with answering(answer) as (session, url, _):
        assert (await read_facts(session, "tgi", url)).complete is False
        facts = await read_facts(session, "tgi", url, headers={"authorization": "Bearer mirror"})
        assert facts.model == "smollm2-135m-instruct"


async def _huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(OSError):
        while True:
            await response.write(b" " * (1 << 16))
    return response


async def _elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/v1/models")


@pytest.mark.parametrize(
    "answer",
    [
        _huge,
        _elsewhere,
        lambda _: _said(b"<html>"),
        lambda _: _said(b"[" * 100_000),
        lambda _: _said(b'{"a":' * 100_000),
        lambda _: _said(b"\xff\xfe\x00"),
        lambda _: _said(b"1" * 5_000),
        lambda _: _said(b"{}", status=500),
    ],
)
async def test_hostile_answers_say_nothing(answer: Answer) -> None:
    async with answering(answer) as (session, url, _):
        assert await read_facts(session, "llama-cpp-python", url) == EngineFacts(kind="llama-cpp-python")


async def _said(data: bytes, status: int = 200) -> web.Response:
    return web.Response(body=data, status=status, content_type="application/json")


async def test_an_engine_that_hangs_costs_the_time_agreed_and_keeps_what_it_said() -> None:
    released = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != "/version":
            await released.wait()
        return web.json_response(VLLM["/version"])

    async with answering(answer) as (session, url, asked):
        facts = await read_facts(session, "vllm", url, timeout_s=1.5)
        assert (facts.version, facts.model) == ("0.32.1", None)
        assert asked == ["/version", "/v1/models"]
        released.set()


async def test_an_engine_that_is_not_there() -> None:
    async with aiohttp.ClientSession() as session:
        assert not (await read_facts(session, "vllm", "http://127.0.0.1:1")).complete


def test_the_bound_has_room_for_an_environment() -> None:
    assert len(json.dumps(VLLM)) < MOST_BYTES / 100
