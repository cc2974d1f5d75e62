"""As much of ClickHouse's HTTP interface as the driver uses, in front of chDB, in a process of its own.

No ClickHouse server is at hand where the tests run; this one is the same engine behind the same protocol.
`python -m tests.store.http_server FOLDER [PORT]` prints its port. `FOLDER.mode` holds what befalls requests,
one of MODES; `late:2`: the next two. `FOLDER.fired` gets one line per request that it befell.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import chdb
import lz4.frame

INSERT_MODES: Final = {
    "late": "stored, then the connection is cut",
    "lost": "cut before it is stored",
    "poisoned": "the token is used up, nothing is stored, cut",
    "reset": "the connection is reset while the rows are still being sent",
    "torn": "stored; the answer is cut in its middle",
    "torn_lost": "not stored; an answer of status 200 is cut in its middle",
    "in_body": "not stored; status 200, and the error in the body",
    "in_body_late": "stored; status 200, and an error in the body",
    "short_length": "not stored; status 200, an error, and a Content-Length of 0",
    "trailing": "as short_length, but the error is sent when the connection is used again",
    "long_length": "stored; a Content-Length beyond what is sent",
    "stuck": "stored, and never answered",
}
"""What befalls inserts alone."""
ALL_MODES: Final = {
    "hang": "accepted and never answered",
    "busy": "status 503",
    "slow": "done and answered, but only after SLOW_S",
    "garbled": "status 200, and bytes that are no answer",
}
"""What befalls every request."""
MODES: Final = {"up": "nothing", **INSERT_MODES, **ALL_MODES}
SLOW_S: Final = 1.5
ERROR: Final = b"Code: 241. DB::Exception: Memory limit (total) exceeded. (MEMORY_LIMIT_EXCEEDED)\n"
TRANSPORT: Final = {
    "query",
    "database",
    "query_id",
    "session_id",
    "user",
    "password",
    "compress",
    "decompress",
    "default_format",
    "wait_end_of_query",
    "send_progress_in_http_headers",
    "http_headers_progress_interval_ms",
    "client_protocol_version",
    "cancel_http_readonly_queries_on_client_close",
    "enable_http_compression",
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    """Head and body leave at once: what stands behind an answer's end is there before the next request."""
    chdb_: Any
    folder: str
    mode: Path
    scratch: Path
    engine = threading.Lock()
    faults = threading.Lock()
    behind = b""
    """What is sent before the next answer of this connection."""

    def do_GET(self) -> None:
        self._run(b"")

    def do_POST(self) -> None:
        fields = parse_qs(urlsplit(self.path).query)
        if fields.get("query", [""])[0].startswith("INSERT INTO") and self._fault("reset") == "reset":
            self.rfile.read(min(64, int(self.headers.get("Content-Length") or 0)))
            self._reset()
            return
        body = self._body()
        if body is None:
            self.close_connection = True  # the client is gone: half a request is none
            return
        if self.headers.get("Content-Encoding") == "lz4":
            body = lz4.frame.decompress(body)
        self._run(body)

    def _body(self) -> bytes | None:
        if self.headers.get("Transfer-Encoding") != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            return body if len(body) == length else None
        body = b""
        while True:
            line = self.rfile.readline().strip()
            if not line:
                return None
            size = int(line, 16)
            body += self.rfile.read(size)
            self.rfile.readline()
            if size == 0:
                return body

    def _run(self, body: bytes) -> None:
        self.wfile.write(self.behind)
        self.behind = b""
        fields = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        settings = {n: v for n, v in fields.items() if n not in TRANSPORT and not n.startswith("param_")}
        sql, rows = fields.get("query", ""), body
        if not sql and body.startswith(b"INSERT INTO") and b" FORMAT Native\n" in body:
            head, _, rows = body.partition(b" FORMAT Native\n")
            sql = head.decode()
        insert = sql.startswith("INSERT INTO") and rows != b""
        fault = self._fault(*ALL_MODES, *(INSERT_MODES if insert else ()))
        if fault == "hang":
            self._wait_for_the_client()
            return
        if fault == "busy":
            self._answer(503, b"too busy")
            return
        if fault == "garbled":
            self._answer(200, b"\x03\x07garbled, this is no answer at all \xff\xfe")
            return
        if fault == "slow":
            time.sleep(SLOW_S)
        try:
            with self.engine:
                if "database" in fields:
                    self.chdb_.query(f"USE `{fields['database']}`")
                if insert:
                    data, written = b"", self._insert(sql, rows, settings, fault)
                else:
                    text = "\n".join(filter(None, (sql, body.decode())))
                    data, written = self._query(text, fields, settings), 0
        except RuntimeError as error:
            self._answer(500, str(error).encode())
            return
        self._answer_after(fault, data, written)

    def _fault(self, *kinds: str) -> str:
        """What befalls this request, if it is one of these kinds; `fault:n` holds for the next n."""
        with self.faults:
            fault, _, left = self.mode.read_text().partition(":")
            if fault not in kinds:
                return "up"
            if left:
                self.mode.write_text("up" if left == "1" else f"{fault}:{int(left) - 1}")
            with Path(f"{self.folder}.fired").open("a") as fired:
                fired.write(f"{fault}\n")
            return fault

    def _insert(self, sql: str, rows: bytes, settings: dict[str, str], fault: str) -> int:
        """Rows that were read, 0 where the fault leaves them out."""
        path = self.scratch / f"insert-{threading.get_ident()}.native"
        path.write_bytes(rows)
        clause = ", ".join(f"{name} = '{value}'" for name, value in settings.items())
        sql = sql.removesuffix("FORMAT Native").rstrip()
        statement = f"{sql} FROM INFILE '{path}' SETTINGS {clause} FORMAT Native"
        if fault == "poisoned":
            other = f"SELECT * REPLACE (999 AS part) FROM file('{path}', 'Native') LIMIT 1"
            statement = f"{sql} SETTINGS {clause} {other}"
        if fault in ("lost", "torn_lost", "in_body", "short_length", "trailing"):
            return 0
        return int(self.chdb_.query(statement).rows_read())

    def _query(self, sql: str, fields: dict[str, str], settings: dict[str, str]) -> bytes:
        parameters = {name[6:]: value for name, value in fields.items() if name.startswith("param_")}
        handle = self.chdb_
        if "readonly" in settings:
            handle = chdb.connect(self.folder)
            handle.query(f"USE `{fields['database']}`")
            for name, value in sorted(settings.items(), key=lambda item: item[0] == "readonly"):
                handle.query(f"SET {name} = '{value}'")
        form = fields.get("default_format", "TabSeparated")
        return bytes(handle.query(sql, form, params=parameters).bytes())

    def _answer_after(self, fault: str, data: bytes, written: int) -> None:
        match fault:
            case "late" | "lost" | "poisoned":
                self._cut()
            case "torn" | "torn_lost":
                self._answer(200, b"half", length=64)
                self._cut()
            case "in_body" | "in_body_late":
                self._answer(200, ERROR, written=written)
            case "short_length":
                self._answer(200, ERROR, length=0)
            case "trailing":
                self._answer(200, b"")
                self.behind = ERROR
            case "long_length":
                self._answer(200, data, length=len(data) + 100, written=written)
                self._wait_for_the_client()
            case "stuck":
                self._wait_for_the_client()
            case _:
                self._answer(200, data, written=written)

    def _answer(self, status: int, data: bytes, *, length: int | None = None, written: int = 0) -> None:
        self.send_response(status)
        if status not in (200, 503):
            self.send_header("X-ClickHouse-Exception-Code", "1")
        if written:
            self.send_header("X-ClickHouse-Summary", json.dumps({"written_rows": str(written)}))
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def _wait_for_the_client(self) -> None:
        """Say nothing until the client gives up."""
        self.close_connection = True
        self.connection.settimeout(300)
        try:
            self.connection.recv(1)
        except OSError:
            return

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reset(self) -> None:
        """Close with a reset: what the client still sends is refused."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.wfile.close()
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is none of ours."""


def main(folder: str, port: str = "0") -> None:
    Handler.folder = folder
    Handler.chdb_ = chdb.connect(folder)
    Handler.mode = Path(f"{folder}.mode")
    if not Handler.mode.exists():
        Handler.mode.write_text("up")
    with tempfile.TemporaryDirectory() as scratch:  # not beside the folder: its disk may be full
        Handler.scratch = Path(scratch)
        server = Server(("127.0.0.1", int(port)), Handler)
        print(json.dumps({"port": server.server_address[1]}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
