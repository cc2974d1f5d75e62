"""A query's result as plain data, and the archive worker's read-only query endpoint.

One process owns a chDB folder; others read through it. The endpoint listens on loopback only, has no
authentication and gives what the read-only handle gives: one statement that reads, within limits.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import orjson

from pipeline.store.client import Store
from pipeline.store.errors import QueryError, StoreError, StoreUnavailableError
from pipeline.store.read_only import readable

MAX_QUERY_BYTES: Final = 1 << 20
ANSWER_TIMEOUT_S: Final = 120
TSV: Final = "text/tab-separated-values"
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """A whole result. Values are JSON's: times are text, 64-bit integers are integers, NaN is None."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def as_json(self) -> dict[str, Any]:
        """The object that `klaxon sql --json` and the endpoint give."""
        return {
            "columns": [{"name": n, "type": t} for n, t in zip(self.names, self.types, strict=True)],
            "rows": self.rows,
            "row_count": len(self.rows),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> QueryResult:
        """The inverse of `as_json`."""
        columns = found["columns"]
        return cls(
            tuple(column["name"] for column in columns),
            tuple(column["type"] for column in columns),
            tuple(map(tuple, found["rows"])),
        )


def run_query(store: Store, sql: str) -> QueryResult:
    """Run one statement that only reads; blocks. Raises QueryError or StoreUnavailableError."""
    try:
        found = orjson.loads(store.text(readable(store, sql), "JSONCompact"))
    except orjson.JSONDecodeError:
        raise QueryError("one statement that gives rows is expected") from None
    meta = found["meta"]
    return QueryResult(
        tuple(column["name"] for column in meta),
        tuple(column["type"] for column in meta),
        tuple(map(tuple, found["data"])),
    )


def listen_address(text: str) -> tuple[str, int]:
    """`host:port` of a loopback address. Raises StoreError on any other."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    numeric = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(numeric).is_loopback
        number = int(port)
    except ValueError:
        loopback, number = False, -1
    if not loopback or not 0 <= number <= 65_535:
        raise StoreError(
            f"archive.query_listen {text!r}: expected 127.0.0.1:PORT; the endpoint has no authentication and "
            "is never opened to a network"
        )
    return numeric, number


class QueryEndpoint:
    """POST a statement, get its rows: JSON, or tab-separated values where `Accept` asks for them."""

    def __init__(self, store: Store, listen: str) -> None:
        """Takes over `store`, which must be read-only. Raises StoreError if the address is not free."""
        host, port = listen_address(listen)
        self._store = store
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise StoreError(f"archive.query_listen {listen}: {error.strerror}; choose a free port") from None
        self._server.store = store
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="query-endpoint",
            daemon=True,
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port` it listens on."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening and close the store."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._store.close()


def query_endpoint(listen: str, sql: str) -> QueryResult:
    """Run a query through a worker's endpoint; blocks. Raises QueryError or StoreUnavailableError."""
    host, port = listen_address(listen)
    try:
        body = sql.encode()
    except UnicodeEncodeError:
        raise QueryError("the query is not UTF-8") from None
    connection = HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("POST", "/", body, {"Accept": JSON})
        answer = connection.getresponse()
        found = orjson.loads(answer.read())
    except (OSError, HTTPException, orjson.JSONDecodeError) as error:
        raise StoreUnavailableError(f"query endpoint {listen}: {error}") from None
    finally:
        connection.close()
    if answer.status == HTTPStatus.OK:
        return QueryResult.from_json(found)
    if answer.status == HTTPStatus.BAD_REQUEST:
        raise QueryError(found["error"], found.get("code"))
    raise StoreUnavailableError(f"query endpoint {listen}: {found['error']}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    store: Store


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_POST(self) -> None:
        # A web page may reach loopback under a name of its own (DNS rebinding); it cannot forge this header.
        host = (self.headers.get("Host") or "").rpartition(":")[0].strip("[]")
        if host not in ("127.0.0.1", "localhost", "::1"):
            self._refuse(HTTPStatus.FORBIDDEN, "only loopback addresses are answered")
            return
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > MAX_QUERY_BYTES:
            self.close_connection = True
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a query is at most {MAX_QUERY_BYTES} bytes")
            return
        sql = self.rfile.read(int(length)).decode("utf-8", "replace")
        try:
            if TSV in (self.headers.get("Accept") or ""):
                self._answer(
                    HTTPStatus.OK,
                    TSV,
                    self.server.store.text(readable(self.server.store, sql), "TSVWithNames"),
                )
            else:
                result = run_query(self.server.store, sql)
                self._answer(HTTPStatus.OK, JSON, orjson.dumps(result.as_json()))
        except QueryError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error), error.code)
        except StoreError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _refuse(self, status: HTTPStatus, reason: str, code: int | None = None) -> None:
        self._answer(status, JSON, orjson.dumps({"error": reason, "code": code}))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Queries may quote events: nothing of them is logged (C2)."""
