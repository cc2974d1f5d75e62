"""Real chDB. One process hosts one folder at a time: each module its own, each test a database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store.client import Store, connect
from pipeline.store.migrate import migrate

_numbers = itertools.count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DSN of an open chDB folder."""
    dsn = f"chdb://{tmp_path_factory.mktemp('chdb') / 'archive'}"
    holder = connect(dsn, "scratch", create_database=True)
    holder.warm_up()
    yield dsn
    holder.close()


@pytest.fixture
def empty_store(engine: str) -> Iterator[Store]:
    """A connection to a database without tables."""
    store = connect(engine, f"t{next(_numbers)}", create_database=True)
    yield store
    store.close()


@pytest.fixture
def store(empty_store: Store) -> Store:
    """A connection to a migrated database."""
    migrate(empty_store, now_us=1)
    return empty_store


def folder_of(dsn: str) -> Path:
    return Path("/" + dsn.removeprefix("chdb://").lstrip("/"))
