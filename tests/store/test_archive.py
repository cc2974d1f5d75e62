"""The archive's protocol on real chDB: exactly once, whatever happens between attempts."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pipeline.store.archive import TABLES, Archive, ArchivePartition, Checkpoint
from pipeline.store.blocks import Block, BlockLimits, Range
from pipeline.store.client import Store
from pipeline.store.columns import Column, Columns, taken
from pipeline.store.errors import QueryError, RowError, StoreUnavailableError
from schemas.topics import TICK, Topic
from tests.store.records import START_US, LogRecord, expected_places, packed, pair_batch, request_log

pytestmark = pytest.mark.slow

SMALL = BlockLimits(rows=40, size_bytes=1 << 20, age_us=1_000)
TOPIC = Topic.REQUESTS
NEVER = threading.Event()


def drive(
    archive: Archive, log: list[LogRecord], *, step: int = 3, blocks: int | None = None
) -> ArchivePartition:
    """Consume a log as a worker would, from the archive's own position; stop after some stored blocks."""
    part = archive.open_partition(TOPIC, 0)
    now_us, left = 0, blocks
    for number, record in enumerate(record for record in log if record.offset >= part.read_from):
        now_us += 100
        part.add(record, now_us)
        if number % step:
            continue
        while block := part.take(now_us, force=part.full):
            if left == 0:
                return part
            assert archive.store_block(block, NEVER)
            part.stored(block)
            left = None if left is None else left - 1
    while block := part.take(now_us, force=True):
        if left == 0:
            return part
        assert archive.store_block(block, NEVER)
        part.stored(block)
        left = None if left is None else left - 1
    return part


def places(store: Store, topic: Topic = TOPIC) -> list[tuple[int, int]]:
    """Every stored (off, pos) as it physically is, doubled ones twice."""
    rows = store.rows(f"SELECT off, pos FROM {TABLES[topic]} WHERE part = 0 ORDER BY off, pos")
    return [(off, pos) for off, pos in rows]


def some_of(columns: Columns, rows: list[int]) -> dict[str, Column]:
    return {name: taken(column, np.array(rows, dtype=np.int64)) for name, column in columns.items()}


@dataclass
class Flaky:
    """A store that fails as told: ("lost" before the insert, "late" after it, "poisoned": token burnt)."""

    store: Store
    failures: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    def rows(self, sql: str, parameters: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        return self.store.rows(sql, parameters)

    def row(self, sql: str, parameters: Mapping[str, object] | None = None) -> tuple[Any, ...]:
        return self.store.row(sql, parameters)

    def insert(self, table: str, columns: Columns, token: str) -> bool:
        self.tokens.append(token)
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "poisoned":
            # What a server's crash can leave: the token is logged, its rows are not there.
            one = some_of(columns, [0]) | {"part": [999]}
            self.store.insert(table, one, token)
        if failure == "late":
            self.store.insert(table, columns, token)
        if failure == "partly":
            half = some_of(columns, list(range(len(columns["topic"]) // 2)))
            self.store.insert(table, half, token)
        if failure == "refused":
            raise QueryError("Code: 252. DB::Exception: Too many parts", 252)
        if failure == "misfit":
            raise RowError("table t: does not fit")
        if failure:
            raise StoreUnavailableError("ClickHouse cannot be reached")
        return self.store.insert(table, columns, token)


def flaky(store: Store, *failures: str) -> tuple[Archive, Flaky]:
    wrapped = Flaky(store, list(failures))
    return Archive(wrapped, SMALL, "boot"), wrapped  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store.archive.FIRST_DELAY_S", 0.001)


def test_stores_every_event_once_and_commits_what_is_stored(store: Store) -> None:
    log = request_log(1, 120)
    archive = Archive(store, SMALL, "boot")
    part = drive(archive, log)
    assert part.idle
    assert places(store) == expected_places(log)
    assert archive.surplus(TOPIC) == 0
    gauges = part.gauges()
    assert gauges["stored_rows"] == gauges["events"] == len(expected_places(log))
    assert gauges["ticks"] == sum(record.content_type == TICK for record in log)
    assert gauges["rejected"] > 0
    assert gauges["read"] == len(log)
    days = store.rows("SELECT uniqExact(blk_first), uniqExact(blk_first, day) FROM inference_log")
    assert days[0][0] == days[0][1] > 1, "a block lies in one table partition"


def test_goes_on_after_the_newest_block_whatever_was_committed(store: Store) -> None:
    log = request_log(2, 150)
    for boot in range(6):
        drive(Archive(store, SMALL, f"boot-{boot}"), log, step=boot + 1, blocks=1)
    last = drive(Archive(store, SMALL, "last"), log)
    assert last.read_from > 0
    assert places(store) == expected_places(log)


def test_records_before_the_position_and_doubled_ones_are_skipped(store: Store) -> None:
    log = request_log(3, 60)
    drive(Archive(store, SMALL, "a"), log)
    archive = Archive(store, SMALL, "b")
    part = archive.open_partition(TOPIC, 0)
    for record in log:
        part.add(record, 0)
        part.add(record, 0)
    assert part.take(10**9, force=True) is None
    assert part.gauges()["skipped"] == 2 * len(log)
    assert places(store) == expected_places(log)


@pytest.mark.parametrize(
    "failures",
    [
        ("lost",),
        ("late",),
        ("lost", "late", "late", "lost"),
        ("refused", "refused"),
        ("poisoned",),
        ("poisoned", "", "lost"),
        ("late", "", "", "poisoned", "late"),
        ("partly",),
        ("partly", "", "partly", "lost"),
    ],
    ids="-".join,
)
def test_a_retry_neither_loses_nor_doubles(store: Store, failures: tuple[str, ...]) -> None:
    log = request_log(4, 80)
    archive, wrapped = flaky(store, *failures)
    drive(archive, log)
    assert wrapped.failures == [], "every failure happened"
    assert places(store) == expected_places(log)
    assert archive.gauges()["retries"] >= 1
    repaired = {"poisoned", "partly"} & set(failures)
    assert (archive.gauges()["repaired_rows"] > 0) == bool(repaired)
    assert any(token.endswith(":r1") for token in wrapped.tokens) == bool(repaired)


def test_a_swallowed_retry_would_be_lost_without_counting(store: Store) -> None:
    """Control: the poisoned token really makes ClickHouse answer OK and store nothing."""
    log = [record for record in request_log(5, 40) if record.rows]
    archive, _ = flaky(store, "poisoned")
    archive._missing = lambda block: None  # type: ignore[method-assign]
    drive(archive, log)
    assert places(store) != expected_places(log)


def test_rows_that_do_not_fit_end_the_process_at_once(store: Store) -> None:
    archive, _ = flaky(store, "misfit")
    with pytest.raises(RowError):
        drive(archive, request_log(6, 10))


def test_stop_ends_the_waiting_without_storing(store: Store) -> None:
    archive, _ = flaky(store, *["lost"] * 1_000)
    part = archive.open_partition(TOPIC, 0)
    part.add(request_log(7, 1)[0], 0)
    block = part.take(0, force=True)
    assert block is not None
    stop = threading.Event()
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(archive.store_block(block, stop)))
    waiting.start()
    stop.set()
    waiting.join(timeout=20)
    assert ended == [False]
    assert archive.store_block(block, stop) is False, "a block is not begun once its partition is lost"
    assert places(store) == []


def partial(store: Store, log: list[LogRecord], lost: slice) -> Block:
    """Store the log as one block of which some rows are missing, as after a loss of power."""
    archive = Archive(store, BlockLimits(), "crashed")
    part = archive.open_partition(TOPIC, 0)
    for record in log:
        part.add(record, 0)
    block = part.take(0, force=True)
    assert block is not None
    kept = list(range(block.rows))
    del kept[lost]
    store.insert(block.table, some_of(block.columns, kept), block.token)
    return block


LOSSES = [slice(5, 25), slice(0, 10), slice(-10, None), slice(0, None, 2), slice(1, None)]


@pytest.mark.parametrize("lost", LOSSES, ids=str)
def test_a_partial_block_is_completed_first(store: Store, lost: slice) -> None:
    log = request_log(8, 60)
    block = partial(store, log[:20], lost)
    archive = Archive(store, SMALL, "next")
    assert archive.checkpoint(TOPIC, 0) == Checkpoint(block.first, Range(block.first, block.last))
    part = drive(archive, log)
    assert part.read_from == block.first
    assert archive.gauges()["repaired_rows"] > 0
    assert places(store) == expected_places(log)
    assert Archive(store, SMALL, "later").checkpoint(TOPIC, 0).completing is None


def test_a_crash_while_completing_is_completed_by_the_next(store: Store) -> None:
    log = request_log(9, 60)
    partial(store, log[:20], slice(0, None, 2))
    dying = Archive(store, SMALL, "dying", passing=die_at("before_insert"))
    with pytest.raises(KeyboardInterrupt):
        drive(dying, log)
    drive(Archive(store, SMALL, "next"), log)
    assert places(store) == expected_places(log)


def die_at(point: str) -> Any:
    def passing(step: str) -> None:
        if step == point:
            raise KeyboardInterrupt

    return passing


class AfterMaxOff(Archive):
    """Known bad: goes on after the greatest stored offset."""

    def checkpoint(self, topic: Topic, partition: int) -> Checkpoint:
        ((count, last),) = self._store.rows(f"SELECT count(), max(off) FROM {TABLES[topic]} WHERE part = 0")
        return Checkpoint(int(last) + 1 if count else 0, None)


@pytest.mark.parametrize("lost", LOSSES[:2], ids=str)
def test_control_going_on_after_the_greatest_offset_loses_rows(store: Store, lost: slice) -> None:
    log = request_log(8, 60)
    partial(store, log[:20], lost)
    drive(AfterMaxOff(store, SMALL, "next"), log)
    assert set(places(store)) < set(expected_places(log))


def test_control_range_tokens_on_a_plain_table_double_rows_when_blocks_are_cut_anew(store: Store) -> None:
    """Known bad: the commit as checkpoint, tokens without a process, a table that replaces nothing."""
    store.command(
        "CREATE TABLE plain AS inference_log ENGINE = MergeTree PARTITION BY day "
        "ORDER BY (topic, part, off, pos) SETTINGS non_replicated_deduplication_window = 10000"
    )
    log = [record for record in request_log(10, 60) if record.rows]

    def run(limits: BlockLimits, committed: int) -> None:
        part = ArchivePartition(TOPIC, 0, limits, "same", Checkpoint(committed, None))
        for record in log:
            part.add(record, 0)
        while block := part.take(0, force=True):
            store.insert("plain", block.columns, f"{block.topic}:{block.first}-{block.last}")
            part.stored(block)

    committed = log[10].offset
    run(SMALL, 0)
    run(SMALL, 0)
    once = store.rows("SELECT off, pos FROM plain ORDER BY off, pos")
    assert once == expected_places(log), "cut alike, tokens do their work"
    run(BlockLimits(rows=25, size_bytes=1 << 20, age_us=1_000), committed)
    rows = store.rows("SELECT off, pos FROM plain ORDER BY off, pos")
    assert len(rows) > len(expected_places(log))


def test_zombie_and_successor_together_are_seen_once(store: Store) -> None:
    log = request_log(11, 60)
    zombie = Archive(store, BlockLimits(), "zombie")
    held = zombie.open_partition(TOPIC, 0)
    for record in log[:30]:
        held.add(record, 0)
    late_block = held.take(0, force=True)
    drive(Archive(store, SMALL, "successor"), log)
    assert late_block is not None
    assert zombie.store_block(late_block, NEVER)
    assert zombie.surplus(TOPIC) > 0
    seen = store.rows("SELECT off, pos FROM v_inference_log ORDER BY off, pos")
    assert seen == expected_places(log)
    after = Archive(store, SMALL, "after").checkpoint(TOPIC, 0)
    assert after.completing is None
    store.command("OPTIMIZE TABLE inference_log FINAL")
    assert zombie.surplus(TOPIC) == 0
    assert Archive(store, SMALL, "after").checkpoint(TOPIC, 0) == after


def test_a_long_run_without_rows_is_not_read_again(store: Store) -> None:
    archive = Archive(store, SMALL, "a")
    part = archive.open_partition(TOPIC, 0)
    committed = 0
    for offset in range(1_500):
        part.add(LogRecord(offset, START_US, b"", TICK), offset * 10)
        if block := part.take(offset * 10):
            assert archive.store_block(block, NEVER)
            committed = part.stored(block)
    assert committed > 1_300
    resumed = Archive(store, SMALL, "b").open_partition(TOPIC, 0).read_from
    assert committed - 512 <= resumed <= committed
    assert store.rows("SELECT count() < 4 FROM archive_progress") == [(1,)]
    assert Archive(store, SMALL, "c").open_partition(TOPIC, 1).read_from == 0


def test_back_pressure_bounds_what_a_partition_holds(store: Store) -> None:
    part = Archive(store, SMALL, "a").open_partition(TOPIC, 0)
    log = (record for record in request_log(12, 500))
    first = None
    while not part.full:
        part.add(next(log), 0)
        first = first or part.take(0)
    assert first is not None
    gauges = part.gauges()
    assert gauges["sealed_blocks"] == 1
    assert gauges["open_rows"] <= SMALL.rows
    assert part.take(0) is None, "one block in flight"
    part.stored(first)
    assert not part.full
    with pytest.raises(ValueError, match="not in flight"):
        part.stored(first)


def test_what_only_the_archive_reads_is_handed_back_for_the_dead_letter(store: Store) -> None:
    archive = Archive(store, SMALL, "a")
    pairs = archive.open_partition(Topic.PAIRS, 0)
    assert pairs.add(LogRecord(0, START_US, packed(pair_batch()), None), 0) == ()
    (refused,) = pairs.add(LogRecord(1, START_US, b"\x93", None), 0)
    assert refused.position is None
    block = pairs.take(0, force=True)
    assert block is not None
    assert archive.store_block(block, NEVER)
    assert pairs.stored(block) == 2, "a refused record does not hold up its partition"
    assert places(store, Topic.PAIRS) == [(0, 0), (0, 1)]


def test_rows_replaced_by_later_ones_do_not_keep_a_block_from_being_complete(store: Store) -> None:
    """After a merge a newer block may have taken a pair's row: completing ends all the same."""
    batches = [pair_batch(), pair_batch(), pair_batch(n=3)]
    log = [LogRecord(at, START_US, packed(batch), None) for at, batch in zip((0, 5, 9), batches, strict=True)]

    def run(boot: str) -> Archive:
        archive = Archive(store, SMALL, boot)
        part = archive.open_partition(Topic.PAIRS, 0)
        for record in log:
            part.add(record, 0)
        while block := part.take(0, force=True):
            assert archive.store_block(block, NEVER)
            part.stored(block)
        return archive

    run("a")
    store.command("OPTIMIZE TABLE pair_scores FINAL")
    before = store.rows("SELECT * FROM v_pair_scores ORDER BY ALL")
    assert Archive(store, SMALL, "b").checkpoint(Topic.PAIRS, 0).completing is not None
    run("b")
    assert store.rows("SELECT * FROM v_pair_scores ORDER BY ALL") == before


def test_an_unmigrated_database_says_what_to_do(empty_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(QueryError, match="inference_log"):
        Archive(empty_store, SMALL, "a").open_partition(TOPIC, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_failures_cuts_and_restarts(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    log = request_log(100 + seed, 300)
    for boot in range(12):
        failures = rng.choices(["", "lost", "late", "poisoned", "partly", "refused"], k=6)
        wrapped = Flaky(store, failures)
        limits = BlockLimits(rng.choice([5, 20, 60]), 1 << 20, 1_000)
        archive = Archive(wrapped, limits, f"boot-{boot}")  # type: ignore[arg-type]
        drive(archive, log, step=rng.randint(1, 5), blocks=rng.randint(1, 5))
    drive(Archive(store, SMALL, "last"), log)
    assert places(store) == expected_places(log), f"seed {seed}"
