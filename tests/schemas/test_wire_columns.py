"""A column of one value for all events reads as that value repeated, faults included, however often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.layout import LOGIT_LAYOUT, REQUEST_LAYOUT, NumberColumn
from schemas.wire_columns import BlobError, read_label, read_number

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
