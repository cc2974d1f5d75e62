"""What must sign or verify does not begin without keys, and says which setting is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.gate_link import believed_directives
from pipeline.cli.main import cli
from pipeline.config import load_config
from pipeline.workers.records import Record
from schemas.topics import Topic
from tests.kafka import keys

SETTINGS = {
    "trust_file": ["worker gate", "router"],
    "directive_key_file": ["worker gate"],
    "command_key_file": ["rollout pause chat", "publish commands"],
}
CASES = [(setting, command) for setting, commands in SETTINGS.items() for command in commands]


def refused(command: str, environment: dict[str, str]) -> str:
    result = CliRunner(env={"KLAXON_KAFKA_BOOTSTRAP": "127.0.0.1:1", **environment}).invoke(
        cli, command.split(), standalone_mode=False
    )
    assert isinstance(result.exception, CommandError), result
    assert result.exception.exit_code == Exit.USAGE
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(("setting", "command"), CASES)
def test_a_missing_key_ends_it_at_once_with_one_line(setting: str, command: str) -> None:
    variable = f"KLAXON_SIGNATURES_{setting.upper()}"
    environment = {name: value for name, value in keys.settings().items() if name != variable}
    said = refused(command, environment)
    assert said.startswith(f"signatures are required, and signatures.{setting} ({variable}) does not name ")
    assert "`klaxon keys create`" in said
    assert said.endswith("KLAXON_SIGNATURES_REQUIRED=false")


@pytest.mark.parametrize(("setting", "command"), CASES)
def test_a_bad_file_ends_it_at_once_and_is_named(setting: str, command: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("v: 1\nkeys: {x: {}}\n")
    bad.chmod(0o600)
    said = refused(command, {**keys.settings(), f"KLAXON_SIGNATURES_{setting.upper()}": str(bad)})
    assert str(bad) in said
    assert (":2: keys.x" in said) == (setting == "trust_file")


def test_commands_that_only_look_leave_out_what_no_gate_signed(tmp_path: Path) -> None:
    def record(*headers: tuple[str, bytes]) -> Record:
        return Record(Topic.CONTROL, 0, 0, 0, 0, dict(headers), b"r", b"{}")

    signed, unsigned = record(keys.directive_header(b"r", b"{}")), record()
    borrowed = record(keys.directive_header(b"r", b"{ }"))
    believed = believed_directives(load_config(None, keys.settings()))
    assert [believed(one) for one in (signed, unsigned, borrowed)] == [True, False, False]
    for settings in ({}, {**keys.settings(), "KLAXON_SIGNATURES_REQUIRED": "false"}):
        believed = believed_directives(load_config(None, settings))
        assert all(believed(one) for one in (signed, unsigned, borrowed))
    bad = tmp_path / "trust.yaml"
    bad.write_text("")
    with pytest.raises(CommandError, match=r"trust\.yaml:1: no trust file"):
        believed_directives(load_config(None, {"KLAXON_SIGNATURES_TRUST_FILE": str(bad)}))
