"""One-second buckets of one source: cells, their cap in log order, what changed, what is closed.

Everything here is a function of the rows in log order: not of how they were cut into records, nor of when
anything was taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pipeline.core.bins import KIND_OF_MEASURE, bin_count, bin_of
from pipeline.core.cells import OTHER, OVERFLOW, CellSums, worst_of
from pipeline.core.evidence import Evidence
from schemas.buckets import WORST_KEPT, Cell, Population, PopulationCells, Second
from schemas.columns import I8
from schemas.events import Arm

CellKey: TypeAlias = tuple[Population | None, str, str]


@dataclass(slots=True)
class Bucket:
    """One open second. `used` counts the cells held against the cap."""

    cells: dict[CellKey, CellSums] = field(default_factory=dict)
    populations: set[Population] = field(default_factory=set)
    used: int = 0
    changed: set[CellKey] = field(default_factory=set)
    seen: set[object] = field(default_factory=set)
    """Keys of the events counted here, for dropping duplicates."""

    def place(self, key: CellKey, capacity: int) -> CellSums | None:
        """The cell, created if there is room for it; None where there is none."""
        cell = self.cells.get(key)
        if cell is not None:
            return cell
        population, _, _ = key
        # A new population takes two places, so that it always has its own `other`.
        newcomer = population is not None and population not in self.populations
        needed = 2 if newcomer else 1
        if self.used + needed > capacity:
            return None
        if newcomer and population is not None:
            self.populations.add(population)
        self.used += needed
        cell = self.cells[key] = CellSums()
        return cell

    def overflow(self, population: Population | None) -> tuple[CellKey, CellSums]:
        """Where evidence goes that found no cell: its population's `other`, or its arm's catch-all."""
        if population is not None and population not in self.populations:
            population = catch_all(population.arm)
        key: CellKey = (population, OTHER, "")
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = CellSums()
        return key, cell


def catch_all(arm: Arm) -> Population:
    """The population of evidence whose own population found no room in a bucket."""
    return Population("", None, arm, None)


class Buckets:
    """The open seconds of one source."""

    def __init__(self, capacity: int) -> None:
        """At most `capacity` cells per second, besides one `other` per arm for populations without room."""
        self._capacity = capacity
        self._open: dict[int, Bucket] = {}

    def bucket(self, second: int) -> Bucket:
        """The bucket of an open second; the caller guarantees that it is not closed yet."""
        bucket = self._open.get(second)
        if bucket is None:
            bucket = self._open[second] = Bucket()
        return bucket

    def add(self, evidence: Evidence) -> None:
        """Add rows, all of open seconds, in log order."""
        if evidence.n == 0:
            return
        claims = _claims(evidence)
        targets: list[tuple[CellKey, CellSums] | None] = [None] * len(claims.keys)
        for at in claims.order:
            second, key = claims.keys[at]
            bucket = self.bucket(second)
            cell = bucket.place(key, self._capacity)
            if cell is not None:
                targets[at] = (key, cell)
                bucket.changed.add(key)
        homeless = np.array([target is None for target in targets], dtype=np.bool_)[claims.claim]
        _add(evidence, claims.rows[~homeless], claims.claim[~homeless], targets)
        first = ~homeless & claims.is_total
        _add_totals(evidence, claims.rows[first], claims.claim[first], targets)
        if homeless.any():
            self._add_overflow(evidence, claims, homeless)

    def _add_overflow(self, evidence: Evidence, claims: _Claims, homeless: np.ndarray) -> None:
        """A row counts once in `other`, however many of its cells found no room."""
        rows, lost = np.unique(claims.rows[homeless], return_counts=True)
        index: dict[tuple[int, CellKey], int] = {}
        targets: list[tuple[CellKey, CellSums] | None] = []
        claim = np.empty(len(rows), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            second = int(evidence.second[row])
            bucket = self.bucket(second)
            key, cell = bucket.overflow(evidence.populations[int(evidence.population[row])])
            bucket.changed.add(key)
            claim[at] = index.setdefault((second, key), len(index))
            if len(index) > len(targets):
                targets.append((key, cell))
            cell.counters[OVERFLOW] = cell.counters.get(OVERFLOW, 0) + int(lost[at])
        _add(evidence, rows, claim, targets)
        homeless_totals = np.isin(rows, claims.rows[homeless & claims.is_total])
        _add_totals(evidence, rows[homeless_totals], claim[homeless_totals], targets)

    def close(self, through: int) -> list[tuple[int, Bucket]]:
        """Take out all seconds up to and including `through`, ascending."""
        closed = sorted(second for second in self._open if second <= through)
        return [(second, self._open.pop(second)) for second in closed]

    def changed(self) -> list[Second]:
        """Whole cells of open seconds that changed since the last call, seconds ascending."""
        seconds = []
        for second in sorted(self._open):
            bucket = self._open[second]
            if bucket.changed:
                seconds.append(content(second, {key: bucket.cells[key] for key in bucket.changed}))
                bucket.changed = set()
        return seconds

    @property
    def open_seconds(self) -> int:
        """Number of open seconds."""
        return len(self._open)

    @property
    def cells_held(self) -> int:
        """Number of cells in all open seconds."""
        return sum(len(bucket.cells) for bucket in self._open.values())

    @property
    def keys_held(self) -> int:
        """Number of event keys held to drop duplicates."""
        return sum(len(bucket.seen) for bucket in self._open.values())


def content(second: int, cells: Mapping[CellKey, CellSums]) -> Second:
    """A second's cells in the form that travels, grouped by population, in the order given."""
    grouped: dict[Population | None, list[Cell]] = {}
    for (population, dimension, value), sums in cells.items():
        grouped.setdefault(population, []).append(sums.cell(dimension, value))
    return Second(second, [PopulationCells(population, held) for population, held in grouped.items()])


@dataclass(frozen=True, slots=True)
class _Claims:
    """Rows × cells: claim i says that row `rows[i]` belongs to the cell `keys[claim[i]]`."""

    rows: I8
    claim: I8
    is_total: np.ndarray
    """Claims of the first dimension, which carry a row's totals."""
    keys: list[tuple[int, CellKey]]
    order: list[int]
    """Indices of `keys` in log order: by first row, within a row by dimension."""


def _claims(evidence: Evidence) -> _Claims:
    dimensions = evidence.dimensions
    row_parts, dimension_parts, code_parts = [], [], []
    for at, dimension in enumerate(dimensions):
        rows = np.flatnonzero(dimension.codes >= 0)
        row_parts.append(rows)
        dimension_parts.append(np.full(len(rows), at, dtype=np.int64))
        code_parts.append(dimension.codes[rows])
    rows, which, codes = (
        np.concatenate(row_parts),
        np.concatenate(dimension_parts),
        np.concatenate(code_parts),
    )
    width = max(len(dimension.values) for dimension in dimensions)
    _, second_at = np.unique(evidence.second, return_inverse=True)
    base = second_at.astype(np.int64) * len(evidence.populations) + evidence.population
    combined = (base[rows] * len(dimensions) + which) * width + codes
    # Within a dimension rows ascend, and a code belongs to one dimension: the first is the earliest row.
    _, first, claim = np.unique(combined, return_index=True, return_inverse=True)
    keys: list[tuple[int, CellKey]] = []
    for row, at, code in zip(rows[first].tolist(), which[first].tolist(), codes[first].tolist(), strict=True):
        population = evidence.populations[int(evidence.population[row])]
        dimension = dimensions[at]
        keys.append((int(evidence.second[row]), (population, dimension.name, dimension.values[code])))
    order = np.lexsort((which[first], rows[first])).tolist()
    return _Claims(rows, claim.astype(np.int64), which == 0, keys, order)


def _runs(sorted_claims: I8) -> I8:
    """Start of every run of equal values."""
    return np.flatnonzero(np.concatenate(([True], sorted_claims[1:] != sorted_claims[:-1])))


def _add(evidence: Evidence, rows: I8, claim: I8, targets: list[tuple[CellKey, CellSums] | None]) -> None:
    """Add counters, measures and worst rows to the cells claimed; every claim has a target."""
    if len(rows) == 0:
        return
    order = np.argsort(claim, kind="stable")
    rows, claim = rows[order], claim[order]
    _add_counts(evidence.counters, rows, claim, targets)
    for name, (values, present) in evidence.measures.items():
        held = present[rows]
        if held.any():
            _add_measure(name, values[rows[held]], claim[held], targets)
    if evidence.worst is not None and evidence.ids is not None:
        scores, present = evidence.worst
        held = present[rows]
        _add_worst(scores, evidence.ids, rows[held], claim[held], targets)


def _cell(targets: list[tuple[CellKey, CellSums] | None], at: int) -> CellSums:
    target = targets[at]
    assert target is not None
    return target[1]


def _add_counts(
    counters: Mapping[str, I8], rows: I8, claim: I8, targets: list[tuple[CellKey, CellSums] | None]
) -> None:
    starts = _runs(claim)
    held = [_cell(targets, at) for at in claim[starts].tolist()]
    for name, counts in counters.items():
        sums = np.add.reduceat(counts[rows], starts).tolist()
        for cell, total in zip(held, sums, strict=True):
            if total:
                cell.counters[name] = cell.counters.get(name, 0) + total


def _add_totals(
    evidence: Evidence, rows: I8, claim: I8, targets: list[tuple[CellKey, CellSums] | None]
) -> None:
    if len(rows) == 0 or not evidence.totals:
        return
    order = np.argsort(claim, kind="stable")
    _add_counts(evidence.totals, rows[order], claim[order], targets)


def _add_measure(name: str, values: I8, claim: I8, targets: list[tuple[CellKey, CellSums] | None]) -> None:
    starts = _runs(claim)
    counts = np.diff(np.append(starts, len(claim))).tolist()
    columns: Iterable[tuple[int, int, int, int, int]] = zip(
        claim[starts].tolist(),
        counts,
        np.add.reduceat(values, starts).tolist(),
        np.minimum.reduceat(values, starts).tolist(),
        np.maximum.reduceat(values, starts).tolist(),
        strict=True,
    )
    sums = {}
    for at, count, total, least, greatest in columns:
        sums[at] = _cell(targets, at).measure(name)
        sums[at].add(count, total, least, greatest)
    kind = KIND_OF_MEASURE.get(name)
    if kind is None:
        return
    width = bin_count(kind)
    found, times = np.unique(claim * width + bin_of(kind, values), return_counts=True)
    owners, bins = found // width, (found % width).tolist()
    starts = _runs(owners)
    ends = [*starts[1:].tolist(), len(bins)]
    added = times.tolist()
    for at, start, end in zip(owners[starts].tolist(), starts.tolist(), ends, strict=True):
        held = sums[at].bins
        for k, count in zip(bins[start:end], added[start:end], strict=True):
            held[k] = held.get(k, 0) + count


def _add_worst(
    scores: I8,
    ids: Iterable[bytes],
    rows: I8,
    claim: I8,
    targets: list[tuple[CellKey, CellSums] | None],
) -> None:
    names = list(ids)
    gathered: dict[int, list[tuple[int, bytes]]] = {}
    for row, at, score in zip(rows.tolist(), claim.tolist(), scores[rows].tolist(), strict=True):
        entries = gathered.setdefault(at, [])
        entries.append((score, names[row]))
    for at, entries in gathered.items():
        cell = _cell(targets, at)
        if len(cell.worst) < WORST_KEPT or max(entries) > cell.worst[-1]:
            cell.worst = worst_of((*cell.worst, *entries))
