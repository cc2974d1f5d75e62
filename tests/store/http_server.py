"""As much of ClickHouse's HTTP interface as the driver uses, in front of chDB, in a process of its own.

No ClickHouse server is at hand where the tests run; this one is the same engine behind the same protocol.
`python -m tests.store.http_server FOLDER` prints its port. `FOLDER.mode` holds what happens to inserts: `up`,
`late` (stored, then the connection is cut), `lost` (cut before) or `poisoned` (the token is used up, nothing
is stored, cut); `late:2`: the next two.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import chdb
import lz4.frame

TRANSPORT = {
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
    chdb_: Any
    folder: str
    mode: Path
    scratch: Path

    def do_GET(self) -> None:
        self._run(b"")

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := self._chunk_size():
                body += self.rfile.read(size)
                self.rfile.readline()
            if size is None:
                self.close_connection = True
                return  # the client is gone: half a request is none
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "lz4":
            body = lz4.frame.decompress(body)
        self._run(body)

    def _chunk_size(self) -> int | None:
        line = self.rfile.readline().strip()
        return int(line, 16) if line else None

    def _run(self, body: bytes) -> None:
        fields = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        settings = {n: v for n, v in fields.items() if n not in TRANSPORT and not n.startswith("param_")}
        sql = "\n".join(filter(None, (fields.get("query", ""), body.split(b"FORMAT Native")[0].decode())))
        insert = sql.startswith("INSERT INTO") and b"FORMAT Native" in body
        fault = self._fault() if insert else "up"
        try:
            if "database" in fields:
                self.chdb_.query(f"USE `{fields['database']}`")
            if insert:
                data = self._insert(sql, body, settings, fault)
            else:
                data = self._query(body.decode() if body and "query" not in fields else sql, fields, settings)
        except RuntimeError as error:
            self._answer(500, str(error).encode())
            return
        if fault == "up":
            self._answer(200, data)
        else:
            self.close_connection = True
            self.connection.close()

    def _fault(self) -> str:
        """What befalls this insert; `fault:n` holds for the next n."""
        fault, _, left = self.mode.read_text().partition(":")
        if left:
            self.mode.write_text("up" if left == "1" else f"{fault}:{int(left) - 1}")
        return fault

    def _insert(self, sql: str, body: bytes, settings: dict[str, str], fault: str) -> bytes:
        path = self.scratch / f"insert-{threading.get_ident()}.native"
        path.write_bytes(body.split(b"FORMAT Native", 1)[1].lstrip(b"\n"))
        clause = ", ".join(f"{name} = '{value}'" for name, value in settings.items())
        statement = f"{sql} FROM INFILE '{path}' SETTINGS {clause} FORMAT Native"
        if fault == "poisoned":
            other = f"SELECT * REPLACE (999 AS part) FROM file('{path}', 'Native') LIMIT 1"
            statement = f"{sql} SETTINGS {clause} {other}"
        return b"" if fault == "lost" else bytes(self.chdb_.query(statement).bytes())

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

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        if status != 200:
            self.send_header("X-ClickHouse-Exception-Code", "1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(folder: str) -> None:
    Handler.folder = folder
    Handler.chdb_ = chdb.connect(folder)
    Handler.mode = Path(f"{folder}.mode")
    Handler.mode.write_text("up")
    Handler.scratch = Path(f"{folder}.scratch")
    Handler.scratch.mkdir(exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(json.dumps({"port": server.server_address[1]}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
