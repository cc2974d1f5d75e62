"""What a publisher is told, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from schemas.topics import Topic

DropReason = Literal["queue_full", "invalid", "too_large", "undeliverable", "closed"]
"""Why an event never reached the broker, as far as the publisher knows."""


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """A batch is sent when it holds this many events or (estimated) bytes."""

    events: int
    bytes: int


# reference figures: below them Kafka's cost per record rules, above them bytes do.
BATCH_LIMITS: Final[Mapping[Topic, BatchLimit]] = {
    Topic.REQUESTS: BatchLimit(500, 128_000),
    Topic.LOGITS: BatchLimit(64, 330_000),
    Topic.TELEMETRY: BatchLimit(500, 128_000),
    Topic.FEEDBACK: BatchLimit(500, 128_000),
}


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """`producer_id` must be new for every process: batches are numbered from 0 under it."""

    producer_id: str
    batch_limits: Mapping[Topic, BatchLimit] = field(default_factory=lambda: BATCH_LIMITS)
    flush_age_us: int = 50_000
    """A batch is sent at this age at the latest, full or not."""
    read_back: bool = True
    """Read each batch as its readers will, and leave out what they would refuse. A producer of small batches
    need not, for it takes a fifth of their CPU: each event's fields are then looked at by themselves."""
    queue_events: int = 20_000
    queue_bytes: int = 16 * 1024 * 1024
    """Bounds of what is accepted but not yet acknowledged, in wire bytes (in memory about ten times that)."""
    retry_first_us: int = 100_000
    retry_most_us: int = 2_000_000
    give_up_us: int = 30_000_000
    """A batch whose sending fails for this long is dropped: its events would be late anyway. One that the
    client still holds, as while the broker is away, is waited for: dropped, and then sent after all, it would
    count twice."""


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counts since the start. accepted = acknowledged + queued + dropped after acceptance."""

    accepted: int
    acknowledged: int
    dropped: Mapping[DropReason, int]
    reported: int
    """Drops reported for events that never came to be."""
    cut: int
    """Logit events that lost positions at their end to fit into a record."""
    batches: int
    retries: int
    queued_events: int
    queued_bytes: int
