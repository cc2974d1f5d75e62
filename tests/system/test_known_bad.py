"""Workers with a known defect must be found out by the judge, and by the suite, that pass the real ones."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from schemas.topics import Topic
from tests.faults.report import Report
from tests.faults.rounds import Plan, archive_server, play
from tests.faults.schedule import POINTS, Action, Fault
from tests.faults.schedule import Worker as Kind
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.system import judge
from tests.system.findings import totals
from tests.system.stack import JOIN_TIMEOUT_S, SECOND, Stack, now_us, stack
from tests.system.workload import Traffic

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1800)]

CELLS = 40


def _fault(worker: Kind, action: Action, name: str, passage: int, after_s: float = 0.5) -> Fault:
    (point,) = (point for point in POINTS[worker] if point.name == name)
    return Fault(0, 0, worker, action, point, passage, seat=0, after_s=after_s)


async def test_the_fault_suite_finds_defects_of_commit_cap_isolation_and_fencing(
    kafka_session: Broker, tmp_path: Path
) -> None:
    faults = [
        _fault("measure", "kill", "flush_acked_before_commit", 20),
        _fault("pair", "kill", "half_waiting", 5),
        # Its successor renews a lease or two, at a second's distance, before it is thawed.
        _fault("gate", "freeze", "gate_before_transaction", 3, after_s=3.0),
    ]
    defects: dict[Kind, str] = {
        "measure": "cap_by_what_the_process_saw",
        "pair": "commit_at_the_read_position",
        "archive": "read_uncommitted",
        "gate": "fence_nobody",
    }
    with archive_server(tmp_path) as address:
        played = await play(kafka_session, tmp_path, address, Plan(1, 0, faults, defects, CELLS))
    report, found = Report([played]), totals(played.findings)
    assert (report.fired, report.passed) == (len(faults), False), played.outcomes
    assert f"lost {found['lost']} doubled {found['doubled']}" in report.last_line
    lost = [line for line in played.findings if line.kind == "lost"]
    doubled = [line for line in played.findings if line.kind == "doubled"]
    assert any(line.startswith("klaxon.requests/") for line in played.findings), played.findings
    assert any(line.startswith("klaxon.logits/") for line in lost), played.findings
    assert any("archived 1, expected 0" in line for line in doubled), played.findings
    assert any(line.startswith("klaxon.control: ") for line in doubled), played.findings


async def test_a_commit_at_the_oldest_waiting_half_is_found(kafka_session: Broker, tmp_path: Path) -> None:
    async with stack(kafka_session, tmp_path, CELLS) as on:
        worker = await _started(on)
        await on.until_closed(now_us(), sources=[Topic.LOGITS])
        traffic = asyncio.gather(*(on.play(Traffic(seed, "none", seconds=12.0)) for seed in range(4)))
        await on.until_closed(now_us() + 5 * SECOND, sources=[Topic.LOGITS])
        await worker.kill()
        await _started(on)
        await traffic
        end_us = now_us() + (JOIN_TIMEOUT_S + 3) * SECOND
        await on.until_closed(end_us, sources=[Topic.LOGITS])
        await on.follower.caught_up()
        wrong = judge.finals(on.log(), Topic.LOGITS, end_us // SECOND)
    assert any("published" in line and "expected" in line for line in wrong), wrong


async def _started(on: Stack) -> Worker:
    defect = "commit_at_the_oldest_waiting_half"
    worker = on.worker("pair", command=(sys.executable, "-m", "tests.system.known_bad", defect, "pair"))
    await worker.start()
    return worker
