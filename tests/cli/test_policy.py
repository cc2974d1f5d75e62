"""`klaxon policy check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.policy import policy


def test_the_shipped_policy_is_good() -> None:
    result = CliRunner().invoke(policy, ["check"])
    assert result.exit_code == 0
    assert "G3-divergence" in result.stdout
    assert "observed only (fallback)" in result.stdout


def test_json_is_one_object() -> None:
    result = CliRunner().invoke(policy, ["check", "--json"])
    told = json.loads(result.stdout)
    assert told["ok"]
    assert told["rules"][0]["limit"] == 0.05


def test_without_a_file_the_configured_policy_is_checked(tmp_path: Path) -> None:
    file, config = tmp_path / "policy.yaml", tmp_path / "klaxon.yaml"
    file.write_text("rules:\n  - {id: mine, metric: kl_lower, window: 1m, limit: 1, action: pause}\n")
    config.write_text(f"policy:\n  file: {file}\n")
    told = json.loads(CliRunner().invoke(policy, ["check", "--config", str(config), "--json"]).stdout)
    assert [rule["id"] for rule in told["rules"]] == ["mine"]


def test_a_file_that_cannot_be_read_has_no_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"absent: cannot be read: No such file") as caught:
        CliRunner().invoke(policy, ["check", str(tmp_path / "absent")], catch_exceptions=False)
    assert caught.value.exit_code is Exit.USAGE


def test_all_equally_near_names_are_proposed(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("rules:\n  - {id: a, metric: kl_lower, window: 1m, limit: 1, action: rollback}\n")
    with pytest.raises(CommandError, match=r"did you mean 'rollback_l1' or 'rollback_l2'\?"):
        CliRunner().invoke(policy, ["check", str(file)], catch_exceptions=False)


def test_a_mistake_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("rules:\n  - id: a\n    metrik: kl_lower\n")
    with pytest.raises(CommandError, match=r"policy\.yaml:3: .*did you mean 'metric'") as caught:
        CliRunner().invoke(policy, ["check", str(file)], catch_exceptions=False)
    assert caught.value.exit_code is Exit.USAGE
