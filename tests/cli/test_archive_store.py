"""The archive's store, opened late: what waits, what ends, and what can be cut."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pipeline.cli.archive_store import archive_opener
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.main import cli
from pipeline.config import ClickHouseConfig, Config
from pipeline.store.client import connect
from pipeline.store.errors import StoreUnavailableError
from pipeline.store.migrate import migrate


def _config(dsn: str) -> Config:
    return msgspec.structs.replace(Config(), clickhouse=ClickHouseConfig(dsn=dsn))


def test_a_server_need_not_be_there_before_it_is_opened() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        with archive_opener(_config(f"http://127.0.0.1:{server.getsockname()[1]}")) as opener:
            for _ in range(2):
                with pytest.raises(StoreUnavailableError, match="cannot be reached"):
                    opener.open()


def test_an_opening_that_gets_no_answer_can_be_cut() -> None:
    ended = threading.Event()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with archive_opener(_config(f"http://127.0.0.1:{server.getsockname()[1]}")) as opener:

            def open_it() -> None:
                with pytest.raises(StoreUnavailableError):
                    opener.open()
                ended.set()

            thread = threading.Thread(target=open_it)
            thread.start()
            accepted, _ = server.accept()
            accepted.recv(1)
            deadline_s = time.monotonic() + 20
            while not ended.wait(0.05):
                opener.cut()  # the driver asks again by itself, on a new connection
                assert time.monotonic() < deadline_s
            thread.join()
            accepted.close()


def test_an_engine_in_this_process_is_opened_once(tmp_path: Path) -> None:
    dsn = f"chdb://{tmp_path}/chdb"
    store = connect(dsn, "klaxon", create_database=True)
    migrate(store, now_us=1)
    store.close()
    with archive_opener(_config(dsn)) as opener:
        assert opener.open() is opener.open()
    connect(dsn, "klaxon").close()


def test_an_address_that_is_none_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLAXON_CLICKHOUSE_DSN", "ftp://127.0.0.1")
    said = CliRunner().invoke(cli, ["worker", "archive"], standalone_mode=False)
    assert isinstance(said.exception, CommandError)
    assert said.exception.exit_code == Exit.USAGE
    assert "clickhouse.dsn" in str(said.exception)
