"""docs/operate.md, "More partitions": what a gate makes of an input topic that has grown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.buckets import PopulationCells
from schemas.topics import partition_of
from tests.core.gate.build import (
    LOGITS,
    SOURCES,
    T0,
    Bench,
    canary,
    final,
    healthy_pairs,
    kinds,
    pair_cell,
    us,
)

GROWN = {**SOURCES, LOGITS: 2 * SOURCES[LOGITS]}
NEW = SOURCES[LOGITS]
BAD = [pair_cell([0.3] * 300)]


def test_a_gate_that_runs_counts_the_new_partition_as_stray_and_does_not_judge_it() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    worst = {T0 + 6: [PopulationCells(canary(), BAD)]}
    bench.read(final(LOGITS, 0, T0 + 6, worst, partition=NEW))
    assert kinds(bench.run(T0 + 6, T0 + 8, healthy_pairs())) == []
    assert bench.core.gauges()["stray_records"] == 1


def test_a_gate_that_starts_again_waits_for_it_and_then_judges_it() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.sources = GROWN
    heir = bench.crash()
    for topic, count in SOURCES.items():
        for partition in range(count):
            heir.read(final(topic, T0 + 6, T0 + 6, partition=partition))
    assert heir.judge(T0 + 6) == []
    assert f"{LOGITS}/{NEW}" in heir.core.blind("chat", us(T0 + 30))
    heir.read(final(LOGITS, 0, T0 + 6, {T0 + 6: [PopulationCells(canary(), BAD)]}, partition=NEW))
    assert kinds(heir.judge(T0 + 6)) == ["trip"]


@given(st.binary(min_size=1, max_size=32), st.integers(1, 64))
def test_twice_the_partitions_leave_a_key_where_it_is_or_move_it_by_their_number(
    key: bytes, count: int
) -> None:
    assert partition_of(key, 2 * count) in (partition_of(key, count), partition_of(key, count) + count)
