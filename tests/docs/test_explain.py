"""docs/explain.md: every command line in it is run against a log, and prints what stands there."""

from __future__ import annotations

import asyncio
import re
import shlex

import pytest
from click.testing import CliRunner

from pipeline.cli.explain import explain_command
from pipeline.cli.main import cli
from pipeline.workers import topics
from tests.cli.test_explain import records
from tests.conftest import REPOSITORY
from tests.core.gate.test_explanation_log import a_life
from tests.kafka.broker import Broker
from tests.kafka.records import produce

PAGE = (REPOSITORY / "docs" / "explain.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[list[str]]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [text.splitlines() for name, text in found if name == language]


def commands() -> list[str]:
    return [line for block in blocks("") for line in block]


def test_no_line_is_left_out() -> None:
    assert commands() == [line for line in PAGE.splitlines() if line.startswith("klaxon ")]
    assert len(commands()) == 6


@pytest.mark.slow
async def test_every_command_line_does_what_it_says(
    embedded: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await topics.create(embedded.config)
    for name, value in embedded.environment.items():
        monkeypatch.setenv(name, value)
    await produce(embedded, records(a_life().effects))
    printed = {}
    for line in commands():
        arguments = shlex.split(line)[1:]
        done = await asyncio.to_thread(CliRunner().invoke, cli, arguments, standalone_mode=False)
        assert (done.exception, done.return_value) == (None, 0), f"{line}: {done.output}"
        printed[line] = done.stdout.splitlines()
    shown = [line for line in commands() if "--at" in line or "sample-size" in line]
    assert [printed[line] for line in shown] == blocks("text")


def test_every_option_is_explained() -> None:
    for parameter in explain_command.params:
        for name in parameter.opts:
            if name.startswith("--") and name != "--config":
                assert f"`{name}" in PAGE, name
