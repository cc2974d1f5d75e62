"""JSON Schemas of everything that travels as JSON, generated from the types that the readers use.

`python -m schemas.json_schema` writes them to `schemas/jsonschema/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from schemas.control import (
    Applied,
    Command,
    DeadLetter,
    Decision,
    Directive,
    DirectiveFile,
    Rollout,
    RolloutSpec,
)
from schemas.events import FeedbackEvent, LogitEvent, NodeEvent, RequestEvent

FOLDER: Final = Path(__file__).parent / "jsonschema"

SCHEMAS: Final[dict[str, type[Struct]]] = {
    "request-event": RequestEvent,
    "logit-event": LogitEvent,
    "node-event": NodeEvent,
    "feedback-event": FeedbackEvent,
    "rollout-spec": RolloutSpec,
    "command": Command,
    "directive": Directive,
    "decision": Decision,
    "rollout": Rollout,
    "applied": Applied,
    "directive-file": DirectiveFile,
    "dead-letter": DeadLetter,
}
"""File name (without .json) → the type it describes."""

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def _any(kind: type) -> dict[str, object]:
    """Command arguments hold whatever their command needs; no other type may be left open."""
    if kind is not object:
        raise TypeError(f"no JSON Schema for {kind!r}")
    return {"description": "any JSON value"}


def schema_text(name: str) -> str:
    """The JSON Schema of one type, as it stands in its file."""
    schema = {"$schema": DIALECT, **msgspec.json.schema(SCHEMAS[name], schema_hook=_any)}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def write(folder: Path) -> None:
    """Write all schemas into `folder`, creating it; files of types no longer listed are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        (folder / f"{name}.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
