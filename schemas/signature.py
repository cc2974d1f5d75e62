"""The prompt signature: what makes two requests "the same question".

HMAC-SHA-256, cut to 128 bits, in hex, over the user's input *before templating*, the request type and the
sampling parameters. Versions are no part of it: two prompt-template versions still pair. The key stays with
the gateways, so that a signature says nothing about the text to anyone else.

The bytes under the HMAC are a list of parts, each UTF-8 and preceded by its length as u32 big-endian:

1. `klaxon/1`;
2. the request type (`chat`, `completion`, …);
3. the number of texts, in decimal; then the texts, in order: of a chat, role and content of every message in
   turn; of a completion, the prompt;
4. for every sampling parameter that the request states, in ascending order of its name's bytes,
   `name=value`: text as it is, a number as the nearest integer (ties to even) to its millionfold.

Nothing is trimmed, folded or normalised. Test vectors: `schemas/examples/signature.json`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from typing import Final

from schemas.errors import SchemaError

SIGNATURE_BYTES: Final = 16
MIN_KEY_BYTES: Final = 16
_DOMAIN: Final = "klaxon/1"
_MILLION: Final = 1_000_000


class SignatureError(SchemaError):
    """No signature can be made of this key or these parameters."""


def _value(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(int(value) * _MILLION)
    if not math.isfinite(value):
        raise SignatureError(f"sampling parameter {name} is {value}; a signature needs a finite number")
    return str(round(value * _MILLION))


def canonical_bytes(request_type: str, texts: Sequence[str], sampling: Mapping[str, float | str]) -> bytes:
    """The bytes a signature is made of. Raises SignatureError for NaN, infinities and lone surrogates."""
    parts = [_DOMAIN, request_type, str(len(texts)), *texts]
    try:
        names = sorted(sampling, key=str.encode)
        parts.extend(f"{name}={_value(name, sampling[name])}" for name in names)
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError as error:
        raise SignatureError(f"text that is not valid Unicode: {error.reason}") from None
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def prompt_signature(
    key: bytes, request_type: str, texts: Sequence[str], sampling: Mapping[str, float | str]
) -> str:
    """32 lower-case hex digits. `key`: at least 16 bytes, else SignatureError."""
    if len(key) < MIN_KEY_BYTES:
        raise SignatureError(f"signature key of {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
    digest = hmac.digest(key, canonical_bytes(request_type, texts, sampling), hashlib.sha256)
    return digest[:SIGNATURE_BYTES].hex()
