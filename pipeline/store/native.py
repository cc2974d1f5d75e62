"""Columns → one block of ClickHouse's Native format. Pure.

The driver writes value by value; numpy columns are written whole here, in the very types of the table. What
has no such shape (maps, arrays, tuples) goes through the driver's own types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from clickhouse_connect.driver.exceptions import ClickHouseError
from clickhouse_connect.driver.insert import InsertContext
from numpy.typing import NDArray

from pipeline.store.columns import (
    Column,
    Columns,
    HexTexts,
    Numbers,
    Optionals,
    Sparse,
    TextLists,
    Texts,
    listed,
)
from pipeline.store.errors import RowError
from schemas.columns import U1, Bool

_WIRE: Final = {
    **{f"UInt{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"Int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    "Float32": "<f4",
    "Float64": "<f8",
    "Bool": "<u1",
    "Date": "<u2",
    "DateTime64": "<i8",
}
_LOW_CARDINALITY_VERSION: Final = (1).to_bytes(8, "little")
_NEW_DICTIONARY: Final = 1 << 9 | 1 << 10
_HEX: Final = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)


def native_block(table: str, columns: Columns, types: Sequence[Any]) -> bytes:
    """One block. `types`: the driver's column types, in the columns' order. Raises RowError."""
    context = InsertContext(table, list(columns), types)
    rows = len(next(iter(columns.values())))
    out = bytearray(_leb128(len(columns)) + _leb128(rows))
    for (name, column), type_ in zip(columns.items(), types, strict=True):
        out += _text(name) + _text(type_.insert_name)
        context.start_column(name)
        try:
            _write(column, type_, out, context)
        except RowError as error:
            raise RowError(f"table {table}, column {name}: {error}") from None
        except (ClickHouseError, TypeError, ValueError, OverflowError) as error:
            raise RowError(f"table {table}, column {name} ({type_.name}): {error}") from error
    return bytes(out)


def _write(column: Column, type_: Any, out: bytearray, context: InsertContext) -> None:
    match column:
        case Optionals():
            _write(column.numbers, type_, out, context)
        case Numbers(values, absent) if (wire := _WIRE.get(_base(type_))) is not None:
            _write_nulls(absent, len(values), type_, out)
            out += _fitting(values, absent, wire).tobytes()
        case Texts() if type_.low_card:
            out += _LOW_CARDINALITY_VERSION
            _write_dictionary(column, type_, out)
        case Texts(values) if _base(type_) == "String":
            codes = column.within
            absent = np.array([text is None for text in values])[codes]
            _write_nulls(absent if absent.any() else None, len(codes), type_, out)
            if absent.all():
                out += bytes(len(codes))  # an empty text each
                return
            texts = [_text(text or "") for text in values]
            out += b"".join([texts[code] for code in codes.tolist()])
        case HexTexts(raw, absent) if _base(type_) == "String" and not type_.low_card:
            _write_nulls(absent, len(raw), type_, out)
            out += _hex_texts(raw, absent)
        case TextLists(lengths, items) if type_.element_type.low_card:
            out += _LOW_CARDINALITY_VERSION
            out += np.cumsum(lengths).astype("<u8").tobytes()
            if len(items):
                _write_dictionary(items, type_.element_type, out)
        case Sparse(n, None, given) if not given and type_.low_card:
            _write(Texts((None,), np.zeros(n, dtype=np.uint8)), type_, out, context)
        case Sparse(n, None, given) if not given and _base(type_) in _WIRE:
            _write(Numbers(np.zeros(n, dtype=np.uint8), np.ones(n, dtype=np.bool_)), type_, out, context)
        case Sparse(n, default, given) if not given and default is not None:
            type_.write_column_prefix(out)
            out += bytes(8 * n)  # where each (empty) array or map ends
        case _:
            type_.write_column(listed(column), out, context)


def _base(type_: Any) -> str:
    name = str(type_.name).removeprefix("LowCardinality(").removeprefix("Nullable(")
    return name.rstrip(")").partition("(")[0]


def _write_nulls(absent: Bool | None, n: int, type_: Any, out: bytearray) -> None:
    if type_.nullable:
        out += bytes(n) if absent is None else absent.astype(np.uint8).tobytes()
    elif absent is not None and absent.any():
        raise RowError("a value is missing")


def _fitting(values: NDArray[Any], absent: Bool | None, wire: str) -> NDArray[Any]:
    """The values in their wire type; what is absent is 0."""
    dtype = np.dtype(wire)
    if absent is not None:
        values = np.where(absent, values.dtype.type(0), values)
    if values.dtype == dtype:
        return values
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        if values.dtype.kind == "f":
            raise RowError(f"{values.dtype} does not fit {dtype}")
        if len(values) and not (limits.min <= int(values.min()) and int(values.max()) <= limits.max):
            raise RowError(f"values from {values.min()} to {values.max()} do not fit {dtype}")
    return values.astype(dtype)


def _write_dictionary(column: Texts, type_: Any, out: bytearray) -> None:
    """The texts that occur, then a key per row. Of a nullable type key 0 is NULL."""
    codes = column.within
    used = np.bincount(codes, minlength=len(column.values)) > 0
    keys: dict[str | None, int] = {None: 0} if type_.nullable else {}
    moved = np.zeros(len(column.values), dtype=np.int64)
    for code in np.flatnonzero(used).tolist():
        text = column.values[code]
        if text is None and not type_.nullable:
            raise RowError("a value is missing")
        moved[code] = keys.setdefault(text, len(keys))
    size = next(power for power in range(4) if len(keys) <= 1 << (8 << power))
    out += (_NEW_DICTIONARY | size).to_bytes(8, "little") + len(keys).to_bytes(8, "little")
    out += b"".join([_text(text or "") for text in keys])
    out += len(codes).to_bytes(8, "little")
    out += moved.astype(f"<u{1 << size}")[codes].tobytes()


def _hex_texts(raw: U1, absent: Bool | None) -> bytes:
    rows, width = len(raw), 2 * raw.shape[1]
    texts = np.empty((rows, 1 + width), dtype=np.uint8)
    texts[:, 0] = width
    texts[:, 1:] = _HEX[raw].view(np.uint8).reshape(rows, width)
    if absent is None:
        return texts.tobytes()
    texts[absent, 0] = 0
    kept = np.ones(texts.shape, dtype=np.bool_)
    kept[absent, 1:] = False
    return texts[kept].tobytes()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _leb128(len(encoded)) + encoded


def _leb128(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
