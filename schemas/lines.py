"""JSON events one a line, as `klaxon publish` takes them, checked as their topic's readers check them."""

from __future__ import annotations

from typing import Any, Final, Protocol

from schemas.columns import I8, Rejected
from schemas.commands import COMMANDS
from schemas.control import Command
from schemas.events import FeedbackEvent, LogitEvent, NodeEvent, RequestEvent
from schemas.json_codec import EVENT, FEEDBACK, LOGITS, NODES, RECORD, REQUESTS, decode_logits
from schemas.topics import MAX_RECORD_BYTES, Topic

Line = RequestEvent | LogitEvent | NodeEvent | FeedbackEvent | Command


class _Reader(Protocol):
    def read(self, value: bytes) -> tuple[list[Any], I8, list[Rejected]]: ...


READERS: Final[dict[Topic, _Reader]] = {
    Topic.REQUESTS: REQUESTS,
    Topic.LOGITS: LOGITS,
    Topic.TELEMETRY: NODES,
    Topic.FEEDBACK: FEEDBACK,
    Topic.COMMANDS: COMMANDS,
}
"""Topics that outsiders write to, and what reads them."""


def read_line(topic: Topic, text: bytes) -> Line | Rejected:
    """The one event of a line, or why it is none (position 0 or None means the same here)."""
    if len(text) > MAX_RECORD_BYTES:
        return Rejected(0, RECORD, f"over {MAX_RECORD_BYTES} bytes, the most a record holds")
    if text.lstrip()[:1] == b"[":
        return Rejected(0, EVENT, "an array; one event a line is expected")
    events, _, rejected = READERS[topic].read(text)
    if topic is Topic.LOGITS and not rejected:
        rejected = list(decode_logits(text).rejected)
    if rejected:
        return rejected[0]
    event: Line = events[0]
    return event


def key_of(event: Line) -> str:
    """The record key, which decides the partition: signature, node, or rollout."""
    if isinstance(event, NodeEvent):
        return event.node
    if isinstance(event, Command):
        return event.rollout
    return event.signature


def event_time_us(event: Line) -> int:
    """When the event happened: completion of requests and answers, else its time."""
    if isinstance(event, RequestEvent | LogitEvent):
        return event.ts_us + event.duration_us
    return event.ts_us
