"""Waits that say what they wait for, and that end.

aiokafka tries some things again for ever and in silence: a coordinator that says "later", a partition without
a position. A task whose work is watched here says so instead, and gives up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from pipeline.errors import PipelineError
from schemas.plain import Log, Plain

log: Log = logging.getLogger("klaxon.waits")

CHECK_S: Final = 1.0
SAY_EVERY: Final = 15
"""Checks in a row that saw nothing move, from one warning to the next."""
GIVE_UP_AFTER: Final = 45
"""And until it ends: later than aiokafka's own requests (40 s), whose errors name more."""
END_WITHIN_S: Final = 10.0
"""What work that was cancelled or given up has left to end its connections."""


class StuckError(PipelineError):
    """What was waited for did not come; the message names it."""


class Waits:
    """What one task waits for, step by step.

    Checks are counted, not seconds: a process that was frozen and thawed has missed time but no check.
    """

    def __init__(self, whose: str) -> None:
        """`whose`: the first words of each line."""
        self._whose = whose
        self._step: str | None = None
        self._moves = 0

    def step(self, what: str) -> None:
        """From here on it waits for this; saying the same again moves nothing on."""
        if what != self._step:
            self._step = what
            self._moves += 1

    def rest(self) -> None:
        """From here on it waits for nothing that must come."""
        self._step = None

    def moved(self) -> None:
        """The step goes on: a record came, a position moved."""
        self._moves += 1

    async def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Await the work, cancelled with this. Raises its error, or StuckError when a step did not move.

        Work that ends cancelled though nobody cancelled this would end without a word: StuckError, too.
        """
        task = asyncio.create_task(work)
        seen, still = -1, 0
        try:
            while not (await asyncio.wait([task], timeout=CHECK_S))[0]:
                still = still + 1 if self._step is not None and self._moves == seen else 0
                seen = self._moves
                if still >= GIVE_UP_AFTER:
                    raise StuckError(self._said(still))
                if still and still % SAY_EVERY == 0:
                    log.warning("%s", Plain(self._said(still)))
            if task.cancelled():
                raise StuckError(f"{self._whose}: was broken off while it waited for {self._step or 'news'}")
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=END_WITHIN_S)
            if task.done() and not task.cancelled():
                task.exception()  # seen

    def _said(self, still: int) -> str:
        return f"{self._whose}: has waited {still * CHECK_S:g} s for {self._step}"
