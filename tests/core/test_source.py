"""Log time, what was read, `whole_from`, closing, and what may be committed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.cell_bytes import Portion
from pipeline.core.flushing import Records
from pipeline.core.source import ContentSettings, HoleError, LogPosition, ReportMemory
from schemas.buckets import Cell, Distribution, FinalBuckets, Population
from schemas.records import read_msgpack
from schemas.topics import Topic, gating_partition

S = 1_000_000
T = 1_700_000_000 * S


def position(memory_s: int = 0, lateness_s: int = 15) -> LogPosition:
    """A log position; R = memory + lateness + 10 s."""
    return LogPosition(lateness_s * S, memory_s * S)


def test_whole_from_the_beginning_of_the_log_is_everything() -> None:
    log = position()
    log.advance(0, T + 1, 0)
    assert log.whole_from == 0


@pytest.mark.parametrize(("append_us", "memory_s", "second"), [
    (T, 0, 1_700_000_005),
    (T + 1, 0, 1_700_000_006),
    (T, 180, 1_700_000_185),
    (T + 999_999, 180, 1_700_000_186),
])  # fmt: skip
def test_whole_from_later_is_rounded_up(append_us: int, memory_s: int, second: int) -> None:
    log = position(memory_s)
    log.advance(7, append_us, 0)
    assert log.whole_from == second


def test_a_second_is_open_up_to_its_end_plus_lateness_inclusive() -> None:
    log = position(lateness_s=15)
    second = T // S
    log.advance(0, T + 16 * S, 0)
    assert log.accepts(second)
    log.advance(1, T + 16 * S + 1, 0)
    assert not log.accepts(second)
    assert log.accepts(second + 1)


def test_the_closing_offset_is_of_the_record_that_closed_the_newest_closed_second() -> None:
    log = position(lateness_s=15)
    found = []
    for offset, at_us in enumerate((T, T + 16 * S, T + 16 * S + 1, T + S, T + 16 * S + 2, T + 19 * S)):
        log.advance(offset, at_us, 0)
        found.append((log.closed_through - T // S, log.closing_offset))
    assert found == [(-17, 0), (-1, 1), (0, 2), (0, 2), (0, 2), (2, 5)]


def test_log_time_never_falls() -> None:
    log = position()
    log.advance(0, T, 0)
    log.advance(1, T - 5 * S, 0)
    assert log.log_us == T


def test_what_was_read_is_skipped() -> None:
    log = position()
    assert log.advance(5, T, 10)
    assert not log.advance(5, T, 10)
    assert not log.advance(2, T + 99 * S, 10)
    assert (log.next_offset, log.log_us, log.bytes_read) == (6, T, 10)


def test_a_hole_is_reported_once_and_accepted_when_it_comes_again() -> None:
    log = position()
    log.advance(5, T, 0)
    with pytest.raises(HoleError) as caught:
        log.advance(8, T, 0)
    assert (caught.value.expected, caught.value.found) == (6, 8)
    assert "from 6" in str(caught.value)
    assert log.advance(8, T, 0)
    assert (log.holes, log.next_offset) == (1, 9)


def test_a_hole_that_closes_is_none() -> None:
    log = position()
    log.advance(5, T, 0)
    with pytest.raises(HoleError):
        log.advance(7, T, 0)
    assert log.advance(6, T, 0)
    assert log.advance(7, T, 0)
    assert log.holes == 0
    with pytest.raises(HoleError):
        log.advance(9, T, 0)


def test_nothing_is_committed_before_r_has_passed() -> None:
    log = position(lateness_s=15)
    log.advance(3, T, 0)
    log.advance(4, T + 25 * S - 1, 0)
    assert log.commit() is None
    log.advance(5, T + 25 * S, 0)
    assert log.commit() == 3
    assert log.commit() is None


@given(st.lists(st.tuples(st.integers(-3 * S, 12 * S), st.booleans()), min_size=1, max_size=60))
def test_commits_only_rise_and_leave_r_to_read_again(steps: list[tuple[int, bool]]) -> None:
    log = position(lateness_s=1)
    append_us, times, last = T, [], -1
    for offset, (step, ask) in enumerate(steps):
        append_us += step
        times.append(append_us)
        log.advance(offset, append_us, 0)
        commit = log.commit() if ask else None
        if commit is not None:
            assert commit > last
            last = commit
            before = max(times[:commit], default=-1)
            # The log time rose here, so whoever begins here knows it.
            assert times[commit] > before
            assert times[commit] <= max(times) - 11 * S


def test_the_index_stays_small() -> None:
    log = position(memory_s=180, lateness_s=15)
    for offset in range(50_000):
        log.advance(offset, T + offset * 10_000, 0)
        log.commit()
    assert log.index_entries <= 4 * 206


def test_a_report_counts_again_only_after_five_silent_seconds() -> None:
    reports = ReportMemory()
    assert reports.is_new("p", 1, T)
    assert not reports.is_new("p", 1, T + 5 * S)
    assert not reports.is_new("p", 1, T + 10 * S)
    assert reports.is_new("p", 1, T + 15 * S + 1)
    assert reports.is_new("p", 2, T + 15 * S + 1)
    assert len(reports) == 2


def test_the_hash_names_what_shapes_content() -> None:
    plain = ContentSettings()
    assert plain.hash == ContentSettings().hash
    assert len({plain.hash, ContentSettings(lateness_us=1).hash, ContentSettings(join_timeout_us=1).hash,
                ContentSettings(cells_per_bucket=1).hash}) == 4  # fmt: skip


@pytest.mark.parametrize(("moved_us", "more"), [(0, 0), (S - 1, 0), (S, 1), (S + 1, 1), (20 * S, 20)])
def test_what_the_next_flush_will_find_closed_if_log_time_goes_on_as_before(moved_us: int, more: int) -> None:
    log = position(lateness_s=15)
    log.advance(0, 117 * S + 1 - moved_us, 1)
    assert log.flushed(3.0) == log.closed_through, "it was not flushed before: nothing is expected"
    log.advance(1, 117 * S + 1, 1)
    assert (log.closed_through, log.flushed(3.0)) == (101, 101 + more)
    assert log.flushed(3.0) == log.closed_through, "it stands still"


@pytest.mark.parametrize(
    ("waiting", "more"), [(0.0, 0), (0.09, 0), (0.1, 1), (0.55, 5), (1.0, 10), (7.0, 10)]
)
def test_what_waits_closes_no_more_than_its_share_of_what_was_read(waiting: float, more: int) -> None:
    log = position(lateness_s=15)
    log.advance(0, 107 * S + 1, 1)
    log.flushed(0.0)
    log.advance(1, 117 * S + 1, 1)
    assert log.flushed(waiting) == log.closed_through + more


def portions_of_size(cells: int) -> list[Portion]:
    """Three seconds of two roll-outs with many cells, ten to a portion."""
    measure = Distribution(100, 10**9, 1, 10**7, list(range(100)), [1] * 100)
    held = [Cell("node", f"node-{n}", {"requests": n}, {"ttft_us": measure}, []) for n in range(cells)]
    populations = [Population(name, 1, "canary", "m") for name in ("chat", "code")]
    return [
        Portion(s, p, 10, b"".join(map(msgspec.msgpack.encode, held[at : at + 10])))
        for s in (7, 8, 9)
        for p in populations
        for at in range(0, cells, 10)
    ]


def test_large_finals_are_split_and_numbered() -> None:
    records = Records(Topic.REQUESTS, 3, ContentSettings(), limit_bytes=20_000)
    made = records.finals(portions_of_size(40), (5, 9), 0, 77)
    assert all(len(record.value) <= 20_000 for record in made)
    finals = [read_msgpack(record.value, FinalBuckets) for record in made]
    assert [final.gating_partition for final in finals] == [record.gating_partition for record in made]
    for gating in range(4):
        parts = [final for final in finals if final.gating_partition == gating]
        assert [final.part for final in parts] == list(range(len(parts)))
        assert {final.parts for final in parts} == {len(parts)}
        names = [
            (second.second, cells.population.rollout, cell.value)
            for final in parts
            for second in final.seconds
            for cells in second.contents
            if cells.population is not None
            for cell in cells.cells
        ]
        owned = [name for name in ("chat", "code") if gating_partition(name) == gating]
        assert names == [(s, name, f"node-{n}") for s in (7, 8, 9) for name in owned for n in range(40)]
        assert owned == [] or len(parts) > 1


def test_every_gating_partition_hears_of_every_closed_second() -> None:
    records = Records(Topic.REQUESTS, 3, ContentSettings())
    finals = [read_msgpack(record.value, FinalBuckets) for record in records.finals([], (5, 9), 4, 77)]
    assert [final.gating_partition for final in finals] == [0, 1, 2, 3]
    assert {(f.closed_from, f.closed_through, f.whole_from, f.offset, f.part, f.parts) for f in finals} == {
        (5, 9, 4, 77, 0, 1)
    }


def test_large_fresh_cells_are_split_too() -> None:
    records = Records(Topic.REQUESTS, 3, ContentSettings(), limit_bytes=20_000)
    fresh = records.fresh(portions_of_size(40), 0, 77)
    assert len(fresh) > 2
    assert all(len(record.value) <= 20_000 for record in fresh)
