"""A rule as the cells of one arm meet it: the baseline's beside it, the canary's without what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pipeline.core.gate.anytime import SequentialRule
from pipeline.core.gate.left_out import LeftOut
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
    wanted: frozenset[str]

    @classmethod
    def of(cls, judged: Judged) -> BaselineSide:
        """Of a relative rule."""
        return cls(judged, frozenset(baseline_dimension(dimension) for dimension in judged.wanted))

    def take(self, into: dict[Scope, Vec], cell: Cell, second: int, sign: int = 1) -> None:
        """As JudgedRule.take."""
        self.judged.take(into, _beside(cell), second, sign)

    def patch(self, second: int, cell: Cell, sign: int) -> None:
        """As JudgedRule.patch."""
        self.judged.patch(second, _beside(cell), sign)


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
