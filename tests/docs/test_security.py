"""docs/security.md: every test that the threat model names exists and is not skipped."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(page: str) -> list[list[str]]:
    """Cells of the threat model's table, without its head."""
    part = page.partition("## Who can do what to whom\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@cache
def collected(path: str) -> frozenset[str]:
    """Functions of a test module that pytest collects and does not skip."""
    file = REPOSITORY / "tests" / path
    if not file.is_file():
        return frozenset()
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(each) for each in node.decorator_list)
            if "skip" not in marks and "xfail" not in marks:
                found.add(node.name)
    return frozenset(found)


def faults_of(page: str) -> list[str]:
    """Rows that show nothing, and tests that are none."""
    faults = [f"nothing shows: {cells[1]}" for cells in rows(page) if not NAMED.search(cells[-1])]
    faults += [f"no test {path}::{name}" for path, name in NAMED.findall(page) if name not in collected(path)]
    return faults


def test_every_threat_names_tests_that_exist() -> None:
    assert len(rows(PAGE)) >= 15
    assert all(len(cells) == 4 for cells in rows(PAGE))
    assert faults_of(PAGE) == []


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        (
            "::test_redirects_are_not_followed`",
            "::test_redirects_are_followed`",
            "no test workers/test_notify.py",
        ),
        ("`workers/test_notify.py::", "`workers/test_notified.py::", "no test workers/test_notified.py"),
        (
            "`core/test_visible.py::test_names_of_nodes_steer_no_terminal_and_add_no_line`",
            "review",
            "nothing shows",
        ),
    ],
)
def test_known_bad_a_test_that_is_none_is_told(good: str, bad: str, told: str) -> None:
    assert good in PAGE
    assert any(told in fault for fault in faults_of(PAGE.replace(good, bad)))
