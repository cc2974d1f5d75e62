"""What waits for one partition of a topic, and how it is cut into batches."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from agents.publish.batches import Event
from agents.publish.settings import BatchLimit
from schemas.topics import Topic


@dataclass(frozen=True, slots=True)
class Item:
    """An accepted event."""

    event: Event
    size: int
    """Bytes on the wire, estimated."""
    since: float
    """Loop time of acceptance."""


@dataclass(slots=True)
class Lane:
    """What waits for one partition."""

    topic: Topic
    partition: int
    limit: BatchLimit
    items: deque[Item] = field(default_factory=deque)
    size: int = 0
    sequence: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something new to look at."""

    def full(self) -> bool:
        """Whether a whole batch waits."""
        return len(self.items) >= self.limit.events or self.size >= self.limit.bytes

    def add(self, item: Item) -> None:
        """Behind what waits already."""
        self.items.append(item)
        self.size += item.size
        if len(self.items) == 1 or self.full():
            self.wake.set()  # between its first and its last a batch waits for its time

    def take(self) -> list[Item]:
        """The next batch: in order, within the limits, at least one item if there is any."""
        batch: list[Item] = []
        size = 0
        while self.items and len(batch) < self.limit.events:
            if batch and size + self.items[0].size > self.limit.bytes:
                break
            item = self.items.popleft()
            batch.append(item)
            size += item.size
        self.size -= size
        return batch
