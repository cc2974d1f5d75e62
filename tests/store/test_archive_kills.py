"""The archive killed at every step, over and over, on one folder: each event stands there exactly once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.store.archive_process import EXIT_CODE, PARTITIONS
from tests.store.records import expected_places, request_log

POINTS = (
    "on_assignment",
    "after_read",
    "before_insert",
    "inside_insert",
    "after_insert",
    "before_commit",
    "after_commit",
)
SEED = 4_000
RECORDS = 600
ROUNDS_PER_POINT = 2


def run(folder: Path, point: str, nth: int = 1) -> tuple[int, list[dict[str, Any]]]:
    arguments = [str(folder), str(SEED), str(RECORDS), point, str(nth)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.archive_process", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=120,
        check=False,
    )
    if done.returncode not in (0, EXIT_CODE):
        pytest.fail(done.stderr.decode()[-2_000:])
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_every_step_each_event_is_stored_exactly_once(tmp_path: Path) -> None:
    folder, rng, fired = tmp_path / "archive", random.Random(SEED), Counter[str]()
    plan = [point for point in POINTS for _ in range(ROUNDS_PER_POINT)]
    rng.shuffle(plan)
    print(f"seed {SEED}, plan {plan}")
    for point in plan:
        nth = 1 if point == "on_assignment" else rng.randint(1, 200 if point == "after_read" else 3)
        code, lines = run(folder, point, nth)
        assert code == EXIT_CODE, f"{point}:{nth} did not fire"
        fired.update(line["fault"] for line in lines if "fault" in line)
    code, lines = run(folder, "none")
    assert code == 0
    assert lines == [{"done": True}]

    code, ((found),) = run(folder, "verify")
    got = Counter(map(tuple, found["rows"]))
    expected = {
        (partition, *place)
        for partition in range(PARTITIONS)
        for place in expected_places(request_log(SEED + partition, RECORDS))
    }
    assert got.keys() == expected, "lost or invented"
    assert set(got.values()) == {1}, "doubled"
    assert fired == Counter(dict.fromkeys(POINTS, ROUNDS_PER_POINT)), "every fault fired"
