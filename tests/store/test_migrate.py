"""Migrations: applied once, in order, recorded; what was edited or is missing is refused by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pipeline.store.archive import TABLES
from pipeline.store.client import Store
from pipeline.store.errors import MigrationError
from pipeline.store.migrate import FOLDER, load, migrate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "migrations"
    shutil.copytree(FOLDER, copy)
    return copy


def test_creates_every_table_and_view_once(empty_store: Store) -> None:
    files = tuple(migration.file for migration in load())
    assert migrate(empty_store, now_us=5).applied == files
    again = migrate(empty_store, now_us=6)
    assert (again.applied, again.present) == ((), files)
    names = {name for (name,) in empty_store.rows("SHOW TABLES")}
    assert {*TABLES.values(), *(f"v_{table}" for table in TABLES.values())} < names


def test_views_hide_the_bookkeeping_and_show_times_in_microseconds(store: Store) -> None:
    for table in TABLES.values():
        columns = dict(row[:2] for row in store.rows(f"DESCRIBE v_{table}"))
        assert not {"blk_first", "blk_last", "blk_rows", "blk_boot", "day"} & columns.keys()
        times = {name: kind for name, kind in columns.items() if kind.startswith("Date")}
        assert times
        assert set(times.values()) <= {"DateTime64(6, 'UTC')", "Nullable(DateTime64(6, 'UTC'))"}


def test_an_edited_file_is_refused_by_name(empty_store: Store, folder: Path) -> None:
    migrate(empty_store, folder=folder, now_us=1)
    edited = folder / "0003_pair_scores.sql"
    edited.write_text(edited.read_text() + "\n")
    with pytest.raises(MigrationError, match=r"0003_pair_scores\.sql was edited after it had been applied"):
        migrate(empty_store, folder=folder, now_us=2)


def test_an_applied_file_that_is_gone_is_refused_by_name(empty_store: Store, folder: Path) -> None:
    (folder / "0008_later.sql").write_text("CREATE TABLE later (n UInt8) ENGINE = MergeTree ORDER BY n;\n")
    migrate(empty_store, folder=folder, now_us=1)
    (folder / "0008_later.sql").unlink()
    with pytest.raises(MigrationError, match=r"0008_later\.sql was applied .* newer than this Klaxon"):
        migrate(empty_store, folder=folder, now_us=2)


def test_a_new_file_is_applied_alone(empty_store: Store, folder: Path) -> None:
    migrate(empty_store, folder=folder, now_us=1)
    (folder / "0008_later.sql").write_text(
        "-- A comment; with a semicolon.\nCREATE TABLE later (n UInt8) ENGINE = MergeTree ORDER BY n;\n"
        "INSERT INTO later VALUES (1), (2);"
    )
    assert migrate(empty_store, folder=folder, now_us=2).applied == ("0008_later.sql",)
    assert empty_store.rows("SELECT sum(n) FROM later") == [(3,)]


def test_a_crash_inside_a_file_is_mended_by_running_again(empty_store: Store) -> None:
    first = load()[0]
    empty_store.command("CREATE TABLE schema_migrations (n UInt8) ENGINE = Memory")
    empty_store.command("DROP TABLE schema_migrations")
    empty_store.command(first.statements(replicated=False)[0])
    assert first.file in migrate(empty_store, now_us=1).applied


def test_names_and_numbers_are_checked(tmp_path: Path) -> None:
    (tmp_path / "0001_a.sql").write_text("")
    (tmp_path / "0003_b.sql").write_text("")
    with pytest.raises(MigrationError, match="number 0002 is expected"):
        load(tmp_path)
    (tmp_path / "2_B.sql").write_text("")
    with pytest.raises(MigrationError, match="name it NNNN_lower_case"):
        load(tmp_path)


def test_replicated_tables_differ_in_their_engine_alone() -> None:
    for migration in load():
        plain = "\n".join(migration.statements(replicated=False))
        replicated = "\n".join(migration.statements(replicated=True))
        assert "{" not in plain
        assert len(re.findall(r"ENGINE = ReplicatedReplacingMergeTree", replicated)) == 1
        assert replicated.replace("ReplicatedReplacing", "Replacing") == plain
