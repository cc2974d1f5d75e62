"""docs/operate.md, "Backup and restore": an archive restored from a backup goes on where its tables stand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import clickhouse_connect
import pytest

from pipeline.store.archive import Archive
from pipeline.store.blocks import BlockLimits
from pipeline.store.client import Store
from pipeline.store.migrate import migrate
from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.store.records import LogRecord, expected_places, request_log

NEVER = threading.Event()
CONFIG = "<clickhouse><backups><allowed_path>{}</allowed_path></backups></clickhouse>"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """chDB with a folder for backups, which is a server's setting."""
    config = tmp_path / "config.xml"
    config.write_text(CONFIG.format(tmp_path))
    client = clickhouse_connect.get_client(
        dsn=f"chdb://{tmp_path}/archive", chdb_options={"config-file": str(config)}
    )
    store = Store(client, "chdb", "klaxon", None, None)
    store.command("CREATE DATABASE klaxon")
    store.command("USE klaxon")
    migrate(store, now_us=1)
    yield store
    client.close()


def read(store: Store, log: list[LogRecord], boot: str) -> None:
    """What a worker does that starts on this log."""
    archive = Archive(store, BlockLimits(rows=40, size_bytes=1 << 20, age_us=1_000), boot)
    part = archive.open_partition(Topic.REQUESTS, 0)
    for record in log:
        if record.offset >= part.read_from:
            part.add(record, record.offset)
    while block := part.take(1 << 40, force=True):
        assert archive.store_block(block, NEVER)
        part.stored(block)


def places(store: Store) -> list[tuple[int, int]]:
    return [(off, pos) for off, pos in store.rows("SELECT off, pos FROM v_inference_log ORDER BY off, pos")]


def test_what_came_after_the_backup_is_read_again_from_the_log(store: Store, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "operate.md").read_text()
    backup, restore = "BACKUP DATABASE klaxon TO", "RESTORE DATABASE klaxon FROM"
    assert f"{backup} Disk(" in page
    assert f"{restore} Disk(" in page
    log = request_log(7, 60)
    read(store, log[:30], "before")
    store.rows(f"{backup} File('{tmp_path}/backup')")
    read(store, log, "after")
    assert places(store) == expected_places(log)
    store.command("DROP DATABASE klaxon SYNC")
    store.rows(f"{restore} File('{tmp_path}/backup')")
    store.command("USE klaxon")
    assert places(store) == expected_places(log[:30])
    assert not migrate(store, now_us=2).applied
    read(store, log, "restored")
    assert places(store) == expected_places(log)


def test_what_the_log_no_longer_has_is_lost(store: Store, tmp_path: Path) -> None:
    log = request_log(8, 60)
    read(store, log[:30], "before")
    read(store, log[45:], "late")
    assert places(store) == expected_places([*log[:30], *log[45:]])
