"""A chDB folder for processes of a test."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.store.client import connect
from pipeline.store.migrate import migrate


def migrated(folder: Path) -> dict[str, str]:
    """Make an empty, migrated chDB in this folder; returns it as configuration. Blocks.

    It belongs to whoever opens it next.
    """
    dsn = f"chdb://{folder}/chdb"
    store = connect(dsn, "klaxon", create_database=True)
    try:
        migrate(store, replicated=False, now_us=time.time_ns() // 1000)
    finally:
        store.close()
    return {"KLAXON_CLICKHOUSE_DSN": dsn, "KLAXON_ARCHIVE_BLOCK_AGE_MS": "200"}
