"""Single columns of a columnar envelope: from blobs to checked values.

A producer's batches mostly repeat themselves: the same version, region, absent seed, … for every event. Such
a column is one value on the wire; what it stands for is worked out once and kept, and so is what all such
columns of a record stand for together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schemas.columns import ABSENT, NO_LABEL, LabelColumn
from schemas.layout import Layout, NumberColumn

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


def constant_numbers(
    layout: Layout, blobs: Sequence[bytes], n: int
) -> tuple[dict[str, NDArray[Any]], Sequence[int]]:
    """The number columns that are one value, and the indices of the others, which are read one by one.

    None but indices where a column is refused or has faults: to be said column by column, in their order.
    """
    every = range(len(layout.numbers))
    if n > _KEPT_EVENTS:
        return {}, every
    plan = _constant_indices(layout, tuple(map(len, blobs)), n)
    if plan is None:
        return {}, every
    constant, others = plan
    columns = _constant_numbers(layout, tuple([blobs[index] for index in constant]), constant, n)
    return ({}, every) if columns is None else (columns.copy(), others)


@lru_cache(maxsize=1024)
def _constant_indices(
    layout: Layout, sizes: tuple[int, ...], n: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Indices of the columns that are one value, and of the others; None where a size fits neither."""
    constant: list[int] = []
    others: list[int] = []
    for index, (column, size) in enumerate(zip(layout.numbers, sizes, strict=True)):
        if size == column.itemsize * n:
            others.append(index)
        elif size == column.itemsize and n:
            constant.append(index)
        else:
            return None
    return tuple(constant), tuple(others)


@lru_cache(maxsize=128)
def _constant_numbers(
    layout: Layout, blobs: tuple[bytes, ...], indices: tuple[int, ...], n: int
) -> dict[str, NDArray[Any]] | None:
    """The columns of these indices by name; None where one has a fault."""
    columns: dict[str, NDArray[Any]] = {}
    for index, blob in zip(indices, blobs, strict=True):
        column = layout.numbers[index]
        columns[column.name], faults = _constant_number(column, blob, n)
        if faults:
            return None
    return columns


def constant_labels(
    layout: Layout, wire: Sequence[tuple[list[str], bytes]], n: int
) -> tuple[dict[str, LabelColumn], Sequence[int]]:
    """As `constant_numbers`, of the label columns."""
    every = range(len(layout.labels))
    if n > _KEPT_EVENTS or n < 2:
        return {}, every
    key = tuple(
        [
            ((values[0] if values else None), codes)
            if len(codes) == 2 and (not values or (len(values) == 1 and len(values[0]) <= MAX_LABEL_CHARS))
            else None
            for values, codes in wire
        ]
    )
    found = _constant_labels(layout, key, n)
    return ({}, every) if found is None else (found[0].copy(), found[1])


@lru_cache(maxsize=128)
def _constant_labels(
    layout: Layout, key: tuple[tuple[str | None, bytes] | None, ...], n: int
) -> tuple[dict[str, LabelColumn], tuple[int, ...]] | None:
    """The columns of which `key` holds the text and the code, and the indices of the others.

    The others have their places in it: both encodings give their labels in the same order.
    """
    columns: dict[str, Any] = dict.fromkeys(layout.labels)
    others: list[int] = []
    for index, (name, optional, held) in enumerate(
        zip(layout.labels, layout.optional_labels, key, strict=True)
    ):
        if held is None:
            others.append(index)
            continue
        text, code = held
        columns[name], faults = _constant_label(optional, () if text is None else (text,), code, n)
        if faults:
            return None
    return columns, tuple(others)


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
    if column.wire != "<f8":
        return bool(column.least <= values.min() and values.max() <= column.high)
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
