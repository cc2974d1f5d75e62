"""Columns of rows before they are inserted: numpy where an event's columns are, lists for the rest. Pure.

Integers are plain: µs are the ticks of `DateTime64(6)`, days those of `Date`, 0 and 1 those of `Bool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from schemas.columns import ABSENT, U1, Bool, LabelColumn

Codes: TypeAlias = NDArray[np.integer[Any]]


class Numbers(Struct, frozen=True, gc=False):
    """(n,) numbers; NULL where `absent`."""

    values: NDArray[Any]
    absent: Bool | None = None

    def __len__(self) -> int:
        return len(self.values)

    def tolist(self) -> list[Any]:
        """As Python values."""
        if self.absent is None:
            return list(self.values.tolist())
        pairs = zip(self.values.tolist(), self.absent.tolist(), strict=True)
        return [None if absent else value for value, absent in pairs]


class Optionals(Struct, frozen=True, gc=False):
    """(n,) numbers; NULL where they are ABSENT, which is looked for once a block, not once a record."""

    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def numbers(self) -> Numbers:
        """The same, as Numbers."""
        return Numbers(self.values, self.values == ABSENT)

    def tolist(self) -> list[Any]:
        """As Python values."""
        return self.numbers.tolist()


class Texts(Struct, frozen=True, gc=False):
    """(n,) texts `values[codes[i]]`, NULL where that is None. `values` may hold one twice, or unused ones.

    A code beyond the last value stands for the last.
    """

    values: tuple[str | None, ...]
    codes: Codes

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def within(self) -> Codes:
        """The codes, none beyond the last value."""
        return np.minimum(self.codes, len(self.values) - 1)

    def tolist(self) -> list[Any]:
        """As Python values."""
        return [self.values[code] for code in self.within.tolist()]


class HexTexts(Struct, frozen=True, gc=False):
    """(n,) texts: the hex digits of the rows of `raw` (n, bytes); NULL where `absent`."""

    raw: U1
    absent: Bool | None = None

    def __len__(self) -> int:
        return len(self.raw)

    def tolist(self) -> list[Any]:
        """As Python values."""
        texts = [row.tobytes().hex() for row in self.raw]
        if self.absent is None:
            return texts
        return [None if absent else text for text, absent in zip(texts, self.absent.tolist(), strict=True)]


class TextLists(Struct, frozen=True, gc=False):
    """(n,) arrays of texts: `lengths[i]` of `items` each, in order."""

    lengths: NDArray[np.int64]
    items: Texts

    def __len__(self) -> int:
        return len(self.lengths)

    def tolist(self) -> list[Any]:
        """As Python values."""
        items, ends = self.items.tolist(), np.cumsum(self.lengths).tolist()
        return [items[end - size : end] for end, size in zip(ends, self.lengths.tolist(), strict=True)]


class Sparse(Struct, frozen=True, gc=False):
    """(n,) values that are `default` (None, or an empty list or dict) but for the given ones."""

    n: int
    default: Any
    given: Mapping[int, Any]

    def __len__(self) -> int:
        return self.n

    def tolist(self) -> list[Any]:
        """As Python values."""
        values = [self.default] * self.n
        for index, value in self.given.items():
            values[index] = value
        return values


Column: TypeAlias = Numbers | Optionals | Texts | HexTexts | TextLists | Sparse | list[Any]
Columns: TypeAlias = Mapping[str, Column]


def label(column: LabelColumn) -> Texts:
    """A label column of events. NO_LABEL is beyond every code."""
    return Texts((*column.values, None), column.codes)


def constant(value: int | str, n: int) -> Column:
    """The same value n times."""
    if isinstance(value, str):
        return Texts((value,), np.zeros(n, dtype=np.uint8))
    return Numbers(np.full(n, value, dtype=np.int64))


def listed(column: Column) -> list[Any]:
    """Any column as Python values."""
    return column if isinstance(column, list) else column.tolist()


def joined(parts: Sequence[Column]) -> Column:
    """Columns of one name, of several records, one after the other. All are of one kind."""
    match parts[0]:
        case list():
            return [value for part in parts for value in part]  # type: ignore[union-attr]
        case Numbers():
            return _joined_numbers(parts)  # type: ignore[arg-type]
        case Optionals():
            return Optionals(np.concatenate([part.values for part in parts])).numbers  # type: ignore[union-attr]
        case Texts():
            return _joined_texts(parts)  # type: ignore[arg-type]
        case HexTexts():
            raws, absent = [part.raw for part in parts], [part.absent for part in parts]  # type: ignore[union-attr]
            return HexTexts(np.concatenate(raws), _joined_masks(absent, [len(raw) for raw in raws]))
        case TextLists():
            lengths = np.concatenate([part.lengths for part in parts])  # type: ignore[union-attr]
            return TextLists(lengths, _joined_texts([part.items for part in parts]))  # type: ignore[union-attr]
        case Sparse(default=default):
            starts = np.cumsum([0, *map(len, parts)]).tolist()
            given = {
                start + index: value
                for start, part in zip(starts, parts, strict=False)
                for index, value in part.given.items()  # type: ignore[union-attr]
            }
            return Sparse(starts[-1], default, given)


def taken(column: Column, rows: NDArray[np.int64]) -> Column:
    """Some rows of a column, in the order of `rows` (ascending)."""
    match column:
        case list():
            return [column[row] for row in rows.tolist()]
        case Numbers(values, absent):
            return Numbers(values[rows], None if absent is None else absent[rows])
        case Optionals(values):
            return Optionals(values[rows])
        case Texts(values, codes):
            return Texts(values, codes[rows])
        case HexTexts(raw, absent):
            return HexTexts(raw[rows], None if absent is None else absent[rows])
        case TextLists() | Sparse():
            plain = column.tolist()
            return [plain[row] for row in rows.tolist()]


def _joined_numbers(parts: Sequence[Numbers]) -> Numbers:
    masks = _joined_masks([part.absent for part in parts], [len(part) for part in parts])
    return Numbers(np.concatenate([part.values for part in parts]), masks)


def _joined_masks(masks: Sequence[Bool | None], sizes: Sequence[int]) -> Bool | None:
    if all(mask is None for mask in masks):
        return None
    filled = [
        np.zeros(size, np.bool_) if mask is None else mask for mask, size in zip(masks, sizes, strict=True)
    ]
    joined = np.concatenate(filled)
    return joined if joined.any() else None


def _joined_texts(parts: Sequence[Texts]) -> Texts:
    """Codes move to one dictionary: first by each record's own start, then all of them at once."""
    codes = np.concatenate([part.codes for part in parts])
    if all(part.values == parts[0].values for part in parts):
        joined = Texts(parts[0].values, codes)
        return Texts(joined.values, joined.within)
    known: dict[str | None, int] = {}
    moved = np.array([known.setdefault(text, len(known)) for part in parts for text in part.values])
    ends = np.cumsum([len(part.values) for part in parts])
    starts = np.concatenate(([0], ends[:-1]))
    sizes = [len(part) for part in parts]
    within = np.minimum(codes + np.repeat(starts, sizes), np.repeat(ends - 1, sizes))
    return Texts(tuple(known), moved[within])
