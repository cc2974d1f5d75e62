"""A loop whose clock stands while there is something to do: a machine that stops lets no time-out pass.

In tests whose every party is on one loop, a time-out is to say what a silent party costs, not how long this
machine took. Measured by the machine's clock it would pass wherever the process stood still for as long.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

TURN_S = 0.005
"""What a turn of the loop counts at most that had something to do."""


class Patience:
    """The clock of one loop: what it waited for nothing but time, and a little for each turn besides."""

    def __init__(self, loop: Any) -> None:
        self._now_s = loop.time()
        self._looked_s = time.monotonic()
        self._select = loop._selector.select
        loop._selector.select, loop.time = self.select, self.time

    def time(self) -> float:
        """In place of the loop's."""
        return self._now_s

    def select(self, timeout_s: float | None) -> Any:
        """In place of the selector's."""
        events = self._select(timeout_s)
        before_s, self._looked_s = self._looked_s, time.monotonic()
        waited = not events and timeout_s is not None and timeout_s > 0
        self._now_s += timeout_s if waited else min(self._looked_s - before_s, TURN_S)
        return events


def patient() -> asyncio.AbstractEventLoop:
    """The running loop, with such a clock from here on. What another process does comes in its own time."""
    loop = asyncio.get_running_loop()
    if not isinstance(getattr(loop.time, "__self__", None), Patience):
        Patience(loop)
    return loop
