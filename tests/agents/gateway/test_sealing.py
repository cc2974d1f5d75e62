"""Sealed texts (C1): they open with the key, as the event's own, and in no other way."""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.sealing import MOST_TEXT_BYTES, Belongs, SealError, Sealing, Spoken, open_sealed
from schemas.events import EncryptedText

KEY = bytes(range(32))
BELONGS = Belongs("c-1", "r-1", "5f0c8a1b2d3e4f60718293a4b5c6d7e8")
SAID = Spoken(("user", "what is 2 + 2?"), "4")
NOW_US = 1_767_225_600_000_000
SEALING = Sealing(KEY, "k", NOW_US)
VECTORS: list[dict[str, Any]] = json.loads(
    resources.files("schemas.examples").joinpath("sealed.json").read_text("utf-8")
)
texts = st.text(max_size=200)


def sealed(said: Spoken = SAID, belongs: Belongs = BELONGS) -> EncryptedText:
    found = SEALING.seal(said, belongs, NOW_US)
    assert found is not None
    assert msgspec.convert(msgspec.to_builtins(found), EncryptedText) == found, "an event can hold it"
    return found


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    belongs = Belongs(vector["consent_id"], vector["pair_id"], vector["signature"])
    assert belongs.associated_data().hex() == vector["associated_data_hex"]
    key, nonce = bytes.fromhex(vector["key_hex"]), bytes.fromhex(vector["nonce_hex"])
    said = Spoken(tuple(vector["prompt"]), vector["answer"])
    found = Sealing(key, vector["key_id"], NOW_US, lambda _: nonce).seal(said, belongs, NOW_US)
    assert found == EncryptedText(key_id=vector["key_id"], nonce=vector["nonce"], data=vector["data"])
    assert open_sealed(found, belongs, {vector["key_id"]: key}) == said
    # Once more by another interface of the library, from the definition of GCM's parts.
    data = base64.b64decode(vector["data"])
    cipher = Cipher(algorithms.AES(key), modes.GCM(nonce, data[-16:])).decryptor()
    cipher.authenticate_additional_data(bytes.fromhex(vector["associated_data_hex"]))
    plain = cipher.update(data[:-16]) + cipher.finalize()
    assert json.loads(plain) == {"prompt": vector["prompt"], "answer": vector["answer"], "cut": False}


@given(st.lists(texts, max_size=6).map(tuple), texts, st.booleans())
def test_what_is_sealed_opens_again(prompt: tuple[str, ...], answer: str, cut: bool) -> None:
    clean = Spoken(
        tuple(text.encode("utf-8", "replace").decode() for text in prompt),
        answer.encode("utf-8", "replace").decode(),
        cut,
    )
    found = open_sealed(sealed(Spoken(prompt, answer, cut)), BELONGS, {"k": KEY})
    assert found == clean


def test_it_opens_for_nobody_else_and_nowhere_else() -> None:
    found = sealed()
    data = bytearray(base64.b64decode(found.data))
    data[3] ^= 1
    altered = msgspec.structs.replace(found, data=base64.b64encode(bytes(data)).decode())
    shorter = msgspec.structs.replace(found, data="AAAA")
    no_base64 = msgspec.structs.replace(found, nonce="?")
    no_nonce = msgspec.structs.replace(found, nonce="")
    for text, belongs, keys in (
        (found, BELONGS, {}),
        (found, BELONGS, {"k": bytes(32)}),
        (found, BELONGS, {"k": b"short"}),
        (found, Belongs("c-2", BELONGS.pair_id, BELONGS.signature), {"k": KEY}),
        (found, Belongs(BELONGS.consent_id, "r-2", BELONGS.signature), {"k": KEY}),
        (found, Belongs(BELONGS.consent_id, BELONGS.pair_id, "0" * 32), {"k": KEY}),
        (found, Belongs("c-1r", "-1", BELONGS.signature), {"k": KEY}),
        (altered, BELONGS, {"k": KEY}),
        (shorter, BELONGS, {"k": KEY}),
        (no_base64, BELONGS, {"k": KEY}),
        (no_nonce, BELONGS, {"k": KEY}),
    ):
        with pytest.raises(SealError, match="key k"):
            open_sealed(text, belongs, keys)


def test_no_nonce_comes_twice() -> None:
    assert len({sealed().nonce for _ in range(1000)}) == 1000
    assert len(base64.b64decode(sealed().nonce)) == 12


@pytest.mark.parametrize("past_us", [0, 1])
def test_past_its_time_a_key_seals_nothing(past_us: int) -> None:
    assert (SEALING.seal(SAID, BELONGS, NOW_US + past_us) is None) == bool(past_us)


def opened(prompt: tuple[str, ...], answer: str) -> Spoken:
    return open_sealed(sealed(Spoken(prompt, answer)), BELONGS, {"k": KEY})


@pytest.mark.parametrize(("more", "cut"), [(-1, False), (0, False), (1, True)])
def test_what_is_too_long_is_cut_and_said(more: int, cut: bool) -> None:
    answer = "x" * (MOST_TEXT_BYTES + more)
    found = opened(("p",), answer)
    assert (found.answer, found.cut) == (answer[:MOST_TEXT_BYTES], cut)
    found = opened(("p", answer), "a")
    assert found.prompt == ("p" if more < 0 else "", answer[:MOST_TEXT_BYTES])
    assert found.cut == (more >= 0), "the latest text of a prompt is kept first"


def test_it_is_cut_at_whole_characters() -> None:
    found = opened((), "ä" * MOST_TEXT_BYTES)
    assert found == Spoken((), "ä" * (MOST_TEXT_BYTES // 2), cut=True)
    found = opened((), "x" + "€" * MOST_TEXT_BYTES)
    assert set(found.answer[1:]) == {"€"}
    assert MOST_TEXT_BYTES - 3 < len(found.answer.encode()) <= MOST_TEXT_BYTES


def test_whatever_json_makes_of_it_an_event_holds_it() -> None:
    controls = "\x01" * MOST_TEXT_BYTES
    found = opened((controls,), controls)
    assert found.cut
    assert set(found.answer) == {"\x01"}
    assert len(found.answer) >= MOST_TEXT_BYTES // 8


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        Sealing(bytes(31), "k", NOW_US)
