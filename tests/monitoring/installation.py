"""All processes of an installation, on a broker and a ClickHouse folder of a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pipeline.monitoring.metrics import ALL
from pipeline.store.client import connect
from pipeline.store.migrate import migrate
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, KLAXON, Worker
from tests.kafka.waiting import eventually
from tests.monitoring.scraping import get
from tests.workers.fleet import QUICK


def migrated(folder: Path) -> dict[str, str]:
    """An empty chDB folder, as configuration."""
    dsn = f"chdb://{folder}/chdb"
    store = connect(dsn, "klaxon", create_database=True)
    try:
        migrate(store, replicated=False, now_us=time.time_ns() // 1000)
    finally:
        store.close()
    return {"KLAXON_CLICKHOUSE_DSN": dsn, "KLAXON_ARCHIVE_BLOCK_AGE_MS": "200"}


@asynccontextmanager
async def everything(
    broker: Broker, logs: Path, folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Worker]]:
    """The four workers and a router."""
    clickhouse = await asyncio.to_thread(migrated, folder)
    settings = {**QUICK, **GAUGES_EVERY_SECOND, **clickhouse, **(environment or {})}
    async with AsyncExitStack() as stack:
        yield {
            kind: await stack.enter_async_context(
                Worker(
                    kind,
                    broker,
                    logs,
                    environment=settings,
                    command=(*KLAXON, "router") if kind == "router" else None,
                )
            )
            for kind in ALL
        }


async def until_ready(address: str) -> None:
    """`/readyz` answers 200."""

    async def ready() -> bool:
        return (await asyncio.to_thread(get, f"{address}/readyz")).status == 200

    await eventually(ready)
