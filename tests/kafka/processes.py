"""Real `klaxon worker` processes: start, watch their log, freeze, thaw, stop and kill them, by pid."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.conftest import REPOSITORY
from tests.kafka.broker import Broker

LOG_TIMEOUT_S = 120.0
GAUGES_EVERY_SECOND = {"KLAXON_WORKER_GAUGES_EVERY_S": "1"}
ANY_PORT = {
    f"KLAXON_MONITORING_{kind.upper()}_PORT": "0"
    for kind in ("measure", "pair", "gate", "archive", "router", "notify")
}
"""Many run at once on one machine; each says in its log which port it has."""
KLAXON = (sys.executable, "-c", "from pipeline.cli.main import main; main()")
"""The `klaxon` command with this interpreter."""


class Worker:
    """One process. `async with` starts it and makes sure that it is gone at the end, frozen or not."""

    def __init__(
        self,
        kind: str,
        broker: Broker,
        log_folder: Path,
        *,
        fault: str | None = None,
        environment: Mapping[str, str] | None = None,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.kind = kind
        self._command = command or (*KLAXON, "worker", kind)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KLAXON_")},
            **broker.environment,
            **ANY_PORT,
            **(environment or {}),
            "PYTHONUNBUFFERED": "1",
            **({"KLAXON_FAULT": fault} if fault else {}),
        }
        self.log_path = log_folder / f"{kind}-{time.monotonic_ns()}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._seen = 0

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self.running:
            self.thaw()
            await self.kill()

    async def start(self) -> None:
        """Start it; its standard error goes to `log_path`. Returns before it is ready."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, cwd=REPOSITORY, env=self._environment, stdout=log, stderr=log
            )

    @property
    def running(self) -> bool:
        """Whether it is alive, frozen included."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything it has said so far; of a line that is still being written, nothing."""
        whole = not self.running
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text if whole else text[: text.rfind("\n") + 1]

    async def until_log(self, text: str, *, timeout_s: float = LOG_TIMEOUT_S) -> None:
        """Wait for `text` after what was waited for before; fails when the process ends without it."""
        deadline = time.monotonic() + timeout_s
        while True:
            log = self.log
            at = log.find(text, self._seen)
            if at >= 0:
                self._seen = at + len(text)
                return
            if not self.running:
                raise AssertionError(f"{self.kind} ended without saying {text!r}:\n{log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.kind} did not say {text!r} within {timeout_s:g} s:\n{log}")
            await asyncio.sleep(0.05)

    def gauges(self) -> dict[str, dict[str, int]]:
        """What its newest line of gauges says, {} before the first; see `GAUGES_EVERY_SECOND`.

        A line that its end has cut short counts for nothing.
        """
        whole = self.log.rpartition("\n")[0]
        lines = [line for line in whole.splitlines() if f"{self.kind}: gauges " in line]
        if not lines:
            return {}
        said: dict[str, dict[str, int]] = json.loads(lines[-1].partition(": gauges ")[2])
        return said

    async def until_ended(self, *, timeout_s: float = LOG_TIMEOUT_S) -> int:
        """Wait for its end; returns the exit code (negative: killed by that signal)."""
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            raise AssertionError(f"{self.kind} did not end within {timeout_s:g} s:\n{self.log}") from None

    async def until_fault(self, name: str, *, timeout_s: float = LOG_TIMEOUT_S) -> None:
        """Wait for the death by this fault point, and prove that it was this one."""
        code = await self.until_ended(timeout_s=timeout_s)
        assert (code, f"fault {name} fired" in self.log) == (137, True), f"exit {code}:\n{self.log}"

    async def kill(self) -> None:
        """SIGKILL, and wait."""
        self._signal(signal.SIGKILL)
        await self.until_ended()

    async def stop(self, *, timeout_s: float = LOG_TIMEOUT_S) -> int:
        """SIGTERM, and wait; returns the exit code."""
        self._signal(signal.SIGTERM)
        return await self.until_ended(timeout_s=timeout_s)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Any other signal."""
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        # One that has just ended by itself is gone before the loop hears of it.
        with suppress(ProcessLookupError):
            if self.running:
                os.kill(self.pid, number)
