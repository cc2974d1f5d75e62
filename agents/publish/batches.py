"""Events into batches and batches into records: sizes, cuts, encoding. Pure; no clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from schemas.codec import (
    decode_logits,
    decode_requests,
    decode_telemetry,
    encode_logits,
    encode_requests,
    encode_telemetry,
    logit_columns,
    request_columns,
    telemetry_columns,
)
from schemas.columns import BatchHeader, Rejected
from schemas.errors import SchemaError
from schemas.events import FeedbackEvent, LogitEvent, NodeEvent, RequestEvent
from schemas.json_codec import FEEDBACK
from schemas.tabulate import logit_shape_error
from schemas.topics import COLUMNS, CONTENT_TYPE, JSON, MAX_RECORD_BYTES, Topic

Event = RequestEvent | LogitEvent | NodeEvent | FeedbackEvent

TOPIC_OF: Final[dict[type[Any], Topic]] = {
    RequestEvent: Topic.REQUESTS,
    LogitEvent: Topic.LOGITS,
    NodeEvent: Topic.TELEMETRY,
    FeedbackEvent: Topic.FEEDBACK,
}

_ROW_BYTES: Final = 180
"""What numbers and label codes of one event take."""
_ENVELOPE_BYTES: Final = 40_000
"""Room that is kept in a record for header, dictionaries and one event's labels."""

# What building columns of an event that is not of its type may raise; nothing else is expected there.
_MISFITS: Final = (
    AssertionError,
    AttributeError,
    KeyError,
    OverflowError,
    SchemaError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
)


def key_of(event: Event) -> bytes:
    """The event's key: node for node events, else signature. What a keyed record of it would carry."""
    return (event.node if isinstance(event, NodeEvent) else event.signature).encode()


def drop_key(event: Event) -> str | None:
    """How a dropped event is reported: "rollout/arm"; None for events without arm."""
    if isinstance(event, RequestEvent | LogitEvent):
        return f"{event.rollout}/{event.arm}"
    return None


def _position_bytes(event: LogitEvent) -> int:
    id_bytes = 4 if event.tokens is not None else 8
    k = max(map(len, event.top_logprobs), default=0)
    return id_bytes + k * (id_bytes + 4)


def wire_bytes(event: Event) -> int:
    """About how many bytes of a record this event takes; labels that repeat in a batch count for nothing."""
    if isinstance(event, LogitEvent):
        return _ROW_BYTES + len(event.top_logprobs) * _position_bytes(event)
    if isinstance(event, RequestEvent):
        unique = (event.session, event.prompt_id, event.consent_id, event.snapshot_id)
        size = _ROW_BYTES + sum(len(text) for text in unique if text is not None)
        if event.embedding is not None:
            size += 24 * len(event.embedding)
        if event.text is not None:
            size += len(event.text.data) + 600
        size += 700 * len(event.steps or ()) + 300 * len(event.scores or ())
        return size
    return len(msgspec.json.encode(event)) + 1


def cut_to_record(event: LogitEvent) -> LogitEvent:
    """The event's longest beginning, in whole positions, that fits into a record; `ended` is not known then.

    Returns the event itself where it fits.
    """
    per_position = _position_bytes(event)
    most = (MAX_RECORD_BYTES - _ENVELOPE_BYTES) // per_position
    if len(event.top_logprobs) <= most:
        return event
    lists: dict[str, Any] = {"ended": None}
    for name in ("tokens", "top_ids", "token_bytes", "top_bytes", "top_logprobs"):
        values = getattr(event, name)
        if values is not None:
            lists[name] = values[:most]
    return msgspec.structs.replace(event, **lists)


@dataclass(frozen=True, slots=True)
class Codec:
    """How a topic's events become a record's value, and how its readers will read it."""

    content_type: str
    encode: Callable[[Sequence[Any], BatchHeader], bytes]
    refused: Callable[[bytes], Sequence[Rejected]]

    @property
    def headers(self) -> tuple[tuple[str, bytes], ...]:
        """Record headers."""
        return ((CONTENT_TYPE, self.content_type.encode()),)


def _encode_logits(events: Sequence[LogitEvent], header: BatchHeader) -> bytes:
    for event in events:
        fault = logit_shape_error(event)
        if fault is not None:
            raise SchemaError(f"{fault.field}: {fault.reason}")
    return encode_logits(logit_columns(events), header)


CODECS: Final[dict[Topic, Codec]] = {
    Topic.REQUESTS: Codec(
        COLUMNS,
        lambda events, header: encode_requests(request_columns(events), header),
        lambda value: decode_requests(value, COLUMNS).rejected,
    ),
    Topic.LOGITS: Codec(COLUMNS, _encode_logits, lambda value: decode_logits(value, COLUMNS).rejected),
    Topic.TELEMETRY: Codec(
        COLUMNS,
        lambda events, header: encode_telemetry(telemetry_columns(events), header),
        lambda value: decode_telemetry(value, COLUMNS).rejected,
    ),
    Topic.FEEDBACK: Codec(
        JSON, lambda events, _: msgspec.json.encode(events), lambda value: FEEDBACK.read(value)[2]
    ),
}


@dataclass(frozen=True, slots=True)
class Sound:
    """Events of a batch that its readers accept, and the indices of those that they would refuse."""

    events: list[Any]
    value: bytes
    refused: list[int]


_readable: Final = {kind: msgspec.json.Decoder(kind) for kind in (RequestEvent, LogitEvent)}
_LISTS: Final[dict[str, Any]] = {
    "tokens": None, "top_ids": None, "token_bytes": None, "top_bytes": None, "top_logprobs": (),
}  # fmt: skip


def is_readable(event: Any) -> bool:
    """Whether every field but tokens' lists, of which encoding says it, is what the schema allows."""
    decoder = _readable.get(type(event))
    if decoder is None:
        return True
    try:
        decoder.decode(
            msgspec.json.encode(
                msgspec.structs.replace(event, **_LISTS) if isinstance(event, LogitEvent) else event
            )
        )
    except (msgspec.MsgspecError, TypeError, ValueError):
        return False
    return True


def encode_sound(
    codec: Codec, events: Sequence[Any], header: BatchHeader, *, read_back: bool = True
) -> Sound:
    """Encode, leaving out what a reader would refuse: the value is read back once, as its readers will.

    `read_back` False: each event is looked at by itself, which costs less where batches are small.
    """
    value, refused = _try(codec, events, header, read_back=read_back)
    if not refused:
        assert value is not None
        return Sound(list(events), value, [])
    if value is None:
        # Something in the batch is not even of its type: find out which, one by one.
        refused = [i for i, event in enumerate(events) if _try(codec, [event], header, read_back=True)[1]]
    bad = set(refused)
    kept = [event for i, event in enumerate(events) if i not in bad]
    return Sound(kept, codec.encode(kept, header), sorted(bad))


def _try(
    codec: Codec, events: Sequence[Any], header: BatchHeader, *, read_back: bool
) -> tuple[bytes | None, list[int]]:
    """Value and refused indices; (None, all) where the batch cannot be encoded or read as a whole."""
    if not read_back and (refused := [i for i, event in enumerate(events) if not is_readable(event)]):
        return b"", refused
    try:
        value = codec.encode(events, header)
    except _MISFITS:
        return None, list(range(len(events)))
    if not read_back:
        return value, []
    positions = [rejected.position for rejected in codec.refused(value)]
    refused = [position for position in positions if position is not None]
    if len(refused) != len(positions):
        return None, list(range(len(events)))
    return value, refused
