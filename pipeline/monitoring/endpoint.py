"""`/metrics`, `/healthz` and `/readyz` of one process: a small HTTP server in threads of its own.

In threads, because `/healthz` must answer when the event loop no longer turns. What a process says of itself
is read in its loop, at a scrape only. Nothing here can end the process: a port that is taken costs the
endpoint, until it is free.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from pipeline.config import MonitoringConfig
from pipeline.monitoring.exposition import CONTENT_TYPE, Snapshot, exposition
from schemas.plain import Log, Plain

log: Log = logging.getLogger("klaxon.monitoring")

SILENT_S: Final = 10.0
"""A loop that has not turned for so long is not well. The watchdog ends the process later."""
ANSWER_WITHIN_S: Final = 3.0
"""How long the loop may take for what a scrape asks it."""
MOST_CONNECTIONS: Final = 8
IDLE_S: Final = 5.0
"""A client whose request is not whole after so long, or who does not take its answer, is left."""
AGAIN_S: Final = 15.0
"""From one try at a port that is taken to the next."""
POLL_S: Final = 0.5
LAST_SCRAPE_S: Final = 20.0
"""How long a process that ends waits to be scraped once more: Prometheus as we set it up comes every 15 s.
What is counted just before the end would else be seen by nobody."""

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the endpoint asks of its process. All but `beat_s` run in the event loop, and return soon."""

    process: str
    """`measure`, `pair`, …: which metrics it has."""
    snapshot: Callable[[], Snapshot]
    missing: Callable[[], tuple[str, ...]]
    """What stands between the process and being ready, a line each; () when it is."""
    beat_s: Callable[[], float]
    """When the loop last turned (`time.monotonic`); from any thread."""


class Endpoint:
    """Serves until `stop`. `start` returns at once; a thread takes the port, sooner or later."""

    def __init__(self, config: MonitoringConfig, asked: Asked) -> None:
        self._config = config
        self._asked = asked
        self._stopped = threading.Event()
        self._scraped_s = -math.inf
        """When what the last whole answer to `/metrics` says was read (`time.monotonic`)."""

    def start(self) -> None:
        """Begin to serve; call it from the event loop."""
        port = self._config.port_of(self._asked.process)
        if port is None:
            return
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._serve, args=(loop, port), name="monitoring", daemon=True).start()

    def stop(self) -> None:
        """Stop serving, within POLL_S; does not wait."""
        self._stopped.set()

    async def scraped_since(self, since_s: float) -> None:
        """Return once `/metrics` was answered whole with what was true at `since_s` (`time.monotonic`) or
        later, after LAST_SCRAPE_S at most; at once where nobody ever scraped. Where nobody did of late, this
        process may have been frozen: that is what ends many a gate."""
        if self._scraped_s == -math.inf:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SCRAPE_S):
                while self._scraped_s < since_s:  # noqa: ASYNC110 (told by another thread)
                    await asyncio.sleep(0.05)

    def _scraped(self, read_s: float) -> None:
        self._scraped_s = max(self._scraped_s, read_s)

    def _serve(self, loop: asyncio.AbstractEventLoop, port: int) -> None:
        host, process, said = self._config.host, Plain(self._asked.process), False
        while not self._stopped.is_set():
            try:
                server = _Server(host, port, self._asked, loop, self._scraped)
            except OSError as error:
                if not said:
                    said = True
                    log.warning(
                        "%s: no /metrics: port %d of %s cannot be taken (%s); going on without, and trying "
                        "again; set KLAXON_MONITORING_%s_PORT to another port, or to 0 for any free one",
                        process, port, Plain(host), Plain(error.strerror), Plain(process.upper()),
                    )  # fmt: skip
                self._stopped.wait(AGAIN_S)
                continue
            with server:
                log.info("%s: metrics at http://%s:%d/metrics", process, Plain(host), server.server_port)
                while not self._stopped.is_set():
                    server.handle_request()
            return


class _Request(io.RawIOBase):
    """What a client says within IDLE_S in all: one that says a byte now and then holds no place for ever."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until_s = time.monotonic() + IDLE_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    timeout = POLL_S
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        asked: Asked,
        loop: asyncio.AbstractEventLoop,
        scraped: Callable[[float], None],
    ) -> None:
        self.asked = asked
        self.loop = loop
        self.scraped = scraped
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        # Not HTTPServer's: that asks the name service who we are, which can take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_S
    server_version = "klaxon"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def do_GET(self) -> None:
        answers = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._say(HTTPStatus.NOT_FOUND, TEXT, b"known here: /metrics /healthz /readyz\n")
            return
        try:
            answer()
        except TimeoutError:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, TEXT, b"the event loop does not answer\n")
        except OSError:
            return  # the client went away
        except Exception as error:  # no scrape may end a worker; Prometheus counts it as down
            log.error("%s: a scrape cannot be answered", Plain(self.server.asked.process), exc_info=error)
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, b"see the log of this process\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _metrics(self) -> None:
        asked = self.server.asked
        read_s = time.monotonic()
        snapshot = _in_loop(self.server.loop, asked.snapshot)
        text = exposition(asked.process, snapshot, time.time_ns() // 1000)
        self._say(HTTPStatus.OK, CONTENT_TYPE, text)
        self.wfile.flush()
        if self.command != "HEAD":
            self.server.scraped(read_s)

    def _healthz(self) -> None:
        silent_s = time.monotonic() - self.server.asked.beat_s()
        well = silent_s < SILENT_S
        body = {"healthy": well, "loop_silent_seconds": round(silent_s, 3)}
        self._say_json(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, body)

    def _readyz(self) -> None:
        missing = _in_loop(self.server.loop, self.server.asked.missing)
        status = HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK
        self._say_json(status, {"ready": not missing, "missing": missing})

    def _say_json(self, status: HTTPStatus, body: object) -> None:
        self._say(status, JSON, json.dumps(body).encode() + b"\n")

    def _say(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.connection.settimeout(IDLE_S)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: scrapes are no events, and a request line is a stranger's text."""


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> Any:
    """Its answer, from the loop's thread. Raises TimeoutError."""
    future: Future[Any] = Future()

    def answer() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (raised where it was asked)
                future.set_exception(error)

    # No coroutine: a loop that is closed, or that ends first, would leave one that was never awaited.
    try:
        loop.call_soon_threadsafe(answer)
    except RuntimeError:  # closed: the process is about to end
        raise TimeoutError from None
    try:
        return future.result(ANSWER_WITHIN_S)
    finally:
        future.cancel()
