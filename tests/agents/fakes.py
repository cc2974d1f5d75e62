"""A record producer that a test steers: it fails, stalls and remembers as told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.publish.producer import DeliveryError


@dataclass
class Sent:
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes
    headers: dict[str, bytes]


@dataclass
class FakeProducer:
    partition_count: int = 4
    sent: list[Sent] = field(default_factory=list)
    failures: list[DeliveryError] = field(default_factory=list)
    """Raised by the next sends, in order."""
    start_failures: int = 0
    starts: int = 0
    stopped: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Sends wait for it."""
    waiting: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.open.set()

    async def start(self) -> None:
        self.starts += 1
        if self.starts <= self.start_failures:
            raise DeliveryError("nobody there")

    async def stop(self) -> None:
        self.stopped = True

    async def partitions(self, topic: str) -> int:
        return self.partition_count

    async def send(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes,
        headers: Sequence[tuple[str, bytes]],
    ) -> None:
        async with self.changed:
            self.waiting += 1
            self.changed.notify_all()
        await self.open.wait()
        self.waiting -= 1
        if self.failures:
            raise self.failures.pop(0)
        async with self.changed:
            self.sent.append(Sent(topic, partition, key, value, dict(headers)))
            self.changed.notify_all()

    async def until_waiting(self, n: int) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: self.waiting >= n), 60)

    async def until_sent(self, n: int) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: len(self.sent) >= n), 60)
