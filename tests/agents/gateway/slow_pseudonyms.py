"""Pseudonyms once more, slowly: AES by FIPS 197 in plain Python, the network by its definition."""

from __future__ import annotations

import hashlib
import hmac


def _times_two(a: int) -> int:
    return ((a << 1) ^ (0x11B if a & 0x80 else 0)) & 0xFF


def _times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = _times_two(a), b >> 1
    return product


def _box() -> list[int]:
    box = []
    for value in range(256):
        inverse = next((i for i in range(256) if _times(value, i) == 1), 0)
        turned = inverse
        for shift in range(1, 5):
            turned ^= ((inverse << shift) | (inverse >> (8 - shift))) & 0xFF
        box.append(turned ^ 0x63)
    return box


BOX = _box()


def _round_keys(key: bytes) -> list[bytes]:
    words = [key[at : at + 4] for at in range(0, 32, 4)]
    constant = 1
    while len(words) < 60:
        word = words[-1]
        if len(words) % 8 == 0:
            word = bytes(BOX[byte] for byte in word[1:] + word[:1])
            word = bytes([word[0] ^ constant]) + word[1:]
            constant = _times_two(constant)
        elif len(words) % 8 == 4:
            word = bytes(BOX[byte] for byte in word)
        words.append(bytes(a ^ b for a, b in zip(words[-8], word, strict=True)))
    return [b"".join(words[at : at + 4]) for at in range(0, 60, 4)]


def aes256(key: bytes, block: bytes) -> bytes:
    """One block under a key of 32 bytes."""
    keys = _round_keys(key)
    state = [a ^ b for a, b in zip(block, keys[0], strict=True)]
    for number in range(1, 15):
        state = [BOX[byte] for byte in state]
        state = [state[(at + 4 * (at % 4)) % 16] for at in range(16)]
        if number < 14:
            mixed = []
            for column in range(0, 16, 4):
                a = state[column : column + 4]
                mixed += [
                    _times(2, a[i]) ^ _times(3, a[(i + 1) % 4]) ^ a[(i + 2) % 4] ^ a[(i + 3) % 4]
                    for i in range(4)
                ]
            state = mixed
        state = [a ^ b for a, b in zip(state, keys[number], strict=True)]
    return bytes(state)


def pair_key(key: bytes, pair_id: str) -> bytes:
    return hmac.new(key, b"klaxon pseudonyms/1\x00" + pair_id.encode("utf-8"), hashlib.sha256).digest()


def id_pseudonym(key: bytes, pair_id: str, token: int) -> int:
    derived = pair_key(key, pair_id)
    high, low = divmod(token, 1 << 16)
    for number in range(8):
        other = low if number % 2 == 0 else high
        drawn = aes256(derived, bytes([253, number, 0, 0]) + other.to_bytes(4, "little") + bytes(8))
        word = int.from_bytes(drawn[:4], "little")
        if number % 2 == 0:
            high ^= word % (1 << 15)
        else:
            low ^= word % (1 << 16)
    return high * (1 << 16) + low


def bytes_pseudonym(key: bytes, pair_id: str, token: bytes | int) -> str:
    if isinstance(token, int):
        block = bytes([254]) + token.to_bytes(4, "little") + bytes(11)
    elif len(token) < 16:
        block = bytes([len(token)]) + token + bytes(15 - len(token))
    else:
        block = bytes([255]) + hashlib.sha256(token).digest()[:15]
    return aes256(pair_key(key, pair_id), block).hex()
