"""Cells as they travel: the msgpack encoding of `schemas.buckets.Cell`, many at once, straight from integers.

An encoded cell is its numbers, with names, array heads and map heads between them. So the numbers of many
cells and what stands between them are laid out in one flat list, cell after cell, which is encoded as it is:
one call instead of a dozen objects per cell. Tests compare every byte with the encoding of the structs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Raw

from pipeline.core.pieces import pieces
from schemas.buckets import Population

PORTION_BYTES: Final = 1 << 17
"""Portions are cut between cells so that none of several cells is longer."""
PORTION_CELLS: Final = 256
"""Nor has more cells: that many of usual length fit."""
_NOTHING: Final = Raw(b"")
_FIX: Final = 16
"""Array and map heads below it take one byte, others three (or five: there are none)."""
_EMPTY_ARRAY: Final = b"\x90"
_CELL: Final = b"\x95"
"""Head of an array of five: a cell."""
_DISTRIBUTION: Final = b"\x96"
_WIDE: Final = 1 << 16

_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Portion:
    """Some cells of one population in one second, encoded one after the other without a head."""

    second: int
    population: Population | None
    cells: int
    value: bytes


def array_head(length: int) -> bytes:
    """What precedes the elements of an array of this length."""
    if length < _FIX:
        return bytes((0x90 | length,))
    return b"\xdc" + length.to_bytes(2) if length < _WIDE else b"\xdd" + length.to_bytes(4)


@lru_cache(maxsize=256)
def _map_head(length: int) -> Raw:
    return Raw(bytes((0x80 | length,)) if length < _FIX else b"\xde" + length.to_bytes(2))


@lru_cache(maxsize=1 << 14)
def cell_head(dimension: str, value: str) -> Raw:
    """The beginning of a cell's encoding."""
    return Raw(_CELL + _encode(dimension) + _encode(value))


@dataclass(frozen=True, slots=True)
class Measured:
    """One quantity of n cells; `bins` and `counts` are None where it keeps no histogram."""

    name: str
    count: list[int]
    """0: this cell has no such quantity."""
    sum: list[int]
    min: list[int]
    max: list[int]
    bins: list[list[int]] | None
    counts: list[list[int]] | None


class CellBytes:
    """n cells, encoded on demand."""

    def __init__(
        self,
        heads: Sequence[Raw],
        counters: Sequence[tuple[str, list[int]]],
        measures: Sequence[Measured],
        worst: Sequence[Sequence[tuple[int, bytes]]],
    ) -> None:
        """`heads` as of `cell_head`; counters and measures by name in order; zero counters are left out."""
        self._n = len(heads)
        self._columns: list[Sequence[object]] = [heads]
        self._literal = b""
        self._map([values for _, values in counters])
        for name, values in counters:
            self._entry(_encode(name), values, [values])
        self._map([measure.count for measure in measures])
        for measure in measures:
            parts: list[Sequence[object]] = [measure.count, measure.sum, measure.min, measure.max]
            ending = 2 * _EMPTY_ARRAY
            if measure.bins is not None and measure.counts is not None:
                parts += (measure.bins, measure.counts)
                ending = b""
            self._entry(_encode(measure.name) + _DISTRIBUTION, measure.count, parts, ending)
        if any(worst):
            self._column(worst)
        else:
            self._literal += _EMPTY_ARRAY
        self._flush()
        self._width = len(self._columns)
        self._flat: list[object] = [None] * (self._n * self._width)
        for at, column in enumerate(self._columns):
            self._flat[at :: self._width] = column

    def portions(
        self, second: int, population: Population | None, first: int, last: int
    ) -> Iterator[Portion]:
        """The cells first..last (exclusive), which are all of this population and second."""
        for cells, value in pieces(first, last, PORTION_CELLS, self._encoded, _is_too_large):
            yield Portion(second, population, cells, value)

    def _encoded(self, begin: int, end: int) -> bytes:
        tokens = self._flat[begin * self._width : end * self._width]
        return _encode(tokens)[len(array_head(len(tokens))) :]

    def _map(self, entries: Sequence[list[int]]) -> None:
        """The head of a map; the cell has an entry where its number is not 0."""
        always = sum(all(values) for values in entries)
        sometimes = [values for values in entries if not all(values)]
        if not any(any(values) for values in sometimes):
            self._literal += bytes(_map_head(always))
        else:
            found = [always + sum(map(bool, row)) for row in zip(*sometimes, strict=True)]
            self._column([_map_head(length) for length in found])

    def _entry(
        self, key: bytes, has: list[int], parts: Iterable[Sequence[object]], ending: bytes = b""
    ) -> None:
        """A map's key and the parts of its value, where `has` is not 0."""
        if all(has):
            self._literal += key
            for part in parts:
                self._column(part)
            self._literal += ending
        elif any(has):
            for part in (self._n * (Raw(key),), *parts, self._n * (Raw(ending),)):
                self._column([each if held else _NOTHING for each, held in zip(part, has, strict=True)])

    def _column(self, values: Sequence[object]) -> None:
        self._flush()
        self._columns.append(values)

    def _flush(self) -> None:
        if self._literal:
            self._columns.append(self._n * (Raw(self._literal),))
            self._literal = b""


def _is_too_large(value: bytes) -> bool:
    return len(value) > PORTION_BYTES
