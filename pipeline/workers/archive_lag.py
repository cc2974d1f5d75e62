"""Asks the broker how far the archive is behind, and says so before retention deletes what it has not stored.

Beside the worker's own consumer, which fetches nothing while ClickHouse is away and so knows no end. Kafka's
commit stands in for the table's word while that cannot be asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from aiokafka import TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from pipeline.config import KafkaConfig
from pipeline.store.lag import Lag, Standing, lag_of, risk_line
from pipeline.workers.broker import BrokerError, RangeReader, admin_client
from pipeline.workers.records import Partition
from schemas.plain import Log, Plain

log: Log = logging.getLogger("klaxon.archive")

ASK_EVERY_S: Final = 5.0
ANSWER_WITHIN_S: Final = 40.0
RETENTION_EVERY_S: Final = 120.0
SAY_EVERY_S: Final = 60.0

Stored = tuple[int, int | None]
"""First offset that is not stored, and its append time where it was read already."""


class LagWatch:
    """Lags of the partitions of one archive worker, in its event loop."""

    def __init__(self, group: str, kafka: KafkaConfig) -> None:
        self._group = group
        self._kafka = kafka
        self._reader: RangeReader | None = None
        self._retention_us: Mapping[str, int | None] = {}
        self._retention_asked_s = -RETENTION_EVERY_S
        self._found: dict[tuple[Partition, int, int], int | None] = {}
        self._said_s = -SAY_EVERY_S
        self.lags: Mapping[Partition, Lag] = {}
        """By partition, as of the last answer; empty while the broker gives none."""

    async def run(self, stored: Callable[[], Mapping[Partition, Stored | None]]) -> None:
        """Ask now and then, for ever. `stored`: our partitions; None where the table has not answered."""
        try:
            while True:
                try:
                    async with asyncio.timeout(ANSWER_WITHIN_S):
                        self.lags = await self._ask(dict(stored()))
                except (KafkaError, BrokerError, OSError) as error:  # TimeoutError is an OSError
                    self.lags = {}
                    log.info("how far the archive is behind cannot be told: %r", error)
                    await self._close()
                self._warn()
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            await self._close()

    def gauges(self) -> dict[str, int]:
        """Over all partitions."""
        return {
            "lag_records": sum(lag.lag_records for lag in self.lags.values()),
            "behind_us": max((lag.behind_us for lag in self.lags.values()), default=0),
            "retention_at_risk": sum(lag.at_risk for lag in self.lags.values()),
        }

    def _warn(self) -> None:
        risky = {place: lag for place, lag in self.lags.items() if lag.at_risk}
        now_s = time.monotonic()
        if not risky or now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        worst = max(risky, key=lambda place: (risky[place].deleted_records, risky[place].behind_us))
        log.warning("%s", Plain(risk_line(str(worst), risky[worst], len(risky) - 1)))

    async def _ask(self, stored: dict[Partition, Stored | None]) -> dict[Partition, Lag]:
        if not stored:
            return {}
        if self._reader is None:
            reader = RangeReader(self._kafka)
            await reader.start()
            self._reader = reader
        await self._refresh_retention({place.topic for place in stored})
        begins, ends = await self._reader.begin_offsets(stored), await self._reader.end_offsets(stored)
        unopened = [place for place, at in stored.items() if at is None]
        committed = await self._committed(unopened) if unopened else {}
        lags, found = {}, {}
        for place, at in stored.items():
            next_offset, append_us = at or (committed.get(place, begins[place]), None)
            if append_us is None and next_offset < ends[place]:
                key = (place, max(next_offset, begins[place]), ends[place])
                append_us = found[key] = await self._append_time(key)
            standing = Standing(
                next_offset, begins[place], ends[place], append_us, self._retention_us.get(place.topic)
            )
            lags[place] = lag_of(standing, time.time_ns() // 1000)
        self._found = found
        return lags

    async def _append_time(self, key: tuple[Partition, int, int]) -> int | None:
        """Of the first record there, where there is one."""
        if key in self._found:
            return self._found[key]
        place, first, end = key
        assert self._reader is not None
        records = self._reader.read({place: (first, end)})
        try:
            async for record in records:
                return record.append_us
        finally:
            await records.aclose()  # type: ignore[attr-defined]
        return None

    async def _committed(self, places: list[Partition]) -> dict[Partition, int]:
        async with admin_client(self._kafka) as admin:
            partitions = [TopicPartition(*place) for place in places]
            found = await admin.list_consumer_group_offsets(self._group, partitions=partitions)
        return {Partition(*at): said.offset for at, said in found.items() if said.offset >= 0}

    async def _refresh_retention(self, topics: set[str]) -> None:
        now_s = time.monotonic()
        if not self._kafka.append_time:
            return  # the embedded broker keeps no settings
        if now_s - self._retention_asked_s < RETENTION_EVERY_S and topics <= self._retention_us.keys():
            return
        found: dict[str, int | None] = {}
        async with admin_client(self._kafka) as admin:
            wanted = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in sorted(topics)]
            for answer in await admin.describe_configs(wanted):
                for code, _message, _kind, name, entries in answer.resources:
                    if code == 0:
                        settings = {entry[0]: entry[1] for entry in entries}
                        retention_ms = int(settings.get("retention.ms", -1))
                        found[name] = retention_ms * 1000 if retention_ms >= 0 else None
        self._retention_us, self._retention_asked_s = found, now_s

    async def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.stop()
