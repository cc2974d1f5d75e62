"""Prompt signatures and keyed hashes: as `schemas.signature` says, and never an error at a user."""

from __future__ import annotations

import hashlib
import hmac
import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.asking import read_asked
from agents.gateway.signature import PromptSigner
from schemas.signature import SignatureError

VECTORS: list[dict[str, Any]] = json.loads(
    resources.files("schemas.examples").joinpath("signature.json").read_text("utf-8")
)
KEY = bytes(range(16))
SIGNER = PromptSigner(KEY, "s1")
values = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.text(max_size=5))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    signer = PromptSigner(bytes.fromhex(vector["key_hex"]), "k")
    asked = (vector["request_type"], vector["texts"], vector["sampling"])
    assert signer.signature(*asked) == vector["signature"]


@pytest.mark.parametrize(
    ("texts", "sampling"),
    [(["\ud800"], {}), (["a"], {"temperature": float("nan")}), (["a"], {"temperature": float("inf")}),
     (["a"], {"stop": "\udfff"})],
)  # fmt: skip
def test_what_cannot_be_signed_is_none(texts: list[str], sampling: dict[str, Any]) -> None:
    assert SIGNER.signature("chat", texts, sampling) is None


@given(st.text(max_size=5), st.lists(st.text()), st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_it_never_raises(kind: str, texts: list[str], sampling: dict[str, float | str]) -> None:
    found = SIGNER.signature(kind, texts, sampling)
    assert found is None or (len(found) == 32 and found == SIGNER.signature(kind, texts, sampling))


@given(st.sampled_from(["session", "tenant"]), st.text())
def test_hashes_are_what_the_page_says(kind: Any, value: str) -> None:
    parts = [b"klaxon hash/1", kind.encode(), value.encode("utf-8", "surrogatepass")]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    assert SIGNER.hashed(kind, value) == hmac.new(KEY, message, hashlib.sha256).hexdigest()[:32]


def test_a_session_is_no_tenant_and_no_prompt() -> None:
    other = PromptSigner(bytes(16), "s2")
    hashes = {
        SIGNER.hashed("session", "x"), SIGNER.hashed("tenant", "x"), SIGNER.hashed("session", "y"),
        other.hashed("session", "x"), SIGNER.signature("session", ["x"], {}),
    }  # fmt: skip
    assert len(hashes) == 5


def test_a_short_key_is_refused() -> None:
    with pytest.raises(SignatureError, match="15 bytes"):
        PromptSigner(bytes(15), "k")


def signed(**fields: Any) -> str | None:
    asked = read_asked("/v1/chat/completions", json.dumps(fields).encode())
    assert asked is not None
    return SIGNER.signature(asked.request_type, asked.texts, asked.sampling)


def test_everything_that_is_asked_counts_and_nothing_else() -> None:
    plain: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    same = [
        {"model": "other"}, {"stream": True}, {"user": "u"}, {"logprobs": True, "top_logprobs": 5},
        {"metadata": {"a": 1}}, {"stream_options": {"include_usage": True}},
    ]  # fmt: skip
    assert {signed(**{**plain, **more}) for more in [{}, *same]} == {signed(**plain)}
    other = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, picture]}]},
        {"messages": [{"role": "system", "content": "x"}]},
        {"tools": [tool]}, {"tools": [tool, tool]}, {"stop": ["a"]}, {"temperature": 0.6}, {"seed": 1},
        {"response_format": {"type": "json_object"}},
    ]  # fmt: skip
    signatures = {signed(**{**plain, **more}) for more in other}
    assert len(signatures | {signed(**plain)}) == len(other) + 1
    turned = {"type": "function", "function": {"parameters": {"a": 2, "b": 1}, "name": "f"}}
    assert signed(**plain, tools=[turned]) == signed(**plain, tools=[tool]), "as JSON with sorted names"


def test_a_text_that_is_no_unicode_has_no_signature_and_its_user_no_error() -> None:
    body = b'{"messages":[{"role":"user","content":"\\ud800"}]}'
    asked = read_asked("/v1/chat/completions", body)
    assert asked is None or SIGNER.signature(asked.request_type, asked.texts, asked.sampling) is None
