"""The prompt signature: its test vectors, and what must and must not change it."""

from __future__ import annotations

import hashlib
import hmac
import json
from importlib import resources

import pytest

from schemas.signature import SignatureError, canonical_bytes, prompt_signature

KEY = bytes(range(16))
VECTORS = json.loads(resources.files("schemas.examples").joinpath("signature.json").read_text("utf-8"))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_vectors(vector: dict) -> None:
    arguments = (vector["request_type"], vector["texts"], vector["sampling"])
    assert canonical_bytes(*arguments).hex() == vector["canonical_hex"]
    assert prompt_signature(bytes.fromhex(vector["key_hex"]), *arguments) == vector["signature"]


def test_by_hand() -> None:
    parts = [b"klaxon/1", b"completion", b"1", "Hé".encode(), b"max_tokens=16000000", b"temperature=700000"]
    message = b"".join(len(p).to_bytes(4, "big") + p for p in parts)
    expected = hmac.new(KEY, message, hashlib.sha256).hexdigest()[:32]
    assert prompt_signature(KEY, "completion", ["Hé"], {"temperature": 0.7, "max_tokens": 16}) == expected


def test_everything_that_makes_the_question_counts() -> None:
    base = ("chat", ["user", "hello"], {"temperature": 0.7})
    others = [
        ("completion", ["user", "hello"], {"temperature": 0.7}),
        ("chat", ["userhello"], {"temperature": 0.7}),
        ("chat", ["user", "hello "], {"temperature": 0.7}),
        ("chat", ["user", "hello"], {"temperature": 0.700001}),
        ("chat", ["user", "hello"], {}),
        ("chat", ["user", "hello"], {"temperature": 0.7, "seed": 0}),
        ("chat", ["user", "hello", "temperature=700000"], {}),
    ]
    signatures = {prompt_signature(KEY, *arguments) for arguments in [base, *others]}
    assert len(signatures) == len(others) + 1
    assert prompt_signature(bytes(16), *base) != prompt_signature(KEY, *base)


def test_order_of_parameters_and_kind_of_number_do_not_count() -> None:
    one = prompt_signature(KEY, "chat", ["x"], {"temperature": 1, "top_p": 0.5})
    assert one == prompt_signature(KEY, "chat", ["x"], {"top_p": 0.5, "temperature": 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_signature_of_what_is_no_number(value: float) -> None:
    with pytest.raises(SignatureError, match="temperature"):
        prompt_signature(KEY, "chat", ["x"], {"temperature": value})


def test_short_keys_and_broken_text_are_refused() -> None:
    with pytest.raises(SignatureError, match="at least 16"):
        prompt_signature(b"short", "chat", ["x"], {})
    with pytest.raises(SignatureError, match="Unicode"):
        prompt_signature(KEY, "chat", ["\ud800"], {})
