"""The README says what the commands do: its examples run, and print what stands there."""

from __future__ import annotations

import re
import shlex

import click
import orjson
import pytest
from click.testing import CliRunner

from pipeline.cli.demo.export_recording import responses
from pipeline.cli.demo.recording import SHIPPED, VariantName, read_recording
from pipeline.cli.main import cli
from pipeline.cli.spec_file import read_spec
from schemas.codec import decode_requests
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
EXAMPLES = REPOSITORY / "docs" / "examples"


def compared(canary: str) -> tuple[int, str]:
    """Exit code and standard output of a comparison, as wide as the README prints it."""
    arguments = ["compare", str(EXAMPLES / "baseline.jsonl"), str(EXAMPLES / canary)]
    result = CliRunner(env={"COLUMNS": "120"}).invoke(cli, arguments, standalone_mode=False)
    return result.return_value, result.stdout


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_the_printed_comparison_is_the_real_one() -> None:
    code, printed = compared("fault.jsonl")
    assert code == 1
    block = README.split("docs/examples/fault.jsonl\n")[1].split("```")[0]
    assert lines(block) == lines(printed)


def test_the_healthy_example_passes_with_the_figure_given() -> None:
    code, printed = compared("healthy.jsonl")
    assert code == 0
    figure = re.search(r"passes with (0\.\d+)", README)
    mean = re.search(r"kl_lower (0\.\d+) \(90%", printed)
    assert figure is not None
    assert mean is not None
    assert round(float(mean[1]), 4) == float(figure[1])


@pytest.mark.parametrize("variant", ["baseline", "healthy", "fault"])
def test_the_examples_are_the_recording(variant: VariantName) -> None:
    exported = [orjson.dumps(one) for one in responses(read_recording(SHIPPED), variant, "long", 10)]
    assert (EXAMPLES / f"{variant}.jsonl").read_bytes().splitlines() == exported


def commands() -> list[str]:
    """Every `klaxon …` line and inline command of the README."""
    in_blocks = re.findall(r"^(?:\$ \.venv/bin/)?klaxon (.+?)(?: \|.*)?$", README, flags=re.MULTILINE)
    return [*in_blocks, *re.findall(r"`klaxon ([^`…]+)`", README)]


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("command", commands())
def test_every_command_line_parses(command: str) -> None:
    words = shlex.split(command)
    group: click.Command = cli
    context = click.Context(cli)
    while isinstance(group, click.Group) and words:
        found = group.get_command(context, words[0])
        assert found is not None, f"no command {words[0]!r} in {command!r}"
        group, words = found, words[1:]
    if not isinstance(group, click.Group):
        here = [str(REPOSITORY / word) if (REPOSITORY / word).is_file() else word for word in words]
        with group.make_context(group.name, here):  # closes the files it opened
            pass


def test_the_example_roll_out_and_events_are_accepted() -> None:
    spec = read_spec(str(EXAMPLES / "spec.yaml"), None)
    assert spec.fallback == spec.arms["baseline"].model_version
    events = (EXAMPLES / "events.jsonl").read_bytes().splitlines()
    assert len(events) > 1
    decoded = decode_requests(b"[" + b",".join(events) + b"]", None)
    assert (decoded.columns.n, decoded.rejected) == (len(events), ())


def test_linked_pages_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target
