"""All processes of an installation, on a broker and a ClickHouse folder of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pipeline.monitoring.metrics import ALL
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, KLAXON, Worker
from tests.kafka.waiting import eventually
from tests.monitoring.scraping import get
from tests.store.folder import migrated
from tests.workers.fleet import QUICK


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
