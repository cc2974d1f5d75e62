"""A column of one value for all events reads as that value repeated, faults included, however often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.layout import LOGIT_LAYOUT, REQUEST_LAYOUT, Layout, NumberColumn
from schemas.wire_columns import BlobError, constant_labels, constant_numbers, read_label, read_number

COLUMNS = (*REQUEST_LAYOUT.numbers, *LOGIT_LAYOUT.numbers)


@given(st.sampled_from(COLUMNS), st.binary(min_size=8, max_size=8), st.integers(2, 600))
def test_one_number_for_all_is_that_number_repeated(column: NumberColumn, raw: bytes, n: int) -> None:
    one = raw[: column.itemsize]
    want, faults = read_number(column, one * n, n)
    for _ in range(2):
        got, same_faults = read_number(column, one, n)
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()
        assert list(same_faults) == list(faults)
        assert not got.flags.writeable


@given(st.sampled_from(COLUMNS), st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=9))
def test_a_value_is_judged_alike_whatever_stands_beside_it(column: NumberColumn, raws: list[bytes]) -> None:
    blobs = [raw[: column.itemsize] for raw in raws]
    _, faults = read_number(column, b"".join(blobs), len(blobs))
    alone = [
        (row, fault[0][1]) for row, blob in enumerate(blobs) if (fault := read_number(column, blob, 1)[1])
    ]
    assert list(faults) == alone


@given(
    st.booleans(),
    st.lists(st.sampled_from(["", "a", "b", "x" * 257]), max_size=3),
    st.sampled_from([0, 1, 2, 3, 0xFFFF]),
    st.integers(2, 600),
)
def test_one_label_for_all_is_that_label_repeated(
    optional: bool, values: list[str], code: int, n: int
) -> None:
    one = np.uint16(code).tobytes()
    want, faults = read_label(optional, values, one * n, n)
    for _ in range(2):
        got, same_faults = read_label(optional, values, one, n)
        assert (got.values, got.codes.tobytes()) == (want.values, want.codes.tobytes())
        assert list(same_faults) == list(faults)


@pytest.mark.parametrize(("size", "n"), [(8, 0), (12, 2), (0, 1), (24, 2)])
def test_a_blob_of_another_length_is_refused(size: int, n: int) -> None:
    column = next(each for each in COLUMNS if each.itemsize == 8)
    with pytest.raises(BlobError, match=f"blob of {size} bytes; {n} events need {8 * n} "):
        read_number(column, bytes(size), n)


@pytest.mark.parametrize("layout", [REQUEST_LAYOUT, LOGIT_LAYOUT], ids=lambda layout: layout.kind)
def test_constant_columns_together_are_what_each_is_alone(layout: Layout) -> None:
    blobs = [np.array([max(c.low, 0)]).astype(c.wire).tobytes() for c in layout.numbers]
    blobs[2] = blobs[2] * 4
    columns, others = constant_numbers(layout, blobs, 4)
    assert others == (2,)
    for index, column in enumerate(layout.numbers):
        if index != 2:
            assert columns[column.name].tolist() == read_number(column, blobs[index], 4)[0].tolist()
    wire = [(["x"], bytes(2)) for _ in layout.labels]
    wire[1] = (["x", "y"], bytes(8))
    labels, rest = constant_labels(layout, wire, 4)
    assert rest == (1,)
    assert list(labels) == list(layout.labels)
    assert {labels[name].get(3) for name in layout.labels if name != layout.labels[1]} == {"x"}


@pytest.mark.parametrize("size", [0, 3, 8])
def test_a_record_with_a_column_that_is_refused_or_faulty_is_read_column_by_column(size: int) -> None:
    blobs = [np.array([max(c.low, 0)]).astype(c.wire).tobytes() for c in REQUEST_LAYOUT.numbers]
    blobs[0] = b"\xff" * size
    columns, others = constant_numbers(REQUEST_LAYOUT, blobs, 4)
    assert columns == {}
    assert list(others) == list(range(len(blobs)))
