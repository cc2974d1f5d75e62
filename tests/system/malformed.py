"""The must-fail examples as traffic: which fit into a batch of valid events, and what stands beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from schemas.examples import InvalidExample, invalid_examples
from schemas.topics import COLUMNS, JSON, Topic

Event = dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """What must stand in the dead letter of a record."""

    position: int | None
    field: str
    reason_contains: str


def _embeddable(topic: Topic) -> list[InvalidExample]:
    """Must-fail examples that are one JSON object, refused by itself."""
    found = []
    for example in invalid_examples(topic):
        if example.content_type == JSON and example.position == 0 and example.neighbours == 0:
            try:
                said = json.loads(example.value)
                json.dumps(said, allow_nan=False)
            except ValueError:
                continue  # Python would write it otherwise: such examples are sent as they are
            if isinstance(said, dict):
                found.append(example)
    return found


EMBEDDABLE: Final = {topic: _embeddable(topic) for topic in (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY)}


def neighbours_of(example: InvalidExample) -> list[tuple[int, Event]] | None:
    """(position, valid event) beside the refused one; None where only a decoder could tell, or it stops."""
    if example.field == "v" and example.content_type == COLUMNS:
        return None  # a worker stops at it, as it must
    if example.neighbours == 0:
        return []
    try:
        said = json.loads(example.value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, list):
        return None
    found = [(at, event) for at, event in enumerate(said) if at != example.position]
    return found if len(found) == example.neighbours else None
