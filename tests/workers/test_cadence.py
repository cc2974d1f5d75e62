"""How often a worker flushes: often enough for a trip, and never for a large part of its time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, cast

import pytest

from pipeline.config import Config
from pipeline.workers.cadence import BEHIND_LATEST_S, FLUSH_EVERY_S, FLUSH_LATEST_S, pause_s
from pipeline.workers.records import Partition
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import SourceKind
from pipeline.workers.transport import Link, Position
from schemas.topics import Topic

FIRST, SECOND = Partition(Topic.REQUESTS, 0), Partition(Topic.REQUESTS, 1)


@pytest.mark.parametrize(
    ("spent_s", "behind", "expected_s"),
    [
        (0.0, False, FLUSH_EVERY_S),
        (0.006, False, FLUSH_EVERY_S),
        (0.02, False, 0.08),
        (0.2, False, FLUSH_LATEST_S),
        (0.0, True, FLUSH_EVERY_S),
        (0.02, True, 0.18),
        (0.2, True, BEHIND_LATEST_S),
    ],
)
def test_a_pause_is_a_multiple_of_what_a_flush_computed(
    spent_s: float, behind: bool, expected_s: float
) -> None:
    assert pause_s(spent_s, behind=behind) == pytest.approx(expected_s)


@dataclass
class Read:
    """Stands for a core object: it has read so far."""

    next_offset: int | None = None


@dataclass
class Ends:
    """Stands for the link: where partitions end; none yet fetched where nothing is said."""

    ends: dict[Partition, int]

    def position(self, place: Partition) -> Position | None:
        return Position(0, self.ends[place]) if place in self.ends else None


async def _worker(ends: dict[Partition, int]) -> tuple[SourceWorker, dict[Partition, Read]]:
    made = {FIRST: Read(), SECOND: Read()}
    kind = SourceKind(
        lambda *_: cast("Any", None),
        lambda topic, partition: cast("Any", made[Partition(topic, partition)]),
    )
    worker = SourceWorker(cast("Link", Ends(ends)), Config(), {Topic.REQUESTS: kind})
    await worker.assigned(frozenset(made))
    return worker, made


async def test_how_much_waits_over_what_was_read_since_the_last_flush() -> None:
    worker, made = await _worker({FIRST: 100, SECOND: 10})
    assert worker._waiting_over_read() == 0, "nothing was read yet, so nothing is known"
    made[FIRST].next_offset, made[SECOND].next_offset = 20, 10
    assert worker._waiting_over_read() == 80 / 30
    made[FIRST].next_offset = 55
    assert worker._waiting_over_read() == 45 / 35
    made[FIRST].next_offset = 90
    assert worker._waiting_over_read() == 10 / 35
    assert worker._waiting_over_read() == inf, "10 wait, nothing was read"
    made[FIRST].next_offset = 100
    assert worker._waiting_over_read() == 0


async def test_what_is_not_ours_or_was_not_fetched_makes_nobody_late() -> None:
    worker, made = await _worker({FIRST: 1000})
    made[FIRST].next_offset, made[SECOND].next_offset = 1, 1
    assert worker._waiting_over_read() > 0
    await worker.revoked(frozenset({FIRST}))
    assert worker._waiting_over_read() == 0
