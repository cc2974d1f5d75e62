"""What is read of a process's log while it is being written; signals to one that has ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from pipeline.config import KafkaConfig
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker

SAYS = """
import sys, time
sys.stderr.write('pair: gauges {"process": {"reads": 1}}\\npair: gauges {"process": {"rea')
sys.stderr.flush()
time.sleep(600)
"""
STAYS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


async def test_one_that_has_just_ended_by_itself_is_stopped_without_an_error(tmp_path: Path) -> None:
    leave = tmp_path / "leave"
    command = (sys.executable, "-c", STAYS, str(leave))
    async with Worker("pair", Broker(KafkaConfig()), tmp_path, command=command) as worker:
        leave.touch()
        while psutil.pid_exists(worker.pid):
            time.sleep(0.01)  # noqa: ASYNC251 (the loop is not to hear of it)
        assert worker.running
        assert await worker.stop() == 0


async def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SAYS)
    async with Worker("pair", Broker(KafkaConfig()), tmp_path, command=command) as worker:
        await worker.until_log("gauges")
        assert worker.gauges() == {"process": {"reads": 1}}
        assert worker.log.endswith("}\n")
        await worker.kill()
        assert '{"rea' in worker.log, "what an ended process said last is read, whole or not"
        assert worker.gauges() == {"process": {"reads": 1}}
