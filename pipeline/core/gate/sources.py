"""What one source partition has said: closed seconds, their content, and the fresh cells of open ones.

A second is known from a source if a statement covers it that was whole and made with this gate's content
settings; one that a later statement jumps over is unknown. Unknown is never empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from schemas.buckets import Cell, FinalBuckets, FreshCells, Population, PopulationCells, Second

CellKey: TypeAlias = tuple[Population | None, str, str]
Placed: TypeAlias = tuple[int, Population | None, Cell]
"""A cell with its second and population."""

KEPT_SECONDS: Final = 7_200
"""Most seconds that wait for other sources; over it the older half becomes unknown: memory is bounded."""
KEPT_ASSEMBLIES: Final = 4
KEPT_LACKS: Final = 256

Why: TypeAlias = Literal[
    "warming_up", "other_settings", "not_retained", "waited_too_long", "not_closed", "unheard"
]
"""Why seconds of a source are unknown: its worker started too late to see them whole; they were closed with
other content settings; no statement about them is kept any more; they waited too long for other sources; they
are not closed yet; nothing was heard that reaches back to them."""
OTHERWISE: Final = "closed with other content settings than the gate's"


@dataclass(frozen=True, slots=True)
class Change:
    """How what is known of open seconds changed."""

    removed: list[Placed]
    added: list[Placed]


@dataclass(slots=True)
class Source:
    """One partition of requests, logits or telemetry, as its finals and fresh cells tell of it."""

    topic: str
    partition: int
    settings_hash: str
    closed_through: int | None = None
    first: tuple[int, int] | None = None
    """(closed_from, whole_from) of the first statement read."""
    offset: int = -1
    fresh_offset: int = -1
    conflicts: int = 0
    """Statements about one second that contradict each other: somebody must look."""
    foreign: int = 0
    """Statements made with other content settings."""
    overflowed: int = 0
    stale: int = 0
    """Fresh cells of closed seconds, or older than what is known: of a worker that lost its partition."""
    known: list[tuple[int, int]] = field(default_factory=list)
    """Known seconds as intervals, ascending, both ends inclusive."""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Seconds that no statement covers although the worker saw them whole: no longer retained."""
    lacks: deque[tuple[int, int, Why]] = field(default_factory=lambda: deque(maxlen=KEPT_LACKS))
    """Seconds that a statement left unknown, and why, in the order in which they were told."""
    content: dict[int, list[PopulationCells]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    """Second not yet folded → offset of the statement that closed it."""
    closings: deque[tuple[int, int]] = field(default_factory=deque)
    """(closed through, offset), ascending: which statement closed a second first."""
    fresh: dict[int, dict[CellKey, tuple[int, Cell]]] = field(default_factory=dict)
    assemblies: dict[tuple[int, int, int, int], tuple[int, list[Second]]] = field(default_factory=dict)
    """Statements of which parts are missing → (next part, seconds so far)."""

    @property
    def name(self) -> str:
        """`topic/partition`."""
        return f"{self.topic}/{self.partition}"

    def state_final(self, final: FinalBuckets, folded: int) -> Change:
        """Take in one record; its statement holds when its last part is read. `folded`: seconds done with."""
        seconds = self._assemble(final)
        change = Change([], [])
        if seconds is None:
            return change
        self._close(final)
        if final.settings_hash != self.settings_hash:
            self.foreign += 1
            self._lack(final.closed_from, final.closed_through, "other_settings")
            return change
        first = max(final.closed_from, final.whole_from)
        self._lack(final.closed_from, min(first - 1, final.closed_through), "warming_up")
        if first <= final.closed_through:
            self._know(first, final.closed_through)
        stated = _by_second(seconds)
        earliest = max(first, folded + 1)
        recent = range(max(earliest, final.closed_through - KEPT_SECONDS // 2 + 1), final.closed_through + 1)
        # Of a statement about hours, after a silence, older seconds are kept as far as they hold anything.
        holding = (second for second in stated if earliest <= second <= final.closed_through)
        for second in sorted({*recent, *holding}):
            self._own(second, final.offset, stated.get(second, []), change)
        if len(self.owners) > KEPT_SECONDS:
            for second in sorted(self.owners)[: len(self.owners) - KEPT_SECONDS // 2]:
                self._drop(second, change)
        return change

    def state_fresh(self, fresh: FreshCells, folded: int) -> Change:
        """Take in changed cells of open seconds; per cell the newest offset wins."""
        change = Change([], [])
        if fresh.settings_hash != self.settings_hash:
            self.foreign += 1
            return change
        self.fresh_offset = max(self.fresh_offset, fresh.offset)
        for second in fresh.seconds:
            at = second.second
            if at <= folded or at in self.owners or at < fresh.whole_from or self._closed(at):
                self.stale += sum(len(one.cells) for one in second.contents)
                continue
            cells = self.fresh.setdefault(at, {})
            for population_cells in second.contents:
                for cell in population_cells.cells:
                    key = (population_cells.population, cell.dimension, cell.value)
                    before = cells.get(key)
                    if before is not None:
                        if before[0] > fresh.offset:
                            self.stale += 1
                            continue
                        change.removed.append((at, population_cells.population, before[1]))
                    cells[key] = (fresh.offset, cell)
                    change.added.append((at, population_cells.population, cell))
        return change

    def take(self, second: int) -> list[PopulationCells]:
        """The content of a complete second, which is then done with."""
        self.owners.pop(second, None)
        self.fresh.pop(second, None)
        return self.content.pop(second, [])

    def skip(self, through: int) -> None:
        """Seconds up to this one are done with, whatever they held."""
        for kept in (self.owners, self.content, self.fresh):
            for second in [second for second in kept if second <= through]:
                del kept[second]

    def unknown_in(self, first: int, last: int) -> int | None:
        """The first second of first..last that is not known; None if all are."""
        at = first
        for low, high in self.known:
            if low > at:
                break
            at = max(at, high + 1)
        return at if at <= last else None

    def unknown_parts(self, first: int, last: int) -> list[tuple[int, int, Why]]:
        """What of first..last is unknown, ascending, and why."""
        parts: list[tuple[int, int, Why]] = []
        at = first
        for low, high in (*self.known, (last + 1, last + 1)):
            if at < low and at <= last:
                parts += self._reasons(at, min(low - 1, last))
            at = max(at, high + 1)
        return parts

    def closing_offset(self, second: int) -> int:
        """Offset of the statement that closed this second; −1 if none did."""
        for through, offset in self.closings:
            if through >= second:
                return offset
        return -1

    def forget(self, before: int) -> None:
        """Seconds before this one will not be asked for again."""
        self.known = [(low, high) for low, high in self.known if high >= before]
        self.gaps = [(low, high) for low, high in self.gaps if high >= before]
        while self.lacks and self.lacks[0][1] < before:
            self.lacks.popleft()
        while len(self.closings) > 1 and self.closings[0][0] < before:
            self.closings.popleft()

    def open_cells(self) -> Iterator[Placed]:
        """Everything known of seconds that are not folded yet."""
        for second, contents in self.content.items():
            for population_cells in contents:
                for cell in population_cells.cells:
                    yield second, population_cells.population, cell
        for second, cells in self.fresh.items():
            for (population, _, _), (_, cell) in cells.items():
                yield second, population, cell

    def _assemble(self, final: FinalBuckets) -> list[Second] | None:
        """All parts of the statement once the last one is here. A part out of order voids the others."""
        if final.parts == 1:
            return final.seconds
        key = (final.offset, final.closed_from, final.closed_through, final.parts)
        due, seconds = self.assemblies.pop(key, (0, []))
        if final.part == 0:
            due, seconds = 0, []
        if final.part != due:
            return None
        seconds.extend(final.seconds)
        if due + 1 == final.parts:
            return seconds
        while len(self.assemblies) >= KEPT_ASSEMBLIES:
            del self.assemblies[next(iter(self.assemblies))]
        self.assemblies[key] = (due + 1, seconds)
        return None

    def _close(self, final: FinalBuckets) -> None:
        """Move the closed end; what a statement jumps over without a reason is a gap."""
        if self.first is None:
            self.first = (final.closed_from, final.whole_from)
        elif self.closed_through is not None:
            due = self.closed_through + 1
            if final.closed_from > due and final.whole_from <= due:
                self.gaps.append((due, final.closed_from - 1))
                self._lack(due, final.closed_from - 1, "not_retained")
            else:
                self._lack(due, final.closed_from - 1, "warming_up")
        if self.closed_through is None or final.closed_through > self.closed_through:
            self.closed_through = final.closed_through
            self.closings.append((final.closed_through, final.offset))
        self.offset = max(self.offset, final.offset)

    def _own(self, second: int, offset: int, stated: list[PopulationCells], change: Change) -> None:
        """Set a second's content; of two statements the greater offset wins."""
        owner = self.owners.get(second)
        before = self.content.get(second, [])
        if owner is not None:
            if _canonical(before) != _canonical(stated):
                self.conflicts += 1
            if offset <= owner:
                return
        for population_cells in before:
            change.removed.extend(
                (second, population_cells.population, cell) for cell in population_cells.cells
            )
        for (population, _, _), (_, cell) in self.fresh.pop(second, {}).items():
            change.removed.append((second, population, cell))
        self.owners[second] = offset
        if stated:
            self.content[second] = stated
        else:
            self.content.pop(second, None)
        for population_cells in stated:
            change.added.extend(
                (second, population_cells.population, cell) for cell in population_cells.cells
            )

    def _drop(self, second: int, change: Change) -> None:
        """Let go of a second that waited too long for other sources: it is unknown from now on."""
        for population_cells in self.content.pop(second, []):
            change.removed.extend(
                (second, population_cells.population, cell) for cell in population_cells.cells
            )
        del self.owners[second]
        self.overflowed += 1
        self._lack(second, second, "waited_too_long")
        self.known = [
            part
            for low, high in self.known
            for part in ((low, min(high, second - 1)), (max(low, second + 1), high))
            if part[0] <= part[1]
        ]

    def _know(self, first: int, last: int) -> None:
        """Add an interval; touching ones join."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((*self.known, (first, last))):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        self.known = merged

    def _lack(self, first: int, last: int, why: Why) -> None:
        """Remember why these seconds are unknown, if they are any; what goes on is one entry."""
        if first > last:
            return
        if self.lacks and self.lacks[-1][2] == why and self.lacks[-1][1] + 1 >= first >= self.lacks[-1][0]:
            first, last = self.lacks[-1][0], max(last, self.lacks[-1][1])
            self.lacks.pop()
        self.lacks.append((first, last, why))

    def _reasons(self, first: int, last: int) -> list[tuple[int, int, Why]]:
        """Why these unknown seconds are unknown: as the newest statement about each says."""
        parts: list[tuple[int, int, Why]] = []
        for second in _edges(first, last, self.lacks, self.closed_through):
            why: Why = "unheard" if self._closed(second) else "not_closed"
            for low, high, told in self.lacks:
                if low <= second <= high:
                    why = told
            if parts and parts[-1][2] == why:
                continue
            if parts:
                parts[-1] = (parts[-1][0], second - 1, parts[-1][2])
            parts.append((second, last, why))
        return parts

    def _closed(self, second: int) -> bool:
        return self.closed_through is not None and second <= self.closed_through


def _edges(
    first: int, last: int, lacks: Iterable[tuple[int, int, Why]], closed_through: int | None
) -> list[int]:
    """The seconds of first..last at which a reason may begin, ascending; `first` is among them."""
    edges = {first, first if closed_through is None else closed_through + 1}
    for low, high, _ in lacks:
        edges |= {low, high + 1}
    return sorted(edge for edge in edges if first <= edge <= last)


def _by_second(seconds: list[Second]) -> dict[int, list[PopulationCells]]:
    """Content by second; the slices of one second that several parts hold are put together."""
    stated: dict[int, list[PopulationCells]] = {}
    for second in seconds:
        stated.setdefault(second.second, []).extend(second.contents)
    return stated


def _canonical(contents: list[PopulationCells]) -> dict[CellKey, Cell]:
    return {
        (population_cells.population, cell.dimension, cell.value): cell
        for population_cells in contents
        for cell in population_cells.cells
    }
