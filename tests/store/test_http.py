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
from pipeline.store.errors import QueryError, StoreError, StoreUnavailableError
from pipeline.store.migrate import migrate
from tests.conftest import REPOSITORY
from tests.store.records import expected_places, request_log
from tests.store.test_archive import SMALL, TOPIC, drive, places

pytestmark = pytest.mark.slow


UNANSWERED = ("long_length", "stuck", "hang")
"""What is waited for in vain."""


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
    store.close()
    store = connect(server.dsn, database, timeout_s=_patience_s(request))
    yield store
    store.close()


def _patience_s(request: pytest.FixtureRequest) -> float:
    """Where there will be an answer it is waited for, however busy the machine is: attempts are counted."""
    callspec = getattr(request.node, "callspec", None)
    mode = "" if callspec is None else str(callspec.params.get("mode"))
    return 2 if mode.startswith(UNANSWERED) else 120


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
        ("reset:3", False, False),
        ("torn:2", False, False),
        ("torn_lost:2", False, False),
        ("in_body:2", True, True),
        ("in_body_late:2", True, False),
        ("short_length:2", True, True),
        ("trailing:2", False, False),
        ("long_length:1", False, False),
        ("stuck:1", False, False),
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


@pytest.mark.parametrize("mode", ["hang:2", "busy:5", "garbled:4", "slow:3"])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_no_answer_or_none_of_clickhouses_is_waited_out(
    server: Server, remote: Store, mode: str, when: str
) -> None:
    log = request_log(21, 60)
    archive = Archive(remote, SMALL, "boot")
    if when == "later":
        drive(archive, log, blocks=2)
    server.mode.write_text(mode)
    for _ in range(8):
        try:
            part = archive.open_partition(TOPIC, 0)
            break
        except StoreError as error:
            print(error)
    assert (part.read_from > 0) == (when == "later"), "no answer is read as an empty table"
    drive(archive, log)
    assert server.mode.read_text() == "up", "every fault happened"
    assert places(remote) == expected_places(log)


def test_the_driver_sends_an_insert_again_unasked_and_the_store_says_so(
    server: Server, remote: Store
) -> None:
    row = {"topic": ["t"], "part": [0], "upto": [1]}
    assert remote.insert("archive_progress", row, "a")
    server.mode.write_text("late:1")
    assert not remote.insert("archive_progress", row, "b")


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
