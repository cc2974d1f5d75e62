"""How names become fixed-size numbers: pair ids, and tokens of engines that give bytes instead of ids."""

from __future__ import annotations

import hashlib
import re
from typing import Final

_HEX32: Final = re.compile(r"[0-9a-f]{32}")


def pair_id_bytes(pair_id: str) -> bytes:
    """The 16 bytes a pair id travels as.

    32 lower-case hex digits as they are, any other string as the first 16 bytes of its UTF-8 text's SHA-256.
    """
    if _HEX32.fullmatch(pair_id):
        return bytes.fromhex(pair_id)
    return hashlib.sha256(pair_id.encode()).digest()[:16]


def token_hash(hex_bytes: str) -> int:
    """The 62-bit number that stands for a token known by its bytes only: SHA-256's first 62 bits."""
    digest = hashlib.sha256(bytes.fromhex(hex_bytes)).digest()
    return int.from_bytes(digest[:8], "big") >> 2
