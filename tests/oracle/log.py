"""Log time of a partition, and what is closed at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
AHEAD_US = 5_000_000
TICK = "application/vnd.klaxon.tick"


@dataclass(frozen=True)
class Settings:
    """The configuration that shapes content."""

    lateness_us: int = 15_000_000
    join_timeout_us: int = 60_000_000
    cells_per_bucket: int = 2048
    waiting_bytes: int = 256 * 1024 * 1024


def record(
    offset: int, append_us: int, content_type: str | None, value: bytes, producer: Any = None
) -> Record:
    """A record as read from a topic. Columnar records must be given as the JSON of the same events."""
    events = None if content_type == TICK else json.loads(value)
    if isinstance(events, dict):
        events = [events]
    return {
        "offset": offset,
        "append_us": append_us,
        "size_bytes": len(value),
        "events": events,
        "producer": producer,
    }


def with_log_time(records: Sequence[Record]) -> Iterator[tuple[int, Record]]:
    """(greatest append time so far, record), in offset order."""
    log_us = -1
    for each in sorted(records, key=lambda r: r["offset"]):
        log_us = max(log_us, each["append_us"])
        yield log_us, each


def is_open(second: int, log_us: int, settings: Settings) -> bool:
    """A bucket accepts while log time is not later than its end plus lateness."""
    return log_us <= (second + 1) * 1_000_000 + settings.lateness_us


def closed_through(records: Sequence[Record], settings: Settings) -> int:
    """Newest second that is closed at the end of this log; −1 if none."""
    if not records:
        return -1
    log_us = max(r["append_us"] for r in records)
    second = log_us // 1_000_000
    while second >= 0 and is_open(second, log_us, settings):
        second -= 1
    return second


def closed_only(contents: Any, records: Sequence[Record], settings: Settings) -> Any:
    """Of these seconds, those that are closed at the end of the log."""
    last = closed_through(records, settings)
    return {second: held for second, held in contents.items() if second <= last}


def whole_from(first: Record, memory_us: int) -> int:
    """First second that a reader who begins at this record may publish."""
    if first["offset"] == 0:
        return 0
    due = first["append_us"] + memory_us + AHEAD_US
    return due // 1_000_000 + (1 if due % 1_000_000 else 0)


def drops(records: Sequence[Record]) -> dict[int, list[tuple[str, str, int]]]:
    """offset → (roll-out, arm, count) that its producer reports and that were not reported 5 s before."""
    last: dict[tuple[str, int], int] = {}
    found: dict[int, list[tuple[str, str, int]]] = {}
    for log_us, each in with_log_time(records):
        producer = each.get("producer")
        if not producer or not producer["dropped"] or each["events"] is None:
            continue
        key = (producer["producer_id"], producer["sequence"])
        if key not in last or log_us - last[key] > 5_000_000:
            found[each["offset"]] = [
                (name[: name.rindex("/")], name[name.rindex("/") + 1 :], count)
                for name, count in producer["dropped"].items()
            ]
        last[key] = log_us
    return found
