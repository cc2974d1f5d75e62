"""Consent: who may give it, for whom, until when; and that nothing else opens the way for a text (C3)."""

from __future__ import annotations

import base64
import json
import re
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.consent import MOST_VALID_US, Consented, Consents, Refusal, Refused, consent_bytes
from schemas.signing import Signer, Trust, TrustedKey, Use
from tests.conftest import REPOSITORY

VECTORS: list[dict[str, Any]] = json.loads(
    resources.files("schemas.examples").joinpath("consent.json").read_text("utf-8")
)
"""Signed by `tests/schemas/ed25519.py` and plain Python alone."""
NOW_US = 1_767_225_600_000_000
SOON_US = NOW_US + 3_600_000_000
ISSUER = Signer(bytes(range(32)))
OTHER = Signer(bytes(range(1, 33)))


def trusting(*signers: Signer, use: Use = Use.CONSENT, **validity: Any) -> Consents:
    keys = {one.key_id: TrustedKey(one.public_key, frozenset({use}), **validity) for one in signers}
    return Consents(lambda: Trust(keys))


def header(
    signer: Signer = ISSUER, consent_id: str = "c-1", subject: str = "s", expires_us: int = SOON_US
) -> str:
    signature = signer._key.sign(consent_bytes(consent_id, subject, expires_us))
    return f"{consent_id};{expires_us};{signer.key_id}:{base64.b64encode(signature).decode()}"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    signed = (vector["consent_id"], vector["subject"], vector["expires_us"])
    assert consent_bytes(*signed).hex() == vector["signed_hex"]
    signer = Signer(bytes.fromhex(vector["private_key_hex"]))
    assert header(signer, *signed) == vector["header"]
    found = trusting(signer).check(vector["header"], vector["subject"], vector["expires_us"])
    assert found == Consented(vector["consent_id"])


def test_the_page_for_issuers_says_the_same() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def consent" in one)
    names: dict[str, Any] = {}
    exec(block, names)
    for vector in VECTORS:
        signed = (vector["consent_id"], vector["subject"], vector["expires_us"])
        assert names["consent"](bytes.fromhex(vector["private_key_hex"]), *signed) == vector["header"]


def test_every_refusal_has_its_name() -> None:
    good = header()
    mine = trusting(ISSUER)
    assert mine.check(good, "s", NOW_US) == Consented("c-1")
    ends = {"valid_from_us": NOW_US, "valid_until_us": NOW_US + 5}
    refused: tuple[tuple[Consents, str | None, str | None, int, Refusal], ...] = (
        (mine, None, "s", NOW_US, Refusal.ABSENT),
        (mine, "", "s", NOW_US, Refusal.MALFORMED),
        (mine, good, None, NOW_US, Refusal.NO_SUBJECT),
        (mine, good, "", NOW_US, Refusal.NO_SUBJECT),
        (mine, good, "s", SOON_US + 1, Refusal.EXPIRED),
        (trusting(OTHER), good, "s", NOW_US, Refusal.UNKNOWN_KEY),
        (trusting(ISSUER, use=Use.COMMANDS), good, "s", NOW_US, Refusal.UNKNOWN_KEY),
        (trusting(ISSUER, **ends), good, "s", NOW_US - 1, Refusal.UNKNOWN_KEY),
        (trusting(ISSUER, **ends), good, "s", NOW_US + 6, Refusal.UNKNOWN_KEY),
        (mine, good, "another user", NOW_US, Refusal.WRONG_SIGNATURE),
        (mine, good.replace("c-1", "c-2"), "s", NOW_US, Refusal.WRONG_SIGNATURE),
        (mine, good.replace(str(SOON_US), str(SOON_US + 1)), "s", NOW_US, Refusal.WRONG_SIGNATURE),
        (mine, header(OTHER).replace(OTHER.key_id, ISSUER.key_id), "s", NOW_US, Refusal.WRONG_SIGNATURE),
        (mine, header(expires_us=NOW_US + MOST_VALID_US + 1), "s", NOW_US, Refusal.TOO_LONG),
    )
    for consents, said, subject, at_us, reason in refused:
        assert consents.check(said, subject, at_us) == Refused(reason), reason
    assert {reason for *_, reason in refused} == set(Refusal)


def test_the_ends_of_its_time() -> None:
    mine = trusting(ISSUER)
    assert mine.check(header(expires_us=NOW_US), "s", NOW_US) == Consented("c-1")
    assert mine.check(header(expires_us=NOW_US - 1), "s", NOW_US) == Refused(Refusal.EXPIRED)
    most = NOW_US + MOST_VALID_US
    assert mine.check(header(expires_us=most), "s", NOW_US) == Consented("c-1")
    assert mine.check(header(expires_us=most + 1), "s", NOW_US) == Refused(Refusal.TOO_LONG)


def test_a_key_that_is_taken_out_is_nothing_at_once() -> None:
    keys = {ISSUER.key_id: TrustedKey(ISSUER.public_key, frozenset({Use.CONSENT}))}
    consents = Consents(lambda: Trust(keys))
    assert isinstance(consents.check(header(), "s", NOW_US), Consented)
    keys.clear()
    assert consents.check(header(), "s", NOW_US) == Refused(Refusal.UNKNOWN_KEY)


@pytest.mark.parametrize(
    "said",
    ["c;1", ";1;x:y", "c 1", header() + " ", " " + header(), header()[:-1], header() + ";", "é" + header(),
     header().replace("c-1", "c" * 129), header().replace("c-1", "c/1"), header(consent_id="c-1").upper(),
     header().replace(str(SOON_US), "1" * 17), header().replace(str(SOON_US), "-1"),
     header().replace(str(SOON_US), "١٢"), "x" * 100_000, header().replace(ISSUER.key_id, "z" * 16),
     header() + "\n", "\ud800"],
)  # fmt: skip
def test_what_is_malformed(said: str) -> None:
    assert trusting(ISSUER).check(said, "s", NOW_US) == Refused(Refusal.MALFORMED)


@given(st.text(max_size=600), st.text(max_size=20))
def test_no_header_raises_and_none_is_guessed(said: str, subject: str) -> None:
    assert isinstance(trusting(ISSUER).check(said, subject, NOW_US), Refused)


@given(st.text(max_size=30).filter(lambda subject: subject not in ("", "s")))
def test_a_consent_is_worth_nothing_for_anybody_else(subject: str) -> None:
    assert trusting(ISSUER).check(header(), subject, NOW_US) == Refused(Refusal.WRONG_SIGNATURE)


def test_lengths_keep_parts_apart() -> None:
    """Moving characters between consent id, subject and time makes another message."""
    assert consent_bytes("ab", "c", 1) != consent_bytes("a", "bc", 1)
    assert consent_bytes("a", "b1", 1) != consent_bytes("a", "b", 11)
