"""When a worker of sources says that it is ready, and how far it says to be behind; nothing runs here."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pipeline.config import Config
from pipeline.workers.records import Partition
from pipeline.workers.source import SourceWorker
from pipeline.workers.source_kind import SourceKind
from pipeline.workers.transport import Link, Position
from schemas.topics import Topic
from tests.workers.test_resume import Reads

FIRST, SECOND = (Partition(Topic.LOGITS.value, number) for number in range(2))


class Positions:
    """Stands for the link: how far each partition is fetched, as the test says."""

    def __init__(self) -> None:
        self.at: dict[Partition, Position] = {}

    def position(self, place: Partition) -> Position | None:
        return self.at.get(place)


@pytest.fixture
def link() -> Positions:
    return Positions()


@pytest.fixture
def worker(link: Positions) -> SourceWorker:
    kind = SourceKind(lambda *_: cast("Any", None), lambda *_: Reads())
    return SourceWorker(cast("Link", link), Config(), {Topic.LOGITS: kind})


async def test_what_is_not_caught_up_is_said_by_name(worker: SourceWorker, link: Positions) -> None:
    await worker.assigned(frozenset({FIRST, SECOND}))
    assert worker.missing() == (
        "klaxon.logits/0: its end is not known yet",
        "klaxon.logits/1: its end is not known yet",
    )
    link.at = {FIRST: Position(3, 10), SECOND: Position(5, 5)}
    assert worker.missing() == ("klaxon.logits/0: 7 records to catch up",)
    assert worker.gauges()["klaxon.logits/0"]["lag_records"] == 7


async def test_ready_is_what_was_read_to_where_the_log_ended_then(
    worker: SourceWorker, link: Positions
) -> None:
    await worker.assigned(frozenset({FIRST}))
    link.at = {FIRST: Position(3, 10)}
    assert worker.missing()
    link.at = {FIRST: Position(9, 500)}
    assert worker.missing()
    link.at = {FIRST: Position(10, 900)}
    assert worker.missing() == (), "what came since is lag, and a metric"
    assert worker.gauges()["klaxon.logits/0"]["lag_records"] == 890
    link.at = {FIRST: Position(11, 90_000)}
    assert worker.missing() == ()


async def test_a_new_assignment_begins_anew_and_a_lost_partition_is_nobodys_concern(
    worker: SourceWorker, link: Positions
) -> None:
    await worker.assigned(frozenset({FIRST, SECOND}))
    link.at = {FIRST: Position(10, 10), SECOND: Position(0, 8)}
    assert worker.missing() == ("klaxon.logits/1: 8 records to catch up",)
    await worker.revoked(frozenset({SECOND}))
    assert worker.missing() == ()
    assert "klaxon.logits/1" not in worker.gauges()
    await worker.assigned(frozenset({FIRST, SECOND}))
    link.at = {FIRST: Position(10, 12), SECOND: Position(8, 8)}
    assert worker.missing() == ("klaxon.logits/0: 2 records to catch up",)


async def test_a_worker_without_a_partition_is_ready(worker: SourceWorker) -> None:
    await worker.assigned(frozenset())
    assert worker.missing() == ()
