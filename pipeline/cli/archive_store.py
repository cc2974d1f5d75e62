"""The store of an archive worker: connected, warmed up, and open to read-only queries where configured."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

from pipeline.config import Config
from pipeline.store.archive import Archive, Step
from pipeline.store.blocks import BlockLimits
from pipeline.store.client import Store, connect, connect_read_only
from pipeline.store.embedded import embedded_folder
from pipeline.store.errors import QueryError, StoreUnavailableError
from pipeline.store.queries import QueryEndpoint
from pipeline.store.watched_pool import WatchedPool
from pipeline.workers.broker import back_off_s
from pipeline.workers.faults import fault
from schemas.plain import Log, Plain

log: Log = logging.getLogger("klaxon.archive")

T = TypeVar("T")


class ArchiveOpener:
    """Opens the archive on the configured ClickHouse, once; `close` when done with it."""

    def __init__(self, config: Config) -> None:
        """Raises StoreError on an address that is none."""
        self._clickhouse = config.clickhouse
        self._limits = config.archive
        self._pool: WatchedPool | None = None
        self._exits = ExitStack()
        self._archive: Archive | None = None
        self.embedded = embedded_folder(config.clickhouse.dsn) is not None

    def open(self) -> Archive:
        """Connected, warmed up, answering read-only queries where configured. Blocks; not re-entrant.

        Raises StoreUnavailableError or QueryError while ClickHouse cannot be used; other StoreErrors stay.
        """
        if self._archive is None:
            with ExitStack() as exits:
                store = exits.enter_context(closing(self._connect()))
                store.warm_up()
                if self._limits.query_listen is not None:
                    self._answer_queries(exits, self._limits.query_listen)
                self._exits = exits.pop_all()
            limits = self._limits
            self._archive = Archive(
                store,
                BlockLimits(limits.block_rows, limits.block_bytes, limits.block_age_ms * 1_000),
                boot_id=uuid.uuid4().hex,
                passing=_passing,
            )
        return self._archive

    def cut(self) -> None:
        """Make an `open` that waits for a server's answer fail at once. From any thread."""
        if self._pool is not None:
            self._pool.cut()

    def close(self) -> None:
        """Close what was opened."""
        self._exits.close()

    def _connect(self) -> Store:
        clickhouse = self._clickhouse
        self._pool = None if self.embedded else WatchedPool()
        return connect(
            clickhouse.dsn,
            clickhouse.database,
            username=clickhouse.username,
            password=clickhouse.password.reveal(),
            timeout_s=clickhouse.timeout_s,
            pool=self._pool,
        )

    def _answer_queries(self, exits: ExitStack, listen: str) -> None:
        clickhouse = self._clickhouse
        readers = connect_read_only(
            clickhouse.dsn,
            clickhouse.database,
            username=clickhouse.username,
            password=clickhouse.password.reveal(),
        )
        endpoint = exits.enter_context(closing(QueryEndpoint(readers, listen)))
        log.info("read-only queries are answered at %s", Plain(endpoint.address))


@contextmanager
def archive_opener(config: Config) -> Iterator[ArchiveOpener]:
    """What opens the archive. An engine in this process is opened by now, and waited for: it blocks.

    A server need not be there yet: the worker connects, and shows meanwhile how far it is behind.
    """
    with closing(ArchiveOpener(config)) as opener:
        if opener.embedded:
            _once_available(opener.open)
        yield opener


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
