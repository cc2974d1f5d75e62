"""Every command says how it is called: its help has an example that parses as far as its command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.demo.command import _hints
from pipeline.cli.main import cli


def paths(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of all commands, groups among them."""
    yield before
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        assert found is not None, name
        if isinstance(found, click.Group):
            yield from paths(found, (*before, name))
        else:
            yield (*before, name)


@pytest.mark.parametrize("path", list(paths(cli)), ids=" ".join)
def test_every_help_has_an_example_of_its_command(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli, [*path, "--help"])
    assert shown.exit_code == 0
    _, _, example = shown.output.partition("Example")
    assert " ".join(("klaxon", *path)) in example, shown.output


def hinted(folder: Path, content: str) -> list[str]:
    path = folder / "klaxon.yaml"
    path.write_text(content)
    return [line for line in _hints(path, stay=True, keep=True) if "curl" in line]


def test_a_demo_that_stays_says_how_its_gateway_is_asked(tmp_path: Path) -> None:
    engines = '[{arm: baseline, kind: llama.cpp, model_version: a, engines: [{node: n, url: "http://x:1"}]}]'
    (line,) = hinted(tmp_path, f"gateway: {{port: 18081, rollout: demo, pools: {engines}}}\n")
    assert line.startswith("  curl http://127.0.0.1:18081/v1/chat/completions -d '{")
    assert hinted(tmp_path, "kafka: {partitions: 4}\n") == []
