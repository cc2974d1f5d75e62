"""`klaxon policy check`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.policy import policy
from pipeline.policy_file import parse_policy, read_policy_file, shipped_policy_text
from tests.conftest import REPOSITORY


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


def test_what_a_policy_may_not_mean_is_said_and_it_is_good(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "rules:\n  - {id: tail, metric: ttft_us, statistic: p99, window: 60s, limit: 1s, action: pause}\n"
    )
    result = CliRunner().invoke(policy, ["check", str(file)])
    assert result.exit_code == 0
    assert "caution   tail: ttft_us p99 of 100 samples rests on the 2 slowest of them" in result.stdout
    assert "→ min_samples: 1000, or `mode: observe`" in result.stdout
    told = json.loads(CliRunner().invoke(policy, ["check", str(file), "--json"]).stdout)
    assert [(one["rule"], one["code"]) for one in told["cautions"]] == [("tail", "thin_tail")]
    assert "caution" not in CliRunner().invoke(policy, ["check"]).stdout, "the shipped one needs none"


ANYTIME = """sequential: {alpha: 0.05}
rules:
  - {id: a, metric: kl_lower, evidence: anytime, window: 5m, limit: 0.05, action: rollback_l1}
  - {id: b, metric: kl_lower, evidence: anytime, window: 5m, limit: 0.1, action: rollback_l2}
  - {id: c, metric: kl_lower, evidence: anytime, window: 5m, limit: 0.03, action: pause}
  - {id: d, metric: kl_lower, window: 5m, limit: 0.05, action: rollback_l1}
"""


def test_the_alpha_ledger(tmp_path: Path) -> None:
    """Each enforcing rule that ends a generation has alpha / R, each pass all of it."""
    file = tmp_path / "policy.yaml"
    file.write_text(ANYTIME)
    lines = CliRunner().invoke(policy, ["check", str(file)]).stdout.splitlines()
    start = lines.index("alpha     0.05 is the chance of a false trip in a generation, shared by 2 rules:")
    tested = "its pass is tested at 0.05, evidence 20"
    assert lines[start + 1 : start + 4] == [
        f"          a 0.025, trips at evidence 40; {tested}",
        f"          b 0.025, trips at evidence 40; {tested}",
        f"          c 0.05 of its own: it ends no generation, trips at evidence 20; {tested}",
    ]
    assert lines[start + 4].strip().startswith("in a generation that had other policies before")
    assert lines[0].startswith(
        "a              kl_lower mean > 0.05, anytime evidence, from 100 samples, in rollout"
    )
    told = json.loads(CliRunner().invoke(policy, ["check", str(file), "--json"]).stdout)
    assert told["alpha"]["alpha"] == 0.05
    keys = ("id", "trip", "evidence_bound", "shared")
    assert [tuple(one[key] for key in keys) for one in told["alpha"]["rules"]] == [
        ("a", 0.025, 40, True), ("b", 0.025, 40, True), ("c", 0.05, 20, False),
    ]  # fmt: skip
    assert [rule["evidence"] for rule in told["rules"]] == ["anytime", "anytime", "anytime", "point"]


def test_without_sequential_rules_there_is_no_ledger(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("rules: [{id: d, metric: kl_lower, window: 5m, limit: 0.05, action: rollback_l1}]")
    assert "alpha" not in CliRunner().invoke(policy, ["check", str(file)]).stdout
    told = json.loads(CliRunner().invoke(policy, ["check", str(file), "--json"]).stdout)
    assert told["alpha"] == {"alpha": 0.05, "rules": []}


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


def test_the_first_weeks_example_observes_every_shipped_rule_and_moves_nothing() -> None:
    """docs/examples/observe.yaml keeps up with the shipped policy: the same rules, none of which enforces."""
    shipped = parse_policy(shipped_policy_text())
    observed = read_policy_file(str(REPOSITORY / "docs" / "examples" / "observe.yaml"))
    assert observed.rules == tuple(replace(rule, mode="observe") for rule in shipped.rules)
    assert observed.coverage == shipped.coverage
    assert observed.progression == replace(shipped.progression, mode="manual")
