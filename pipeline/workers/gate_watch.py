"""What stands on a gating partition's control topic beside the gate's own directives.

Outside the group, read-committed as routers read it: what a router could obey is seen here, nothing else.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from pipeline.config import KafkaConfig
from pipeline.workers.broker import client_options, isolation
from pipeline.workers.gate_signatures import UNSIGNED, GateSignatures
from schemas.control import Directive
from schemas.plain import Log, Plain
from schemas.records import read_json
from schemas.topics import Topic
from schemas.unpacking import AT_ONCE
from schemas.whole import whole

log: Log = logging.getLogger("klaxon.gate")

POLL_MS: Final = 500
PAUSE_S: Final = 0.2
"""Between two looks: whoever floods the topic is answered this often, not once a record."""
TELL_EVERY_S: Final = 10.0


class ControlWatch:
    """Follows one partition of the control topic from an offset on. `start` before use, `stop` after."""

    def __init__(self, kafka: KafkaConfig, partition: int, signatures: GateSignatures = UNSIGNED) -> None:
        self._signatures = signatures
        self._place = TopicPartition(Topic.CONTROL.value, partition)
        self._kafka = kafka
        self._consumer: AIOKafkaConsumer[bytes, bytes] | None = None
        """From `start` on: what never started has nothing to close."""
        self._own: set[bytes] = set()
        self._untold: Counter[str] = Counter()
        self._told_s = -TELL_EVERY_S

    async def start(self, first: int) -> None:
        """Connect, and read on at this offset; raises aiokafka's KafkaConnectionError."""
        self._consumer = AIOKafkaConsumer(
            **client_options(self._kafka),
            isolation_level=isolation(self._kafka),
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=POLL_MS,
            max_poll_records=10 * AT_ONCE,  # a flood is passed as fast as it is fetched
        )
        await whole(self._consumer.start())
        self._consumer.assign([self._place])
        self._consumer.seek(self._place, first)

    async def stop(self) -> None:
        """Disconnect."""
        if self._consumer is not None:
            await whole(self._consumer.stop())

    def expect(self, value: bytes) -> None:
        """The gate writes this: the first such record to come by is no foreign one. Kept until it does."""
        self._own.add(value)

    async def foreign(self) -> dict[str, list[Directive | None]]:
        """Foreign records since the last call, by the roll-out that is their key; waits at most POLL_MS.

        None stands for a tombstone, for what is no directive, for one of another roll-out than its key, and
        for one that no trusted key signed: routers pass over that, but compaction puts it in the place of
        ours. So its numbers count for nothing, and use none up.
        """
        assert self._consumer is not None, "not started"
        now_us = time.time_ns() // 1000
        found: dict[str, list[Directive | None]] = {}
        for records in (await self._consumer.getmany(self._place, timeout_ms=POLL_MS)).values():
            for record in records:
                if record.value is not None and record.value in self._own:
                    self._own.remove(record.value)
                    continue
                name = name_of(record.key)
                directive = directive_of(name, record.value)
                if not self._signatures.believes(record.key, record.value, dict(record.headers), now_us):
                    directive = None
                found.setdefault(name, []).append(directive)
        return found

    def tell(self, name: str | None, records: int, answer: str) -> None:
        """A warning about foreign records of a roll-out, at most one in TELL_EVERY_S. None: of no roll-out
        of ours; the key is a stranger's text then."""
        self._untold["others" if name is None or len(self._untold) >= 100 else name] += records
        if time.monotonic() - self._told_s < TELL_EVERY_S:
            return
        self._told_s = time.monotonic()
        said = ", ".join(f"{count} of {one[:60]!r}" for one, count in sorted(self._untold.items()))
        self._untold.clear()
        log.warning(
            "%s/%d: foreign records, which no gate wrote: %s; %s; find out who may write this topic "
            "(only the gate needs to)",
            Topic.CONTROL,
            self._place.partition,
            Plain(said),
            Plain(answer),
        )


def name_of(key: bytes | None) -> str:
    """The roll-out that a record's key names."""
    return (key or b"").decode("utf-8", "replace")


def directive_of(name: str, value: bytes | None) -> Directive | None:
    """The directive of this roll-out in a record's value; None if it is none."""
    if not value:
        return None
    try:
        directive = read_json(value, Directive)
    except msgspec.DecodeError:
        return None
    return directive if directive.rollout == name else None
