"""docs/divergence.md: its table and plot are what the command makes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.docs.divergence import PAGE, PLOT, Row, in_page, intersection, plot, rows, table, tail_bucket

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def found(shared_dir: Path) -> list[Row]:
    return rows(shared_dir)


def test_the_table_is_what_the_command_prints(found: list[Row]) -> None:
    assert in_page(PAGE.read_text(encoding="utf-8")) == table(found)


def test_the_plot_is_what_the_command_draws(found: list[Row]) -> None:
    assert PLOT.read_text(encoding="utf-8") == plot(found)


def test_only_the_certified_ones_never_claim_too_much(found: list[Row]) -> None:
    """What the page says of the four, and a control: the other two are seen above the truth."""
    for row in found:
        assert row.above["kl_lower"] == row.above["tail bucket"] == 0, row.what
        assert row.means["tail bucket"] <= row.means["kl_lower"] <= row.truth, row.what
    for name in ("kl_floor", "intersection"):
        assert sum(row.above[name] for row in found) > 100, name


def test_the_yardsticks_by_hand() -> None:
    p, q = {1: math.log(0.6), 2: math.log(0.2)}, {1: math.log(0.4), 3: math.log(0.2)}
    assert tail_bucket(p, q) == pytest.approx(0.6 * math.log(1.5) + 0.4 * math.log(0.4 / 0.6), rel=1e-12)
    assert intersection(p, q) == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(intersection(p, {3: -0.1}))
    both = {1: math.log(0.3), 2: math.log(0.1)}, {1: math.log(0.2), 2: math.log(0.2)}
    assert intersection(*both) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-12)


def test_the_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"test_\w+\.py", PAGE.read_text(encoding="utf-8")))
    assert named
    folder = REPOSITORY / "tests" / "core" / "divergence"
    assert not [name for name in named if not (folder / name).exists()]
