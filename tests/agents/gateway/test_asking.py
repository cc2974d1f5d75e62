"""What is read of a request, and what each engine is asked for beyond it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.gateway.asking import (
    CHAT,
    COMPLETIONS,
    Added,
    Asked,
    EngineKind,
    can_be_full,
    read_asked,
    shadow_body,
    with_capture,
)
from schemas.signature import prompt_signature
from tests.agents.gateway.captures import recorded

KINDS: tuple[EngineKind, ...] = get_args(EngineKind)
MESSAGES = [{"role": "user", "content": "hi"}]


def asked(path: str = CHAT, **fields: Any) -> Asked:
    body = {"model": "m", **({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}), **fields}
    found = read_asked(path, json.dumps(body).encode())
    assert found is not None
    return found


def captured(of: Asked, kind: EngineKind, **more: Any) -> tuple[dict[str, Any], Added]:
    body, added = with_capture(of, kind, **{"top": 5, "level": "full", "model": None, **more})
    return json.loads(body), added


def new(of: Asked, kind: EngineKind, **more: Any) -> dict[str, Any]:
    """What the engine is asked for beyond what the user asks."""
    body, _ = captured(of, kind, **more)
    return {name: value for name, value in body.items() if name not in of.fields or of.fields[name] != value}


USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("kind", "path", "fields", "added"),
    [
        (
            "vllm",
            CHAT,
            {
                "logprobs": True,
                "top_logprobs": 6,
                "return_tokens_as_token_ids": True,
                "return_token_ids": True,
            },
            Added("full", logprobs=True, token_ids=True),
        ),
        (
            "vllm",
            COMPLETIONS,
            {"logprobs": 5, "return_tokens_as_token_ids": True, "return_token_ids": True},
            Added("full", logprobs=True, token_ids=True),
        ),
        ("llama.cpp", CHAT, {"logprobs": True, "top_logprobs": 5}, Added("full", logprobs=True)),
        ("llama.cpp", COMPLETIONS, {"logprobs": 5}, Added("full", logprobs=True)),
        ("llama-cpp-python", CHAT, {}, Added()),
        ("llama-cpp-python", COMPLETIONS, {}, Added()),
        ("sglang", CHAT, {"logprobs": True, "top_logprobs": 5}, Added("full", logprobs=True)),
        ("sglang", COMPLETIONS, {"logprobs": 5}, Added("full", logprobs=True)),
        ("tgi", CHAT, {"logprobs": True, "top_logprobs": 5}, Added("full", logprobs=True)),
        ("tgi", COMPLETIONS, {}, Added()),
    ],
)
def test_what_each_engine_is_asked_for(
    kind: EngineKind, path: str, fields: dict[str, Any], added: Added
) -> None:
    of = asked(path)
    assert new(of, kind) == fields
    assert captured(of, kind)[1] == added
    usage = {} if kind.startswith("llama") else USAGE
    streamed = asked(path, stream=True)
    assert new(streamed, kind) == fields | usage
    assert captured(streamed, kind)[1] == Added(
        added.level, added.logprobs, added.token_ids, usage=bool(usage)
    )
    assert new(streamed, kind, level="timing") == usage
    assert captured(streamed, kind, level="timing")[1] == Added(usage=bool(usage))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_ask_for_leaves_the_body_its_bytes(kind: EngineKind) -> None:
    body = b' {"model": "m", "messages":[{"role":"user","content":"\\u4f60"}] , "temperature":1.0e0}\n'
    of = read_asked(CHAT, body)
    assert of is not None
    assert with_capture(of, kind, top=5, level="timing", model=None) == (body, Added())
    assert with_capture(of, kind, top=5, level="timing", model="m") == (body, Added())


def test_other_fields_keep_their_bytes() -> None:
    """Numbers no double holds, escapes, spaces, order."""
    rest = (
        b'"temperature":0.30000000000000004441,"seed":12345678901234567890123,'
        b'"logit_bias":{"5": 1e-7},"x":"\\u4f60"'
    )
    of = read_asked(CHAT, b'{"messages":[ {"role":"user","content":"hi"} ],' + rest + b"}")
    assert of is not None
    body, _ = with_capture(of, "llama.cpp", top=5, level="full", model="other")
    assert body == (
        b'{"messages":[ {"role":"user","content":"hi"} ],' + rest
        + b',"model":"other","logprobs":true,"top_logprobs":5}'
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [1, 2, 5, 20, None])
def test_the_users_own_logprobs_are_captured_as_they_are(kind: EngineKind, top: int | None) -> None:
    of = asked(logprobs=True, **({} if top is None else {"top_logprobs": top}))
    body, added = captured(of, kind)
    if top is None and kind != "llama.cpp":
        assert (body, added) == (dict(of.fields), Added())  # no candidates
        return
    if top == 1 and kind == "vllm":
        # What was emitted stands for the best, which it need not be: nothing is bounded by it.
        assert (body, added) == (dict(of.fields), Added())
        legacy = asked(COMPLETIONS, logprobs=1)  # here it stands beside the best
        assert captured(legacy, kind)[1].level == "full"
        return
    assert added.level == "full"
    assert not added.logprobs
    assert (body["logprobs"], body.get("top_logprobs")) == (True, top)
    assert "return_tokens_as_token_ids" not in body  # it would change what he reads
    assert added.token_ids is (kind == "vllm")


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 0},  # no candidates to compare
        {"top_logprobs": 3},  # engines refuse it, and still must
        {"logprobs": False, "top_logprobs": 3},
        {"use_beam_search": True},
        {"best_of": 3},
        {"echo": True},
        {"logprob_token_ids": [1, 2]},  # refused without logprobs, and still must be
        {"logprob_token_ids": [1, 2], "logprobs": True, "top_logprobs": 5},  # no list of the best
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_compared_is_only_timed(kind: EngineKind, fields: dict[str, Any]) -> None:
    assert not can_be_full(asked(**fields), kind)
    assert new(asked(**fields), kind) == {}
    assert captured(asked(**fields), kind)[1] == Added()


def test_llama_cpp_refuses_logprobs_with_tools_in_a_stream() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert captured(asked(tools=tools, stream=True), "llama.cpp") == (
        {"model": "m", "messages": MESSAGES, "tools": tools, "stream": True},
        Added(),
    )
    assert captured(asked(tools=tools), "llama.cpp")[1].logprobs
    assert captured(asked(tools=tools, stream=True), "vllm")[1].logprobs
    copy = json.loads(shadow_body(asked(tools=tools, stream=True), "llama.cpp", top=5, model=None))
    assert (copy["stream"], copy["logprobs"]) == (False, True)


def test_stream_options_of_the_user() -> None:
    own = asked(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert captured(own, "vllm", level="timing") == (dict(own.fields), Added())
    other = asked(
        stream=True, stream_options={"include_usage": False, "x": 1, "continuous_usage_stats": True}
    )
    body, added = captured(other, "vllm", level="timing")
    assert body["stream_options"] == {"include_usage": True, "x": 1}
    assert added.usage
    wrong = asked(stream=True, stream_options=[1])
    assert captured(wrong, "vllm", level="timing") == (dict(wrong.fields), Added())
    assert not captured(asked(), "vllm")[1].usage


def test_tgi_takes_five_and_vllm_one_more_up_to_twenty() -> None:
    assert new(asked(), "tgi", top=20)["top_logprobs"] == 5
    assert new(asked(), "vllm", top=4)["top_logprobs"] == 5
    assert new(asked(), "vllm", top=19)["top_logprobs"] == 20
    assert new(asked(), "vllm", top=20)["top_logprobs"] == 20


def test_a_copy_asks_for_everything_and_keeps_the_sampling() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "stop": ["x"], "max_tokens": 9, "min_p": 0.1}
    of = asked(
        **sampling, n=3, logprobs=True, top_logprobs=2, request_id="r", rid="q", stream_options={"x": 1},
        prompt_logprobs=1,
    )  # fmt: skip
    for kind in KINDS:
        copy = json.loads(shadow_body(of, kind, top=5, model="canary"))
        assert {name: copy[name] for name in sampling} == sampling
        assert (copy["stream"], copy["n"], copy["model"], copy["messages"]) == (True, 1, "canary", MESSAGES)
        assert not {"request_id", "rid", "prompt_logprobs"} & copy.keys()
        assert copy.get("stream_options") == (None if kind.startswith("llama") else {"include_usage": True})
        assert copy["top_logprobs"] == {"vllm": 6, "llama-cpp-python": 2}.get(kind, 5)
        # The user reads candidates by their text and bytes; a copy by ids could not be compared with that.
        assert "return_tokens_as_token_ids" not in copy
    assert json.loads(shadow_body(asked(), "vllm", top=5, model=None))["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (False, 0, False, 1)),
        ({"logprobs": True}, (True, None, False, 1)),
        ({"logprobs": True, "top_logprobs": 3, "n": 2}, (True, 3, False, 2)),
        ({"stream_options": {"include_usage": True}}, (False, 0, True, 1)),
        ({"n": 0}, (False, 0, False, 1)),
        ({"n": "2"}, (False, 0, False, 1)),
    ],
)
def test_what_is_asked_of_a_chat(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    of = asked(**fields)
    assert (of.logprobs, of.top, of.usage, of.choices) == expected


def test_what_is_asked_of_completions() -> None:
    of = asked(COMPLETIONS, logprobs=0, n=2)
    assert (of.logprobs, of.top, of.choices, of.request_type, of.texts) == (True, 0, 2, "completion", ("hi",))
    assert asked(COMPLETIONS, prompt=["a", "b"], n=2).choices == 4
    assert not asked(COMPLETIONS, prompt=["a", "b"]).comparable
    assert asked(COMPLETIONS, prompt=[1, 2]).texts == ("[1,2]",)
    assert asked(COMPLETIONS, prompt=[[1, 2], [3]]).texts == ("[1,2]", "[3]")
    assert asked(COMPLETIONS).top == 0
    assert not asked(COMPLETIONS, logprobs=True).logprobs


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None, None)),
        ({"temperature": 0, "top_p": 1, "seed": -1, "max_tokens": 5}, (0.0, 1.0, -1, 5)),
        ({"max_tokens": 5, "max_completion_tokens": 7}, (None, None, None, 7)),
        (
            {"temperature": 100, "seed": 2**63 - 1, "max_tokens": 2**31 - 1},
            (100.0, None, 2**63 - 1, 2**31 - 1),
        ),
        # What no event may hold is absent from it.
        ({"temperature": 100.1, "top_p": 1.1, "seed": 2**63, "max_tokens": 2**31}, (None,) * 4),
        ({"temperature": -0.1, "top_p": -0.1, "seed": -(2**63) - 1, "max_tokens": -1}, (None,) * 4),
        ({"temperature": True, "top_p": "1", "seed": 1.0, "max_tokens": 1.5}, (None,) * 4),
    ],
)
def test_sampling_parameters_of_events(fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    of = asked(**fields)
    assert (of.temperature, of.top_p, of.seed, of.max_tokens) == expected


def test_what_the_signature_is_over() -> None:
    of = asked(
        messages=[
            {"role": "system", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "é"}, {"text": "b", "type": "x"}]},
        ],
        temperature=0.5, seed=3, stop=["b", "a"], tools=[{"b": 1, "a": 2}], stream=True, user="u",
        logprobs=True, top_logprobs=2, ignore_eos=True, top_k=None, stream_options={},
    )  # fmt: skip
    assert of.texts == ("system", "", "user", '[{"text":"é","type":"text"},{"text":"b","type":"x"}]')
    assert of.sampling == {
        "temperature": 0.5,
        "seed": 3,
        "stop": '["b","a"]',
        "tools": '[{"a":2,"b":1}]',
        "ignore_eos": "true",
    }
    assert len(prompt_signature(b"k" * 16, of.request_type, of.texts, of.sampling)) == 32


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b'{"input":"x"}'),
        (CHAT, b""),
        (CHAT, b"[]"),
        (CHAT, b"{"),
        (CHAT, b'{"messages":[]}'),
        (CHAT, b'{"messages":"hi"}'),
        (CHAT, b'{"messages":[{"content":"x"}]}'),
        (CHAT, b'{"messages":[{"role":"user","content":"\\ud83d"}]}'),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}'),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"x":' + b"9" * 5000 + b"}"),
        (CHAT, b'{"messages":[{"role":"user","content":' + b"[" * 5000 + b"]" * 5000 + b"}]}"),
        (COMPLETIONS, b'{"prompt":null}'),
        (COMPLETIONS, b'{"prompt":[]}'),
        (COMPLETIONS, b'{"prompt":"\xff"}'),
    ],
)
def test_what_is_not_understood_is_none(path: str, body: bytes) -> None:
    assert read_asked(path, body) is None


@pytest.mark.shared
def test_real_requests_are_understood(shared_dir: Path) -> None:
    for one in recorded(shared_dir):
        assert one.asked.texts
        assert one.asked.logprobs
        assert one.asked.comparable


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    "model",
    "messages",
    "prompt",
    "stream",
    "n",
    "logprobs",
    "top_logprobs",
    "stream_options",
    "temperature",
    "top_p",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "tools",
    "echo",
    "best_of",
    "return_token_ids",
    "stop",
]


@settings(max_examples=400)
@given(
    st.dictionaries(st.sampled_from(NAMES), values),
    st.sampled_from(KINDS),
    st.sampled_from([CHAT, COMPLETIONS]),
)
def test_any_request_is_read_or_none_and_keeps_its_meaning(
    fields: dict[str, Any], kind: EngineKind, path: str
) -> None:
    fields.setdefault("messages", MESSAGES)
    fields.setdefault("prompt", "x")
    of = read_asked(path, json.dumps(fields).encode())
    if of is None:
        return
    prompt_signature(b"k" * 16, of.request_type, of.texts, of.sampling)
    body, added = with_capture(of, kind, top=5, level="full", model=None)
    ours = {"logprobs", "top_logprobs", "return_tokens_as_token_ids"} if added.logprobs else set()
    ours |= {"return_token_ids"} if added.token_ids else set()
    ours |= {"stream_options"} if added.usage else set()
    sent = json.loads(body)
    assert {k: v for k, v in sent.items() if k not in ours} == {
        k: v for k, v in of.fields.items() if k not in ours
    }
    json.loads(shadow_body(of, kind, top=5, model="x"))
