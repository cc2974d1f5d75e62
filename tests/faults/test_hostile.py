"""Hostile and overwhelming traffic, in short; the long form is `python -m tests.faults.hostile`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.faults import hostile
from tests.faults.load import lifted, load
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON
from tests.workers.events import answer

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

LARGE_RECORDS = 900


async def test_a_measure_worker_under_load(kafka: Broker, log_folder: Path) -> None:
    async with load(kafka, log_folder, "measure") as on:
        outcomes = [await hostile.more_cells_than_fit(on, 20, 200), await hostile.ten_times_the_rate(on, 3)]
        assert await on.worker.stop() == 0
    for each in outcomes:
        print(each)
    assert not [line for each in outcomes for line in each.problems]


async def test_a_pair_worker_under_load(kafka: Broker, log_folder: Path) -> None:
    async with load(kafka, log_folder, "pair") as on:
        outcomes = [
            await hostile.impossible_events(on, 2),
            await hostile.one_hot_signature(on, 1_000),
            await hostile.endless_unmatched(on, 40, large=False),
        ]
        await _publish_refuses(kafka, log_folder)
        assert await on.worker.stop() == 0
    for each in outcomes:
        print(each)
    assert not [line for each in outcomes for line in each.problems]


async def test_bytes_bound_what_waits(kafka: Broker, log_folder: Path) -> None:
    outcome = await hostile.play(
        kafka, log_folder, "pair", hostile.LONG_JOIN,
        lambda on: hostile.endless_unmatched(on, LARGE_RECORDS, large=True),
    )  # fmt: skip
    print(outcome)
    assert not outcome.problems


async def test_a_pair_worker_without_its_bound_is_found(kafka: Broker, log_folder: Path) -> None:
    outcome = await hostile.play(
        kafka, log_folder, "pair", hostile.LONG_JOIN,
        lambda on: hostile.endless_unmatched(on, LARGE_RECORDS, large=True),
        lifted("bytes", "pair"),
    )  # fmt: skip
    print(outcome)
    assert any("more than the" in line for line in outcome.problems), outcome
    assert any("nothing was ended" in line for line in outcome.problems), outcome


async def test_a_measure_worker_without_its_cap_is_found(kafka: Broker, log_folder: Path) -> None:
    outcome = await hostile.play(
        kafka, log_folder, "measure", {},
        lambda on: hostile.more_cells_than_fit(on, 20, 200),
        lifted("cap", "measure"),
    )  # fmt: skip
    print(outcome)
    assert any("there may be" in line for line in outcome.problems), outcome
    assert outcome.accounted == outcome.sent


async def _publish_refuses(broker: Broker, folder: Path) -> None:
    """An event of a million positions never leaves; its neighbours do."""
    file = folder / "events.jsonl"
    halves = [
        json.dumps(answer(hostile.now_us(), arm, "published")).encode() for arm in ("baseline", "canary")
    ]
    file.write_bytes(b"\n".join((halves[0], hostile.million_positions(1_000_000), halves[1])) + b"\n")
    process = await asyncio.create_subprocess_exec(
        *KLAXON, "publish", Topic.LOGITS.value, str(file), "--json",
        cwd=REPOSITORY, env={**broker.environment, "HOME": str(folder)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    said = json.loads(out)
    assert (process.returncode, said["accepted"], said["rejected"]) == (2, 2, 1), said
    (reason,) = said["rejected_by_reason"]
    assert "over 900000 bytes" in reason
