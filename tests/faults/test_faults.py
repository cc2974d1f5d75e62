"""The fault suite in short: every worker killed once and frozen once. The long form: `make faults`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults.report import WIDTH, Report
from tests.faults.rounds import Plan, archive_server, play
from tests.faults.schedule import ACTIONS, WORKERS, schedule
from tests.kafka.broker import Broker

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(1800),
]

SEED = int(os.environ.get("SEED", "20260717"))
PER_WORKER = 2


async def test_workers_killed_and_frozen_in_pairs_change_nothing(
    kafka_session: Broker, tmp_path: Path
) -> None:
    plan = Plan(SEED, 0, schedule(SEED, 0, PER_WORKER))
    with archive_server(tmp_path) as address:
        played = await play(kafka_session, tmp_path, address, plan)
    report = Report([played])
    report.show(Console(width=WIDTH))
    assert not played.findings, "\n".join(played.findings)
    assert not [f"{each.fault}: {each.why}" for each in played.outcomes if not each.fired]
    count = PER_WORKER * len(WORKERS)
    wanted = f"faults fired {count}/{count} lost 0 doubled 0 false_trips 0 missed_trips 0"
    assert (report.passed, report.last_line) == (True, wanted)
    # Not a proof of anything if nothing happened.
    assert {(each.fault.worker, each.fault.action) for each in played.outcomes} == {
        (worker, action) for worker in WORKERS for action in ACTIONS[:PER_WORKER]
    }
    assert played.decisions["trip"] >= 2, played.decisions
