"""One-second buckets of sources: cells, their cap in log order, what changed, what is closed.

Everything here is a function of a source's rows in log order: not of how they were cut into records, nor of
when anything was taken out, nor of what other sources there are. What is done for many of them at once costs
little more than for one: a call of numpy costs about the same for a few cells and for a hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
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
    """One open second of a source. `used` counts the cells held against the cap."""

    table: CellTable
    groups: dict[Population | None, Group] = field(default_factory=dict)
    """By population, in the order in which they were claimed."""
    histograms: Histograms = field(default_factory=Histograms)
    used: int = 0
    seen: set[Hashable] = field(default_factory=set)
    """Keys of the events counted here, for dropping duplicates."""
    changed: bool = False
    """Whether anything was added since its changed cells were last taken."""

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

    def __init__(self, capacity: int, table: CellTable | None = None) -> None:
        """At most `capacity` cells per second, besides one `other` per arm for populations without room.

        `table`: holds the cells; sources that share one can be added to and taken from together.
        """
        self._capacity = capacity
        self._table = CellTable() if table is None else table
        self._open: dict[int, Bucket] = {}
        self.capped = 0
        """Rows that found no cell of their own."""
        self.counted: Counter[str] = Counter()
        """What was ever added, by counter."""

    @property
    def table(self) -> CellTable:
        """Holds the cells."""
        return self._table

    @property
    def capacity(self) -> int:
        """Cells that a second has room for."""
        return self._capacity

    def bucket(self, second: int) -> Bucket:
        """The bucket of an open second; the caller guarantees that it is not closed yet."""
        bucket = self._open.get(second)
        if bucket is None:
            bucket = self._open[second] = Bucket(self._table)
        return bucket

    def add(self, evidence: Evidence) -> None:
        """Add rows, all of open seconds, in log order."""
        add_together([(self, evidence.n)], evidence)

    def close(self, through: int) -> list[Portion]:
        """Take out all seconds up to and including `through`, ascending, in the form that travels."""
        return close_together([(self, through)])[0]

    def changed(self, after: int = -1) -> list[Portion]:
        """Whole cells of open seconds that changed since they were last taken, seconds ascending.

        Those of seconds up to and including `after` stay: they are taken later, or closed.
        """
        return changed_together([(self, after)])[0]

    def give_back(self) -> None:
        """Let go of everything: its cells are no longer in the table."""
        self._table.give_back(_all_slots(self.take(1 << 62)))

    def take(self, through: int) -> list[tuple[int, Bucket]]:
        """Take out the seconds up to and including `through`, ascending; their cells stay in the table."""
        taken = [(second, self._open[second]) for second in sorted(self._open) if second <= through]
        for second, _ in taken:
            del self._open[second]
        return taken

    def take_changed(self, after: int) -> list[tuple[int, Bucket]]:
        """The open seconds after this one that changed, ascending; from here on they did not."""
        taken = [(second, self._open[second]) for second in sorted(self._open) if second > after]
        taken = [(second, bucket) for second, bucket in taken if bucket.changed]
        for _, bucket in taken:
            bucket.changed = False
        return taken

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


def add_together(shares: Sequence[tuple[Buckets, int]], evidence: Evidence) -> None:
    """Add rows, all of open seconds: so many of each of these, in log order, one source after the other.

    They share a table, else this raises ValueError.
    """
    if evidence.n:
        _Addition([(buckets, n) for buckets, n in shares if n], evidence).make()


def close_together(wanted: Sequence[tuple[Buckets, int]]) -> list[list[Portion]]:
    """`Buckets.close` of each of these, which share a table; else this raises ValueError."""
    if not wanted:
        return []
    table = _shared_table([buckets for buckets, _ in wanted])
    closed = [buckets.take(through) for buckets, through in wanted]
    portions = _portions(table, closed, changed_only=False)
    if any(closed):
        table.give_back(_all_slots(chain.from_iterable(closed)))
    return portions


def changed_together(wanted: Sequence[tuple[Buckets, int]]) -> list[list[Portion]]:
    """`Buckets.changed` of each of these, which share a table; else this raises ValueError."""
    if not wanted:
        return []
    table = _shared_table([buckets for buckets, _ in wanted])
    return _portions(table, [buckets.take_changed(after) for buckets, after in wanted], changed_only=True)


def _shared_table(sources: Sequence[Buckets]) -> CellTable:
    """The one table of all of these, of which there is at least one."""
    table = sources[0].table
    if any(source.table is not table for source in sources):
        raise ValueError("sources that are settled together share one table of cells")
    return table


def _all_slots(seconds: Iterable[tuple[int, Bucket]]) -> I8:
    return np.concatenate([_NO_SLOTS, *(bucket.slots() for _, bucket in seconds)])


def _portions(
    table: CellTable, wanted: Sequence[Sequence[tuple[int, Bucket]]], *, changed_only: bool
) -> list[list[Portion]]:
    """Cells of some sources' seconds, by population; many cells at once cost less each."""
    found: list[list[Portion]] = [[] for _ in wanted]
    batch = _Batch(table)
    for portions, seconds in zip(found, wanted, strict=True):
        for second, bucket in seconds:
            batch.add(portions, second, bucket, changed_only=changed_only)
            if batch.cells >= _CELLS_AT_ONCE:
                batch.encode()
                batch = _Batch(table)
    batch.encode()
    return found


class _Addition:
    """Rows of evidence of some sources, and what they add to each of their cells."""

    def __init__(self, shares: Sequence[tuple[Buckets, int]], evidence: Evidence) -> None:
        self._evidence = evidence
        self._sources = [buckets for buckets, _ in shares]
        self._table = _shared_table(self._sources)
        sizes = [n for _, n in shares]
        self._begins = list(accumulate(sizes[:-1], initial=0))
        self._source: I8 = np.repeat(np.arange(len(sizes)), sizes)
        # Buckets are numbered by source, then by second.
        first = int(evidence.second.min())
        span = int(evidence.second.max()) - first + 1
        found, self._bucket = np.unique(self._source * span + (evidence.second - first), return_inverse=True)
        owners, seconds = np.divmod(found, span)
        self._owners: list[int] = owners.tolist()
        self._buckets = [
            self._sources[owner].bucket(second)
            for owner, second in zip(self._owners, (seconds + first).tolist(), strict=True)
        ]
        self._quantities = Quantities(evidence.n, evidence.counters, evidence.measures)
        self._bins: Binned | None = binned(evidence.measures)
        self._worst: Worst | None = None
        self._order = Order.of_log(evidence.n)
        if evidence.worst is not None and evidence.ids is not None and evidence.worst[1].any():
            self._worst = Worst(*evidence.worst, evidence.ids)
            self._order = self._worst.order()

    def make(self) -> None:
        """Add everything."""
        evidence = self._evidence
        claims = claims_of(evidence, self._bucket, self._order)
        slots = self._place(claims)
        totals = {name: counts for name, counts in evidence.totals.items() if counts.any()}
        for name, counts in (*evidence.counters.items(), *totals.items()):
            for source, n in zip(self._sources, np.add.reduceat(counts, self._begins).tolist(), strict=True):
                source.counted[name] += n
        homes = claims.homes(slots, evidence.n, _NO_ROOM) if totals else None
        lost = slots == _NO_ROOM
        if lost.any():
            without_room, times = np.unique(claims.members.only(lost).rows, return_counts=True)
            others = self._overflow_slots(without_room)
            self._table.add_counts(OVERFLOW, times, others)
            for source, n in zip(self._source[without_room].tolist(), times.tolist(), strict=True):
                self._sources[source].capped += n
            if homes is not None:
                unhoused = homes[without_room] == _NO_ROOM
                homes[without_room[unhoused]] = others[unhoused]
            self._add(*self._by_slot(without_room, others))
            claims, slots = claims.only(~lost), slots[~lost]
        self._add(claims.members, slots)
        for name, counts in totals.items():
            assert homes is not None
            held = np.flatnonzero((counts != 0) & (homes != _NO_ROOM))
            self._table.add_counts(name, counts[held], homes[held])

    def _place(self, claims: Claims) -> I8:
        """Every claim's slot; cells that are new take theirs in log order."""
        evidence = self._evidence
        labels = [(each.name, value) for each in evidence.dimensions for value in each.values]
        numbers, populations = claims.bucket.tolist(), claims.population.tolist()
        wanted = [labels[label] for label in claims.label.tolist()]
        slots: list[int] = []
        begins = starts_of_runs(claims.bucket * len(evidence.populations) + claims.population)
        for begin, end in pairwise([*begins.tolist(), len(wanted)]):
            bucket = self._buckets[numbers[begin]]
            bucket.changed = True
            group = bucket.groups.get(evidence.populations[populations[begin]])
            cells = group.cells if group is not None else {}
            slots += [cells.get(label, _NO_ROOM) for label in wanted[begin:end]]
        found = np.array(slots, dtype=np.int64)
        for claim in claims.in_log_order(np.flatnonzero(found == _NO_ROOM)).tolist():
            key = (evidence.populations[populations[claim]], *wanted[claim])
            number = numbers[claim]
            slot = self._buckets[number].place(key, self._sources[self._owners[number]].capacity)
            found[claim] = _NO_ROOM if slot is None else slot
        return found

    def _overflow_slots(self, rows: I8) -> I8:
        """Where each of these rows counts, once, however many of its cells found no room."""
        numbers, populations = self._bucket[rows].tolist(), self._evidence.population[rows].tolist()
        found = [
            self._buckets[number].overflow(self._evidence.populations[population])
            for number, population in zip(numbers, populations, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def _by_slot(self, rows: I8, slots: I8) -> tuple[Members, I8]:
        """Row `rows[i]` belongs to `slots[i]`: rows by slot, and the distinct slots."""
        return grouped(slots, int(slots.max()) + 1, self._order.places[rows], self._order)

    def _add(self, members: Members, slots: I8) -> None:
        """Add counters, measures and worst rows: those of group i to `slots[i]`."""
        if len(slots) == 0:
            return
        if len(set(slots.tolist())) < len(slots):
            # Two names of one cell: populations that are equal, or labels that are alike once joined.
            members, slots = self._by_slot(members.rows, np.repeat(slots, members.sizes))
        self._table.add(self._quantities, members, slots)
        if self._bins is not None:
            numbers = self._bucket[members.rows[members.starts]]
            for number, keys, times in self._bins.counts(members, slots, numbers):
                self._buckets[number].histograms.add(keys, times)
        if self._worst is not None:
            self._table.add_worst(self._worst, members, slots)


class _Batch:
    """Cells of one table that are encoded together."""

    def __init__(self, table: CellTable) -> None:
        self._table = table
        self._members: list[tuple[list[Portion], int, Population | None, int]] = []
        """Where the portions go, second, population, and how many cells of it follow."""
        self._slots: list[I8] = []
        self._histograms: list[Histograms] = []
        """Of each bucket; `_slots` are its cells."""
        self.cells = 0

    def add(self, portions: list[Portion], second: int, bucket: Bucket, *, changed_only: bool) -> None:
        """One bucket's cells."""
        slots = bucket.slots()
        sizes = [len(group.cells) for group in bucket.groups.values()]
        if changed_only:
            chosen = self._table.changed[slots]
            begins = list(accumulate(sizes[:-1], initial=0))
            sizes = np.add.reduceat(chosen, begins, dtype=np.int64).tolist()
            slots = slots[chosen]
            self._table.changed[slots] = False
        self._members += [
            (portions, second, population, size)
            for population, size in zip(bucket.groups, sizes, strict=True)
        ]
        self._slots.append(slots)
        self._histograms.append(bucket.histograms)
        self.cells += len(slots)

    def encode(self) -> None:
        """All of them, in order."""
        if not self.cells:
            return
        histograms = runs(self._histograms, self._slots, self._table.binned)
        made = self._table.cells(np.concatenate(self._slots), histograms)
        first = 0
        for portions, second, population, size in self._members:
            portions += made.portions(second, population, first, first + size)
            first += size
