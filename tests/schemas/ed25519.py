"""Ed25519 in plain Python, after RFC 8032 section 5.1: shares no code with what it checks. Slow."""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias

Point: TypeAlias = tuple[int, int]

P: Final = 2**255 - 19
ORDER: Final = 2**252 + 27742317777372353535851937790883648493
D: Final = -121665 * pow(121666, P - 2, P) % P


def add(a: Point, b: Point) -> Point:
    """The sum of two points."""
    (x1, y1), (x2, y2) = a, b
    product = D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + product, P - 2, P) % P
    y = (y1 * y2 + x1 * x2) * pow(1 - product, P - 2, P) % P
    return x, y


def times(scalar: int, point: Point) -> Point:
    """A multiple of a point."""
    total = (0, 1)
    while scalar:
        if scalar & 1:
            total = add(total, point)
        point = add(point, point)
        scalar >>= 1
    return total


def _base() -> Point:
    y = 4 * pow(5, P - 2, P) % P
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    return (P - x if x & 1 else x), y


BASE: Final = _base()


def encoded(point: Point) -> bytes:
    """32 bytes."""
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _secret(private_key: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(private_key).digest()
    scalar = int.from_bytes(digest[:32], "little") & ((1 << 254) - 8) | 1 << 254
    return scalar, digest[32:]


def public_key(private_key: bytes) -> bytes:
    """32 bytes of 32."""
    return encoded(times(_secret(private_key)[0], BASE))


def sign(private_key: bytes, message: bytes) -> bytes:
    """64 bytes."""
    scalar, prefix = _secret(private_key)
    nonce = int.from_bytes(hashlib.sha512(prefix + message).digest(), "little") % ORDER
    first = encoded(times(nonce, BASE))
    challenge = hashlib.sha512(first + public_key(private_key) + message).digest()
    second = (nonce + int.from_bytes(challenge, "little") * scalar) % ORDER
    return first + second.to_bytes(32, "little")
