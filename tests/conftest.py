"""What every test may ask for: the shared data folder, and whether this is CI."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ("tests.kafka.fixtures",)

IN_CI = os.environ.get("CI") == "true"
REPOSITORY = Path(__file__).resolve().parent.parent


# A slow machine is no defect: examples have no deadline.
hypothesis.settings.register_profile("klaxon", deadline=None)
hypothesis.settings.load_profile("klaxon")


def required_or_skip(reason: str) -> None:
    """Skip with the reason for a newcomer; in CI the same absence is a failure."""
    if IN_CI:
        pytest.fail(f"required in CI: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared traces, captures and vectors (`KLAXON_SHARED`, default `../shared`)."""
    folder = Path(os.environ.get("KLAXON_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / "data").is_dir():
        required_or_skip(f"no shared data at {folder}; set KLAXON_SHARED to the folder that holds data/")
    return folder
