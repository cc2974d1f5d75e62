"""The directive file: what a router makes of one that is absent, good, bad, gone, or there before Kafka."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agents.router.core import Effective
from agents.router.directive_file import MAX_BYTES, WatchedFile
from agents.router.runner import Change, Router, RouterSettings
from pipeline.cli.break_glass import break_glass
from pipeline.cli.router import human_line, json_line
from schemas.control import Aborted
from tests.agents.test_router_core import directive, take

ORDER = Aborted(by="op", ts_us=1, fallback="v1")
BAD = [
    b"",
    b"{}",
    b"null",
    b"{torn",
    b'{"v":1}',
    b'{"v":2,"aborted":{}}',
    b'{"v":1,"aborted":{"chat":{}}}',
    b'{"v":1,"aborted":{"":{"by":"op","ts_us":1}}}',
    b'{"v":1,"aborted":{"chat":{"by":"op","ts_us":1,"weights":{"v2":5}}}}',
    b"[" * 100_000,
    b"\xff\xfe",
    b" " * (MAX_BYTES + 1),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router.json"


def aborts(path: Path, *names: str) -> None:
    for name in names:
        assert break_glass([path], name, ORDER) == ([str(path)], {})


def test_it_comes_changes_and_goes(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = WatchedFile(path)
    file.poll()
    assert (dict(file.aborted), file.unsure, caplog.text) == ({}, False, "")
    aborts(path, "chat", "code")
    file.poll()
    assert dict(file.aborted) == {"chat": ORDER, "code": ORDER}
    assert "chat is aborted here by op" in caplog.text
    path.unlink()
    file.poll()
    assert dict(file.aborted) == {}
    assert "code is no longer aborted here" in caplog.text


@pytest.mark.parametrize("content", BAD)
def test_of_a_bad_file_the_last_good_state_stays(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = WatchedFile(path)
    aborts(path, "chat")
    file.poll()
    caplog.clear()
    path.write_bytes(content)
    for _ in range(3):
        file.poll()
        assert dict(file.aborted) == {"chat": ORDER}
        assert not file.unsure
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.getMessage().startswith(f"{path}: ")
    assert record.getMessage().endswith("until then what it said stays")
    aborts_again = WatchedFile(path)
    aborts_again.poll()
    assert aborts_again.unsure, "a router that starts on it does not know what it said"
    path.unlink()
    for each in (file, aborts_again):
        each.poll()
        assert (dict(each.aborted), each.unsure) == ({}, False)


def test_a_folder_is_no_directive_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = WatchedFile(tmp_path)
    file.poll()
    assert file.unsure
    assert "is no regular file" in caplog.text


def told(router: Router, at_s: float) -> list[Change]:
    found: list[Change] = []
    router._on_change = found.append
    router._tell(int(at_s * 1_000_000))
    return found


def test_it_holds_against_every_directive_until_it_is_gone(path: Path) -> None:
    file = WatchedFile(path)
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None, file)
    take(router, directive(5, 25.0))
    router._caught_up = True
    assert [one.reason for one in told(router, 0)] == ["applied"]
    aborts(path, "chat")
    file.poll()
    (change,) = told(router, 1)
    assert (change.reason, change.effective.weights) == ("aborted_by_file", {"v1": 100.0, "v2": 0.0})
    for number, record in enumerate(
        (directive(6, 50.0), directive(1, 100.0, generation=9, state="promoted"))
    ):
        take(router, record, number)
        assert all(one.effective.weights["v2"] == 0.0 for one in told(router, number))
    path.write_bytes(b"{torn")
    file.poll()
    assert told(router, 3) == []
    path.unlink()
    file.poll()
    (change,) = told(router, 4)
    assert (change.reason, change.effective.weights["v2"]) == ("file_lifted", 100.0)


def test_before_the_topic_is_read_only_the_file_speaks(path: Path) -> None:
    file = WatchedFile(path)
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None, file)
    take(router, directive(5, 25.0))
    aborts(path, "chat")
    file.poll()
    (change,) = told(router, 0)
    assert (change.effective.weights, change.directive, change.epoch) == ({"v1": 100.0}, None, None)
    assert human_line(change) == "chat · aborted by file · v1 100 %"
    assert '"directive":null' in json_line(change)
    router._caught_up = True
    (change,) = told(router, 0)
    assert (change.effective.weights, change.epoch) == ({"v1": 100.0, "v2": 0.0}, 5)


def test_a_rollout_only_the_file_knew_is_told_gone(path: Path) -> None:
    file = WatchedFile(path)
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None, file)
    assert break_glass([path], "chat", Aborted(by="op", ts_us=1)) == ([str(path)], {})
    file.poll()
    (change,) = told(router, 0)
    assert "none under test gets anything" in human_line(change)
    path.unlink()
    file.poll()
    (change,) = told(router, 0)
    assert (change.reason, change.effective) == (
        "file_lifted",
        Effective({}, (), lease_valid=False, dead_man=False),
    )
    assert told(router, 0) == []


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[asyncio.Queue[Change]]:
    """A router whose broker is not there."""
    changes: asyncio.Queue[Change] = asyncio.Queue()
    stop = asyncio.Event()
    settings = RouterSettings("127.0.0.1:1", "r1", retry_max_s=0.5)
    task = asyncio.create_task(Router(settings, changes.put_nowait, WatchedFile(path)).run(stop))
    try:
        yield changes
    finally:
        stop.set()
        await asyncio.wait_for(task, 120)


async def test_it_is_obeyed_without_a_broker_and_after_a_restart(path: Path) -> None:
    async with running(path) as changes:
        began_s = time.monotonic()
        aborts(path, "chat")
        change = await asyncio.wait_for(changes.get(), 120)
        print(f"obeyed after {time.monotonic() - began_s:.2f} s")
        assert change.effective == Effective({"v1": 100.0}, (), False, False, aborted=True)
    async with running(path) as changes:
        change = await asyncio.wait_for(changes.get(), 120)
        assert change.effective.aborted
        path.unlink()  # noqa: ASYNC240 (at once)
        assert (await asyncio.wait_for(changes.get(), 120)).reason == "file_lifted"
