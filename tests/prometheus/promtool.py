"""Runs promtool: rules evaluated on series that a test makes up, or that were scraped."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "infra" / "prometheus"
RULES = FOLDER / "alerts.yml"


@dataclass(frozen=True, slots=True)
class Case:
    """Series (name and labels → values, one every `interval_s`), and what is asked of them at `at_s`."""

    alert: str
    series: Mapping[str, str]
    at_s: int
    firing: int
    """How many alerts of this name fire."""
    interval_s: int = 15
    operator: str = "count"
    """`group`: `firing`, 0 or 1, only says whether any fires."""


def promtool() -> str:
    """Its path; skips with the reason where there is none."""
    found = subprocess.run([FOLDER / "promtool.sh"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


def check_alerts(cases: Sequence[Case], folder: Path) -> str:
    """Runs promtool on these cases; returns what it says of those that are not so, "" if all are."""
    tests: list[dict[str, Any]] = [
        {
            "interval": f"{case.interval_s}s",
            "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
            "promql_expr_test": [
                {
                    "expr": f'{case.operator}(ALERTS{{alertname="{case.alert}", alertstate="firing"}})',
                    "eval_time": f"{case.at_s}s",
                    "exp_samples": [{"labels": "{}", "value": case.firing}] if case.firing else [],
                }
            ],
        }
        for case in cases
    ]
    path = folder / "tests.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests})
    )
    ran = subprocess.run([promtool(), "test", "rules", path], capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr
