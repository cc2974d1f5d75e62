"""Signatures against RFC 8032, against our vectors, and against whoever alters or borrows them."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.signing import (
    SIGNATURE,
    Signer,
    Trust,
    TrustedKey,
    Use,
    Verdict,
    key_id,
    signed_bytes,
    signer_of,
)
from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.schemas import ed25519

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "signing_vectors.json").read_text(encoding="utf-8")
)
"""Written by `ed25519.py` here and plain Python alone; docs/security.md says how."""
NOW_US = 1_000_000
MINE = Signer(bytes(range(32)))
OTHER = Signer(bytes(range(1, 33)))


def trusting(*signs: Use, signer: Signer = MINE, **validity: Any) -> Trust:
    return Trust({signer.key_id: TrustedKey(signer.public_key, frozenset(signs or Use), **validity)})


def judged(
    trust: Trust, header: bytes | None, *, value: bytes | None = b"{}", key: bytes = b"chat"
) -> Verdict:
    return trust.check(Topic.CONTROL, key, value, header, NOW_US)


def test_rfc_8032() -> None:
    for vector in VECTORS["rfc8032"]:
        private_key, message = bytes.fromhex(vector["private_key"]), bytes.fromhex(vector["message"])
        signer = Signer(private_key)
        assert signer.public_key.hex() == vector["public_key"] == ed25519.public_key(private_key).hex()
        assert signer._key.sign(message).hex() == vector["signature"]
        assert ed25519.sign(private_key, message).hex() == vector["signature"]


def test_our_vectors_are_signed_alike_and_believed() -> None:
    for vector in VECTORS["records"]:
        topic, key, value = Topic(vector["topic"]), vector["key"].encode(), vector["value"].encode()
        signer = Signer(bytes.fromhex(vector["private_key"]))
        assert signed_bytes(topic.value, key, value).hex() == vector["signed"]
        assert signer.header(topic.value, key, value) == (SIGNATURE, vector["header"].encode())
        trust = trusting(signer=signer)
        assert trust.check(topic, key, value, vector["header"].encode(), NOW_US) is Verdict.TRUSTED
    assert len({vector["header"] for vector in VECTORS["records"]}) == len(VECTORS["records"])


def test_the_page_for_other_implementations_says_the_same() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def header" in one)
    names: dict[str, Any] = {}
    exec(block, names)
    for vector in VECTORS["records"]:
        arguments = (vector["topic"], vector["key"].encode(), vector["value"].encode())
        assert names["header"](bytes.fromhex(vector["private_key"]), *arguments) == vector["header"]


def test_every_refusal_has_its_name() -> None:
    _, header = MINE.header(Topic.CONTROL, b"chat", b"{}")
    encoded = header.partition(b":")[2]
    good = trusting(Use.DIRECTIVES)
    assert judged(good, header) is Verdict.TRUSTED
    assert judged(good, None) is Verdict.UNSIGNED
    assert judged(good, header, value=None) is Verdict.UNSIGNED
    assert judged(trusting(signer=OTHER), header) is Verdict.UNKNOWN_KEY
    assert judged(Trust({}), header) is Verdict.UNKNOWN_KEY
    assert judged(trusting(Use.COMMANDS), header) is Verdict.NOT_FOR_THIS_USE
    assert judged(good, header, value=b"{ }") is Verdict.WRONG_SIGNATURE
    assert judged(good, header, key=b"chaT") is Verdict.WRONG_SIGNATURE
    assert judged(good, OTHER.key_id.encode() + b":" + encoded) is Verdict.UNKNOWN_KEY
    both = Trust({**good.keys, **trusting(signer=OTHER).keys})
    assert judged(both, OTHER.key_id.encode() + b":" + encoded) is Verdict.WRONG_SIGNATURE


def test_validity_at_its_ends() -> None:
    _, header = MINE.header(Topic.CONTROL, b"chat", b"{}")
    for validity, verdict in (
        ({"valid_from_us": NOW_US, "valid_until_us": NOW_US}, Verdict.TRUSTED),
        ({"valid_from_us": NOW_US + 1}, Verdict.OUTSIDE_VALIDITY),
        ({"valid_until_us": NOW_US - 1}, Verdict.OUTSIDE_VALIDITY),
    ):
        assert judged(trusting(**validity), header) is verdict


@pytest.mark.parametrize(
    "made",
    [
        b"", b":", b"{id}", b"{id}:", b"{id}:!!!!", b"{id}:AAAA", b"{id}:{short}", b"{id}:{long}",
        b"{id}::{good}", b"{id} :{good}", b"{id}:{good}\n", b"\xff\xfe:{good}", b"{id}:" + b"A" * 100_000,
    ],
)  # fmt: skip
def test_a_header_that_is_none_is_refused_and_nothing_raised(made: bytes) -> None:
    _, header = MINE.header(Topic.CONTROL, b"chat", b"{}")
    signature = base64.b64decode(header.partition(b":")[2])
    for name, value in (
        (b"{id}", MINE.key_id.encode()),
        (b"{good}", base64.b64encode(signature)),
        (b"{short}", base64.b64encode(signature[:-1])),
        (b"{long}", base64.b64encode(signature + b"\0")),
    ):
        made = made.replace(name, value)
    assert made != header
    assert judged(trusting(), made) in (Verdict.WRONG_SIGNATURE, Verdict.UNKNOWN_KEY)


def test_a_signature_is_worth_nothing_on_another_topic() -> None:
    _, header = MINE.header(Topic.COMMANDS, b"chat", b"{}")
    assert judged(trusting(), header) is Verdict.WRONG_SIGNATURE
    with pytest.raises(KeyError):
        trusting().check(Topic.REQUESTS, b"chat", b"{}", header, NOW_US)


PARTS = st.tuples(st.sampled_from(["klaxon.control", "klaxon.commands"]), st.binary(), st.binary())


@given(PARTS, PARTS)
def test_no_two_records_are_signed_over_the_same_bytes(
    one: tuple[str, bytes, bytes], two: tuple[str, bytes, bytes]
) -> None:
    assert (signed_bytes(*one) == signed_bytes(*two)) == (one == two)


@given(st.binary(min_size=1), st.data())
def test_one_altered_bit_is_found(value: bytes, data: st.DataObject) -> None:
    _, header = MINE.header(Topic.CONTROL, b"chat", value)
    assert judged(trusting(), header, value=value) is Verdict.TRUSTED
    at = data.draw(st.integers(0, len(value) * 8 - 1))
    altered = bytearray(value)
    altered[at // 8] ^= 1 << at % 8
    assert judged(trusting(), header, value=bytes(altered)) is Verdict.WRONG_SIGNATURE


def test_ids() -> None:
    assert MINE.key_id == key_id(MINE.public_key)
    assert signer_of(MINE.header("t", None, b"")[1]) == MINE.key_id
    assert signer_of(None) == ""
    with pytest.raises(ValueError, match="32 bytes"):
        Trust({"x": TrustedKey(b"short", frozenset(Use))})
