"""The same store over HTTP: the driver's own retries, outages, and `klaxon sql` on a server's address."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.store.archive import Archive
from pipeline.store.client import Store, connect, connect_read_only
from pipeline.store.errors import QueryError, StoreUnavailableError
from pipeline.store.migrate import migrate
from tests.conftest import REPOSITORY
from tests.store.records import expected_places, request_log
from tests.store.test_archive import SMALL, drive, places

pytestmark = pytest.mark.slow


@dataclass
class Server:
    dsn: str
    mode: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("http") / "archive"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.http_server", str(folder)], cwd=REPOSITORY, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        yield Server(f"http://127.0.0.1:{port}", Path(f"{folder}.mode"))
        process.kill()


@pytest.fixture
def remote(server: Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    server.mode.write_text("up")
    database = f"d{abs(hash(request.node.name))}"
    store = connect(server.dsn, database, create_database=True)
    migrate(store, now_us=1)
    yield store
    store.close()


@pytest.mark.parametrize(
    ("mode", "hidden", "repaired"),
    [
        ("up", True, False),
        ("late:1", True, False),
        ("lost:1", True, False),
        ("poisoned:1", True, True),
        ("late:5", False, False),
        ("lost:5", False, False),
        ("poisoned:4", False, True),
    ],
)
def test_broken_connections_neither_lose_nor_double(
    server: Server, remote: Store, mode: str, hidden: bool, repaired: bool
) -> None:
    log = request_log(20, 60)
    archive = Archive(remote, SMALL, "boot")
    server.mode.write_text(mode)
    drive(archive, log)
    assert server.mode.read_text() == "up", "every fault happened"
    assert places(remote) == expected_places(log)
    assert (archive.gauges()["retries"] == 0) == hidden, "the driver alone sent it again"
    assert (archive.gauges()["repaired_rows"] > 0) == repaired


def test_the_driver_sends_an_insert_again_unasked_and_the_store_says_so(
    server: Server, remote: Store
) -> None:
    row = {"topic": ["t"], "part": [0], "upto": [1]}
    assert remote.insert("archive_progress", row, "a") == 1
    server.mode.write_text("late:1")
    assert remote.insert("archive_progress", row, "b") == 2


def test_read_only_over_http(server: Server, remote: Store) -> None:
    reader = connect_read_only(server.dsn, remote.database)
    assert reader.rows("SELECT count() FROM v_inference_log") == [(0,)]
    with pytest.raises(QueryError, match="readonly"):
        reader.text("INSERT INTO archive_progress SELECT 't', 1, 1", "JSON")
    with pytest.raises(QueryError, match=r"^Code: 62\. DB::Exception: Syntax error"):
        reader.text("selec 1", "JSON")
    reader.close()


def test_a_missing_database_and_an_absent_server() -> None:
    with pytest.raises(
        StoreUnavailableError, match=r"http://127\.0\.0\.1:1 cannot be reached: Connection refused"
    ):
        connect("http://127.0.0.1:1", "klaxon")
