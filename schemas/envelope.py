"""The columnar envelope: one array-like msgpack struct of little-endian column blobs, a kind per topic.

Every blob holds one value per event, or a single one that holds for all; `layout` names them in their order.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from schemas.events import Count, Name

VERSION: Final = 1


class Envelope(Struct, frozen=True, array_like=True):
    """What every envelope begins with; the fields of its kind follow."""

    v: int
    kind: str
    n: int
    producer_id: Name
    sequence: Count
    dropped: dict[str, Count]


class RequestEnvelope(Envelope, frozen=True, array_like=True):
    """n request events: numbers in the order of REQUEST_LAYOUT, labels as (dictionary, u2 codes)."""

    signature: bytes
    pair_id: bytes
    numbers: list[bytes]
    labels: list[tuple[list[str], bytes]]
    extras: dict[int, bytes]


class LogitEnvelope(Envelope, frozen=True, array_like=True):
    """n logit events; ids are i4 or i8 (`id_bytes`), log-probabilities f4, both row-major per answer."""

    signature: bytes
    pair_id: bytes
    numbers: list[bytes]
    labels: list[tuple[list[str], bytes]]
    id_bytes: int
    tokens: bytes
    top_ids: bytes
    top_logprobs: bytes


class TelemetryEnvelope(Envelope, frozen=True, array_like=True):
    """n node events as one JSON array: telemetry is small, its envelope only numbers the batch."""

    events: bytes


class _Head(Struct, frozen=True, array_like=True):
    """What envelopes of every version begin with."""

    v: int
    kind: str


_head: Final = msgspec.msgpack.Decoder(_Head)


def unknown_version(value: bytes, kind: str) -> int | None:
    """The version of an envelope of this kind if it is one that is not read here, however it goes on."""
    try:
        head = _head.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return None
    return head.v if head.kind == kind and head.v > VERSION else None
