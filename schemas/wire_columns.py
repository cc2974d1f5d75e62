"""Single columns of a columnar envelope: from blobs to checked values.

A producer's batches mostly repeat themselves: the same version, region, absent seed, … for every event. Such
a column is one value on the wire; what it stands for is worked out once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.columns import ABSENT, NO_LABEL, LabelColumn
from schemas.layout import NumberColumn

MAX_LABEL_CHARS: Final = 256
_KEPT_EVENTS: Final = 512
"""Columns of more events are not kept: the memory of the caches stays below some megabytes."""

Faults = Sequence[tuple[int, str]]
"""(event, why its value is refused)."""


class BlobError(ValueError):
    """A blob of a length that fits neither all events nor a single value."""


def read_number(column: NumberColumn, blob: bytes, n: int) -> tuple[NDArray[Any], Faults]:
    """(n,) values, and what violates the limits of the event types. Raises BlobError."""
    if _is_constant(blob, column.itemsize, n):
        return _constant_number(column, blob, n) if n <= _KEPT_EVENTS else _number(column, blob * n)
    return _number(column, blob)


def read_label(optional: bool, values: list[str], blob: bytes, n: int) -> tuple[LabelColumn, Faults]:
    """n labels, and those that have no text, or none of an allowed length. Raises BlobError."""
    if not _is_constant(blob, 2, n):
        return _label(optional, tuple(values), blob)
    if n <= _KEPT_EVENTS and (not values or (len(values) == 1 and len(values[0]) <= MAX_LABEL_CHARS)):
        return _constant_label(optional, tuple(values), blob, n)
    return _label(optional, tuple(values), blob * n)


def _is_constant(blob: bytes, itemsize: int, n: int) -> bool:
    if len(blob) == itemsize * n:
        return False
    if len(blob) == itemsize and n:
        return True
    raise BlobError(
        f"blob of {len(blob)} bytes; {n} events need {itemsize * n} (or {itemsize} for all alike)"
    )


def _number(column: NumberColumn, blob: bytes) -> tuple[NDArray[Any], Faults]:
    values = np.frombuffer(blob, dtype=column.wire)
    faults = () if _is_inside(column, values) else _out_of_range(column, values)
    return values.view(np.bool_) if column.flag else values, faults


_constant_number = lru_cache(maxsize=1024)(lambda column, blob, n: _number(column, blob * n))


def _is_inside(column: NumberColumn, values: NDArray[Any]) -> bool:
    """Whether all values are between the limits; a NaN is not."""
    if len(values) == 0:
        return True
    with np.errstate(invalid="ignore"):
        return bool(column.least <= values.min() and values.max() <= column.high)


def _out_of_range(column: NumberColumn, values: NDArray[Any]) -> Faults:
    bad = ~((values >= column.least) & (values <= column.high))
    absent = ""
    if column.optional:
        bad &= values != ABSENT
        absent = f" or {ABSENT} for absent"
    rows = np.flatnonzero(bad)
    return [
        (row, f"{value} is not in {column.low}..{column.high}{absent}")
        for row, value in zip(rows.tolist(), values[rows].tolist(), strict=True)
    ]


def _label(optional: bool, values: tuple[str, ...], blob: bytes) -> tuple[LabelColumn, Faults]:
    codes = np.frombuffer(blob, dtype="<u2")
    shortest = 0 if optional else 1
    lengths = list(map(len, values))
    fit = not lengths or shortest <= min(lengths) <= max(lengths) <= MAX_LABEL_CHARS
    unknown = codes >= len(values)
    if optional:
        unknown &= codes != NO_LABEL
    column = LabelColumn(values, codes)
    if fit and not unknown.any():
        return column, ()
    faults: list[tuple[int, str]] = []
    unfit = [code for code, length in enumerate(lengths) if not shortest <= length <= MAX_LABEL_CHARS]
    for row in np.flatnonzero(unknown | np.isin(codes, unfit)).tolist():
        code = int(codes[row])
        if code == NO_LABEL:
            faults.append((row, "required field is missing"))
        elif code >= len(values):
            faults.append((row, f"code {code} has no entry"))
        else:
            allowed = f"allowed are {shortest} to {MAX_LABEL_CHARS}"
            faults.append((row, f"{lengths[code]} characters; {allowed}"))
    return column, faults


_constant_label = lru_cache(maxsize=1024)(
    lambda optional, values, blob, n: _label(optional, values, blob * n)
)
