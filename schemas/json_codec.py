"""JSON records: one event object, or an array of them.

The fast path is one msgspec decode of the whole record. Only when that fails is the record taken apart, so
that a bad event costs nothing but itself.
"""

from __future__ import annotations

import json
import re
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from schemas import control as control_types
from schemas import events as event_types
from schemas.columns import (
    I8,
    MISSING,
    Decoded,
    LogitColumns,
    Rejected,
    RequestColumns,
    TelemetryColumns,
)
from schemas.events import FeedbackEvent, LogitEvent, NodeEvent, RequestEvent
from schemas.select import drop_unreadable, in_order
from schemas.tabulate import logit_columns, logit_shape_error, request_columns, telemetry_columns

MAX_EVENTS: Final = 65_534
"""Events of one record: label codes are u2."""
RECORD: Final = "record"
"""Rejected.field where a whole record cannot be read."""
EVENT: Final = "event"
"""Rejected.field where an event is no object, or no JSON."""

FIELD_NAMES: Final = frozenset(
    field
    for module in (event_types, control_types)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Struct)
    for field in kind.__struct_fields__
)
"""Names of fields of any event or command."""

E = TypeVar("E", bound=Struct)

_MISSING: Final = re.compile(r"Object missing required field `([^`]+)`(?: - at `\$(.*)`)?", re.DOTALL)
_AT: Final = re.compile(r"(.*) - at `(?:key in )?\$(.*)`", re.DOTALL)
_SPACE: Final = b" \t\n\r"
_TOKENS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)


def explain(position: int | None, error: Exception, where: str = EVENT) -> Rejected:
    """What msgspec's complaint says of one event: dotted field path and reason."""
    message = str(error)
    if isinstance(error, RecursionError):
        return Rejected(position, where, "nested too deeply")
    missing = _MISSING.fullmatch(message)
    if missing:
        path = ".".join(part for part in ((missing[2] or "").lstrip("."), missing[1]) if part)
        return Rejected(position, path, MISSING)
    at = _AT.fullmatch(message)
    if at:
        return Rejected(position, at[2].lstrip(".") or where, at[1])
    return Rejected(position, where, message)


class EventReader(Generic[E]):
    """Reads JSON records of one event type."""

    def __init__(self, event_type: type[E]) -> None:
        self._one = msgspec.json.Decoder(event_type)
        self._many = msgspec.json.Decoder(list[event_type])  # type: ignore[valid-type]
        self._raw = msgspec.json.Decoder(list[msgspec.Raw])

    def read(self, value: bytes) -> tuple[list[E], I8, list[Rejected]]:
        """Events, their positions in the record, and what was refused. Never raises on content."""
        is_array = value.lstrip(_SPACE)[:1] == b"["
        try:
            events = self._many.decode(value) if is_array else [self._one.decode(value)]
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if not is_array:
                return [], _no_positions(), [self._explain_object(value, error)]
            return self._read_apart(value)
        if len(events) > MAX_EVENTS:
            return [], _no_positions(), [_too_many(len(events))]
        return events, np.arange(len(events)), []

    def _explain_object(self, value: bytes, error: Exception) -> Rejected:
        if value.lstrip(_SPACE)[:1] != b"{":
            reason = "empty" if not value.strip(_SPACE) else f"not JSON events: {error}"
            return Rejected(None, RECORD, reason)
        return self._explain(0, value, error)

    def _explain(self, position: int, text: bytes, error: Exception) -> Rejected:
        if isinstance(error, msgspec.ValidationError | RecursionError):
            return explain(position, error)
        return _non_finite(position, text) or explain(position, error)

    def _read_apart(self, value: bytes) -> tuple[list[E], I8, list[Rejected]]:
        texts = self._elements(value)
        if isinstance(texts, Rejected):
            return [], _no_positions(), [texts]
        if len(texts) > MAX_EVENTS:
            return [], _no_positions(), [_too_many(len(texts))]
        events: list[E] = []
        positions: list[int] = []
        rejected: list[Rejected] = []
        for position, text in enumerate(texts):
            try:
                events.append(self._one.decode(text))
                positions.append(position)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                rejected.append(self._explain(position, bytes(text), error))
        return events, np.array(positions, dtype=np.int64), rejected

    def _elements(self, value: bytes) -> list[bytes] | Rejected:
        try:
            return [bytes(raw) for raw in self._raw.decode(value)]
        except (msgspec.DecodeError, RecursionError) as error:
            texts = split_array(value)
            if texts is None:
                return explain(None, error, RECORD)
            return texts


def split_array(value: bytes) -> list[bytes] | None:
    """Elements of a JSON array whose elements need not be valid JSON; None where it cannot be cut safely.

    Cut at commas outside strings and brackets; brackets must match and strings must end.
    """
    text = value.strip(_SPACE)
    if text[:1] != b"[":
        return None
    closing: list[bytes] = []
    elements: list[bytes] = []
    start = 1
    end = -1
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token in b"[{":
            closing.append(b"]" if token == b"[" else b"}")
        elif token in b"]}":
            if not closing or closing.pop() != token:
                return None
            if not closing:
                elements.append(text[start : match.start()])
                end = match.end()
                break
        elif token == b'"':
            return None
        elif token == b"," and len(closing) == 1:
            elements.append(text[start : match.start()])
            start = match.end()
    if end != len(text):
        return None
    stripped = [element.strip(_SPACE) for element in elements]
    return [] if stripped == [b""] else stripped


def _non_finite(position: int, text: bytes) -> Rejected | None:
    """Where an event that is not JSON says NaN or Infinity, the field that does."""
    if b"NaN" not in text and b"Infinity" not in text:
        return None
    try:
        event = json.loads(text, parse_constant=_NonFinite)
    except (ValueError, RecursionError):
        return None
    found = _constants(event)
    if found is None:
        return None
    return Rejected(position, found[0] or EVENT, f"{found[1]} is not JSON; send null")


class _NonFinite(str):
    """Stands for NaN or ±Infinity in a tolerantly parsed event."""

    __slots__ = ()


def _constants(event: object) -> tuple[str, str] | None:
    """Path and name of the first NaN or ±Infinity. A loop: the nesting is the sender's."""
    waiting: list[tuple[str, object]] = [("", event)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _NonFinite):
            return path, str(value)
        if isinstance(value, dict):
            # As msgspec says it: a key that is no field of ours is the sender's text.
            names = [(name if name in FIELD_NAMES else "[...]", member) for name, member in value.items()]
            members = [(f"{path}.{name}" if path else name, member) for name, member in names]
            waiting.extend(reversed(members))
        elif isinstance(value, list):
            waiting.extend((f"{path}[{i}]", member) for i, member in reversed(list(enumerate(value))))
    return None


def _no_positions() -> I8:
    return np.empty(0, dtype=np.int64)


def _too_many(n: int) -> Rejected:
    return Rejected(None, RECORD, f"{n} events in one record; at most {MAX_EVENTS}")


REQUESTS: Final = EventReader(RequestEvent)
LOGITS: Final = EventReader(LogitEvent)
NODES: Final = EventReader(NodeEvent)
FEEDBACK: Final = EventReader(FeedbackEvent)


def decode_requests(value: bytes) -> Decoded[RequestColumns]:
    """Request events of one JSON record."""
    events, positions, rejected = REQUESTS.read(value)
    return Decoded(request_columns(events), positions, tuple(rejected), None)


def decode_telemetry(value: bytes) -> Decoded[TelemetryColumns]:
    """Node events of one JSON record."""
    events, positions, rejected = NODES.read(value)
    return Decoded(telemetry_columns(events), positions, tuple(rejected), None)


def decode_logits(value: bytes) -> Decoded[LogitColumns]:
    """Logit events of one JSON record."""
    events, positions, rejected = LOGITS.read(value)
    kept: list[LogitEvent] = []
    rows: list[int] = []
    for event, position in zip(events, positions.tolist(), strict=True):
        error = logit_shape_error(event)
        if error is None:
            kept.append(event)
            rows.append(position)
        else:
            rejected.append(Rejected(position, error.field, error.reason))
    columns, kept_positions, unreadable = drop_unreadable(logit_columns(kept), np.array(rows, dtype=np.int64))
    return Decoded(columns, kept_positions, in_order([*rejected, *unreadable]), None)
