"""What the gateway of the live demo has published, read back from the topics: nothing is taken on trust."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer
from aiokafka.structs import ConsumerRecord

from pipeline.cli.demo.fleet import FAULTY_NODE, ROLLOUT
from pipeline.cli.demo.play import Played, Sent
from pipeline.cli.demo.prompts import BOUNDARY_TOKENS
from pipeline.workers.broker import started
from schemas.codec import decode_logits, decode_requests
from schemas.columns import BASELINE, CANARY, CONTROL, LogitColumns
from schemas.control import Applied
from schemas.topics import CONTENT_TYPE, Topic

TOPICS: Final = (Topic.REQUESTS, Topic.LOGITS, Topic.APPLIED)


@dataclass(slots=True)
class _Half:
    complete_us: int
    node: str
    input_tokens: int
    ts_us: int


@dataclass(slots=True)
class Witness:
    """Counts events of the demo's roll-out as they come."""

    router: str
    """Whose reports of applied directives are waited for."""
    played: Played = field(default_factory=Played)
    fault_since_us: int | None = None
    """When the node went wrong; requests that arrived later may be damaged."""
    applied: int = 0
    """Reports of `router`."""
    _halves: dict[str, dict[int, _Half]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def watching(self, bootstrap: str) -> AsyncIterator[None]:
        """Read the topics from their beginnings until the end of the block."""
        made = AIOKafkaConsumer(
            *(topic.value for topic in TOPICS),
            bootstrap_servers=bootstrap,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        async with started(made) as consumer:
            reading = asyncio.create_task(self._read(consumer))
            try:
                yield
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()

    async def until(self, *, pairs: int = 0, events: int = 0, applied: int = 0, timeout_s: float) -> bool:
        """Wait for so many pairs, request events and reports; False when they did not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.played.pairs < pairs or self.played.events < events or self.applied < applied:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                for record in records:
                    self._note(record)
            self._news.set()

    def _note(self, record: ConsumerRecord) -> None:
        content_type = dict(record.headers).get(CONTENT_TYPE)
        kind = content_type.decode() if content_type else None
        if record.topic == Topic.APPLIED:
            said = msgspec.json.decode(record.value, type=Applied)
            self.applied += said.router == self.router and said.rollout == ROLLOUT
        elif record.topic == Topic.REQUESTS:
            self.played.events += decode_requests(record.value, kind).columns.n
        else:
            columns = decode_logits(record.value, kind).columns
            for row in range(columns.n):
                self._half(columns, row)

    def _half(self, columns: LogitColumns, row: int) -> None:
        pair_id = bytes(columns.pair_id[row]).hex()
        arm = int(columns.arm[row])
        ts_us = int(columns.ts_us[row])
        halves = self._halves.setdefault(pair_id, {})
        if arm in halves:
            return
        node = columns.labels["node"].get(row) or ""
        complete_us = ts_us + int(columns.duration_us[row])
        halves[arm] = _Half(complete_us, node, int(columns.input_tokens[row]), ts_us)
        if BASELINE in halves and CANARY in halves and arm != CONTROL:
            self._pair(pair_id, halves[BASELINE], halves[CANARY])
        if BASELINE in halves and CONTROL in halves and arm != CANARY:
            self.played.controls += 1

    def _pair(self, pair_id: str, baseline: _Half, canary: _Half) -> None:
        since_us = self.fault_since_us
        affected = (
            since_us is not None
            and canary.ts_us >= since_us
            and canary.node == FAULTY_NODE
            and canary.input_tokens > BOUNDARY_TOKENS
        )
        later = "canary" if canary.complete_us >= baseline.complete_us else "baseline"
        self.played.pairs += 1
        self.played.affected += affected
        self.played.sent[pair_id] = Sent(
            max(baseline.complete_us, canary.complete_us),
            "canary" if later == "canary" else "baseline",
            canary.node,
            canary.input_tokens,
            affected,
        )
