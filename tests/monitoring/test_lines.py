"""Log lines: what may stand in them is decided by type, in both formats."""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, KafkaError
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import LoggingConfig
from pipeline.errors import PipelineError
from pipeline.monitoring.lines import OURS, Lines, set_up
from pipeline.workers.records import Partition
from schemas.plain import Plain, PlainJson
from schemas.topics import Topic

SECRET = "sk-canary-4711"


def said(*arguments: object, message: str = "%s", name: str = "klaxon.test", error: Any = None) -> list[str]:
    """The line for people, and the JSON one."""
    record = logging.LogRecord(
        name, logging.WARNING, "f.py", 1, message, arguments, (type(error), error, None) if error else None
    )
    formats = [Lines("gate", as_json=as_json, typed=(Partition, KafkaError)) for as_json in (False, True)]
    return [each.format(record) for each in formats]


def test_what_may_be_said_is_said() -> None:
    place = Partition("klaxon.logits", 3)
    human, as_json = said(
        place, 7, 1.5, Topic.CONTROL, Plain("r1"), message="%s: %d rows in %.1f s into %s of %s"
    )
    assert human.endswith(" WARNING klaxon.test: klaxon.logits/3: 7 rows in 1.5 s into klaxon.control of r1")
    line = json.loads(as_json)
    assert line["event"] == "%s: %d rows in %.1f s into %s of %s"
    assert line["arguments"] == ["klaxon.logits/3", 7, 1.5, "klaxon.control", "r1"]
    assert (line["level"], line["process"], line["logger"]) == ("WARNING", "gate", "klaxon.test")


@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        SECRET.encode(),
        [SECRET],
        {SECRET: 1},
        ValueError(SECRET),
        KeyError(SECRET),
        PlainJson(json.dumps({"a": 1})) + SECRET,
    ],
)
def test_anything_else_is_replaced_by_its_type(value: object) -> None:
    """Known-bad: with logging's own formatter every one of these lines holds the secret."""
    for message in ("%s", "%r", "%s and more"):
        record = logging.LogRecord("klaxon.x", logging.INFO, "f.py", 1, message, (value,), None)
        assert SECRET in logging.Formatter().format(record)
        for line in said(value, message=message):
            assert SECRET not in line
            assert f"[{type(value).__name__} withheld]" in line


def test_errors_of_known_kinds_speak_and_others_are_named() -> None:
    for line in said(PipelineError("klaxon.logits/3: mend it")):
        assert "klaxon.logits/3: mend it" in line
    for line in said(
        KafkaConnectionError("no broker"), ConnectionRefusedError(111, "refused"), message="%r %s"
    ):
        assert "KafkaConnectionError: " in line
        assert "no broker" in line
        assert "refused" in line
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error
    except ValueError as error:
        caught = error
    human, as_json = said(message="ended", error=caught)
    for text in (human, json.loads(as_json)["error"]):
        assert SECRET not in text
        assert "builtins.KeyError: KeyError (its message is withheld" in text
        assert text.index("KeyError") < text.index("ValueError"), "the cause comes first"
        assert "test_lines.py" in text


def test_an_event_is_one_line() -> None:
    human, as_json = said(PipelineError("a\nb"), message="%s")
    assert "\n" not in human
    assert "\n" not in as_json
    _, as_json = said(message="ended", error=ValueError("x"))
    assert "\n" not in as_json


def test_other_packages_lose_what_errors_and_bytes_say() -> None:
    for line in said(ValueError(SECRET), SECRET.encode(), 3, message="%s %r %d", name="aiokafka.client"):
        assert SECRET not in line
        assert "ValueError" in line
    first, *_ = said(
        message=f"never retrieved\nfuture: <Task exception=ValueError('{SECRET}')>", name="asyncio"
    )
    assert SECRET not in first


def test_gauges_are_an_object_in_json() -> None:
    human, as_json = said(Plain("pair"), PlainJson('{"process":{"reads":3}}'), message="%s: gauges %s")
    assert human.endswith('pair: gauges {"process":{"reads":3}}')
    assert json.loads(as_json)["arguments"] == ["pair", {"process": {"reads": 3}}]


@given(st.text(min_size=1), st.sampled_from(["%s", "%r", "%d", "%(x)s", "100 %"]))
def test_no_argument_breaks_a_line(value: str, message: str) -> None:
    for line in said(value, message=message):
        assert "\n" not in line
        assert line


def test_a_plain_text_keeps_its_type_only_as_it_is() -> None:
    """What is made of it is a bare string again, and has to be said to be plain anew."""
    assert type(Plain("a") + "b") is str
    assert type(f"{Plain('a')}") is str
    assert sys.getsizeof(Plain("a")) < 100


def test_our_lines_are_told_from_info_up_and_those_of_others_from_warning_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = (root.level, root.handlers[:], sys.excepthook, threading.excepthook)
    levels = {name: logging.getLogger(name).level for name in OURS}
    try:
        set_up("gateway", LoggingConfig())
        for name in ("klaxon.gateway", "agents.gateway.running", "aiohttp.server"):
            logging.getLogger(name).info("info of %s", Plain(name))
            logging.getLogger(name).warning("warning of %s", Plain(name))
    finally:
        root.setLevel(before[0])
        root.handlers[:], sys.excepthook, threading.excepthook = before[1:]
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    said = capsys.readouterr().err
    for text in ("info of klaxon.gateway", "info of agents.gateway.running", "warning of aiohttp.server"):
        assert text in said
    assert "info of aiohttp" not in said
