"""`/metrics`, `/healthz` and `/readyz` of a process that is no worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from pipeline.config import MonitoringConfig
from pipeline.monitoring.endpoint import Asked, Endpoint
from pipeline.monitoring.exposition import Snapshot
from pipeline.monitoring.metrics import Gauges
from pipeline.monitoring.process import resident_bytes
from schemas.header_names import batches_left_out

BEAT_EVERY_S: Final = 0.5


@asynccontextmanager
async def monitored(
    process: str,
    config: MonitoringConfig,
    *,
    gauges: Callable[[], Gauges],
    missing: Callable[[], tuple[str, ...]],
) -> AsyncIterator[None]:
    """Answer for this process meanwhile. `gauges`, `missing`: as of `Asked`, without the process's own."""
    started_us, beat_s = time.time_ns() // 1000, time.monotonic()

    def snapshot() -> Snapshot:
        own = {
            "rss_bytes": resident_bytes(),
            "started_us": started_us,
            "ready": int(not missing()),
            "batches_left_out": batches_left_out(),
        }
        return Snapshot({"process": own, **gauges()})

    async def beat() -> None:
        nonlocal beat_s
        while True:
            beat_s = time.monotonic()
            await asyncio.sleep(BEAT_EVERY_S)

    beating = asyncio.create_task(beat())
    endpoint = Endpoint(config, Asked(process, snapshot, missing, lambda: beat_s))
    endpoint.start()
    try:
        yield
    finally:
        endpoint.stop()
        beating.cancel()
