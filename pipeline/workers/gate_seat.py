"""What the gate holds of one gating partition while it is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.gate.gating import GateCore
from pipeline.workers.gate_watch import ControlWatch
from pipeline.workers.gate_writer import GateWriter
from pipeline.workers.intake import Intake
from pipeline.workers.records import Partition
from pipeline.workers.waits import Waits


@dataclass(slots=True)
class Seat:
    """One gating partition, from its assignment to its revocation. Core and writer are used under `lock`."""

    partition: int
    places: tuple[Partition, ...]
    """What it reads through the group."""
    core: GateCore
    writer: GateWriter
    watch: ControlWatch
    intake: Intake
    waits: Waits
    attempt: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the seat is caught up, or left."""
    left: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to judge."""
    news_finals: bool = True
    news_fresh: bool = True
    news_since_s: float | None = None
    """Since when the oldest news waits."""
    fresh_due_s: float = 0.0
    """When fresh evidence may be judged again."""
    dealt_with: dict[Partition, int] = field(default_factory=dict)
    """Next offset to read, as of the last upkeep."""
    letters: list[Awaitable[Any]] = field(default_factory=list)
    """Dead letters that were sent; commits rest on their acknowledgement, and judgement does not."""
    task: asyncio.Task[None] | None = None

    async def acknowledged(self) -> None:
        """Wait until all dead letters that were sent so far are; raises aiokafka's error."""
        letters = tuple(self.letters)
        for letter in letters:
            await letter
        # Only now: whoever commits waits for them as well.
        known = set(map(id, letters))
        self.letters = [each for each in self.letters if id(each) not in known]
