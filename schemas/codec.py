"""Records of the input topics into columns, whatever their encoding; and columns into records.

Decoding never raises on content: what cannot be read stands in `Decoded.rejected`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from schemas import columnar_codec, json_codec
from schemas.columnar_codec import encode_logits, encode_requests, encode_telemetry
from schemas.columns import (
    BatchHeader,
    Decoded,
    LogitColumns,
    Rejected,
    RequestColumns,
    TelemetryColumns,
)
from schemas.envelope import unknown_version
from schemas.json_codec import RECORD
from schemas.tabulate import logit_columns, request_columns, telemetry_columns
from schemas.topics import COLUMNS, CONTENT_TYPE, JSON, TICK

__all__ = (
    "BatchHeader",
    "Decoded",
    "Rejected",
    "decode_logits",
    "decode_requests",
    "decode_telemetry",
    "encode_logits",
    "encode_requests",
    "encode_telemetry",
    "logit_columns",
    "request_columns",
    "telemetry_columns",
)

C = TypeVar("C", RequestColumns, LogitColumns, TelemetryColumns)


def _decode(
    value: bytes | None,
    content_type: str | None,
    from_json: Callable[[bytes], Decoded[C]],
    from_columns: Callable[[bytes], Decoded[C]],
    what: str,
) -> Decoded[C]:
    kind = JSON if content_type is None else content_type.partition(";")[0].strip().lower()
    if kind == TICK:
        return from_json(b"[]")
    if value is None:
        return _refused(from_json, Rejected(None, RECORD, "the record has no value"))
    if kind == JSON:
        return from_json(value)
    if kind == COLUMNS:
        decoded = from_columns(value)
        if decoded.header is None and (version := unknown_version(value, what)) is not None:
            return replace(decoded, unknown_version=version)
        return decoded
    reason = f"unknown; known: {JSON}, {COLUMNS}"
    return _refused(from_json, Rejected(None, CONTENT_TYPE, reason))


def _refused(from_json: Callable[[bytes], Decoded[C]], rejected: Rejected) -> Decoded[C]:
    return Decoded(from_json(b"[]").columns, np.empty(0, dtype=np.int64), (rejected,), None)


def decode_requests(value: bytes | None, content_type: str | None) -> Decoded[RequestColumns]:
    """Request events of one record; `content_type` as in its header, None means JSON."""
    return _decode(
        value, content_type, json_codec.decode_requests, columnar_codec.decode_requests, "requests"
    )


def decode_logits(value: bytes | None, content_type: str | None) -> Decoded[LogitColumns]:
    """Logit events of one record; `content_type` as in its header, None means JSON."""
    return _decode(value, content_type, json_codec.decode_logits, columnar_codec.decode_logits, "logits")


def decode_telemetry(value: bytes | None, content_type: str | None) -> Decoded[TelemetryColumns]:
    """Node events of one record; `content_type` as in its header, None means JSON."""
    return _decode(
        value, content_type, json_codec.decode_telemetry, columnar_codec.decode_telemetry, "telemetry"
    )
