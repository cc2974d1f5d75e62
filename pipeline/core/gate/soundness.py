"""Whether buckets can be added up at all: their topics are ours, but what stands in them may be anybody's.

A record that ends the gate would end the next one, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.core.bins import KIND_OF_MEASURE, bin_count
from schemas.buckets import Cell, FinalBuckets, FreshCells, Second

AHEAD_S: Final = 3_600
"""Seconds further ahead of this clock cannot have been: clocks differ by less. Nothing grows beyond them."""


def unsound(record: FinalBuckets | FreshCells, now_us: int) -> str:
    """Why this record cannot be taken in; "" if it can."""
    last = now_us // 1_000_000 + AHEAD_S
    if isinstance(record, FinalBuckets):
        if not 0 <= record.part < record.parts:
            return f"part {record.part} of {record.parts}"
        if record.closed_through > last:
            return f"closes second {record.closed_through}, which is far ahead"
        return _unsound_cells(record.seconds, 0, record.closed_through)
    return _unsound_cells(record.seconds, 0, last)


def _unsound_cells(seconds: Sequence[Second], first: int, last: int) -> str:
    for second in seconds:
        if not first <= second.second <= last:
            return f"second {second.second} is not in {first}..{last}"
        for held in second.contents:
            for cell in held.cells:
                if reason := _unsound_cell(cell):
                    return f"second {second.second}, cell {cell.dimension}: {reason}"
    return ""


def _unsound_cell(cell: Cell) -> str:
    for name, held in cell.measures.items():
        if len(held.bins) != len(held.counts):
            return f"{name} has {len(held.bins)} bins and {len(held.counts)} counts"
        if held.count < 0 or (held.counts and min(held.counts) < 0):
            return f"{name} counts less than nothing"
        if sorted(set(held.bins)) != held.bins:
            return f"{name} has bins out of order, or twice"
        kind = KIND_OF_MEASURE.get(name)
        if held.bins and kind is not None and not (0 <= min(held.bins) <= max(held.bins) < bin_count(kind)):
            return f"{name} has a bin that is none of {bin_count(kind)}"
        if kind is not None and held.sum < 0:
            return f"{name} adds up to less than nothing"
    return ""
