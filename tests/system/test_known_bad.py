"""Workers with a known defect must be found out by the judge that passes the real ones."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from schemas.topics import Topic
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.system import archived, judge
from tests.system.stack import JOIN_TIMEOUT_S, SECOND, Stack, now_us, stack
from tests.system.workload import Traffic

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

CELLS = 40


async def _judged(on: Stack, defects: dict[str, str], sources: tuple[Topic, ...]) -> tuple[judge.Log, int]:
    """Traffic through defective workers, all killed and started again in the middle; the log at its end."""
    workers = await _started(on, defects)
    await on.until_closed(now_us(), sources=sources)
    traffic = asyncio.gather(*(on.play(Traffic(seed, "none", seconds=12.0)) for seed in range(4)))
    await on.until_closed(now_us() + 5 * SECOND, sources=sources)
    for worker in workers:
        if worker.kind != "archive":
            await worker.kill()
            await _started(on, {worker.kind: defects[worker.kind]})
    await traffic
    end_us = now_us() + (JOIN_TIMEOUT_S + 3) * SECOND
    await on.until_closed(end_us, sources=sources)
    await on.follower.caught_up()
    return on.log(), end_us // SECOND


async def _started(on: Stack, defects: dict[str, str]) -> list[Worker]:
    workers = [
        on.worker(kind, command=(sys.executable, "-m", "tests.system.known_bad", defect, kind))
        for kind, defect in defects.items()
    ]
    for worker in workers:
        await worker.start()
    return workers


async def test_defects_of_commit_cap_and_isolation_are_found(kafka_session: Broker, tmp_path: Path) -> None:
    defects = {
        "measure": "cap_by_what_the_process_saw",
        "pair": "commit_at_the_read_position",
        "archive": "read_uncommitted",
    }
    async with stack(kafka_session, tmp_path, CELLS) as on:
        log, through = await _judged(on, defects, (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY))
        assert on.sent.aborted > 0
        await on.until_archived(log)
        for worker in on.started:
            if worker.running:
                await worker.stop()
        rows = await on.query(*archived.QUERIES)
    capped = judge.finals(log, Topic.REQUESTS, through)
    assert any("published" in line and "expected" in line for line in capped), capped
    lost = judge.finals(log, Topic.LOGITS, through)
    assert any("were never published" in line for line in lost), lost
    surplus = archived.differences(log, rows)
    assert any("archived 1, expected 0" in line for line in surplus), surplus


async def test_a_commit_at_the_oldest_waiting_half_is_found(kafka_session: Broker, tmp_path: Path) -> None:
    async with stack(kafka_session, tmp_path, CELLS) as on:
        defects = {"pair": "commit_at_the_oldest_waiting_half"}
        log, through = await _judged(on, defects, (Topic.LOGITS,))
    wrong = judge.finals(log, Topic.LOGITS, through)
    assert any("published" in line and "expected" in line for line in wrong), wrong
