"""With --json every command prints exactly one JSON object on standard output, also where it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from pipeline.cli.exits import error_json
from pipeline.cli.main import cli, main


def commands(group: click.Group = cli, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command line that takes --json, without arguments."""
    found = []
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                found += commands(command, (*words, name))
            elif any("--json" in one.opts for one in command.params):
                found.append((*words, name))
    return found


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["klaxon", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


def test_there_are_commands_to_ask() -> None:
    assert {("doctor",), ("topics", "check"), ("rollout", "start"), ("keys", "create")} <= set(commands())


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_wrong_usage_is_one_object(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, *words, "--json", "--no-such-option")
    assert code == 2
    assert "no-such-option" in json.loads(out)["error"]
    assert set(json.loads(out)) == {"error", "remedy"}
    assert "no-such-option" in err, "people are told as before"
    code, out, err = run(capsys, monkeypatch, *words, "--no-such-option")
    assert (code, out) == (2, "")


def test_a_mistake_in_the_configuration_is_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "none.yaml"
    code, out, err = run(capsys, monkeypatch, "topics", "check", "--config", str(wrong), "--json")
    assert (code, out.count("\n")) == (2, 1)
    assert json.loads(out) == {
        "error": f"configuration {wrong}: cannot be read: No such file or directory",
        "remedy": "name another file with --config",
    }
    assert err == f"klaxon: {'; '.join(json.loads(out).values())}\n"


def test_a_service_that_is_away_is_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KLAXON_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    monkeypatch.setenv("KLAXON_KAFKA_CONNECT_TIMEOUT_S", "1")
    code, out, _ = run(capsys, monkeypatch, "topics", "check", "--json")
    assert code == 3
    assert json.loads(out)["remedy"] == "check kafka.bootstrap"
    assert "127.0.0.1:1" in json.loads(out)["error"]


def test_what_comes_after_two_dashes_is_no_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "policy", "check", "--", "--json")
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    ("message", "error", "remedy"),
    [("a", "a", None), ("a; b", "a", "b"), ("a; b; c", "a; b", "c"), ("a: run `b`", "a: run `b`", None)],
)
def test_the_remedy_is_what_a_message_ends_with(message: str, error: str, remedy: str | None) -> None:
    assert json.loads(error_json(message)) == {"error": error, "remedy": remedy}
