"""Fault points, watchdog, dead letters and back-off: without a broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import get_args

import pytest

from pipeline.workers.broker import RETRY_LONGEST_S, back_off_s
from pipeline.workers.dead_letters import MOST_PER_RECORD, dead_letters
from pipeline.workers.faults import EXIT_CODE, FaultPoint
from pipeline.workers.records import Record
from pipeline.workers.watchdog import Watchdog
from schemas.codec import decode_requests
from schemas.columns import MOST_SAID_CHARS, Rejected
from schemas.topics import CONTENT_TYPE, TICK, Topic


def _started(points: list[str], fault: str | None) -> subprocess.Popen[str]:
    """A process that passes these points in order and then says that it lives."""
    lines = [
        "from pipeline.workers.faults import fault",
        *(f"fault({point!r})" for point in points),
        "print('lives')",
    ]
    environment = {"KLAXON_FAULT": fault} if fault is not None else {}
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env={**environment, "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _passages(points: list[str], fault: str | None) -> subprocess.CompletedProcess[str]:
    """The same, run to its end."""
    with _started(points, fault) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_without_a_fault_every_point_is_passed() -> None:
    assert _passages(list(get_args(FaultPoint)), None).stdout == "lives\n"


def test_the_named_passage_kills_and_says_so() -> None:
    done = _passages(["after_read", "before_flush", "after_read"], "after_read:2")
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")
    assert done.stderr == "fault after_read fired\n"


def test_another_passage_does_not_kill() -> None:
    assert _passages(["after_read", "before_flush"], "after_read:2").stdout == "lives\n"


def test_a_point_may_stop_the_process_or_freeze_it_until_it_is_continued() -> None:
    stopped = _passages(["after_read"], "after_read:1:stop")
    assert (stopped.returncode, stopped.stderr) == (-signal.SIGTERM, "fault after_read fired\n")
    with _started(["after_read"], "after_read:1:freeze") as frozen:
        assert os.WIFSTOPPED(os.waitpid(frozen.pid, os.WUNTRACED)[1])
        frozen.send_signal(signal.SIGCONT)
        assert frozen.communicate() == ("lives\n", "fault after_read fired\n")


def test_a_fault_may_come_soon_after_its_point() -> None:
    lines = [
        "import time",
        "from pipeline.workers.faults import fault",
        "fault('inside_insert', soon=True)",
        "print('lives', flush=True)",
        "time.sleep(60)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={"KLAXON_FAULT": "inside_insert", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (EXIT_CODE, "fault inside_insert fired\n")


@pytest.mark.parametrize(
    "text", ["nowhere", "after_read:x", "after_read:0x1", "after_read:1:burn", "after_read:1:kill:2"]
)
def test_an_unknown_fault_is_refused(text: str) -> None:
    done = _passages([], text)
    assert done.returncode == 1
    assert "expected name, name:nth or name:nth:action with a name of on_assigned" in done.stderr


def test_the_watchdog_ends_a_process_whose_loop_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.workers.watchdog.CHECK_S", 0.01)
    ended = threading.Event()
    reasons: list[str] = []

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    watchdog = Watchdog(3, end=end)
    watchdog.start()
    assert ended.wait(10)
    assert "has not turned" in reasons[0]


def test_the_watchdog_leaves_a_turning_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.workers.watchdog.CHECK_S", 0.01)
    reasons: list[str] = []
    watchdog = Watchdog(50, end=reasons.append)
    watchdog.start()
    for _ in range(100):
        watchdog.beat()
        threading.Event().wait(0.005)
    watchdog.stop()
    watchdog.join(10)
    assert reasons == []


def _record(**changes: object) -> Record:
    fields = {
        "topic": Topic.REQUESTS,
        "partition": 1,
        "offset": 7,
        "append_us": 1,
        "timestamp_type": 1,
        "headers": {},
        "key": None,
        "value": b"payload",
    }
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_letter_says_where_and_why_but_not_what() -> None:
    (letter,) = dead_letters(_record(), [Rejected(3, "status", "not a number")], payload=False)
    assert (letter.topic, letter.partition, letter.offset, letter.position) == ("klaxon.requests", 1, 7, 3)
    assert (letter.field, letter.reason, letter.payload) == ("status", "not a number", None)
    assert letter.sha256 == "239f59ed55e737c77147cf55ad0c1b030b6d7ee748a7426952f9b852d5a935e5"


def test_a_letter_holds_the_payload_where_it_was_asked_for() -> None:
    (letter,) = dead_letters(_record(), [Rejected(None, "", "bad")], payload=True)
    assert letter.payload == "cGF5bG9hZA=="


def test_a_letter_is_short_whatever_was_sent() -> None:
    event = b'{"v":1,"arm":"' + b"x" * 800_000 + b'"}'
    rejected = decode_requests(event, None).rejected
    (letter,) = dead_letters(_record(value=event), rejected, payload=False)
    assert letter.field == "arm"
    assert (letter.reason, letter.kind) == ("Invalid enum value", "value")
    assert len(Rejected(0, "arm", "x" * 800_000).reason) == MOST_SAID_CHARS


def test_one_record_cannot_flood_the_dead_letter() -> None:
    rejected = [Rejected(position, "v", "missing") for position in range(MOST_PER_RECORD + 5)]
    letters = list(dead_letters(_record(), rejected, payload=False))
    assert len(letters) == MOST_PER_RECORD
    assert letters[-2].position == MOST_PER_RECORD - 2
    assert letters[-1].reason == "6 more events of this record were rejected"


def test_ticks_and_content_types_are_read_from_the_headers() -> None:
    assert _record(headers={CONTENT_TYPE: TICK.encode()}).is_tick
    assert not _record().is_tick
    assert _record().content_type is None
    assert _record(headers={CONTENT_TYPE: b"\xff"}).content_type == "\ufffd"


def test_back_off_doubles_up_to_its_bound() -> None:
    assert 0.3 < back_off_s(0) <= 0.5
    assert 0.7 < back_off_s(1) <= 1.0
    assert RETRY_LONGEST_S * 0.7 < back_off_s(1000) <= RETRY_LONGEST_S
