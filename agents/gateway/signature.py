"""The prompt signature of a request, and what else of it travels as a keyed hash (its session, its tenant).

Signature: `schemas.signature` over what was asked. Others: HMAC-SHA-256 under the same key of
`klaxon hash/1`, the kind and the value, each UTF-8 and preceded by its length as u32 big-endian; the first 16
bytes in hex.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from schemas.signature import MIN_KEY_BYTES, SIGNATURE_BYTES, SignatureError, prompt_signature

_DOMAIN: Final = "klaxon hash/1"
Hashed = Literal["session", "tenant"]


class PromptSigner:
    """The gateway's signature key. Immutable, shared between threads."""

    __slots__ = ("_key", "key_id")

    def __init__(self, key: bytes, key_id: str) -> None:
        """`key`: at least 16 random bytes, else SignatureError."""
        if len(key) < MIN_KEY_BYTES:
            raise SignatureError(f"signature key of {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
        self._key = key
        self.key_id: Final = key_id

    def signature(
        self, request_type: str, texts: Sequence[str], sampling: Mapping[str, float | str]
    ) -> str | None:
        """32 hex digits; None where none can be made (lone surrogates, no finite number): never mirrored."""
        try:
            return prompt_signature(self._key, request_type, texts, sampling)
        except (SignatureError, OverflowError):
            return None

    def hashed(self, kind: Hashed, value: str) -> str:
        """32 hex digits that stand for a session or a tenant wherever the event goes. Never raises."""
        parts = (_DOMAIN.encode(), kind.encode(), value.encode("utf-8", "surrogatepass"))
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, message, hashlib.sha256)[:SIGNATURE_BYTES].hex()
