"""Brokers of tests end with the process that started them, even when that one cannot clean up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

HOLDER = """
import sys
from pathlib import Path
from tests.kafka.broker import none_left
with none_left(Path(sys.argv[1])):
    print("guarded", flush=True)
    sys.stdin.read()
"""


def test_no_broker_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    """What runs here in the broker's place is any process: it is known by its `broker.pid`."""
    with subprocess.Popen(["sleep", "600"]) as broker:
        (tmp_path / "broker.pid").write_text(str(broker.pid))
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            with holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"guarded\n"
                assert broker.poll() is None
                holder.kill()
            assert broker.wait(timeout=60) == -signal.SIGKILL
        finally:
            broker.kill()
