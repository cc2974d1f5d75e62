"""What is on its way to the broker: how much of it at a time, and what follows once it is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.monitoring.timing import Timing
from pipeline.workers.faults import fault
from pipeline.workers.runner import first_end_of


@dataclass(frozen=True, slots=True)
class Sent:
    """What left in one flush."""

    began_s: float
    """When it began, by the monotonic clock."""
    evidence: Sequence[Awaitable[Any]]
    """Acknowledgements that the next flushes wait for."""
    besides: Sequence[Awaitable[Any]]
    """Of what nobody decides by, dead letters and scored pairs: only `then` waits for them."""
    then: Callable[[], None]
    """Called once all of this and of those before it is acknowledged."""


class UnderWay:
    """Flushes that were sent, in order, at most so many at a time whose evidence is not acknowledged."""

    def __init__(self, most: int) -> None:
        self.took = Timing()
        """From the begin of a flush until its evidence is acknowledged."""
        self._room = asyncio.Semaphore(most)
        self._sent: asyncio.Queue[Sent] = asyncio.Queue()
        self._there: asyncio.Queue[Sent] = asyncio.Queue()
        """Bounded by time: the producer gives up what it cannot send, and that ends `acknowledge`."""

    async def room(self) -> None:
        """Wait until one more may be sent, and take its place: `put` must follow."""
        await self._room.acquire()

    def put(self, sent: Sent) -> None:
        """The next flush."""
        self._sent.put_nowait(sent)

    async def acknowledge(self) -> None:
        """Wait for one after the other, without end; raises the error of what the broker does not take."""
        await first_end_of(self._acknowledge_evidence(), self._acknowledge_besides())

    async def _acknowledge_evidence(self) -> None:
        while True:
            sent = await self._sent.get()
            if sent.evidence:
                await asyncio.gather(*sent.evidence)
                fault("flush_acked_before_commit")
                self.took.took(time.monotonic() - sent.began_s)
            self._there.put_nowait(sent)
            self._room.release()

    async def _acknowledge_besides(self) -> None:
        while True:
            sent = await self._there.get()
            await asyncio.gather(*sent.besides)
            sent.then()
