"""All sources of one gating partition together: what is complete, what is unknown, and what was read.

The sources of a roll-out are all partitions of requests, logits and telemetry. A second is complete when
every one of them has closed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pipeline.core.gate.evidence import FAMILIES
from pipeline.core.gate.policy import Family
from pipeline.core.gate.progress import UnknownSeconds
from pipeline.core.gate.sources import OTHERWISE, Change, Placed, Source
from schemas.buckets import FinalBuckets, FreshCells, PopulationCells
from schemas.control import Inputs

Contents = dict[str, list[tuple[Family, PopulationCells]]]
"""Roll-out → its populations of one second."""
NOTHING: Final = Change([], [])
NAMED: Final = 8
"""Sources that a message names."""
UNKNOWN_OF_S: Final = 300
"""Of so many complete seconds the unknown ones are counted."""


class Intake:
    """Finals and fresh cells as they come; complete seconds as they go. `cursor`: newest second done with."""

    def __init__(self, partition: int, sources: Mapping[str, int], settings_hash: str) -> None:
        self.partition = partition
        self.cursor: int | None = None
        self.strays = 0
        self.sources = {
            (topic, number): Source(topic, number, settings_hash)
            for topic, count in sorted(sources.items())
            for number in range(count)
        }

    @property
    def done(self) -> int:
        """The newest second done with; −1 before the first."""
        return -1 if self.cursor is None else self.cursor

    def final(self, final: FinalBuckets) -> tuple[Family | None, Change]:
        """Take in a record of `klaxon.buckets`; returns how open seconds changed."""
        source = self._source(final.topic, final.partition, final.gating_partition)
        if source is None:
            return None, NOTHING
        return FAMILIES.get(source.topic), source.state_final(final, self.done)

    def fresh(self, fresh: FreshCells) -> tuple[Family | None, Change]:
        """Take in a record of `klaxon.partials`; returns how open seconds changed."""
        source = self._source(fresh.topic, fresh.partition, fresh.gating_partition)
        if source is None:
            return None, NOTHING
        return FAMILIES.get(source.topic), source.state_fresh(fresh, self.done)

    def complete_through(self) -> int | None:
        """The newest second that every source has closed; None while one has not spoken."""
        through = [source.closed_through for source in self.sources.values()]
        known = [second for second in through if second is not None]
        return min(known) if known and len(known) == len(through) else None

    def begin(self, first_needed: int) -> None:
        """Set the cursor before the first second that anybody needs; earlier ones are dropped."""
        stated = min(source.first[0] for source in self.sources.values() if source.first is not None)
        self.cursor = max(first_needed, stated) - 1
        for source in self.sources.values():
            source.skip(self.cursor)

    def take(self, second: int) -> Contents:
        """The content of the next complete second, by roll-out; the second is then done with."""
        contents: Contents = {}
        for source in self.sources.values():
            family = FAMILIES.get(source.topic)
            for population_cells in source.take(second):
                population = population_cells.population
                if family is not None and population is not None:
                    contents.setdefault(population.rollout, []).append((family, population_cells))
        self.cursor = second
        return contents

    def open_cells(self) -> Iterator[tuple[Family, Placed]]:
        """Everything known of seconds that are not done with."""
        for source in self.sources.values():
            family = FAMILIES.get(source.topic)
            if family is not None:
                for placed in source.open_cells():
                    yield family, placed

    def unknown(self, first: int, last: int) -> str:
        """What of these seconds is unknown; "" if nothing."""
        for source in self.sources.values():
            second = source.unknown_in(first, last)
            if second is not None:
                return f"second {second} of {source.name} is unknown"
        return ""

    def unknown_parts(self, first: int, last: int) -> list[UnknownSeconds]:
        """All of it, by source: whose, which, why. At most NAMED of them, those that last longest first."""
        parts = [
            UnknownSeconds(source=source.name, first=low, last=high, why=why)
            for source in self.sources.values()
            for low, high, why in source.unknown_parts(first, last)
        ]
        return sorted(parts, key=lambda part: (-part.last, part.source, part.first))[:NAMED]

    def blind(self, topics: set[str], now_us: int, blind_after_us: int) -> str:
        """Why the newest complete second cannot be vouched for by these topics; "" if it can."""
        target = self.complete_through()
        if target is None:
            silent = [source.name for source in self.sources.values() if source.closed_through is None]
            return f"nothing was heard yet of {_listed(silent)}"
        age_us = now_us - (target + 1) * 1_000_000
        if age_us > blind_after_us:
            late_us = now_us - blind_after_us
            silent = [
                source.name
                for source in self.sources.values()
                if source.closed_through is None or (source.closed_through + 1) * 1_000_000 < late_us
            ]
            return f"the newest complete second is {age_us // 1_000_000} s old; waiting for {_listed(silent)}"
        for source in self.sources.values():
            if source.topic in topics and source.unknown_in(target, target) is not None:
                ((_, _, why),) = source.unknown_parts(target, target)
                because = f" ({OTHERWISE})" if why == "other_settings" else ""
                return f"second {target} of {source.name} is unknown{because}"
        return ""

    def gaps(self, evidence_from: int, restored_through: int | None) -> list[tuple[int, int, str]]:
        """(first, last, source) of seconds that are no longer retained, as one roll-out sees it.

        Seconds that were folded before a restart are its predecessor's to tell: who begins to read amid the
        log may find a source's new owner, who catches up, before the last words of the old one.
        """
        told = -1 if restored_through is None else restored_through
        found: list[tuple[int, int, str]] = []
        for source in self.sources.values():
            found += [
                (low, high, source.name) for low, high in source.gaps if high >= evidence_from and low > told
            ]
            if restored_through is not None and source.first is not None:
                closed_from, whole_from = source.first
                due = restored_through + 1
                if closed_from > due and whole_from <= due:
                    found.append((due, closed_from - 1, source.name))
        return found

    def inputs_at(self, second: int, command_offset: int, now_us: int) -> Inputs:
        """The vector of a complete second: per source the statement that closed it, however finals came."""
        offsets = {source.name: source.closing_offset(second) for source in self.sources.values()}
        return Inputs(offsets=offsets, command_offset=command_offset, complete_through=second, now_us=now_us)

    def inputs_now(self, command_offset: int, now_us: int) -> Inputs:
        """The vector of everything read so far, fresh evidence included."""
        offsets = {source.name: source.offset for source in self.sources.values()}
        for source in self.sources.values():
            if source.fresh_offset >= 0:
                offsets[f"~{source.name}"] = source.fresh_offset
        return Inputs(
            offsets=offsets, command_offset=command_offset, complete_through=self.done, now_us=now_us
        )

    def forget(self, reach_s: int) -> None:
        """Drop what no window reaches any more."""
        for source in self.sources.values():
            source.forget(self.done - reach_s)

    def gauges(self) -> dict[str, int]:
        """Sizes and counts for monitoring."""
        sources = self.sources.values()
        target = self.complete_through()
        return {
            "complete_through": -1 if target is None else target,
            "folded_through": self.done,
            "unknown_seconds": _unknown_seconds(sources, self.done),
            "waiting_seconds": sum(len(source.owners) for source in sources),
            "fresh_cells": sum(len(cells) for source in sources for cells in source.fresh.values()),
            "conflicting_finals": sum(source.conflicts for source in sources),
            "foreign_settings": sum(source.foreign for source in sources),
            "stale_cells": sum(source.stale for source in sources),
            "dropped_seconds": sum(source.overflowed for source in sources),
            "stray_records": self.strays,
        }

    def _source(self, topic: str, partition: int, gating_partition: int) -> Source | None:
        source = self.sources.get((topic, partition))
        if source is None or gating_partition != self.partition:
            self.strays += 1
            return None
        return source


def _unknown_seconds(sources: Iterable[Source], last: int) -> int:
    """Of the UNKNOWN_OF_S seconds that end with `last`, those that at least one source did not state.

    Before a source's first statement nothing is unknown: it had nothing to say yet.
    """
    unknown: set[int] = set()
    for source in sources:
        if source.first is None:
            continue
        at = max(last - UNKNOWN_OF_S + 1, source.first[0])
        for low, high in source.known:
            unknown.update(range(at, min(low, last + 1)))
            at = max(at, high + 1)
        unknown.update(range(at, last + 1))
    return len(unknown)


def _listed(names: list[str]) -> str:
    """A few by name: this is kept in the gate's memory."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
