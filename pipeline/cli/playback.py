"""Recorded events onto today's clock: when each is sent, and by how much its time moves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from schemas.topics import MAX_RECORD_BYTES, Topic

MOST_EVENTS = {Topic.LOGITS: 64, Topic.COMMANDS: 1}
MOST_BYTES = {Topic.LOGITS: 330_000}
_EVENTS, _BYTES = 500, 128_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """One accepted line: its key, when it happened, and its text."""

    key: str
    time_us: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Due:
    """A line to be sent `after_us` from the start, its times moved by `shift_us`."""

    after_us: int
    shift_us: int
    line: Recorded


def schedule(lines: Iterable[Recorded], now_us: int, *, shift: bool, speed: float | None) -> list[Due]:
    """What is sent when, in the order of sending.

    Without `speed` everything is sent at once, and `shift` moves the last event to `now_us`: one constant.
    With `speed` an event is sent when it would have happened, so many times faster, and `shift` moves its
    time to just then: durations stay as they are.
    """
    ordered = sorted(lines, key=lambda line: line.time_us)
    if not ordered:
        return []
    if speed is None:
        constant = now_us - ordered[-1].time_us if shift else 0
        return [Due(0, constant, line) for line in ordered]
    first = ordered[0].time_us
    due = []
    for line in ordered:
        after_us = round((line.time_us - first) / speed)
        due.append(Due(after_us, now_us + after_us - line.time_us if shift else 0, line))
    return due


def moved(due: Due) -> bytes:
    """The event's text with its `ts_us` moved; everything else, unknown fields too, as it was."""
    if due.shift_us == 0:
        return due.line.text
    # Raw members: a number of an unknown field may be beyond every number type, and stays what it is.
    event = msgspec.json.decode(due.line.text, type=dict[str, msgspec.Raw])
    ts_us = msgspec.json.decode(event["ts_us"], type=int) + due.shift_us
    event["ts_us"] = msgspec.Raw(str(ts_us).encode())
    return msgspec.json.encode(event)


def late(due: Sequence[Due], now_us: int, lateness_us: int) -> int:
    """How many of these events will be too old to be judged when they are sent."""
    return sum(d.line.time_us + d.shift_us < now_us + d.after_us - lateness_us for d in due)


def records(topic: Topic, texts: Sequence[bytes]) -> list[list[bytes]]:
    """Cut the events of one partition into records of a size that suits the topic. Order stays."""
    most_events = MOST_EVENTS.get(topic, _EVENTS)
    most_bytes = MOST_BYTES.get(topic, _BYTES)
    cut: list[list[bytes]] = []
    size = 0
    for text in texts:
        if not cut or len(cut[-1]) >= most_events or size + len(text) + 1 > most_bytes:
            cut.append([])
            size = 2
        cut[-1].append(text)
        size += len(text) + 1
    return cut


def value_of(events: Sequence[bytes]) -> bytes:
    """A record's value: the event, or an array of several. At most MAX_RECORD_BYTES."""
    value = events[0] if len(events) == 1 else b"[" + b",".join(events) + b"]"
    assert len(value) <= MAX_RECORD_BYTES + 64
    return value
