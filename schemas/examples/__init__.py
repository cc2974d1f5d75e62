"""Example records per topic: valid ones, and ones that must be refused. Every reader is tested on all.

`<topic>/valid/*.json` is a record's value as it is. `<topic>/invalid/*.json` is an object: `field`,
`reason_contains`, `position` (index of the refused event in its record, null for the whole record),
`neighbours` (how many events of the record are valid and must be counted), and the value as one of `record`
(JSON), `record_text` or `record_base64`; `content_type` where it is not JSON.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from schemas.topics import JSON, Topic


@dataclass(frozen=True, slots=True)
class Example:
    """A record that every reader of its topic accepts, event for event."""

    name: str
    value: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class InvalidExample:
    """A record of which one event, or the whole, must be refused with this field and reason."""

    name: str
    value: bytes
    content_type: str
    field: str
    reason_contains: str
    position: int | None
    neighbours: int


def _files(topic: Topic, kind: str) -> list[tuple[str, bytes]]:
    folder = resources.files(__name__).joinpath(topic.value, kind)
    if not folder.is_dir():
        return []
    found = [(f.name.removesuffix(".json"), f.read_bytes()) for f in folder.iterdir()]
    return sorted(found)


def valid_examples(topic: Topic) -> list[Example]:
    """Valid example records of a topic, by name."""
    return [Example(name, value, JSON) for name, value in _files(topic, "valid")]


def _value(stated: dict[str, Any]) -> bytes:
    if "record_base64" in stated:
        return base64.b64decode(stated["record_base64"])
    if "record_text" in stated:
        return str(stated["record_text"]).encode()
    return json.dumps(stated["record"]).encode()


def invalid_examples(topic: Topic) -> list[InvalidExample]:
    """Must-fail example records of a topic, by name."""
    examples = []
    for name, text in _files(topic, "invalid"):
        stated = json.loads(text)
        examples.append(
            InvalidExample(
                name,
                _value(stated),
                stated.get("content_type", JSON),
                stated["field"],
                stated["reason_contains"],
                stated["position"],
                stated.get("neighbours", 0),
            )
        )
    return examples
