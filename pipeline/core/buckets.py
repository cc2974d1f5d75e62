"""One-second buckets of one source: cells, their cap in log order, what changed, what is closed.

Everything here is a function of the rows in log order: not of how they were cut into records, nor of when
anything was taken out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Final, TypeAlias

import numpy as np

from pipeline.core.cell_bytes import Portion
from pipeline.core.cells import OTHER, OVERFLOW
from pipeline.core.claims import Claims, Members, Order, claims_of, grouped, starts_of_runs
from pipeline.core.evidence import Evidence
from pipeline.core.histograms import Binned, Histograms, binned, runs
from pipeline.core.table import CellTable, Quantities, Worst
from schemas.buckets import Population
from schemas.columns import I8
from schemas.events import Arm

CellKey: TypeAlias = tuple[Population | None, str, str]

_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)
_NO_ROOM: Final = -1
"""Stands for the slot of a cell that found no room in its bucket."""
_CELLS_AT_ONCE: Final = 1024
"""Cells encoded together, unless one second has more."""


@dataclass(slots=True)
class Group:
    """One population's cells in a bucket."""

    cells: dict[tuple[str, str], int] = field(default_factory=dict)
    """Each cell's slot of the table by dimension and value, in the order in which they were claimed."""
    has_room: bool = False
    """Whether it has cells of its own, so that its `other` has a place: not if it is but a catch-all."""


@dataclass(slots=True)
class Bucket:
    """One open second. `used` counts the cells held against the cap."""

    table: CellTable
    groups: dict[Population | None, Group] = field(default_factory=dict)
    """By population, in the order in which they were claimed."""
    histograms: Histograms = field(default_factory=Histograms)
    used: int = 0
    seen: set[Hashable] = field(default_factory=set)
    """Keys of the events counted here, for dropping duplicates."""

    def place(self, key: CellKey, capacity: int) -> int | None:
        """The cell's slot, taken if there is room for it; None where there is none."""
        population, dimension, value = key
        group = self.groups.get(population)
        if group is not None and (slot := group.cells.get((dimension, value))) is not None:
            return slot
        # A new population takes two places, so that it always has its own `other`.
        newcomer = population is not None and (group is None or not group.has_room)
        needed = 2 if newcomer else 1
        if self.used + needed > capacity:
            return None
        self.used += needed
        if group is None:
            group = self.groups[population] = Group()
        group.has_room = True
        return self._take(group, dimension, value)

    def overflow(self, population: Population | None) -> int:
        """The slot of evidence that found no cell: its population's `other`, or its arm's catch-all."""
        group = self.groups.get(population)
        if population is not None and (group is None or not group.has_room):
            group = self.groups.setdefault(catch_all(population.arm), Group())
        elif group is None:
            group = self.groups[population] = Group()
        slot = group.cells.get((OTHER, ""))
        return self._take(group, OTHER, "") if slot is None else slot

    def _take(self, group: Group, dimension: str, value: str) -> int:
        slot = group.cells[dimension, value] = self.table.take(dimension, value)
        return slot

    def slots(self) -> I8:
        """Of all cells, in order."""
        held = chain.from_iterable(group.cells.values() for group in self.groups.values())
        return np.fromiter(held, dtype=np.int64)

    def __len__(self) -> int:
        """Number of cells."""
        return sum(len(group.cells) for group in self.groups.values())


def catch_all(arm: Arm) -> Population:
    """The population of evidence whose own population found no room in a bucket."""
    return Population("", None, arm, None)


class Buckets:
    """The open seconds of one source."""

    def __init__(self, capacity: int) -> None:
        """At most `capacity` cells per second, besides one `other` per arm for populations without room."""
        self._capacity = capacity
        self._table = CellTable()
        self._open: dict[int, Bucket] = {}
        self._changed: set[int] = set()
        self.capped = 0
        """Rows that found no cell of their own."""
        self.counted: Counter[str] = Counter()
        """What was ever added, by counter."""

    def bucket(self, second: int) -> Bucket:
        """The bucket of an open second; the caller guarantees that it is not closed yet."""
        bucket = self._open.get(second)
        if bucket is None:
            bucket = self._open[second] = Bucket(self._table)
        return bucket

    def add(self, evidence: Evidence) -> None:
        """Add rows, all of open seconds, in log order."""
        if evidence.n == 0:
            return
        rows = _Rows(evidence)
        claims = claims_of(evidence, rows.order)
        slots = self._place(evidence, claims)
        totals = {name: counts for name, counts in evidence.totals.items() if counts.any()}
        for name, counts in (*evidence.counters.items(), *totals.items()):
            self.counted[name] += int(counts.sum())
        homes = claims.homes(slots, evidence.n, _NO_ROOM) if totals else None
        lost = slots == _NO_ROOM
        if lost.any():
            without_room, times = np.unique(claims.members.only(lost).rows, return_counts=True)
            others = self._overflow_slots(evidence, without_room)
            self._table.add_counts(OVERFLOW, times, others)
            self.capped += int(times.sum())
            if homes is not None:
                unhoused = homes[without_room] == _NO_ROOM
                homes[without_room[unhoused]] = others[unhoused]
            self._add(rows, *rows.by_slot(without_room, others))
            claims, slots = claims.only(~lost), slots[~lost]
        self._add(rows, claims.members, slots)
        for name, counts in totals.items():
            assert homes is not None
            held = np.flatnonzero((counts != 0) & (homes != _NO_ROOM))
            self._table.add_counts(name, counts[held], homes[held])

    def _place(self, evidence: Evidence, claims: Claims) -> I8:
        """Every claim's slot; cells that are new take theirs in log order."""
        labels = [(each.name, value) for each in evidence.dimensions for value in each.values]
        seconds, populations = claims.second.tolist(), claims.population.tolist()
        wanted = [labels[label] for label in claims.label.tolist()]
        slots: list[int] = []
        begins = starts_of_runs(claims.second * len(evidence.populations) + claims.population)
        for begin, end in pairwise([*begins.tolist(), len(wanted)]):
            second = seconds[begin]
            group = self.bucket(second).groups.get(evidence.populations[populations[begin]])
            cells = group.cells if group is not None else {}
            self._changed.add(second)
            slots += [cells.get(label, _NO_ROOM) for label in wanted[begin:end]]
        found = np.array(slots, dtype=np.int64)
        for claim in claims.in_log_order(np.flatnonzero(found == _NO_ROOM)).tolist():
            key = (evidence.populations[populations[claim]], *wanted[claim])
            slot = self.bucket(seconds[claim]).place(key, self._capacity)
            found[claim] = _NO_ROOM if slot is None else slot
        return found

    def _overflow_slots(self, evidence: Evidence, rows: I8) -> I8:
        """Where each of these rows counts, once, however many of its cells found no room."""
        seconds, populations = evidence.second[rows].tolist(), evidence.population[rows].tolist()
        found = [
            self.bucket(second).overflow(evidence.populations[population])
            for second, population in zip(seconds, populations, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def _add(self, rows: _Rows, members: Members, slots: I8) -> None:
        """Add counters, measures and worst rows: those of group i to `slots[i]`."""
        if len(slots) == 0:
            return
        if len(set(slots.tolist())) < len(slots):
            # Two names of one cell: populations that are equal, or labels that are alike once joined.
            members, slots = rows.by_slot(members.rows, np.repeat(slots, members.sizes))
        self._table.add(rows.quantities, members, slots)
        if rows.bins is not None:
            seconds = rows.second[members.rows[members.starts]]
            for second, keys, times in rows.bins.counts(members, slots, seconds):
                self.bucket(second).histograms.add(keys, times)
        if rows.worst is not None:
            self._table.add_worst(rows.worst, members, slots)

    def close(self, through: int) -> list[Portion]:
        """Take out all seconds up to and including `through`, ascending, in the form that travels."""
        closed = [(second, self._open[second]) for second in sorted(self._open) if second <= through]
        portions = list(self._portions(closed, changed_only=False))
        self._table.give_back(np.concatenate([_NO_SLOTS, *(bucket.slots() for _, bucket in closed)]))
        for second, _ in closed:
            self._changed.discard(second)
            del self._open[second]
        return portions

    def changed(self, after: int = -1) -> list[Portion]:
        """Whole cells of open seconds that changed since they were last taken, seconds ascending.

        Those of seconds up to and including `after` stay: they are taken later, or closed.
        """
        taken = sorted(second for second in self._changed if second > after)
        portions = list(self._portions(((second, self._open[second]) for second in taken), changed_only=True))
        self._changed.difference_update(taken)
        return portions

    def _portions(self, seconds: Iterable[tuple[int, Bucket]], *, changed_only: bool) -> Iterator[Portion]:
        """Cells of these seconds, by population; many cells at once cost less each."""
        batch = _Batch(self._table)
        for second, bucket in seconds:
            batch.add(second, bucket, changed_only=changed_only)
            if batch.cells >= _CELLS_AT_ONCE:
                yield from batch.portions()
                batch = _Batch(self._table)
        yield from batch.portions()

    @property
    def open_seconds(self) -> int:
        """Number of open seconds."""
        return len(self._open)

    @property
    def cells_held(self) -> int:
        """Number of cells in all open seconds."""
        return sum(map(len, self._open.values()))

    @property
    def keys_held(self) -> int:
        """Number of event keys held to drop duplicates."""
        return sum(len(bucket.seen) for bucket in self._open.values())


class _Rows:
    """What rows of evidence add to each of their cells."""

    def __init__(self, evidence: Evidence) -> None:
        self.second = evidence.second
        self.quantities = Quantities(evidence.n, evidence.counters, evidence.measures)
        self.bins: Binned | None = binned(evidence.measures)
        self.worst: Worst | None = None
        self.order = Order.of_log(evidence.n)
        if evidence.worst is not None and evidence.ids is not None and evidence.worst[1].any():
            self.worst = Worst(*evidence.worst, evidence.ids)
            self.order = self.worst.order()

    def by_slot(self, rows: I8, slots: I8) -> tuple[Members, I8]:
        """Row `rows[i]` belongs to `slots[i]`: rows by slot, and the distinct slots."""
        return grouped(slots, int(slots.max()) + 1, self.order.places[rows], self.order)


class _Batch:
    """Cells that are encoded together."""

    def __init__(self, table: CellTable) -> None:
        self._table = table
        self._members: list[tuple[int, Population | None, int]] = []
        """Second, population, and how many cells of it follow."""
        self._slots: list[I8] = []
        self._histograms: list[Histograms] = []
        """Of each second; `_slots` are its cells."""
        self.cells = 0

    def add(self, second: int, bucket: Bucket, *, changed_only: bool) -> None:
        """One second's cells."""
        slots = bucket.slots()
        sizes = [len(group.cells) for group in bucket.groups.values()]
        if changed_only:
            chosen = self._table.changed[slots]
            begins = list(accumulate(sizes[:-1], initial=0))
            sizes = np.add.reduceat(chosen, begins, dtype=np.int64).tolist()
            slots = slots[chosen]
            self._table.changed[slots] = False
        self._members += [
            (second, population, size) for population, size in zip(bucket.groups, sizes, strict=True)
        ]
        self._slots.append(slots)
        self._histograms.append(bucket.histograms)
        self.cells += len(slots)

    def portions(self) -> Iterator[Portion]:
        """All of them, in order."""
        if not self.cells:
            return
        histograms = runs(self._histograms, self._slots, self._table.binned)
        made = self._table.cells(np.concatenate(self._slots), histograms)
        first = 0
        for second, population, size in self._members:
            yield from made.portions(second, population, first, first + size)
            first += size
