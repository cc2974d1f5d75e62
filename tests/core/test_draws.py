"""In CI examples are drawn alike in every run: by the sources alone, not by what ran before in a process."""

from __future__ import annotations

import subprocess
import sys

import hypothesis
import pytest

from tests.conftest import IN_CI, REPOSITORY, our_modules

DRAWS = """
import importlib, sys
from hypothesis import given, settings, strategies as st
for name in sys.argv[1:]:
    importlib.import_module(name)
@settings(derandomize=True, database=None)
@given(st.lists(st.text(max_size=8)))
def draws(drawn):
    print(ascii(drawn))
draws()
"""


def drawn(*modules: str) -> str:
    """Where these are imported."""
    command = [sys.executable, "-c", DRAWS, *modules]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_known_bad_one_more_module_that_is_imported_changes_the_draws() -> None:
    """When this fails, conftest.py need not import all of ours in CI."""
    assert (
        drawn("schemas.topics")
        == drawn("schemas.topics")
        != drawn("schemas.topics", "pipeline.core.gate.metrics")
    )


@pytest.mark.skipif(not IN_CI, reason="elsewhere each run is to draw other examples")
def test_none_is_imported_after_the_first_draw() -> None:
    assert hypothesis.settings().derandomize
    assert [name for name in our_modules() if name not in sys.modules] == []
