"""Every published example through the reader of its topic: accepted whole, or refused where it says."""

from __future__ import annotations

import json
import re

import jsonschema
import msgspec
import pytest

from schemas import codec, json_codec
from schemas.commands import COMMANDS
from schemas.control import Command
from schemas.events import FeedbackEvent, LogitEvent, NodeEvent, RequestEvent
from schemas.examples import Example, InvalidExample, invalid_examples, valid_examples
from schemas.json_codec import FIELD_NAMES
from schemas.json_schema import FOLDER, SCHEMAS, schema_text
from schemas.topics import JSON, Topic

TOPICS = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY, Topic.FEEDBACK, Topic.COMMANDS)
EVENT_SCHEMA = {
    Topic.REQUESTS: "request-event",
    Topic.LOGITS: "logit-event",
    Topic.TELEMETRY: "node-event",
    Topic.FEEDBACK: "feedback-event",
    Topic.COMMANDS: "command",
}
VALID = [pytest.param(t, e, id=f"{t.value}/{e.name}") for t in TOPICS for e in valid_examples(t)]
INVALID = [pytest.param(t, e, id=f"{t.value}/{e.name}") for t in TOPICS for e in invalid_examples(t)]


def read(topic: Topic, example: Example | InvalidExample):
    """(number of events accepted, rejected) of an example, by its topic's reader."""
    decoders = {
        Topic.REQUESTS: codec.decode_requests,
        Topic.LOGITS: codec.decode_logits,
        Topic.TELEMETRY: codec.decode_telemetry,
    }
    if topic in decoders:
        decoded = decoders[topic](example.value, example.content_type)
        assert len(decoded.positions) == decoded.columns.n
        return decoded.columns.n, list(decoded.rejected)
    reader = json_codec.FEEDBACK if topic is Topic.FEEDBACK else COMMANDS
    events, positions, rejected = reader.read(example.value)
    assert len(positions) == len(events)
    return len(events), rejected


def test_every_topic_has_examples() -> None:
    assert {t for t in TOPICS if valid_examples(t)} == set(TOPICS)
    assert {t for t in TOPICS if invalid_examples(t)} == set(TOPICS)


@pytest.mark.parametrize(("topic", "example"), VALID)
def test_valid_example_is_read_whole(topic: Topic, example: Example) -> None:
    value = json.loads(example.value)
    n, rejected = read(topic, example)
    assert rejected == []
    assert n == (len(value) if isinstance(value, list) else 1)


@pytest.mark.parametrize(("topic", "example"), INVALID)
def test_invalid_example_is_refused_where_it_says(topic: Topic, example: InvalidExample) -> None:
    n, rejected = read(topic, example)
    assert [(r.position, r.field) for r in rejected] == [(example.position, example.field)]
    assert example.reason_contains in rejected[0].reason
    assert n == example.neighbours


@pytest.mark.parametrize(("topic", "example"), INVALID)
def test_a_refusal_holds_no_value_that_was_sent(topic: Topic, example: InvalidExample) -> None:
    """It goes to a topic and to logs: what was sent may be personal."""
    _, rejected = read(topic, example)
    for text in _texts(example.value) - set(FIELD_NAMES):
        assert text not in rejected[0].reason
        assert text not in rejected[0].field


def _texts(value: bytes) -> set[str]:
    """Every string of a JSON record, as value or as key, that is long enough to be no coincidence."""
    return set(re.findall(r'"([^"\\]{5,})"', value.decode("utf-8", "replace")))


@pytest.mark.parametrize(("topic", "example"), VALID)
def test_valid_example_satisfies_its_json_schema(topic: Topic, example: Example) -> None:
    schema = json.loads(schema_text(EVENT_SCHEMA[topic]))
    value = json.loads(example.value)
    for event in value if isinstance(value, list) else [value]:
        jsonschema.validate(event, schema)


NOT_IN_A_SCHEMA = {
    # What JSON Schema cannot say: relations between lists, the rules of reading, the spec inside a command.
    "no valid position",
    " lists for ",
    "(or token_bytes with top_bytes)",
}


def _expressible(example: InvalidExample) -> bool:
    if example.content_type != JSON or example.position is None:
        return False
    try:
        json.loads(example.value, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError, RecursionError):
        return False
    return not any(
        reason in rejected.reason
        for reason in NOT_IN_A_SCHEMA
        for rejected in json_codec.decode_logits(example.value).rejected
    )


@pytest.mark.parametrize(
    ("topic", "example"),
    [
        p
        for p in INVALID
        if _expressible(p.values[1])
        and p.values[1].name
        not in (
            "no-top-ids",
            "no-tokens",
            "start-without-fallback",
            "float-overflow",
            "lone-surrogate",
            "nested-too-deep",
        )
    ],
)
def test_invalid_example_violates_its_json_schema(topic: Topic, example: InvalidExample) -> None:
    schema = json.loads(schema_text(EVENT_SCHEMA[topic]))
    value = json.loads(example.value)
    event = value[example.position] if isinstance(value, list) else value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(event, schema)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_committed_json_schema_is_up_to_date(name: str) -> None:
    committed = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert committed == schema_text(name), "run: python -m schemas.json_schema"


def test_no_stray_json_schema() -> None:
    assert {f.stem for f in FOLDER.iterdir()} == set(SCHEMAS)


@pytest.mark.parametrize(
    ("topic", "event_type"),
    [
        (Topic.REQUESTS, RequestEvent),
        (Topic.LOGITS, LogitEvent),
        (Topic.TELEMETRY, NodeEvent),
        (Topic.FEEDBACK, FeedbackEvent),
        (Topic.COMMANDS, Command),
    ],
)
def test_every_field_stands_in_an_example(topic: Topic, event_type: type[msgspec.Struct]) -> None:
    seen: set[str] = set()
    for example in valid_examples(topic):
        value = json.loads(example.value)
        for event in value if isinstance(value, list) else [value]:
            seen.update(event)
    assert {field.name for field in msgspec.structs.fields(event_type)} <= seen
