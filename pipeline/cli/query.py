"""A read-only query of the archive, wherever it is: a server, a chDB folder, or the worker that owns one."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.store.client import connect_read_only
from pipeline.store.embedded import embedded_folder
from pipeline.store.errors import FolderInUseError, StoreError
from pipeline.store.queries import QueryResult, query_endpoint, run_query


def answered(query: str, config: Config) -> QueryResult:
    """The rows; blocks. Raises StoreUnavailableError, FolderInUseError, QueryError, StoreError."""
    clickhouse, listen = config.clickhouse, config.archive.query_listen
    folder = embedded_folder(clickhouse.dsn)
    if folder is not None and not folder.is_dir():
        raise StoreError(f"{clickhouse.dsn}: no such folder; `klaxon migrate` creates the archive")
    try:
        store = connect_read_only(
            clickhouse.dsn,
            clickhouse.database,
            username=clickhouse.username,
            password=clickhouse.password.reveal(),
        )
    except FolderInUseError as error:
        if listen is None:
            raise FolderInUseError(
                f"{clickhouse.dsn}: another process owns this folder; give the archive worker a query "
                "address (archive.query_listen: 127.0.0.1:PORT), the same in this command's configuration"
            ) from error
        return query_endpoint(listen, query)
    try:
        return run_query(store, query)
    finally:
        store.close()
