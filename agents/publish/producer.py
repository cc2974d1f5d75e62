"""What the publisher needs of a Kafka client, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PublishError(Exception):
    """The root of this package's errors."""


class DeliveryError(PublishError):
    """The broker did not take a record, or cannot be reached.

    `permanent`: trying the same again cannot help.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class RecordProducer(Protocol):
    """A Kafka producer. Methods raise DeliveryError and nothing else of their client's."""

    async def start(self) -> None:
        """Connect. May be called again after it failed."""
        ...

    async def stop(self) -> None:
        """Disconnect; nothing that was sent is waited for. Harmless when not started."""
        ...

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        ...

    async def send(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes,
        headers: Sequence[tuple[str, bytes]],
    ) -> None:
        """Send one record and return once the broker has acknowledged it. Without partition: by key."""
        ...
