"""Ed25519 signatures of directives and commands: how they are made, and what a reader makes of one.

The record header `klaxon-signature` is key id, `:`, base64 of Ed25519 over topic, key and value, each
preceded by its u32 big-endian length. No clock, no I/O. For other implementations: docs/security.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from schemas.topics import Topic

SIGNATURE: Final = "klaxon-signature"
"""The record header."""
SIGNATURE_BYTES: Final = 64
PUBLIC_KEY_BYTES: Final = 32
KEY_ID_DIGITS: Final = 16


class Use(StrEnum):
    """What a key may sign."""

    DIRECTIVES = "directives"
    COMMANDS = "commands"
    CONSENT = "consent"
    """What users agreed to: no record, but a header that gateways read."""


USE_OF: Final[Mapping[Topic, Use]] = {Topic.CONTROL: Use.DIRECTIVES, Topic.COMMANDS: Use.COMMANDS}


class Verdict(StrEnum):
    """What a reader makes of a record's signature; all but TRUSTED refuse it, counted by their values."""

    TRUSTED = "trusted"
    UNSIGNED = "unsigned"
    UNKNOWN_KEY = "unknown_key"
    """No key of this id is in the trust file."""
    NOT_FOR_THIS_USE = "not_for_this_use"
    """The key is trusted, but not to sign records of this topic."""
    OUTSIDE_VALIDITY = "outside_validity"
    """The key is not valid yet, or no longer."""
    WRONG_SIGNATURE = "wrong_signature"
    """Not this key's signature of this topic, key and value: altered, or another record's."""


def key_id(public_key: bytes) -> str:
    """A key's id: the first 16 hex digits of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(public_key).hexdigest()[:KEY_ID_DIGITS]


def signed_bytes(topic: str, key: bytes | None, value: bytes) -> bytes:
    """What a signature is over. A record without a key counts as one with an empty key."""
    parts = (topic.encode(), key or b"", value)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class Signer:
    """A private key and its id."""

    def __init__(self, private_key: bytes) -> None:
        """`private_key`: the 32 bytes of RFC 8032."""
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.public_key: Final = self._key.public_key().public_bytes_raw()
        self.key_id: Final = key_id(self.public_key)

    def header(self, topic: str, key: bytes | None, value: bytes) -> tuple[str, bytes]:
        """The header that signs this record."""
        signature = base64.b64encode(self._key.sign(signed_bytes(topic, key, value)))
        return SIGNATURE, self.key_id.encode() + b":" + signature


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, what it may sign, and when. Times in µs; None: without end."""

    public_key: bytes
    signs: frozenset[Use]
    valid_from_us: int = 0
    valid_until_us: int | None = None

    def is_valid(self, now_us: int) -> bool:
        """Whether it may be used now; both ends belong to its validity."""
        return self.valid_from_us <= now_us and (self.valid_until_us is None or now_us <= self.valid_until_us)


class Trust:
    """The keys that a reader trusts. Immutable."""

    def __init__(self, keys: Mapping[str, TrustedKey]) -> None:
        """By id. Raises ValueError for 32 bytes that are no public key."""
        self.keys: Final[Mapping[str, TrustedKey]] = dict(keys)
        self._verifiers = {
            name: Ed25519PublicKey.from_public_bytes(key.public_key) for name, key in self.keys.items()
        }

    def check(
        self, topic: Topic, key: bytes | None, value: bytes | None, header: bytes | None, now_us: int
    ) -> Verdict:
        """Whether the record may be believed. Cheap questions come first: a flood of unsigned ones is cheap.

        A record without a value (a tombstone) says nothing that could be signed. Raises KeyError for a topic
        whose records are not signed.
        """
        use = USE_OF[topic]
        if header is None or value is None:
            return Verdict.UNSIGNED
        name, _, encoded = header.partition(b":")
        named = name.decode("utf-8", "replace")
        trusted = self.keys.get(named)
        if trusted is None:
            return Verdict.UNKNOWN_KEY
        if use not in trusted.signs:
            return Verdict.NOT_FOR_THIS_USE
        if not trusted.is_valid(now_us):
            return Verdict.OUTSIDE_VALIDITY
        try:
            signature = base64.b64decode(encoded, validate=True)
            self._verifiers[named].verify(signature, signed_bytes(topic.value, key, value))
        except (binascii.Error, InvalidSignature):
            return Verdict.WRONG_SIGNATURE
        return Verdict.TRUSTED


def signer_of(header: bytes | None) -> str:
    """The key id that a header names, "" where there is none; nothing is verified."""
    return "" if header is None else header.partition(b":")[0].decode("utf-8", "replace")
