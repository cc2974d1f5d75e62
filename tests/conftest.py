"""What every test may ask for: the shared data folder, and whether this is CI."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ("tests.kafka.fixtures",)

IN_CI = os.environ.get("CI") == "true"
REPOSITORY = Path(__file__).resolve().parent.parent


# A slow machine is no defect: examples have no deadline, nor does drawing them.
hypothesis.settings.register_profile(
    "klaxon", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("klaxon")


LONGEST_FIRST = tuple(
    REPOSITORY / "tests" / each
    for each in (
        "system/test_kills.py",
        "demo/test_command.py",
        "system/test_gateway_engines.py",
        "core/test_content_against_oracle.py",
        "workers/test_gate_process.py",
        "system/test_seeds.py",
        "faults/test_faults.py",
        "faults/test_brokers.py",
        "system/test_known_bad.py",
        "faults/test_clickhouse.py",
        "workers/test_sequential.py",
    )
)
"""Files of a minute and more, in this order: begun last, one would run on when all other tests are done."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are handed out to processes, the longest come first."""
    if hasattr(config, "workerinput"):
        rank = {path: number for number, path in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: rank.get(item.path, len(rank)))


def our_modules() -> Iterator[str]:
    """Names of all that can be imported without running something."""
    for package in map(importlib.import_module, ("schemas", "agents", "pipeline")):
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        yield from (module.name for module in found if not module.name.endswith("__main__"))


def pytest_collection_finish() -> None:
    """What was imported stays; what a test makes is young when it ends, and that alone is looked at then."""
    if IN_CI:
        # Hypothesis draws constants of our modules, too, of those that are imported: draws that are to repeat
        # would else depend on what ran before in the same process.
        for name in our_modules():
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 100, 10)


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_open_fails_it() -> Iterator[None]:
    """As below, for what the fixtures of a file left, and what grew old in a long test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def what_a_test_leaves_open_fails_it() -> Iterator[None]:
    """A socket, producer or task left open says so when it is collected: here or in the very next test."""
    yield
    gc.collect(1)


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
