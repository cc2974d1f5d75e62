"""Topics, record headers, and where a key goes: what every producer and consumer must agree on."""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Final

from schemas.errors import UnknownTopicError

GATING_PARTITIONS: Final = 4
"""Partitions of every topic the gate owns; a roll-out's is murmur2(rollout) mod this."""

CONTENT_TYPE: Final = "content-type"
JSON: Final = "application/json"
COLUMNS: Final = "application/vnd.klaxon.columns+msgpack"
BUCKETS: Final = "application/vnd.klaxon.buckets+msgpack"
TICK: Final = "application/vnd.klaxon.tick"
"""An empty record that moves an idle partition's log time; ignored by everyone but its worker."""

MAX_RECORD_BYTES: Final = 900_000


class Topic(StrEnum):
    """Logical topics; the value is the physical name."""

    REQUESTS = "klaxon.requests"
    LOGITS = "klaxon.logits"
    TELEMETRY = "klaxon.telemetry"
    FEEDBACK = "klaxon.feedback"
    PARTIALS = "klaxon.partials"
    BUCKETS = "klaxon.buckets"
    PAIRS = "klaxon.pairs"
    COMMANDS = "klaxon.commands"
    CONTROL = "klaxon.control"
    DECISIONS = "klaxon.decisions"
    ROLLOUTS = "klaxon.rollouts"
    STATE = "klaxon.state"
    APPLIED = "klaxon.applied"
    DEAD_LETTER = "klaxon.dead-letter"

    @classmethod
    def named(cls, name: str) -> Topic:
        """The topic of this name; raises UnknownTopicError that lists the known ones."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(topic.value for topic in cls)
            raise UnknownTopicError(f"unknown topic {name!r}; known: {known}") from None


INPUTS: Final = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY, Topic.FEEDBACK)
SOURCES: Final = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY)
"""Topics whose partitions are the sources of final buckets."""
GATING: Final = (
    Topic.PARTIALS,
    Topic.BUCKETS,
    Topic.COMMANDS,
    Topic.CONTROL,
    Topic.DECISIONS,
    Topic.ROLLOUTS,
    Topic.STATE,
)


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 (unsigned), seed 0x9747b28c: the hash of its default partitioner."""
    m = 0x5BD1E995
    length = len(data)
    h = 0x9747B28C ^ length
    body = length & ~3
    for k in struct.unpack_from(f"<{length >> 2}I", data):
        k = (k * m) & 0xFFFFFFFF
        k = ((k ^ (k >> 24)) * m) & 0xFFFFFFFF
        h = ((h * m) & 0xFFFFFFFF) ^ k
    tail = data[body:]
    if tail:
        h ^= int.from_bytes(tail, "little")
        h = (h * m) & 0xFFFFFFFF
    h ^= h >> 13
    h = (h * m) & 0xFFFFFFFF
    return h ^ (h >> 15)


def partition_of(key: bytes, partitions: int) -> int:
    """Where Kafka's default partitioner puts a record with this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def gating_partition(rollout: str, partitions: int = GATING_PARTITIONS) -> int:
    """The gating partition that owns a roll-out."""
    return partition_of(rollout.encode(), partitions)
