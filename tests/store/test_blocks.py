"""The block cutter: nothing lost, nothing doubled, every block within what ClickHouse stores atomically."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store.blocks import (
    BEHIND_TIMES,
    US_PER_DAY,
    Block,
    BlockCutter,
    BlockLimits,
    Range,
    day_of,
    token_of,
)
from pipeline.store.columns import listed
from pipeline.store.rows import Rows

LIMITS = BlockLimits(rows=10, size_bytes=1_000, age_us=1_000)


@dataclass(frozen=True)
class Step:
    gap: int
    day: int
    rows: int
    size_bytes: int
    wait_us: int
    take: bool


steps = st.lists(
    st.builds(
        Step,
        gap=st.integers(1, 3),
        day=st.sampled_from([100, 100, 100, 101]),
        rows=st.sampled_from([0, 0, 1, 3, 5, 9, 10, 25]),
        size_bytes=st.integers(0, 1_500),
        wait_us=st.integers(0, 700),
        take=st.booleans(),
    ),
    max_size=40,
)


def rows_of(offset: int, n: int, size_bytes: int) -> Rows:
    return Rows(n, {"off": [offset] * n, "pos": list(range(n))}, size_bytes)


def cutter(completing: Range | None = None) -> BlockCutter:
    return BlockCutter("t", "klaxon.requests", 5, LIMITS, "boot", completing)


@given(steps)
def test_blocks_hold_every_row_once_in_order_within_the_limits(sequence: list[Step]) -> None:
    cut, now_us, offset = cutter(), 0, 0
    fed: list[tuple[int, int, int, int]] = []
    blocks: list[Block] = []
    for step in sequence:
        offset += step.gap
        now_us += step.wait_us
        cut.add(offset, step.day * US_PER_DAY, rows_of(offset, step.rows, step.size_bytes), now_us)
        fed.append((offset, step.day, step.rows, step.size_bytes))
        if step.take and (block := cut.take(now_us)):
            blocks.append(block)
    while block := cut.take(now_us, force=True):
        blocks.append(block)

    assert not cut.holds_records
    got = [
        place
        for b in blocks
        if b.rows
        for place in zip(listed(b.columns["off"]), listed(b.columns["pos"]), strict=True)
    ]
    assert got == [(off, pos) for off, _, n, _ in fed for pos in range(n)]
    ranges = [(b.first, b.last) for b in blocks]
    assert [off for off, *_ in fed] == [
        off for first, last in ranges for off, *_ in fed if first <= off <= last
    ]
    for block in blocks:
        inside = [f for f in fed if block.first <= f[0] <= block.last]
        with_rows = [f for f in inside if f[2] > 0]
        assert block.rows == sum(n for _, _, n, _ in inside)
        assert len({day for _, day, _, _ in with_rows}) <= 1
        if len(with_rows) > 1:
            assert block.rows <= LIMITS.rows
            assert sum(size for *_, size in with_rows) <= LIMITS.size_bytes
        if block.rows:
            assert set(listed(block.columns["blk_first"])) == {block.first}
            assert set(listed(block.columns["blk_last"])) == {block.last}
            assert set(listed(block.columns["blk_rows"])) == {block.rows}
            assert set(listed(block.columns["day"])) == {with_rows[0][1]}
            assert {len(column) for column in block.columns.values()} == {block.rows}


def test_a_block_waits_for_its_age_and_no_longer() -> None:
    cut = cutter()
    cut.add(7, 100 * US_PER_DAY, rows_of(7, 1, 1), now_us=50)
    assert cut.take(1_049) is None
    block = cut.take(1_050)
    assert block is not None
    assert (block.first, block.last, block.rows, block.completes) == (7, 7, 1, False)


def test_a_block_waits_longer_while_more_records_wait_but_not_for_ever() -> None:
    cut = cutter()
    assert cut.due_us is None
    cut.add(7, 100 * US_PER_DAY, rows_of(7, 1, 1), now_us=50)
    assert cut.due_us == 1_050
    assert cut.take(1_050, more_wait=True) is None
    assert cut.take(50 + BEHIND_TIMES * 1_000 - 1, more_wait=True) is None
    block = cut.take(50 + BEHIND_TIMES * 1_000, more_wait=True)
    assert block is not None
    assert (block.first, block.last) == (7, 7)
    assert cut.due_us is None


def test_a_full_block_is_due_at_once() -> None:
    cut = cutter()
    for offset in range(100):
        cut.add(offset, 100 * US_PER_DAY, rows_of(offset, 1, 1), now_us=50)
    assert cut.due_us == 0
    assert cut.take(50, more_wait=True) is not None


def test_records_without_rows_make_a_block_without_rows() -> None:
    cut = cutter()
    cut.add(7, 100 * US_PER_DAY, None, now_us=0)
    cut.add(9, 100 * US_PER_DAY, Rows(0, {}, 0), now_us=0)
    block = cut.take(0, force=True)
    assert block is not None
    assert (block.first, block.last, block.rows, block.columns) == (7, 9, 0, {})


def test_a_partial_block_is_completed_in_exactly_its_range_whatever_the_limits() -> None:
    cut = cutter(Range(10, 14))
    for offset in (10, 12, 13):
        cut.add(offset, 100 * US_PER_DAY, rows_of(offset, 9, 10), now_us=0)
        assert cut.take(10**9, force=True) is None, "never cut short"
    cut.add(14, 100 * US_PER_DAY, rows_of(14, 9, 10), now_us=0)
    cut.add(15, 100 * US_PER_DAY, rows_of(15, 1, 10), now_us=0)
    block = cut.take(0)
    assert block is not None
    assert (block.first, block.last, block.rows, block.completes) == (10, 14, 36, True)
    after = cut.take(0, force=True)
    assert after is not None
    assert (after.first, after.last, after.completes) == (15, 15, False)


@pytest.mark.parametrize("first_there", [12, 15])
def test_a_partial_block_whose_records_are_gone_does_not_swallow_later_ones(first_there: int) -> None:
    cut = cutter(Range(10, 14))
    offsets = [o for o in (12, 15) if o >= first_there]
    for offset in offsets:
        cut.add(offset, 100 * US_PER_DAY, rows_of(offset, 1, 1), now_us=0)
    blocks = [cut.take(0, force=True) for _ in offsets]
    assert [(b.first, b.last, b.rows) for b in blocks if b] == (
        [(10, 14, 1), (15, 15, 1)] if first_there == 12 else [(15, 15, 1)]
    )


def test_token_names_range_and_process() -> None:
    assert token_of("klaxon.logits", 3, 10, 99, "b1") == "klaxon.logits:3:10-99:b1"
    assert day_of(86_400_000_000 * 5 - 1) == 4
