"""Bytes that nobody would send on purpose: records mutated by byte, by msgpack and by JSON structure."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

Make = Callable[[random.Random, bytes, tuple[bytes, ...]], bytes]

INTEGERS: Final = (
    0, 1, -1, 2, 20, 21, 255, 256, 999, 1000, 65_534, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, 2**64 - 1, -(2**31) - 1, -(2**63), 4_102_444_800_000_000, 4_102_444_800_000_001,
    86_400_000_001,
)  # fmt: skip
FLOATS: Final = (
    0.0, -0.0, 5e-324, -5e-324, 2.2e-308, 1e-3, 1.001, -9999.0, -9999.5, 1e39, -1e39, 1e300, 1.7976e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS: Final = ("", "x", "x" * 256, "x" * 257, "\x00", "é" * 200, "😀" * 100, "0" * 32, "r/canary", "\u2028")
WORDS: Final = (
    b"\x00", b"\xff", b"\x80", b"\x7f", b"\xc0", b"\xc1", b"\xc6\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xdb\x80\x00\x00\x00", b"\xc9\x00\x00\x00\x01\x01", b"\xed\xa0\x80", b"\xc3",
    b"\xf4\x90\x80\x80", b'"', b"\\", b"\\u", b"\\ud800", b"[", b"]", b"{", b"}", b",", b":", b"-", b"e9999",
    b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"1e400", b"-0.0", b"5e-324", b"1" * 400, b" ",
)  # fmt: skip
FORMATS: Final = ("<q", "<i", "<f", "<d", "<H", "<b", "<B")
DEEP: Final = 1_200
"""Deeper than a decoder may recurse."""


def nothing(_rng: random.Random, value: bytes, _others: tuple[bytes, ...]) -> bytes:
    """As it is."""
    return value


def noise(rng: random.Random, _value: bytes, _others: tuple[bytes, ...]) -> bytes:
    """Any bytes."""
    return rng.randbytes(rng.choice((0, 1, 2, 9, 40, 200)))


def by_bytes(rng: random.Random, value: bytes, others: tuple[bytes, ...]) -> bytes:
    """Flipped, cut, repeated, spliced."""
    made = bytearray(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(made) + 1)
        end = min(len(made), at + rng.choice((1, 2, 4, 8, 16, 64)))
        kind = rng.randrange(7)
        if kind == 0 and made:
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at:at] = rng.choice(WORDS)
        elif kind == 2:
            made[at:end] = rng.choice(WORDS)
        elif kind == 3:
            del made[at:end]
        elif kind == 4:
            made[at:at] = made[at:end] * rng.choice((1, 2, 50))
        elif kind == 5:
            del made[at:]
        else:
            other = rng.choice(others)
            cut = rng.randrange(len(other) + 1)
            made[at:] = other[cut:]
    return bytes(made)


def by_msgpack(rng: random.Random, value: bytes, others: tuple[bytes, ...]) -> bytes:
    """Another tree of the same kind: counts, blob lengths, values, nesting."""
    try:
        tree = msgspec.msgpack.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return by_bytes(rng, value, others)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _changed(rng, tree)
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError, ValueError):
        return by_bytes(rng, value, others)


def by_json(rng: random.Random, value: bytes, others: tuple[bytes, ...]) -> bytes:
    """Another document of the same kind, sometimes with what JSON itself forbids or leaves open."""
    try:
        tree = json.loads(value)
    except (ValueError, RecursionError):
        return by_bytes(rng, value, others)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _changed(rng, tree)
    try:
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.5, default=lambda blob: blob.hex())
    except (RecursionError, ValueError):
        return by_bytes(rng, value, others)
    made = text.encode("utf-8", "surrogatepass")
    kind = rng.randrange(12)
    if kind == 0 and b"{" in made:  # a key said twice: the later one counts, or none
        at = made.index(b"{") + 1
        name = json.dumps(rng.choice(_names(tree) or ["v"])).encode()
        made = made[:at] + name + b": " + rng.choice((b"1", b"null", b'"x"', b"[]")) + b", " + made[at:]
    elif kind == 1:
        made = (
            rng.choice((b"\xef\xbb\xbf", b" \n\t\r ", b"\x00"))
            + made
            + rng.choice((b"", b" ", b"\x00", b","))
        )
    elif kind == 2:
        made = b"[" + b", ".join([made] * rng.choice((2, 3, 9))) + b"]"
    return made


def in_bulk(rng: random.Random, value: bytes, others: tuple[bytes, ...]) -> bytes:
    """Up to a record's limit of one thing: where the cost of a byte may grow with their number."""
    size = rng.choice((20_000, 100_000, 400_000))
    kind = rng.randrange(5)
    if kind == 0:
        part = rng.choice(
            (b"[", b"{", b'{"":', b'"\\', b"\\", b",", b"[],", b'"",', b"{},", b"\x91", b"\x81\x01", b"0")
        )
        return b"[" * rng.randrange(2) + part * (size // len(part))
    if kind == 1:
        start = rng.randrange(len(value) + 1)
        part = value[start : start + rng.choice((1, 3, 10, 100))] or b"x"
        return value[:start] + part * (size // len(part)) + value[start:]
    if kind == 2:
        return b"[" + b",".join([value] * max(1, size // (len(value) + 1))) + b"]"
    if kind == 3:
        bad = by_bytes(rng, value, others)
        return b"[" + b",".join([value, bad] * max(1, size // (len(value) + len(bad) + 2))) + b"]"
    return value + rng.randbytes(size)


def by_structure(rng: random.Random, value: bytes, others: tuple[bytes, ...]) -> bytes:
    """By that of its encoding."""
    return (by_json if value.lstrip()[:1] in (b"[", b"{") else by_msgpack)(rng, value, others)


MUTATORS: Final[tuple[tuple[int, Make], ...]] = (
    (2, nothing),
    (8, noise),
    (80, by_bytes),
    (200, by_structure),
    (1, in_bulk),
)
"""(weight, mutator)."""


def mutated(rng: random.Random, value: bytes, others: tuple[bytes, ...]) -> bytes:
    """By one of all mutators."""
    weights = [weight for weight, _ in MUTATORS]
    return rng.choices([make for _, make in MUTATORS], weights)[0](rng, value, others)


def _names(tree: Any) -> list[str]:
    return (
        list(tree) if isinstance(tree, dict) else _names(tree[0]) if isinstance(tree, list) and tree else []
    )


def _changed(rng: random.Random, tree: Any) -> Any:
    """The tree with one node changed; parents are changed in place."""
    parent: Any = None
    at: Any = None
    node = tree
    while isinstance(node, list | dict) and node and rng.random() < 0.85:
        parent, at = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = node[at]
    new = _other(rng, node)
    if parent is None:
        return new
    kind = rng.randrange(12)
    if kind == 0:
        del parent[at]
    elif kind == 1 and isinstance(parent, list):
        parent[at:at] = [node] * rng.choice((1, 2, 30))
    elif kind == 2 and isinstance(parent, dict):
        parent[rng.choice(TEXTS) if isinstance(at, str) else rng.choice(INTEGERS)] = new
    else:
        parent[at] = new
    return tree


def _other(rng: random.Random, node: Any) -> Any:
    """Another value for a node: near it, or of another kind."""
    kind = rng.random()
    if isinstance(node, bytes) and kind < 0.8:
        return _other_blob(rng, node)
    if isinstance(node, bool | None) or kind < 0.15:
        return _any_value(rng)
    if isinstance(node, int):
        return rng.choice((rng.choice(INTEGERS), node + rng.choice((-1, 1)), -node, float(node)))
    if isinstance(node, float):
        return rng.choice((*FLOATS, node * 1e-3, -node))
    if isinstance(node, str):
        return rng.choice((*TEXTS, node + "x", node[:-1], node.upper(), "\ud800" + node))
    if isinstance(node, list):
        return rng.choice((node[:-1], node[1:], [*node, *node], node * 9, [node], []))
    return _any_value(rng)


def _any_value(rng: random.Random) -> Any:
    kind = rng.randrange(9)
    if kind == 0:
        deep: Any = []
        for _ in range(rng.choice((3, 60, DEEP))):
            deep = [deep] if rng.random() < 0.5 else {"": deep}
        return deep
    if kind == 1:
        return rng.choice(TEXTS) * rng.choice((1, 1, 40))
    return rng.choice((None, True, False, [], {}, rng.choice(INTEGERS), rng.choice(FLOATS), rng.randbytes(9)))


def _other_blob(rng: random.Random, blob: bytes) -> bytes:
    """Another length, or one number in it replaced."""
    kind = rng.randrange(8)
    if kind == 0:
        size = rng.choice((1, 2, 4, 8, 16))
        return rng.choice((blob[:-size], blob + bytes(size), blob[:size], blob * 2, b"", blob[size:]))
    form = rng.choice(FORMATS)
    size = struct.calcsize(form)
    values: tuple[float, ...] = FLOATS if form in ("<f", "<d") else INTEGERS
    number = rng.choice(values)
    if form not in ("<f", "<d"):
        number = int(number) & ((1 << 8 * size) - 1)
        packed = number.to_bytes(size, "little")
    else:
        packed = struct.pack("<d", number) if form == "<d" else struct.pack("<f", _narrow(number))
    if len(blob) < size or kind == 1:
        return packed * max(1, len(blob) // size)
    at = rng.randrange(len(blob) // size) * size
    return blob[:at] + packed + blob[at + size :]


def _narrow(number: float) -> float:
    """What a float32 can hold of it."""
    return max(-3.4e38, min(3.4e38, number)) if abs(number) != float("inf") else number
