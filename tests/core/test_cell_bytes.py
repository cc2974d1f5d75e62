"""Cells made of integers are byte for byte what the encoding of their structs is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core import cell_bytes
from pipeline.core.cell_bytes import CellBytes, Measured, array_head, cell_head
from schemas.buckets import Cell, Distribution

COUNTERS = ("cut", "late", "requests", "überlaut")
BINNED = ("duration_us", "ttft_us")
PLAIN = ("a gauge", "input_tokens")

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(max_size=40)


@st.composite
def distributions(draw: st.DrawFn, *, binned: bool) -> Distribution:
    """With a count; more bins than a short array head tells."""
    bins = sorted(draw(st.sets(st.integers(0, 8191), max_size=20))) if binned else []
    counts = draw(st.lists(st.integers(1, 1 << 40), min_size=len(bins), max_size=len(bins)))
    count = draw(st.integers(1, (1 << 63) - 1))
    return Distribution(count, draw(INTEGERS), draw(INTEGERS), draw(INTEGERS), bins, counts)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Names in order; each counter and measure may be missing."""
    counters = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(COUNTERS, st.integers(1, 1 << 62))))
    measures = draw(
        st.fixed_dictionaries(
            {},
            optional={name: distributions(binned=name in BINNED) for name in (*BINNED, *PLAIN)},
        )
    )
    worst = draw(st.lists(st.tuples(INTEGERS, st.binary(max_size=20)), max_size=3))
    return Cell(
        draw(TEXTS), draw(TEXTS), dict(sorted(counters.items())), dict(sorted(measures.items())), worst
    )


def encoder(held: list[Cell]) -> CellBytes:
    """The same cells as columns of integers."""
    return CellBytes(
        [cell_head(cell.dimension, cell.value) for cell in held],
        [(name, [cell.counters.get(name, 0) for cell in held]) for name in COUNTERS],
        [measured(name, [cell.measures.get(name) for cell in held]) for name in sorted((*BINNED, *PLAIN))],
        [cell.worst for cell in held],
    )


def measured(name: str, held: list[Distribution | None]) -> Measured:
    """One quantity of all cells; where there is none, anything but a count."""
    some = [each or Distribution(0, 0, (1 << 63) - 1, -(1 << 63), [], []) for each in held]
    return Measured(
        name,
        [each.count for each in some],
        [each.sum for each in some],
        [each.min for each in some],
        [each.max for each in some],
        [each.bins for each in some] if name in BINNED else None,
        [each.counts for each in some] if name in BINNED else None,
    )


@given(st.lists(cells(), min_size=1, max_size=8))
def test_every_byte_is_that_of_the_structs(held: list[Cell]) -> None:
    portions = list(encoder(held).portions(7, None, 0, len(held)))
    assert sum(portion.cells for portion in portions) == len(held)
    assert b"".join(portion.value for portion in portions) == b"".join(map(msgspec.msgpack.encode, held))


@given(st.lists(cells(), min_size=2, max_size=12), st.data())
def test_any_of_the_cells_alone(held: list[Cell], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(held)))
    last = data.draw(st.integers(first, len(held)))
    portions = encoder(held).portions(7, None, first, last)
    want = b"".join(map(msgspec.msgpack.encode, held[first:last]))
    assert b"".join(portion.value for portion in portions) == want


@given(st.lists(cells(), min_size=1, max_size=30), st.integers(1, 400))
def test_portions_are_as_short_as_cells_allow(held: list[Cell], limit_bytes: int) -> None:
    sizes = [len(msgspec.msgpack.encode(cell)) for cell in held]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cell_bytes, "PORTION_BYTES", limit_bytes)
        patch.setattr(cell_bytes, "PORTION_CELLS", 7)
        portions = list(encoder(held).portions(7, None, 0, len(held)))
    for portion in portions:
        assert portion.cells <= 7
        assert len(portion.value) == sum(sizes[: portion.cells])
        assert len(portion.value) <= limit_bytes or portion.cells == 1
        del sizes[: portion.cells]
    assert not sizes


@given(st.integers(0, 15) | st.integers(0, 1 << 17))
def test_array_heads(length: int) -> None:
    assert msgspec.msgpack.encode([None] * length) == array_head(length) + b"\xc0" * length
