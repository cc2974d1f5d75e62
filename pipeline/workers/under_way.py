"""What is on its way to the broker: how much of it at a time, and what follows once it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.workers.faults import fault


@dataclass(frozen=True, slots=True)
class _Sent:
    waiting: Sequence[Awaitable[Any]]
    then: Callable[[], None]


class UnderWay:
    """Flushes that were sent, in order, at most so many unacknowledged ones at a time."""

    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)
        self._sent: asyncio.Queue[_Sent] = asyncio.Queue()

    async def room(self) -> None:
        """Wait until one more may be sent, and take its place: `put` must follow."""
        await self._room.acquire()

    def put(self, waiting: Sequence[Awaitable[Any]], then: Callable[[], None]) -> None:
        """`waiting`: a flush's acknowledgements; `then` is called after these and those of all before it."""
        self._sent.put_nowait(_Sent(waiting, then))

    async def acknowledge(self) -> None:
        """Wait for one after the other, without end; raises the error of what the broker does not take."""
        while True:
            sent = await self._sent.get()
            if sent.waiting:
                await asyncio.gather(*sent.waiting)
                fault("flush_acked_before_commit")
            sent.then()
            self._room.release()
