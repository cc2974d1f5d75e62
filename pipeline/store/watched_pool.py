"""HTTP connections to ClickHouse of which can be told what became of an insert."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from clickhouse_connect.driver.httputil import get_pool_manager_options
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection

MOST_IDLE: Final = 256
"""Connections that are kept for the next insert: as many as the archive has threads; more would be thrown
away after each answer, with a line in the log."""


class WatchedPool(PoolManager):
    """HTTP connections that remember, per thread, what was asked and answered, and that can all be cut.

    The driver sends an insert again unasked when the connection breaks, and takes every answer of status 200
    for a success, whatever it says: both must be seen.
    """

    def __init__(self) -> None:
        super().__init__(**get_pool_manager_options(maxsize=MOST_IDLE))
        self._thread = threading.local()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        register = self._sockets.add

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                register(self.sock)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                register(self.sock)

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure

        self.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}

    @property
    def requests(self) -> int:
        """Requests of the calling thread so far."""
        return getattr(self._thread, "count", 0)

    @property
    def answer(self) -> BaseHTTPResponse | None:
        """The newest answer to the calling thread."""
        return getattr(self._thread, "answer", None)

    def request(self, *args: Any, **kwargs: Any) -> BaseHTTPResponse:
        """As PoolManager.request."""
        self._thread.count = self.requests + 1
        self._thread.answer = None
        answer = self._thread.answer = super().request(*args, **kwargs)
        return answer

    def cut(self) -> None:
        """Break every connection: whoever waits for an answer gets an error at once. From any thread."""
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def says_all_written(answer: BaseHTTPResponse | None, rows: int) -> bool:
    """Whether an answer is a whole one that counts at least these rows (a view's are counted, too)."""
    if answer is None or answer.data:
        return False
    try:
        summary = json.loads(answer.headers.get("X-ClickHouse-Summary", "{}"))
        return int(summary["written_rows"]) >= rows
    except (ValueError, KeyError, TypeError):
        return False
