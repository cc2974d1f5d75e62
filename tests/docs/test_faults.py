"""docs/faults.md: every test and every command that it names exists, and every row names one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

import pytest

from tests.conftest import REPOSITORY
from tests.docs.test_security import NAMED, collected
from tests.faults.brokers import NAMES
from tests.faults.clickhouse import SCENARIOS
from tests.faults.hostile import LONG
from tests.system.known_bad import DEFECTS

PAGE = (REPOSITORY / "docs" / "faults.md").read_text(encoding="utf-8")
COMMAND: Final = re.compile(r"`(brokers|clickhouse|hostile) ([\w-]+)`")
DEFECT: Final = re.compile(r"`--defect \w+=(\w+)`")
PLAYS: Final[Mapping[str, Collection[str]]] = {"brokers": NAMES, "clickhouse": SCENARIOS, "hostile": LONG}


def rows(page: str) -> list[list[str]]:
    """Cells of all tables, without their heads."""
    found, in_table = [], 0
    for line in page.splitlines():
        in_table = in_table + 1 if line.startswith("|") else 0
        if in_table > 2:
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def faults_of(page: str) -> list[str]:
    """Rows that name neither a test nor a command, and names that are none."""
    faults = [
        f"nothing shows: {cells[0]}"
        for cells in rows(page)
        if not any(
            each.search(cells[-1]) for each in (NAMED, COMMAND, DEFECT, re.compile("`make faults`|`fuzz`"))
        )
    ]
    faults += [f"no test {path}::{name}" for path, name in NAMED.findall(page) if name not in collected(path)]
    faults += [f"no {suite} {name}" for suite, name in COMMAND.findall(page) if name not in PLAYS[suite]]
    faults += [f"no defect {name}" for name in DEFECT.findall(page) if name not in DEFECTS]
    return faults


def test_every_row_names_what_shows_it() -> None:
    assert len(rows(PAGE)) >= 25
    assert faults_of(PAGE) == []


def test_every_long_run_is_on_the_page() -> None:
    named = set(COMMAND.findall(PAGE))
    assert named == {(suite, name) for suite, names in PLAYS.items() for name in names}


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ("`brokers stall`", "`brokers stalled`", "no brokers stalled"),
        ("`faults/test_blind.py::", "`faults/test_blinded.py::", "no test faults/test_blinded.py"),
        ("=read_uncommitted`", "=read_anything`", "no defect read_anything"),
        ("`brokers catch-up`", "a look", "nothing shows"),
    ],
)
def test_known_bad_a_name_that_is_none_is_told(good: str, bad: str, told: str) -> None:
    assert good in PAGE
    assert any(told in fault for fault in faults_of(PAGE.replace(good, bad)))
