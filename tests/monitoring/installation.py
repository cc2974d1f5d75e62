"""All processes of an installation, on a broker and a ClickHouse folder of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from pipeline.monitoring.metrics import WORKERS
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, KLAXON, Worker
from tests.kafka.waiting import eventually
from tests.monitoring.scraping import get
from tests.store.folder import migrated
from tests.workers.fleet import QUICK

STARTED = (*WORKERS, "router", "notify")


@asynccontextmanager
async def everything(
    broker: Broker, logs: Path, folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Worker]]:
    """The four workers, a router, and a notifier whose receiver is away."""
    clickhouse = await asyncio.to_thread(migrated, folder)
    notified = {"KLAXON_NOTIFY_URL": "http://127.0.0.1:9/", "KLAXON_NOTIFY_SECRET": "whsec_" + "a2tr" * 8}
    settings = {**notified, **QUICK, **GAUGES_EVERY_SECOND, **clickhouse, **(environment or {})}
    async with AsyncExitStack() as stack:
        yield {
            kind: await stack.enter_async_context(
                Worker(
                    kind,
                    broker,
                    logs,
                    environment=settings,
                    command=None if kind in WORKERS else (*KLAXON, kind),
                )
            )
            for kind in STARTED
        }


async def until_ready(address: str) -> None:
    """`/readyz` answers 200."""

    async def ready() -> bool:
        with suppress(OSError, HTTPException):  # a busy machine's: asked again
            return (await asyncio.to_thread(get, f"{address}/readyz")).status == 200
        return False

    await eventually(ready)
