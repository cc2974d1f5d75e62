"""Consent (C3): a header signed by whoever asked the user; only with a valid one does a text leave, sealed.

The header (`headers.consent`, `x-klaxon-consent` unless configured otherwise) is

    <consent id>;<expires_us>;<key id>:<base64 of Ed25519>

The signature is over `klaxon consent/1`, the consent id, the subject and the expiry in decimal, each UTF-8
and preceded by its length as u32 big-endian. The subject is not in the header: it is what the request itself
says of its user (its session, else the body's `user`), so a header that was given for one user is worth
nothing with another's request. Keys are those of the trust file that may sign `consent`. Test vectors:
`schemas/examples/consent.json`; how an issuer makes one: docs/security.md.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from schemas.signing import Trust, Use

MOST_CHARS: Final = 512
MOST_VALID_US: Final = 31 * 86_400_000_000
"""A consent that would hold for longer is refused: it could not be withdrawn in time."""
_DOMAIN: Final = b"klaxon consent/1"
_HEADER: Final = re.compile(
    r"([A-Za-z0-9._-]{1,128});([0-9]{1,16});([0-9a-f]{16}):([A-Za-z0-9+/]{86}==)", re.ASCII
)


class Refusal(StrEnum):
    """Why a text does not leave; counted by their values."""

    ABSENT = "absent"
    """No header."""
    MALFORMED = "malformed"
    NO_SUBJECT = "no_subject"
    """The request says nothing of its user that the consent could be bound to."""
    EXPIRED = "expired"
    TOO_LONG = "too_long"
    """Valid for more than MOST_VALID_US from now."""
    UNKNOWN_KEY = "unknown_key"
    """No key of this id is in the trust file, or it may not sign consents, or not now."""
    WRONG_SIGNATURE = "wrong_signature"
    """Not this key's signature of this consent for this subject: altered, or another user's."""


@dataclass(frozen=True, slots=True)
class Consented:
    """The text of this request may be kept, encrypted."""

    consent_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It may not."""

    reason: Refusal


def consent_bytes(consent_id: str, subject: str, expires_us: int) -> bytes:
    """What a consent's signature is over."""
    parts = (
        _DOMAIN, consent_id.encode(), subject.encode("utf-8", "surrogatepass"), str(expires_us).encode()
    )  # fmt: skip
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class Consents:
    """The gateway's reading of consents. Memory: none; what holds is asked of the trust file each time."""

    def __init__(self, trust: Callable[[], Trust]) -> None:
        """`trust`: the keys that are trusted now."""
        self._trust = trust

    def check(self, header: str | None, subject: str | None, now_us: int) -> Consented | Refused:
        """Whether this request's user consented, by its header and its subject. Never raises.

        Cheap questions come first: a flood of bad headers costs little.
        """
        if header is None:
            return Refused(Refusal.ABSENT)
        read = _HEADER.fullmatch(header) if len(header) <= MOST_CHARS else None
        if read is None:
            return Refused(Refusal.MALFORMED)
        consent_id, expires, key_id, encoded = read.groups()
        if not subject:
            return Refused(Refusal.NO_SUBJECT)
        expires_us = int(expires)
        if expires_us < now_us:
            return Refused(Refusal.EXPIRED)
        if expires_us > now_us + MOST_VALID_US:
            return Refused(Refusal.TOO_LONG)
        key = self._trust().keys.get(key_id)
        if key is None or Use.CONSENT not in key.signs or not key.is_valid(now_us):
            return Refused(Refusal.UNKNOWN_KEY)
        try:
            signature = base64.b64decode(encoded, validate=True)
            verifier = Ed25519PublicKey.from_public_bytes(key.public_key)
            verifier.verify(signature, consent_bytes(consent_id, subject, expires_us))
        except (binascii.Error, InvalidSignature):
            return Refused(Refusal.WRONG_SIGNATURE)
        return Consented(consent_id)
