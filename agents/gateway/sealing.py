"""Texts that may leave (C1): AES-256-GCM, bound to the consent, the pair and the signature they belong to.

Plaintext: JSON `{"prompt": [text, …], "answer": text, "cut": bool}`. Associated data: `klaxon text/1`,
consent id, pair id and signature, each UTF-8 and preceded by its length as u32 big-endian; so a text moved to
another event does not open. The nonce is 96 random bits. Test vectors: `schemas/examples/sealed.json`.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from schemas.errors import SchemaError
from schemas.events import EncryptedText

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
MOST_TEXT_BYTES: Final = 65_536
"""UTF-8 bytes of a prompt, and of an answer, that are kept; the rest is cut off, at whole characters."""
_MOST_PLAIN_BYTES: Final = 262_144 // 4 * 3 - 16
"""What `EncryptedText.data` holds as base64, without the tag."""
_DOMAIN: Final = "klaxon text/1"


class SealError(SchemaError):
    """A sealed text does not open: another key, or it was altered or belongs to another event."""


class Spoken(msgspec.Struct, frozen=True):
    """What was said: the user's texts as in the signature, the answer's text."""

    prompt: tuple[str, ...]
    answer: str
    cut: bool = False
    """True where it was longer than is kept."""


@dataclass(frozen=True, slots=True)
class Belongs:
    """The event that a text belongs to."""

    consent_id: str
    pair_id: str
    signature: str

    def associated_data(self) -> bytes:
        """What authenticates it."""
        parts = [part.encode() for part in (_DOMAIN, self.consent_id, self.pair_id, self.signature)]
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class Sealing:
    """The gateway's text key. Shared between threads."""

    __slots__ = ("_cipher", "_random", "key_id", "valid_until_us")

    def __init__(
        self,
        key: bytes,
        key_id: str,
        valid_until_us: int,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`key`: 32 bytes, else ValueError. `valid_until_us`: within 90 days of its making (C1)."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"text key of {len(key)} bytes; {KEY_BYTES} are needed")
        self._cipher = AESGCM(key)
        self._random = random
        self.key_id: Final = key_id
        self.valid_until_us: Final = valid_until_us

    def seal(self, said: Spoken, belongs: Belongs, now_us: int) -> EncryptedText | None:
        """Encrypted; None once the key is past its time: then no text leaves until it is rotated (C1)."""
        if now_us > self.valid_until_us:
            return None
        nonce = self._random(NONCE_BYTES)
        plain = _plaintext(said)
        data = self._cipher.encrypt(nonce, plain, belongs.associated_data())
        return EncryptedText(
            key_id=self.key_id,
            nonce=base64.b64encode(nonce).decode(),
            data=base64.b64encode(data).decode(),
        )


def open_sealed(text: EncryptedText, belongs: Belongs, keys: Mapping[str, bytes]) -> Spoken:
    """What was said, for whoever holds the key: `keys` by id. Raises SealError."""
    key = keys.get(text.key_id)
    if key is None:
        raise SealError(f"sealed under key {text.key_id}, which is not among those given")
    try:
        nonce, data = (base64.b64decode(part, validate=True) for part in (text.nonce, text.data))
        plain = AESGCM(key).decrypt(nonce, data, belongs.associated_data())
        return msgspec.json.decode(plain, type=Spoken)
    except (binascii.Error, ValueError, InvalidTag, msgspec.MsgspecError):
        raise SealError(f"does not open under key {text.key_id}: altered, or another event's text") from None


def _plaintext(said: Spoken) -> bytes:
    """What is encrypted: at most _MOST_PLAIN_BYTES, whatever JSON makes of the texts."""
    most = MOST_TEXT_BYTES
    while len(plain := msgspec.json.encode(_bounded(said, most))) > _MOST_PLAIN_BYTES:
        most //= 2
    return plain


def _bounded(said: Spoken, most_bytes: int) -> Spoken:
    """At most so much of the prompt, its latest texts first, and of the answer; what is no Unicode as `?`."""
    room, latest = most_bytes, []
    for text in reversed(said.prompt):
        latest.append(_beginning(text, room))
        room -= len(latest[-1].encode())
    prompt, answer = tuple(reversed(latest)), _beginning(said.answer, most_bytes)
    whole, kept = (*said.prompt, said.answer), (*prompt, answer)
    lost = any(len(left) < len(text) for text, left in zip(whole, kept, strict=True))
    return Spoken(prompt, answer, said.cut or lost)


def _beginning(text: str, most_bytes: int) -> str:
    encoded = text[:most_bytes].encode("utf-8", "replace")
    return encoded[:most_bytes].decode("utf-8", "ignore")
