"""Sparse histograms: how often each (cell, quantity, bin) came, as sorted integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeline.core.bins import KIND_OF_MEASURE, bin_of
from pipeline.core.claims import Members, sorted_integers, starts_of_runs
from schemas.columns import I8, Bool

_BIN_BITS: Final = 13
_CODE_BITS: Final = 16
"""A key is slot << 16 | code, a code is quantity << 13 | bin."""
_BIN_MASK: Final = (1 << _BIN_BITS) - 1
_CODES: Final = 1 << _CODE_BITS
_BUCKET_SHIFT: Final = 44
"""Keys take fewer bits: there are never so many slots."""
_NOTHING: Final = np.zeros(0, dtype=np.int64)
_PIECES: Final = 64
"""Pieces of one bucket's histograms that wait to be put together."""
_QUANTITIES: Final = {name: number for number, name in enumerate(KIND_OF_MEASURE)}

Measures = Mapping[str, tuple[I8, Bool]]
"""Values by name, and which rows have one."""


def keeps_histogram(name: str) -> bool:
    """Whether this quantity has bins; all others have count, sum and extremes only."""
    return name in _QUANTITIES


@dataclass(frozen=True, slots=True)
class Binned:
    """The bins of n rows."""

    codes: I8
    """(m,) distinct quantities and bins, ascending."""
    at: I8
    """(quantities, n) index into `codes` of each row's bin; m where the row has no value."""

    def counts(self, members: Members, slots: I8, bucket: I8) -> Iterator[tuple[int, I8, I8]]:
        """Per bucket: keys of the cells of these rows, ascending, and how many rows have each.

        The rows of group i count in `slots[i]`, which is a cell of `bucket[i]`.
        """
        order = np.lexsort((slots, bucket))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        width = len(self.codes) + 1
        keys = self.at.take(members.rows, axis=1)
        keys += np.repeat(rank * width, members.sizes)
        keys = sorted_integers(keys.ravel(), width * len(order))
        starts = starts_of_runs(keys)
        times = np.diff(starts, append=len(keys))
        cells, at = np.divmod(keys[starts], width)
        has = at < len(self.codes)
        cells, times = cells[has], times[has]
        found = (slots[order][cells] << _CODE_BITS) | self.codes[at[has]]
        buckets = bucket[order]
        begins = starts_of_runs(buckets)
        edges = [*np.searchsorted(cells, begins).tolist(), len(cells)]
        for number, each in enumerate(buckets[begins].tolist()):
            run = slice(edges[number], edges[number + 1])
            yield each, found[run], times[run]


def binned(measures: Measures) -> Binned | None:
    """The bins of all quantities that keep a histogram; None without a value."""
    held = [name for name in measures if name in _QUANTITIES and measures[name][1].any()]
    if not held:
        return None
    codes = np.empty((len(held), len(measures[held[0]][0])), dtype=np.int64)
    for kind in {KIND_OF_MEASURE[name] for name in held}:
        at = [number for number, name in enumerate(held) if KIND_OF_MEASURE[name] == kind]
        codes[at] = bin_of(kind, np.array([measures[held[number]][0] for number in at]))
    codes |= np.array([_QUANTITIES[name] << _BIN_BITS for name in held])[:, None]
    codes[~np.array([measures[name][1] for name in held])] = _CODES
    # A table of what came costs less than sorting.
    least = int(codes.min())
    came = np.zeros(_CODES + 1 - least, dtype=np.bool_)
    came[codes - least] = True
    distinct = np.flatnonzero(came[:-1]) + least
    index = np.empty(_CODES + 1 - least, dtype=np.int64)
    index[distinct - least] = np.arange(len(distinct))
    index[-1] = len(distinct)
    return Binned(distinct, index[codes - least])


@dataclass(frozen=True, slots=True)
class Runs:
    """Histograms of some cells: the one of quantity j and cell i is `bins[begins[j][i] : ends[j][i]]`."""

    begins: list[list[int]]
    ends: list[list[int]]
    bins: list[int]
    counts: list[int]

    def lists(self, quantity: int) -> tuple[list[list[int]], list[list[int]]]:
        """Every cell's bins and counts."""
        cuts = list(map(slice, self.begins[quantity], self.ends[quantity]))
        return list(map(self.bins.__getitem__, cuts)), list(map(self.counts.__getitem__, cuts))


class Histograms:
    """Those of one bucket's cells."""

    def __init__(self) -> None:
        """Nothing counted yet."""
        self._keys: list[I8] = []
        self._counts: list[I8] = []
        """Pieces, each ascending; put together before they are read, and now and then."""

    def add(self, keys: I8, counts: I8) -> None:
        """Count each key so many times more; keys ascending and distinct."""
        self._keys.append(keys)
        self._counts.append(counts)
        if len(self._keys) > _PIECES:
            self._settle()

    @property
    def settled(self) -> tuple[I8, I8]:
        """All keys, ascending, and how often each came."""
        self._settle()
        return (self._keys[0], self._counts[0]) if self._keys else (_NOTHING, _NOTHING)

    def _settle(self) -> None:
        if len(self._keys) < 2:
            return
        keys = np.concatenate(self._keys)
        order = np.argsort(keys, kind="stable")  # merges the pieces: each is sorted
        keys = keys[order]
        starts = starts_of_runs(keys)
        self._keys = [keys[starts]]
        self._counts = [np.add.reduceat(np.concatenate(self._counts)[order], starts)]


def runs(held: Sequence[Histograms], slots: Sequence[I8], names: Sequence[str]) -> Runs:
    """The histograms of cells × names, where the cells `slots[i]` are of the bucket of `held[i]`.

    At once, as a call of numpy costs about the same for a few cells and for a hundred.
    """
    settled = [each.settled for each in held]
    buckets: I8 = np.arange(len(held)) << _BUCKET_SHIFT
    # A bucket's number above its keys: they ascend over all.
    keys = np.concatenate([keys for keys, _ in settled])
    keys += np.repeat(buckets, [len(keys) for keys, _ in settled])
    counts = np.concatenate([counts for _, counts in settled])
    cells = (np.concatenate(slots) << _CODE_BITS) + np.repeat(buckets, list(map(len, slots)))
    quantities = np.array([_QUANTITIES[name] for name in names], dtype=np.int64)
    low = cells + (quantities << _BIN_BITS)[:, None]
    edges = np.searchsorted(keys, (low, low + _BIN_MASK + 1))
    first, last = (int(edges.min()), int(edges.max())) if edges.size else (0, 0)
    begins, ends = (edges - first).tolist()
    return Runs(begins, ends, (keys[first:last] & _BIN_MASK).tolist(), counts[first:last].tolist())
