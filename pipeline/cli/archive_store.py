"""The store of an archive worker: connected, warmed up, and open to read-only queries where configured."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pipeline.config import Config
from pipeline.store.archive import Archive, Step
from pipeline.store.blocks import BlockLimits
from pipeline.store.client import connect, connect_read_only
from pipeline.store.errors import QueryError, StoreUnavailableError
from pipeline.store.queries import QueryEndpoint
from pipeline.workers.broker import back_off_s
from pipeline.workers.faults import fault

log = logging.getLogger("klaxon.archive")

T = TypeVar("T")


@contextmanager
def opened_archive(config: Config) -> Iterator[Archive]:
    """The archive on the configured ClickHouse; waits for it with back-off. Blocks."""
    clickhouse, limits = config.clickhouse, config.archive
    dsn, database, user = clickhouse.dsn, clickhouse.database, clickhouse.username
    password = clickhouse.password
    timeout_s = clickhouse.timeout_s
    store = _once_available(
        lambda: connect(dsn, database, username=user, password=password, timeout_s=timeout_s)
    )
    endpoint = None
    try:
        _once_available(store.warm_up)
        if limits.query_listen is not None:
            readers = connect_read_only(dsn, database, username=user, password=password)
            endpoint = QueryEndpoint(readers, limits.query_listen)
            log.info("read-only queries are answered at %s", endpoint.address)
        yield Archive(
            store,
            BlockLimits(limits.block_rows, limits.block_bytes, limits.block_age_ms * 1_000),
            boot_id=uuid.uuid4().hex,
            passing=_passing,
        )
    finally:
        if endpoint is not None:
            endpoint.close()
        store.close()


def _passing(step: Step) -> None:
    if step == "before_insert":
        fault("before_insert")
        fault("inside_insert", soon=True)
    else:
        fault("after_insert_before_commit")


def _once_available(action: Callable[[], T]) -> T:
    attempt = 0
    while True:
        try:
            return action()
        except (StoreUnavailableError, QueryError) as error:
            delay_s = back_off_s(attempt)
            log.warning("%s; trying again in %.1f s (a new database: run `klaxon migrate`)", error, delay_s)
            time.sleep(delay_s)
            attempt += 1
