"""A rule as the cells of one arm meet it: the baseline's beside it, both without what is left out (G7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pipeline.core.gate.anytime import SequentialRule
from pipeline.core.gate.left_out import LeftOut, Part
from pipeline.core.gate.metrics import Vec
from pipeline.core.gate.relative import baseline_dimension, held_as
from pipeline.core.gate.rules import JudgedRule
from pipeline.core.gate.windows import Scope
from schemas.buckets import Cell

Judged: TypeAlias = JudgedRule | SequentialRule


@dataclass(frozen=True, slots=True)
class BaselineSide:
    """A rule relative to the baseline, as the baseline's cells meet it."""

    judged: Judged
    compared: frozenset[str]
    """Dimensions of its cells that the canary's are compared with."""
    left_out: LeftOut
    """Classes of traffic that the canary gets no more: compared with them, the rest would look better."""
    wanted: frozenset[str]

    @classmethod
    def of(cls, judged: Judged, left_out: LeftOut) -> BaselineSide:
        """Of a relative rule. `left_out` names none of the canary's nodes."""
        compared = frozenset(baseline_dimension(dimension) for dimension in judged.wanted)
        return cls(judged, compared, left_out, compared | left_out.needed(strata=True))

    def take(self, into: dict[Scope, Vec], cell: Cell, second: int, sign: int = 1) -> None:
        """As JudgedRule.take."""
        for part, factor in self._parts(cell, second):
            self.judged.take(into, part, second, sign * factor)

    def patch(self, second: int, cell: Cell, sign: int) -> None:
        """As JudgedRule.patch."""
        for part, factor in self._parts(cell, second):
            self.judged.patch(second, part, sign * factor)

    def _parts(self, cell: Cell, second: int) -> Iterator[Part]:
        if not self.left_out.exclusions:  # nearly always, and asked of every cell
            yield _beside(cell), 1
            return
        for part, factor in self.left_out.parts(cell, second, strata=True):
            dimension = part.dimension
            # Where no cell says what to take out, nothing is compared: it would stay in for good.
            if dimension in self.compared and self.left_out.tells_all_arms(dimension, second):
                yield _beside(part), factor


def _beside(cell: Cell) -> Cell:
    return Cell(*held_as((cell.dimension, cell.value)), cell.counters, cell.measures, [])


@dataclass(frozen=True, slots=True)
class Remaining:
    """A rule as the canary's cells meet it where something of the canary is left out."""

    judged: Judged
    left_out: LeftOut
    wanted: frozenset[str]
    strata: bool
    """Whether its cells come with strata: those of requests do."""

    @classmethod
    def of(cls, judged: Judged, left_out: LeftOut) -> Remaining:
        """Of this rule, without what is left out."""
        strata = judged.rule.metric.family == "requests"
        return cls(judged, left_out, judged.wanted | left_out.needed(strata=strata), strata)

    def take(self, into: dict[Scope, Vec], cell: Cell, second: int, sign: int = 1) -> None:
        """As JudgedRule.take."""
        for part, factor in self.left_out.parts(cell, second, strata=self.strata):
            if part.dimension in self.judged.wanted:
                self.judged.take(into, part, second, sign * factor)

    def patch(self, second: int, cell: Cell, sign: int) -> None:
        """As JudgedRule.patch."""
        for part, factor in self.left_out.parts(cell, second, strata=self.strata):
            if part.dimension in self.judged.wanted:
                self.judged.patch(second, part, sign * factor)


Side: TypeAlias = Judged | BaselineSide | Remaining
