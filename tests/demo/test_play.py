"""Traffic against the wall clock: times as recorded, arrivals compressed, fault only where it belongs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.cli.demo import play
from pipeline.cli.demo.fleet import FAULTY_NODE, Fleet, Routing, Served
from pipeline.cli.demo.play import Player, Script
from pipeline.cli.demo.recording import read_recording
from pipeline.cli.demo.traffic import Arrival
from tests.demo.test_recording import write_recording
from tests.workers.moved_loop import in_moved_time


def wall_us() -> int:
    """As told by a loop whose clock the player's own waiting moves."""
    return 1_800_000_000_000_000 + round(asyncio.get_running_loop().time() * 1e6)


@pytest.fixture
def moved_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "wall_us", wall_us)


async def played(player: Player) -> int:
    """Play it all; how long that took."""
    started_us = wall_us()
    await player.run(lambda _: None)
    return wall_us() - started_us


@pytest.mark.usefixtures("moved_time")
def test_answers_are_published_when_complete_and_arrivals_are_compressed(tmp_path: Path) -> None:
    recording = read_recording(write_recording(tmp_path, duration_us=120_000))
    published: list[tuple[int, Served]] = []
    arrivals = [Arrival(i * 1_000_000, "chat", 3000 if i % 2 else 100) for i in range(100)]
    player = Player(
        Script(requests=40, speed=200.0, fault_from=20),
        iter(arrivals),
        Fleet(recording, seed=1),
        lambda served: published.append((wall_us(), served)),
        lambda: Routing(3, 5.0),
        lambda: 0,
    )
    took_us = in_moved_time(played(player))
    tally = player.played
    # 39 gaps of 1 s, 200 times faster, and the last answer's 120 ms.
    assert took_us == pytest.approx(39_000_000 // 200 + 120_000, abs=10)
    assert tally.requests == tally.pairs == 40
    assert tally.events == len(published)
    first = {served.request.pair_id: i for i, (_, served) in reversed(list(enumerate(published)))}
    order = sorted(first, key=first.__getitem__)
    for at_us, served in published:
        assert at_us >= served.request.ts_us + served.request.duration_us
        assert served.request.duration_us == 120_000
        assert served.request.generation == 3
        if served.affected:
            assert served.logit.node == FAULTY_NODE
            assert served.logit.input_tokens > 2048
            assert order.index(served.request.pair_id or "") >= 20
    assert tally.affected == sum(served.affected for _, served in published) > 0
    assert tally.controls == sum(served.logit.arm == "control" for _, served in published) > 0
    for pair_id, sent in tally.sent.items():
        halves = [s for _, s in published if s.logit.pair_id == pair_id and s.logit.arm != "control"]
        assert sent.later_half == halves[-1].logit.arm
        assert sent.node == next(s.logit.node for s in halves if s.logit.arm == "canary")


async def test_without_a_fault_nothing_is_affected(tmp_path: Path) -> None:
    recording = read_recording(write_recording(tmp_path, duration_us=1_000))
    player = Player(
        Script(requests=200, speed=1000.0, fault_from=None),
        iter([Arrival(i, "chat", 3000) for i in range(200)]),
        Fleet(recording, seed=1),
        lambda served: None,
        lambda: Routing(None, 0.0),
        lambda: 0,
    )
    await player.run(lambda played: None)
    assert player.played.affected == 0
    assert player.played.requests == 200


@pytest.mark.parametrize("percent", [0.0, 25.0, 100.0])
def test_the_split_of_user_traffic_follows_the_router(tmp_path: Path, percent: float) -> None:
    fleet = Fleet(read_recording(write_recording(tmp_path)), seed=5)
    users = {"baseline": 0, "canary": 0, "control": 0}
    for i in range(800):
        served = fleet.serve(Arrival(i, "chat", 50), 1_000_000, Routing(1, percent), fault=False)
        for one in served:
            users[one.request.arm] += not one.request.shadow
    assert users["control"] == 0
    assert users["baseline"] + users["canary"] == 800
    assert users["canary"] / 8 == pytest.approx(percent, abs=6)


@pytest.mark.usefixtures("moved_time")
def test_a_backlog_stretches_the_traffic(tmp_path: Path) -> None:
    """While the publisher is behind nothing arrives; afterwards the gaps are as before, none is made up."""
    recording = read_recording(write_recording(tmp_path, duration_us=1_000))
    out: list[int] = []
    held_up_looks = 0

    def backlog() -> int:
        nonlocal held_up_looks
        if len(out) > 20 and held_up_looks < 3:
            held_up_looks += 1
            return 1_000
        return 0

    player = Player(
        Script(requests=40, speed=1.0, fault_from=None),
        iter([Arrival(i * 1_000, "chat", 100) for i in range(40)]),
        Fleet(recording, seed=1),
        lambda served: out.append(served.request.ts_us),
        lambda: Routing(None, 0.0),
        backlog,
    )
    in_moved_time(played(player))
    assert player.played.requests == 40
    assert held_up_looks == 3
    # Held up for at least once 20 ms; nothing came early to make up for it.
    assert max(out) - min(out) >= 39_000 + 20_000
