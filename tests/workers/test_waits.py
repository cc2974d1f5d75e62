"""Waits that say what they wait for, with short checks; and a gate's seat whose steps never answer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any

import pytest

from pipeline.config import Config, SignaturesConfig
from pipeline.workers import gate_seat as shell
from pipeline.workers.gate import READS, WRITES, GateWorker, gate
from pipeline.workers.records import Partition, Record
from pipeline.workers.waits import GIVE_UP_AFTER, StuckError, Waits
from schemas.topics import SOURCES, Topic
from tests.kafka.waiting import eventually

SEATS = frozenset(Partition(topic.value, 2) for topic in READS)


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.workers.waits.CHECK_S", 0.001)


async def _never() -> None:
    await asyncio.Event().wait()


async def test_a_wait_says_what_it_waits_for_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits("gating partition 2")
    waits.step("a coordinator")
    with pytest.raises(StuckError, match=r"gating partition 2: has waited .* s for a coordinator"):
        await waits.watch(_never())
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert all("for a coordinator" in line for line in said)


async def test_a_wait_that_moves_on_or_must_not_end_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def work(waits: Waits) -> None:
        waits.step("records")
        for _ in range(3 * GIVE_UP_AFTER):
            await asyncio.sleep(0.001)
            waits.moved()
        waits.rest()
        await asyncio.sleep(0.2)

    waits = Waits("it")
    await waits.watch(work(waits))
    assert caplog.records == []


async def test_the_same_step_again_is_no_move() -> None:
    async def work(waits: Waits) -> None:
        while True:
            waits.step("a position")
            await asyncio.sleep(0)

    waits = Waits("it")
    with pytest.raises(StuckError, match="for a position"):
        await waits.watch(work(waits))


async def test_the_work_s_own_error_and_end_are_handed_on_and_a_cancelled_one_is_cancelled() -> None:
    async def fails() -> None:
        raise ValueError("its own")

    ended = asyncio.Event()

    async def ends() -> None:
        try:
            await _never()
        finally:
            ended.set()

    with pytest.raises(ValueError, match="its own"):
        await Waits("it").watch(fails())
    watching = asyncio.create_task(Waits("it").watch(ends()))
    await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait([watching])
    assert watching.cancelled()
    assert ended.is_set()


async def test_work_that_was_broken_off_by_nobody_here_is_no_quiet_end() -> None:
    """A client that is closed lets go of whoever waits for it with a cancellation of its own."""

    async def let_go(waits: Waits) -> None:
        waits.step("a position")
        raise asyncio.CancelledError

    waits = Waits("gating partition 2")
    with pytest.raises(StuckError, match="gating partition 2: was broken off while it waited for a position"):
        await waits.watch(let_go(waits))


class _Parts:
    """Everything a seat connects to. `stuck` names the step that never answers, and how often it does not."""

    def __init__(self, stuck: str, times: int) -> None:
        self._stuck, self.left = stuck, times
        self.closed = 0
        self.begun = asyncio.Event()
        """Set when the first connection of a seat is asked for."""
        self.committed: list[dict[Partition, int]] = []
        self.letters: list[asyncio.Future[None]] = []

    async def passes(self, step: str) -> None:
        """Return, or never."""
        if step == self._stuck and self.left > 0:
            self.left -= 1
            await _never()

    def positioned(self) -> bool:
        """Whether Faust has fetched."""
        return self._stuck != "position"

    def writer(self, *_: object) -> _Writer:
        """In the place of GateWriter."""
        return _Writer(self)

    def watch(self, *_: object) -> _Watch:
        """In the place of ControlWatch."""
        return _Watch(self)

    def reader(self, *_: object) -> _Reader:
        """In the place of RangeReader."""
        return _Reader(self)


class _Writer:
    def __init__(self, parts: _Parts) -> None:
        self._parts = parts

    async def start(self) -> None:
        self._parts.begun.set()
        await self._parts.passes("writer")

    async def close(self) -> None:
        self._parts.closed += 1
        await self._parts.passes("close")


class _Watch:
    def __init__(self, parts: _Parts) -> None:
        self._parts = parts

    async def start(self, _first: int) -> None:
        await self._parts.passes("watch")

    async def stop(self) -> None:
        pass

    async def foreign(self) -> dict[str, list[None]]:
        await _never()
        return {}


class _Reader:
    def __init__(self, parts: _Parts) -> None:
        self._parts = parts

    async def start(self) -> None:
        await self._parts.passes("reader")

    async def stop(self) -> None:
        pass

    async def begin_offsets(self, places: Iterable[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: Iterable[Partition]) -> dict[Partition, int]:
        await self._parts.passes("ends")
        return dict.fromkeys(places, 0)

    async def read(self, ranges: Mapping[Partition, tuple[int, int]]) -> AsyncIterator[Record]:
        await self._parts.passes("memory" if len(ranges) > 1 else "since")
        return
        yield


class _Link:
    """As far as a seat asks."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self.dead_letters: dict[str, Counter[str]] = {}

    def position(self, _place: Partition) -> object | None:
        return object() if self._parts.positioned() else None

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        await self._parts.passes("commit")
        self._parts.committed.append(dict(offsets))
        return True

    async def send(self, *_: object, **__: object) -> asyncio.Future[None]:
        letter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts.letters.append(letter)
        return letter


Seated = Callable[[str, int], tuple[GateWorker, _Parts]]


@pytest.fixture
def seated(monkeypatch: pytest.MonkeyPatch) -> Seated:
    def make(stuck: str, times: int) -> tuple[GateWorker, _Parts]:
        parts = _Parts(stuck, times)
        monkeypatch.setattr(shell, "GateWriter", parts.writer)
        monkeypatch.setattr(shell, "ControlWatch", parts.watch)
        monkeypatch.setattr(shell, "RangeReader", parts.reader)
        monkeypatch.setattr(shell, "LOOK_EVERY_S", 0.001)
        monkeypatch.setattr(shell.Intake, "left_behind", _nothing)
        counts = dict.fromkeys((*SOURCES, *READS, *WRITES), 1)
        worker = gate(Config(signatures=SignaturesConfig(required=False))).make(_Link(parts), counts)  # type: ignore[arg-type]
        assert isinstance(worker, GateWorker)
        return worker, parts

    return make


async def _nothing(*_: object) -> AsyncIterator[Record]:
    return
    yield


STEPS = {
    "writer": "the transaction coordinator",
    "reader": "a connection to read with",
    "memory": "its memory",
    "watch": "a connection to watch the control topic with",
    "ends": "its memory",
    "since": "what was written since",
    "position": f"the first fetch of {Topic.BUCKETS}/2",
}


@pytest.mark.parametrize("stuck", sorted(STEPS.keys() - {"position"}))
async def test_a_seat_whose_step_does_not_answer_is_taken_with_new_connections(
    seated: Seated, caplog: pytest.LogCaptureFixture, stuck: str
) -> None:
    caplog.set_level(logging.INFO)
    worker, parts = seated(stuck, 1)
    await worker.assigned(SEATS)
    running: Coroutine[Any, Any, None] = worker.run()
    serving = asyncio.create_task(running)

    async def taken() -> bool:
        return "gating partition 2: taken" in caplog.text

    await eventually(taken, timeout_s=120)
    assert f"s for {STEPS[stuck]}" in caplog.text
    assert "trying again with new connections" in caplog.text
    assert not serving.done()
    await worker.stop()
    serving.cancel()
    await asyncio.wait([serving])
    assert parts.closed == 2


@pytest.mark.parametrize("stuck", sorted(STEPS))
async def test_a_seat_that_cannot_be_taken_ends_the_process_with_one_line(seated: Seated, stuck: str) -> None:
    worker, _ = seated(stuck, 2)
    await worker.assigned(SEATS)
    with pytest.raises(StuckError, match=rf"gating partition 2: has waited .* s for {STEPS[stuck]}"):
        await asyncio.wait_for(worker.run(), 120)
    await worker.stop()


async def _goes_on(judged: list[int], serving: asyncio.Task[None]) -> None:
    """Wait until it has been judged ten times more."""
    before = len(judged)

    async def more() -> bool:
        assert not serving.done()
        return len(judged) > before + 10

    await eventually(more)


async def test_a_group_without_a_coordinator_holds_up_no_judgement(
    seated: Seated, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    monkeypatch.setattr(shell, "PACE_S", 0.001)
    monkeypatch.setattr(shell, "UPKEEP_EVERY_S", 0.001)
    monkeypatch.setattr(shell.GateCore, "renew", lambda _, now_us: judged.append(now_us) or [])
    worker, parts = seated("commit", 1)
    await worker.assigned(SEATS)
    serving = asyncio.create_task(worker.run())

    async def waits_for_the_commit() -> bool:
        return parts.left == 0

    await eventually(waits_for_the_commit, timeout_s=120)
    await _goes_on(judged, serving)
    await asyncio.wait_for(worker.revoked(SEATS), 120)
    await worker.stop()
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_dead_letter_that_nobody_acknowledges_holds_up_the_commit_and_no_judgement(
    seated: Seated, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    monkeypatch.setattr(shell, "PACE_S", 0.001)
    monkeypatch.setattr(shell, "UPKEEP_EVERY_S", 0.001)
    monkeypatch.setattr(shell.GateCore, "renew", lambda _, now_us: judged.append(now_us) or [])
    worker, parts = seated("nothing", 0)
    await worker.assigned(SEATS)
    serving = asyncio.create_task(worker.run())
    garbage = Record(Topic.PARTIALS, 2, 0, 1_000_000, 1, {}, None, b"garbage")
    await asyncio.wait_for(worker.read(garbage), 120)
    assert len(parts.letters) == 1
    await _goes_on(judged, serving)
    place = garbage.place
    assert all(each[place] == 0 for each in parts.committed)
    parts.letters[0].set_result(None)

    async def committed() -> bool:
        return bool(parts.committed) and parts.committed[-1][place] == 1

    await eventually(committed, timeout_s=120)
    await worker.stop()
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_seat_whose_connections_do_not_close_is_left_all_the_same(
    seated: Seated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it is Faust's rebalance."""
    monkeypatch.setattr("pipeline.workers.waits.END_WITHIN_S", 0.01)
    worker, parts = seated("close", 1)
    await worker.assigned(SEATS)
    await eventually(parts.begun.wait, timeout_s=120)
    await asyncio.wait_for(worker.revoked(SEATS), 120)
    assert parts.closed == 1
