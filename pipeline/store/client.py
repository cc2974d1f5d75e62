"""ClickHouse through clickhouse-connect: a server over HTTP, or chDB in this process, behind one handle.

Every call blocks; run it in a thread. A `Store` may be shared by threads. One process owns a chDB folder.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import clickhouse_connect
import cramjam
from clickhouse_connect.driver.exceptions import (
    ClickHouseError,
    DataError,
    InternalError,
    OperationalError,
)

from pipeline.secret import without_password
from pipeline.store.columns import Columns
from pipeline.store.embedded import closed, embedded_folder, opened, owned_by_another
from pipeline.store.errors import (
    FolderInUseError,
    QueryError,
    RowError,
    StoreError,
    StoreUnavailableError,
)
from pipeline.store.native import native_block
from pipeline.store.watched_pool import WatchedPool, says_all_written

EMBEDDED_MEMORY_BYTES: Final = 2 << 30
CONNECT_TIMEOUT_S: Final = 5
ANSWER_TIMEOUT_S: Final = 120
UNKNOWN_DATABASE: Final = 81
UNKNOWN_TABLE: Final = 60

INSERT_SETTINGS: Final[Mapping[str, object]] = {
    # One insert, one block, one answer (async_insert is on by default since 26.2).
    "async_insert": 0,
    # Rows of equal key stay as inserted until a merge: what was sent can be counted right afterwards.
    "optimize_on_insert": 0,
    # The answer begins when all is done: its status and its count of rows are those of the whole insert.
    "wait_end_of_query": 1,
}

# Every error is raised as well, and the driver's log lines quote rows (C2).
logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)

_CODE: Final = re.compile(r"Code: (\d+)")
_GARBLED: Final = (ValueError, LookupError, TypeError, ArithmeticError, struct.error, EOFError)
"""What the driver's parser raises at an answer that is none of ClickHouse's, or only half of one."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What one read-only query may take."""

    memory_bytes: int = 2 << 30
    time_s: int = 60
    rows: int = 1_000_000

    @property
    def settings(self) -> dict[str, object]:
        """As ClickHouse settings."""
        return {
            "max_memory_usage": self.memory_bytes,
            "max_execution_time": self.time_s,
            "max_result_rows": self.rows,
            "result_overflow_mode": "throw",
        }


class Store:
    """An open connection. Raises StoreUnavailableError, QueryError or RowError, never the driver's own."""

    def __init__(
        self, client: Any, where: str, database: str, folder: Path | None, pool: WatchedPool | None
    ) -> None:
        self._client = client
        self._pool = pool
        self._where = where
        self._folder = folder
        self._turns = threading.Lock()
        self.database: Final = database
        self._column_types: dict[tuple[str, tuple[str, ...]], Any] = {}

    @property
    def embedded(self) -> bool:
        """Whether ClickHouse runs inside this process."""
        return self._folder is not None

    @property
    def where(self) -> str:
        """The address, fit for messages."""
        return self._where

    def command(self, sql: str, parameters: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing."""
        try:
            self._client.command(sql, parameters=parameters)
        except ClickHouseError as error:
            raise _translated(error, self._where) from None

    def rows(self, sql: str, parameters: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        try:
            return list(self._client.query(sql, parameters=parameters).result_rows)
        except ClickHouseError as error:
            raise _translated(error, self._where) from None
        except _GARBLED as error:
            raise _unreadable(error, self._where) from error

    def row(self, sql: str, parameters: Mapping[str, object] | None = None) -> tuple[Any, ...]:
        """The one row of a query that always has one: an answer without it was cut on its way."""
        rows = self.rows(sql, parameters)
        if len(rows) != 1:
            raise StoreUnavailableError(f"ClickHouse at {self._where}: an answer of {len(rows)} rows, not 1")
        return rows[0]

    def text(self, sql: str, form: str) -> bytes:
        """A query's whole result in one of ClickHouse's output formats. Threads take turns where embedded."""
        with self._turns if self.embedded else nullcontext():
            try:
                result: bytes = self._client.raw_query(sql, fmt=form)
            except ClickHouseError as error:
                self._drop_remains()
                raise _translated(error, self._where) from None
        return result

    def _drop_remains(self) -> None:
        """What chDB had written of an answer when the query failed stands before its next answer: take it."""
        if self.embedded:
            with suppress(ClickHouseError):
                self._client.raw_query("SELECT 1", fmt="TSVRaw")

    def insert(self, table: str, columns: Columns, token: str) -> bool:
        """Insert columns of equal length as one block under a de-duplication token.

        Returns whether it is sure that all rows are stored now. It is not if the driver met a broken
        connection and sent them again, or if the answer does not say how many were written.
        A token stands for exactly these rows: ClickHouse silently drops other rows under a used token.
        Raises RowError where a value does not fit its column.
        """
        names = tuple(columns)
        try:
            types = self._column_types.get((table, names))
            if types is None:
                context = self._client.create_insert_context(table, column_names=names)
                types = self._column_types[table, names] = context.column_types
            block = native_block(table, columns, types)
            before = self._pool.requests if self._pool is not None else 0
            self._client.raw_insert(
                table,
                names,
                block if self._pool is None else bytes(cramjam.lz4.compress(block, level=0)),
                settings={**INSERT_SETTINGS, "insert_deduplication_token": token},
                fmt="Native",
                compression=None if self._pool is None else "lz4",
            )
        except DataError as error:
            raise RowError(f"table {table}: {_first_line(error)}") from None
        except ClickHouseError as error:
            raise _translated(error, self._where) from None
        except _GARBLED as error:
            raise _unreadable(error, self._where) from error
        except OSError as error:  # chDB reads the rows from a file that the driver writes
            raise StoreUnavailableError(f"ClickHouse at {self._where}: {error}") from None
        if self._pool is None:
            return True
        rows = len(next(iter(columns.values())))
        return self._pool.requests - before == 1 and says_all_written(self._pool.answer, rows)

    def cut(self) -> None:
        """Break the connections to a server: calls that wait for its answer fail at once. From any thread.

        Calls of an embedded ClickHouse end by themselves.
        """
        if self._pool is not None:
            self._pool.cut()

    def warm_up(self) -> None:
        """Pay what the first insert costs (seconds: the driver imports pandas) before records wait for it."""
        if not self.embedded:
            self.rows("SELECT 1")
            return
        self.command("CREATE TEMPORARY TABLE IF NOT EXISTS warm_up (n UInt8) ENGINE = Memory")
        self.insert("warm_up", {"n": [0]}, token="warm-up")  # noqa: S106 (no secret)
        self.command("DROP TABLE IF EXISTS warm_up")

    def close(self) -> None:
        """Close the connection; a chDB folder is free again once all of this process's are closed."""
        self._client.close()
        if self._pool is not None:
            self._pool.clear()
        if self._folder is not None:
            closed(self._folder)


def connect(
    dsn: str,
    database: str,
    *,
    username: str = "default",
    password: str = "",
    create_database: bool = False,
    settings: Mapping[str, object] | None = None,
    timeout_s: int = ANSWER_TIMEOUT_S,
    pool: WatchedPool | None = None,
) -> Store:
    """Open a connection; blocks (chDB: 1-4 s). `timeout_s`: how long a server may keep silent in an answer.

    `pool`: a new one, for whoever may have to cut an opening that gets no answer (a server's only).
    Raises FolderInUseError (chDB folder owned by another process), StoreUnavailableError, QueryError
    (code 81: no such database and not `create_database`) or StoreError (wrong address).
    """
    folder = embedded_folder(dsn)
    where = without_password(dsn)
    if create_database:
        first = _open(dsn, None, username, password, folder, settings, None, timeout_s)
        try:
            first.command(f"CREATE DATABASE IF NOT EXISTS `{database}`")
        except ClickHouseError as error:
            raise _translated(error, where) from None
        finally:
            first.close()
    if folder is None and pool is None:
        pool = WatchedPool()
    client = _open(dsn, database, username, password, folder, settings, pool, timeout_s)
    if folder is not None:
        opened(folder)
    return Store(client, where, database, folder, pool)


def connect_read_only(
    dsn: str,
    database: str,
    *,
    username: str = "default",
    password: str = "",
    limits: ReadLimits | None = None,
) -> Store:
    """A connection for analysts: can only select, within the limits. Raises as `connect`.

    On a server the account's own rights come first; this is a second line, not an access control.
    """
    wanted = (limits or ReadLimits()).settings
    if embedded_folder(dsn) is None:
        return connect(
            dsn, database, username=username, password=password, settings={**wanted, "readonly": 1}
        )
    store = connect(dsn, database, settings=wanted)
    # Last, and for good: a handle that is read-only refuses every change of a setting.
    store.command("SET readonly = 1")
    return store


def _open(
    dsn: str,
    database: str | None,
    username: str,
    password: str,
    folder: Path | None,
    settings: Mapping[str, object] | None,
    pool: WatchedPool | None,
    timeout_s: int,
) -> Any:
    arguments: dict[str, Any] = {"settings": dict(settings or {})}
    if database is not None:
        arguments["database"] = database
    if folder is not None:
        if owned_by_another(folder):
            raise FolderInUseError(
                f"{dsn}: another process owns this folder; a chDB folder has one owner. Stop it, or query "
                "through it (archive.query_listen)"
            )
        arguments["chdb_options"] = {"max_server_memory_usage": EMBEDDED_MEMORY_BYTES}
    else:
        if urlsplit(dsn).username is None:
            arguments |= {"username": username, "password": password}
        arguments |= {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "send_receive_timeout": timeout_s,
            # Sessions serialise; our statements share none.
            "autogenerate_session_id": False,
            "pool_mgr": pool,
        }
    try:
        return clickhouse_connect.get_client(dsn=dsn, **arguments)
    except ClickHouseError as error:
        translated = _translated(error, without_password(dsn))
        if isinstance(translated, QueryError) and translated.code == UNKNOWN_DATABASE:
            raise QueryError(
                f"{without_password(dsn)}: no database {database!r}; create it with `klaxon migrate`",
                UNKNOWN_DATABASE,
            ) from None
        raise translated from None
    except ImportError:
        raise StoreError(f"{dsn}: chDB is not installed; pip install 'klaxon[embedded]'") from None
    except OSError as error:
        raise StoreUnavailableError(f"{without_password(dsn)}: {error}") from None


def _translated(error: ClickHouseError, where: str) -> StoreError:
    message = _first_line(error)
    found = _CODE.search(message)
    if "EmbeddedServer" in message:
        return FolderInUseError(f"{where}: cannot be opened: {message}")
    if found is None and isinstance(error, OperationalError | InternalError):
        return StoreUnavailableError(f"ClickHouse at {where} cannot be reached: {_short(message)}")
    return QueryError(message, int(found.group(1)) if found else None)


def _unreadable(error: Exception, where: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"ClickHouse at {where}: an answer that cannot be read ({type(error).__name__})"
    )


def _first_line(error: Exception) -> str:
    """ClickHouse's own message without what the driver puts around it, first line only."""
    message = str(error).strip() or type(error).__name__
    found = re.search(r"Code: \d+\. DB::Exception:", message)
    return message[found.start() if found else 0 :].splitlines()[0].partition(" (for url ")[0]


def _short(message: str) -> str:
    refused = re.search(r"\[Errno \d+\] ([A-Za-z ]+)", message)
    return refused.group(1) if refused else message[:300]
