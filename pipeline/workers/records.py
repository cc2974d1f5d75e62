"""What a worker sees of Kafka: partitions, records and the hand-over between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from schemas.topics import CONTENT_TYPE, TICK, Topic

APPEND_TIME: Final = 1
"""`Record.timestamp_type` where the broker set the time (`LogAppendTime`); 0 is the producer's."""


class Partition(NamedTuple):
    """One partition of one of our topics; equal to the (topic, partition) pairs of Faust and aiokafka."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Record:
    """One Kafka record, bytes as they are."""

    topic: Topic
    partition: int
    offset: int
    append_us: int
    """The record's timestamp: the broker's append time, or the producer's where the broker keeps that."""
    timestamp_type: int
    headers: Mapping[str, bytes]
    key: bytes | None
    value: bytes

    @property
    def place(self) -> Partition:
        """The partition the record stands in."""
        return Partition(self.topic.value, self.partition)

    @property
    def content_type(self) -> str | None:
        """The header that names the encoding; None where a foreign producer sent none."""
        header = self.headers.get(CONTENT_TYPE)
        return None if header is None else header.decode("utf-8", "replace")

    @property
    def is_tick(self) -> bool:
        """Whether the record only moves log time."""
        return self.headers.get(CONTENT_TYPE) == TICK.encode()
