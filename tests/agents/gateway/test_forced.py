"""Scoring another engine's tokens: what is asked, and what is read of the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.asking import EngineKind, read_asked
from agents.gateway.capture import Captured
from agents.gateway.forced import forced_request, read_forced
from schemas.answers.positions import Answer, Position, Token

ASKED = read_asked("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"hi"}]}')


def answer(*ids: int | None) -> Answer:
    return Answer(tuple(Position(Token(one), ((Token(one), -0.5),)) for one in ids), ended=True)


BASELINE = Captured(answer=answer(7, 8, 9), prompt_token_ids=(1, 2), finish_reason="stop", ended=True)


def request(kind: EngineKind, baseline: Captured = BASELINE, asked: Any = ASKED, **more: Any) -> Any:
    found = forced_request(asked, baseline, kind, **{"top": 5, "model": None, **more})
    return None if found is None else (found[0], json.loads(found[1]))


def test_what_vllm_is_asked() -> None:
    assert request("vllm") == (
        "/v1/completions",
        {"model": "m", "prompt": [1, 2, 7, 8, 9], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 5},
    )
    assert request("vllm", model="other", top=30)[1] | {"prompt": 0} == {
        "model": "other", "prompt": 0, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 20,
    }  # fmt: skip


def test_what_sglang_is_asked() -> None:
    assert request("sglang") == (
        "/generate",
        {
            "input_ids": [1, 2, 7, 8, 9],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 5,
        },
    )


@pytest.mark.parametrize("kind", ["llama.cpp", "llama-cpp-python", "tgi"])
def test_engines_that_score_no_prompt(kind: EngineKind) -> None:
    assert request(kind) is None


@pytest.mark.parametrize(
    "baseline",
    [
        Captured(),
        replace(BASELINE, answer=None),
        replace(BASELINE, answer=answer()),
        replace(BASELINE, answer=answer(7, None)),
        replace(BASELINE, prompt_token_ids=None),
        replace(BASELINE, prompt_token_ids=()),
    ],
)
def test_unknown_tokens_cannot_be_scored(baseline: Captured) -> None:
    assert request("vllm", baseline) is None


@pytest.mark.parametrize(
    ("content", "possible"),
    [
        ("hi", True),
        ([{"type": "text", "text": "hi"}], True),
        ([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}], False),
        ([{"text": "hi"}], False),
        ([5], False),
    ],
)
def test_only_text_has_tokens_to_name(content: Any, possible: bool) -> None:
    body = json.dumps({"messages": [{"role": "system"}, {"role": "user", "content": content}]}).encode()
    asked = read_asked("/v1/chat/completions", body)
    assert (request("vllm", asked=asked) is not None) is possible


@pytest.mark.shared
def test_a_real_answer_of_vllm(shared_dir: Path) -> None:
    """25 tokens of which the last three count as the answer."""
    body = (shared_dir / "data" / "sse" / "vllm" / "completion_prompt_logprobs.json").read_bytes()
    places = json.loads(body)["choices"][0]["prompt_logprobs"]
    ids = [int(next(iter(place))) for place in places[-3:]]
    baseline = Captured(answer=answer(*ids), prompt_token_ids=(1,) * 22, ended=False)
    said = read_forced("vllm", body, baseline)
    assert said.error is None
    assert said.answer is not None
    assert [position.emitted.id for position in said.answer.generated] == ids
    for position, place in zip(said.answer.generated, places[-3:], strict=True):
        assert {token.id: value for token, value in position.entries} == {
            int(key): value["logprob"] for key, value in place.items()
        }
    assert (said.ended, said.output_tokens, said.input_tokens) == (False, 3, 22)
    other = Captured(answer=answer(*ids[:-1], ids[-1] + 1), prompt_token_ids=(1,) * 22)
    assert read_forced("vllm", body, other) == Captured(error="garbled")


def sglang(tokens: list[Any], top: list[Any]) -> bytes:
    return json.dumps(
        {"text": "", "meta_info": {"id": "x", "input_token_logprobs": tokens, "input_top_logprobs": top}}
    ).encode()


def test_an_answer_of_sglang() -> None:
    body = sglang(
        [[None, 2, None], [-0.4, 7, " cat"], [-6.5, 8, "x"], [-1.0, 9, None]],
        [None, [[-0.4, 7, " cat"], [-1.5, 3, None]], [[-0.1, 4, None], [-3, 5, None]], [[-1.0, 9, None]]],
    )
    said = read_forced("sglang", body, BASELINE)
    assert said.answer is not None
    assert [[(token.id, value) for token, value in p.entries] for p in said.answer.generated] == [
        [(7, -0.4), (3, -1.5)],
        [(8, -6.5), (4, -0.1), (5, -3.0)],  # outside the best: first, so that it is known to set no cap
        [(9, -1.0)],
    ]
    assert said.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        ("vllm", b'{"error":{"message":"too long","code":400}}', "refused"),
        ("vllm", b'{"error":{"message":"CUDA out of memory","code":500}}', "oom"),
        ("vllm", b'{"choices":[]}', "garbled"),
        ("vllm", b'{"choices":[{"prompt_logprobs":[null]}]}', "garbled"),
        ("vllm", b'{"choices":[{"prompt_logprobs":[{"a":1}]}]}', "garbled"),
        ("vllm", b"<html>", "garbled"),
        ("sglang", b'{"error":{"message":"queue is full"}}', "overload"),
        ("sglang", b"{}", "engine"),
        ("sglang", b"[]", "garbled"),
        ("sglang", sglang([], []), "garbled"),
        ("sglang", sglang([[-0.4, 7, None]], []), "garbled"),
        ("sglang", sglang([[-0.4, 2**31, None]], [[]]), "garbled"),
        ("sglang", sglang([[-0.4, 7, 0], [-0.4, 8, 0], [-0.4, 8, 0]], [[], [], []]), "garbled"),
    ],
)
def test_what_went_wrong(kind: EngineKind, body: bytes, error: str) -> None:
    assert read_forced(kind, body, BASELINE) == Captured(error=error)


values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "prompt_logprobs",
                    "meta_info",
                    "input_token_logprobs",
                    "input_top_logprobs",
                    "7",
                    "rank",
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(st.sampled_from(["vllm", "sglang"]), values, st.binary(max_size=5))
def test_whatever_comes_is_read_or_garbled(kind: EngineKind, value: Any, tail: bytes) -> None:
    for body in (json.dumps(value).encode() + tail, json.dumps(value).encode()):
        assert read_forced(kind, body, BASELINE).answer is None
