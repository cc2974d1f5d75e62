"""Merging is exact and knows no order; the cap fills in log order; histograms answer within their bins."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core import claims
from pipeline.core import evidence as ev
from pipeline.core.bins import bin_of
from pipeline.core.buckets import Buckets
from pipeline.core.cell_bytes import Portion
from pipeline.core.evidence import Dimension, Evidence
from pipeline.core.flushing import Records
from pipeline.core.source import ContentSettings
from schemas.buckets import Cell, Distribution, FinalBuckets, Population, Second
from schemas.records import read_msgpack
from schemas.topics import Topic
from tests.core.merging import (
    CellSums,
    count_over,
    mean,
    merge_all,
    merge_cells,
    quantile,
    subtract_cells,
)

VALUES = st.lists(st.integers(0, 5_000_000), max_size=30)


def distribution(values: list[int]) -> Distribution:
    """A latency distribution, directly."""
    bins: dict[int, int] = {}
    for k in bin_of("latency", np.array(values, dtype=np.int64)).tolist():
        bins[k] = bins.get(k, 0) + 1
    low, high = (min(values), max(values)) if values else (0, 0)
    return Distribution(len(values), sum(values), low, high, sorted(bins), [bins[k] for k in sorted(bins)])


def cell(values: list[int]) -> Cell:
    """A cell with one measure, and each value among the worst."""
    sums = CellSums()
    held = {"ttft_us": distribution(values)} if values else {}
    counters = {"requests": len(values)} if values else {}
    worst = sorted(((v, bytes([v % 256])) for v in values), reverse=True)[:3]
    sums.merge(Cell("all", "", counters, held, worst))
    return sums.cell("all", "")


@given(VALUES, VALUES, VALUES)
def test_merging_is_exact_associative_and_commutative(a: list[int], b: list[int], c: list[int]) -> None:
    whole = cell(a + b + c)
    assert merge_cells(merge_cells(cell(a), cell(b)), cell(c)) == whole
    assert merge_cells(cell(a), merge_cells(cell(c), cell(b))) == whole
    assert merge_all([cell(b), cell(c), cell(a)], "all", "") == whole


@given(VALUES, VALUES)
def test_subtracting_gives_back_everything_but_extremes(a: list[int], b: list[int]) -> None:
    left = subtract_cells(merge_cells(cell(a), cell(b)), cell(b))
    assert left.counters == cell(a).counters
    assert left.measures.keys() == cell(a).measures.keys()
    for name, got in left.measures.items():
        want = cell(a).measures[name]
        assert (got.count, got.sum, got.bins, got.counts) == (want.count, want.sum, want.bins, want.counts)
        assert got.min <= want.min
        assert got.max >= want.max


@given(st.lists(st.integers(0, 5_000_000), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_within_one_percent(values: list[int], q: float) -> None:
    got = quantile(distribution(values), "latency", q)
    rank = max(1, -int(-q * len(values) // 1))
    want = sorted(values)[rank - 1]
    assert got is not None
    assert abs(got - want) <= 0.0102 * want + 1


@given(VALUES)
def test_share_over_an_edge_is_exact(values: list[int]) -> None:
    assert count_over(distribution(values), "latency", 500_000) == sum(v > 500_000 for v in values)


@given(VALUES, st.integers(0, 5_000_000))
def test_share_over_any_limit_is_never_too_large(values: list[int], limit: int) -> None:
    assert count_over(distribution(values), "latency", limit) <= sum(v > limit for v in values)


def test_nothing_has_no_quantile_and_no_mean() -> None:
    empty = distribution([])
    assert quantile(empty, "latency", 0.5) is None
    assert mean(empty) is None


def rows(spec: list[tuple[int, str, str]]) -> Evidence:
    """Full rows (second, version, node)."""
    populations = [Population("r", 1, "canary", version) for _, version, _ in spec]
    n = len(spec)
    return Evidence(
        second=np.array([second for second, _, _ in spec], dtype=np.int64),
        populations=populations,
        population=np.arange(n),
        dimensions=(
            ev.constant("all", "", n),
            Dimension("node", "uvwxyz", np.array(["uvwxyz".index(node) for _, _, node in spec])),
        ),
        counters={"requests": np.ones(n, dtype=np.int64)},
        totals={"cut": np.ones(n, dtype=np.int64)},
        measures={"ttft_us": (np.arange(n, dtype=np.int64), np.ones(n, dtype=np.bool_))},
    )


def read(portions: list[Portion]) -> list[Second]:
    """What a reader of a record with these cells has."""
    records = Records(Topic.REQUESTS, 0, ContentSettings(gating_partitions=1))
    (record,) = records.finals(portions, (0, 9), 0, 0)
    return read_msgpack(record.value, FinalBuckets).seconds


def filled(batches: list[Evidence], capacity: int) -> list[Second]:
    """All content after these batches."""
    buckets = Buckets(capacity)
    for batch in batches:
        buckets.add(batch)
    return read(buckets.close(10**12))


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_cap_depends_on_the_order_of_rows_only(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    spec = [(rng.randrange(2), rng.choice("ab"), rng.choice("xyzuvw")) for _ in range(20)]
    evidence = rows(spec)
    pieces = [rows(spec[at : at + 1]) for at in range(len(spec))]
    for at, piece in enumerate(pieces):
        piece.measures["ttft_us"][0][:] = at
    assert filled([evidence], capacity) == filled(pieces, capacity)
    for second in filled([evidence], capacity):
        held = [(c.dimension, c.value) for cells in second.contents for c in cells.cells]
        kept = [name for name in held if name[0] != "other"]
        assert len(kept) <= capacity


@given(st.integers(0, 10**6))
def test_how_long_keys_are_sorted_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    evidence = rows([(rng.randrange(3), rng.choice("ab"), rng.choice("xyzuvw")) for _ in range(20)])
    short = filled([evidence], 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_SHORT", 0)
        assert filled([evidence], 9) == short


def test_what_finds_no_cell_counts_once_in_other() -> None:
    (second,) = filled([rows([(5, "a", "x"), (5, "a", "y"), (5, "a", "z")])], capacity=3)
    cells = {(c.dimension, c.value): c for c in second.contents[0].cells}
    assert cells.keys() == {("all", ""), ("node", "x"), ("other", "")}
    assert cells["all", ""].counters == {"requests": 3, "cut": 3}
    assert cells["other", ""].counters == {"requests": 2, "overflow": 2}
    assert cells["other", ""].measures["ttft_us"].sum == 1 + 2


def test_a_population_without_room_counts_in_its_arms_catch_all() -> None:
    (second,) = filled([rows([(5, "a", "x"), (5, "b", "x"), (5, "c", "x")])], capacity=3)
    found = {cells.population: cells.cells for cells in second.contents}
    assert found.keys() == {Population("r", 1, "canary", "a"), Population("", None, "canary", None)}
    (other,) = found[Population("", None, "canary", None)]
    assert (other.dimension, other.counters) == ("other", {"requests": 2, "overflow": 4, "cut": 2})


def test_changed_cells_come_once_and_whole() -> None:
    buckets = Buckets(100)
    buckets.add(rows([(5, "a", "x"), (5, "a", "y")]))
    assert len(read(buckets.changed())[0].contents[0].cells) == 3
    assert buckets.changed() == []
    buckets.add(rows([(5, "a", "y")]))
    (second,) = read(buckets.changed())
    assert {c.value: c.counters["requests"] for c in second.contents[0].cells} == {"": 3, "y": 2}


def test_what_changed_in_a_second_that_is_left_out_comes_later_or_with_its_close() -> None:
    buckets = Buckets(100)
    buckets.add(rows([(5, "a", "x"), (6, "a", "x"), (7, "a", "x")]))
    assert [second.second for second in read(buckets.changed(after=6))] == [7]
    buckets.add(rows([(6, "a", "x")]))
    assert [second.second for second in read(buckets.close(5))] == [5]
    (second,) = read(buckets.changed())
    assert second.second == 6
    assert {c.value: c.counters["requests"] for c in second.contents[0].cells} == {"": 2, "x": 2}
    assert buckets.changed() == []


@pytest.mark.parametrize("tokens", [512, 513, 8193])
def test_contexts_are_nested(tokens: int) -> None:
    node = Dimension("node", ("n",), np.zeros(1, dtype=np.int64))
    found = [
        (d.name, d.values[int(d.codes[0])])
        for dimensions in ev.contexts(np.array([tokens]), node)
        for d in dimensions
        if d.codes[0] >= 0
    ]
    over = [f">{limit}" for limit in (512, 2048, 4096, 8192) if tokens > limit]
    assert found == [*(("context", v) for v in over), *(("node_context", f"n|{v}") for v in over)]
