"""What is read of a process's log while it is being written."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.config import KafkaConfig
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker

SAYS = """
import sys, time
sys.stderr.write('pair: gauges {"process": {"reads": 1}}\\npair: gauges {"process": {"rea')
sys.stderr.flush()
time.sleep(600)
"""


async def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SAYS)
    async with Worker("pair", Broker(KafkaConfig()), tmp_path, command=command) as worker:
        await worker.until_log("gauges")
        assert worker.gauges() == {"process": {"reads": 1}}
        assert worker.log.endswith("}\n")
        await worker.kill()
        assert '{"rea' in worker.log, "what an ended process said last is read, whole or not"
        assert worker.gauges() == {"process": {"reads": 1}}
