"""Ends a process whose event loop no longer turns.

Kafka's heartbeats come from a thread of their own: a worker whose loop is stuck would keep its partitions
for ever. Nobody but the process itself can notice.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

CHECK_S: Final = 1.0
EXIT_CODE: Final = 70


class Watchdog(threading.Thread):
    """Calls `end` when `beat` was not called during `patience` checks in a row.

    It counts its own checks rather than seconds: a process that was frozen and thawed (SIGSTOP, a paused
    virtual machine) has missed time but no check, and gets its full patience again.
    """

    def __init__(self, patience: int, *, end: Callable[[str], None] | None = None) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._patience = patience
        self._end = end or end_process
        self._beats = 0
        self._stopped = threading.Event()

    def beat(self) -> None:
        """Say that the loop turns; called from it."""
        self._beats += 1

    def stop(self) -> None:
        """End the thread; does not wait for it."""
        self._stopped.set()

    def run(self) -> None:
        seen, missed = -1, 0
        while not self._stopped.wait(CHECK_S):
            beats = self._beats
            missed = missed + 1 if beats == seen else 0
            seen = beats
            if missed >= self._patience:
                self._end(f"the event loop has not turned for {missed} checks of {CHECK_S:g} s")
                return


def end_process(reason: str, code: int = EXIT_CODE) -> None:
    """Name the reason and end the process at once; its process manager starts a new one."""
    print(f"klaxon: {reason}; ending the process", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(code)
