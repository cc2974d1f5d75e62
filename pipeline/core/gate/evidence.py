"""The evidence of one roll-out: which cells are its own, its windows, and what its rules say.

Which populations belong to it is decided here (V1, generations), because only the gate knows the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from pipeline.core.cells import ALL, worst_of
from pipeline.core.gate.location import locate, proofs
from pipeline.core.gate.metrics import EXCESS, Vec, add_into
from pipeline.core.gate.policy import Family, Policy, Rule
from pipeline.core.gate.rules import (
    LOCATING,
    WHOLE,
    CoverageVerdict,
    Finding,
    JudgedCoverage,
    JudgedRule,
    RuleVerdict,
    coverage_vec,
    scope_label,
    whole_scope,
)
from pipeline.core.gate.sources import Placed
from pipeline.core.gate.state import RolloutMemory
from pipeline.core.gate.versions import differing_mask
from pipeline.core.gate.windows import Scope
from schemas.buckets import Cell, Population, PopulationCells
from schemas.control import Cause, RolloutSpec
from schemas.events import Arm
from schemas.topics import Topic

FAMILIES: Final[dict[str, Family]] = {Topic.REQUESTS.value: "requests", Topic.LOGITS.value: "pairs"}
"""Source topic → family of its cells; telemetry has none of a roll-out's."""
Unknown = Callable[[int, int], str]
"""(first, last) second → what of them is unknown, "" if nothing."""
Worst = dict[Scope, list[tuple[int, bytes]]]
Takers = dict[str, tuple[JudgedRule, ...]]
"""Dimension → rules that a cell of it is evidence for."""
NOBODY: Final[Takers] = {}
Place = Literal["ours", "foreign", "other_version", "other_difference"]
"""`foreign`: another generation, or too early. `other_version`: of a model that is not the arm's, so neither
what was scored of it nor what was lost is evidence. `other_difference`: scored between other versions than
those under test; halves that never became a pair stand there too, and are this arm's.
"""


@dataclass(slots=True)
class RolloutEvidence:
    """Windows of one generation under one policy. A new generation or policy gets a new one (R5)."""

    spec: RolloutSpec
    policy: Policy
    generations: range
    """The numbers that its events carry."""
    start_second: int
    evidence_from: int
    rules: list[JudgedRule] = field(default_factory=list)
    coverage: JudgedCoverage = field(init=False)
    worst: dict[int, Worst] = field(default_factory=dict)
    """Folded second → worst canary pairs per scope, as long as any window reaches back."""
    mismatched: int = 0
    """Pairs and requests seen whose versions are not those under test."""
    _masks: dict[Arm, int] = field(default_factory=dict)
    _takers: dict[tuple[Family, Arm], Takers] = field(default_factory=dict)
    """As far as asked for."""

    def __post_init__(self) -> None:
        self.rules = [JudgedRule.of(rule) for rule in self.policy.rules]
        self.coverage = JudgedCoverage.of(self.policy.coverage)
        self._masks = {arm: differing_mask(self.spec, arm) for arm in self.spec.arms}

    @classmethod
    def of(cls, memory: RolloutMemory, spec: RolloutSpec, policy: Policy) -> RolloutEvidence:
        """Empty windows for what this memory says is running."""
        return cls(spec, policy, memory.generations, memory.start_second, memory.evidence_from)

    @property
    def folded(self) -> int | None:
        """The newest folded second."""
        return self.coverage.window.end

    def fold(self, second: int, contents: Iterable[tuple[Family, PopulationCells]]) -> int:
        """Add a complete second; returns how many pairs of canary and baseline were scored in it."""
        per_rule: list[dict[Scope, Vec]] = [{} for _ in self.rules]
        covered: Vec = {}
        worst: Worst = {}
        pairs = 0
        for family, population_cells in contents:
            population = population_cells.population
            if population is None:
                continue
            place = self._place(family, population, second)
            if place == "foreign":
                continue
            if place in ("other_version", "other_difference"):
                self.mismatched += _whole_count(population_cells, family)
                if family == "pairs" and population.arm == "canary":
                    add_into(covered, {EXCESS: _whole_count(population_cells, family)})
                    if place == "other_difference":
                        add_into(covered, _missing(population_cells))
                continue
            for judged, content in zip(self.rules, per_rule, strict=True):
                if _is_of(judged.rule, family, population.arm):
                    for cell in population_cells.cells:
                        if cell.dimension in judged.wanted:
                            judged.take(content, cell, second)
            if family == "pairs" and population.arm == "baseline":
                # Halves of the baseline that a producer dropped: pairs that never came to be.
                add_into(covered, _drops(population_cells))
            if family == "pairs" and population.arm == "canary":
                for cell in population_cells.cells:
                    if cell.dimension == ALL:
                        add_into(covered, coverage_vec(cell.counters))
                        pairs += cell.counters.get("pairs", 0)
                    _collect(worst, cell)
        for judged, content in zip(self.rules, per_rule, strict=True):
            judged.fold(second, content)
        self.coverage.window.fold(second, {WHOLE: covered} if covered else {})
        self._remember(second, worst)
        return pairs

    def patch(self, family: Family, placed: Placed, sign: int) -> None:
        """Add a cell of an open second, or take it out."""
        second, population, cell = placed
        for judged in self.takers(family, second, population).get(cell.dimension, ()):
            judged.patch(second, cell, sign)

    def takers(self, family: Family, second: int, population: Population | None) -> Takers:
        """The rules that cells of this population and second are evidence for. Read only."""
        if population is None or population.rollout != self.spec.rollout:
            return NOBODY
        if self._place(family, population, second) != "ours":
            return NOBODY
        found = self._takers.get((family, population.arm))
        if found is None:
            rules = [judged for judged in self.rules if _is_of(judged.rule, family, population.arm)]
            found = self._takers[family, population.arm] = {
                dimension: tuple(judged for judged in rules if dimension in judged.wanted)
                for dimension in frozenset().union(*(judged.wanted for judged in rules))
            }
        return found

    def renumber(self, generations: range, opened: Iterable[tuple[Family, Placed]]) -> None:
        """Events with these generation numbers are its own from now on. `opened`: the cells of open seconds.

        Folded seconds stay as they are: they were folded before any event could carry a later number.
        """
        cells = list(opened)
        for family, placed in cells:
            self.patch(family, placed, -1)
        self.generations = generations
        for family, placed in cells:
            self.patch(family, placed, 1)

    def judge(self, unknown: Unknown) -> tuple[RuleVerdict, ...]:
        """Every rule at the newest folded second."""
        return tuple(judged.judge(self._unknown(unknown, judged.rule.window_s)) for judged in self.rules)

    def judge_coverage(self, unknown: Unknown) -> CoverageVerdict:
        """Coverage at the newest folded second."""
        return self.coverage.judge(self._unknown(unknown, self.policy.coverage.window_s))

    def judge_ahead(self) -> tuple[int, tuple[RuleVerdict, ...]]:
        """On fresh evidence: the newest open second, and the verdicts that trip there."""
        end = max((max(judged.window.open, default=-1) for judged in self.rules), default=-1)
        if end < 0:
            return end, ()
        tripping = [judged.judge_ahead(end) for judged in self.rules]
        if not any(verdict is not None and verdict.verdict == "trip" for verdict in tripping):
            return end, ()
        return end, tuple(judged.survey(end) for judged in self.rules)

    def cause(
        self, tripping: tuple[RuleVerdict, ...], end: int, opened: Iterable[Placed], *, fresh: bool
    ) -> Cause:
        """Why, with numbers, place and proof. `opened`: the pair cells of open seconds, for fresh trips."""
        first = tripping[0]
        judged = next(one for one in self.rules if one.rule.id == first.rule.id)
        rule, window = judged.rule, judged.window
        scopes = window.open_scopes() if fresh else list(window.scopes())
        vectors = {scope: window.ahead(scope, end) if fresh else window.total(scope) for scope in scopes}
        located = locate(rule, vectors, whole_scope(rule))
        place = None if located is None else (located.dimension, located.value)
        finding = _telling(first.findings, place, whole_scope(rule))
        coverage = self.coverage.judge("").value
        proof: tuple[str, ...] = ()
        if rule.metric.family == "pairs" and rule.arm == "canary":
            proof = proofs(
                self._worst_of(place or finding.scope, end - rule.window_s, end, opened if fresh else ())
            )
        return Cause(
            rule=rule.id,
            capability=rule.capability,
            metric=rule.metric.label,
            value=finding.reading.value,
            bound=finding.reading.bound,
            limit=float(rule.limit),
            window_us=rule.window_s * 1_000_000,
            samples=finding.reading.samples,
            coverage=coverage,
            scope="rollout" if finding.scope == whole_scope(rule) else scope_label(finding.scope),
            located=located,
            pair_ids=proof,
            also=tuple(verdict.rule.id for verdict in tripping[1:]),
        )

    def _worst_of(
        self, scope: Scope, after: int, end: int, opened: Iterable[Placed]
    ) -> Iterator[tuple[int, bytes]]:
        for second, worst in self.worst.items():
            if after < second <= end:
                yield from worst.get(scope, ())
        for second, population, cell in opened:
            if (
                after < second <= end
                and (cell.dimension, cell.value) == scope
                and population is not None
                and population.rollout == self.spec.rollout
                and population.arm == "canary"
                and self._place("pairs", population, second) == "ours"
            ):
                yield from cell.worst

    def _place(self, family: Family, population: Population, second: int) -> Place:
        """Whether a population is evidence of this generation (V1).

        A pair is ours when its halves differ in exactly the dimensions in which the arms do: in another one
        it compares something else, and in fewer it compares a version with itself, which always passes.
        """
        if second < self.evidence_from:
            return "foreign"
        if population.generation is None:
            if second < self.start_second:
                return "foreign"
        elif population.generation not in self.generations:
            return "foreign"
        arm = self.spec.arms.get(population.arm)
        if arm is None:
            return "foreign"
        if population.model_version is not None and population.model_version != arm.model_version:
            return "other_version"
        if family == "pairs" and population.differs != self._masks[population.arm]:
            return "other_difference"
        return "ours"

    def _unknown(self, unknown: Unknown, window_s: int) -> str:
        second = self.folded
        assert second is not None
        return unknown(max(self.evidence_from, second - window_s + 1), second)

    def _remember(self, second: int, worst: Worst) -> None:
        while self.worst and (oldest := next(iter(self.worst))) <= second - self.policy.window_s:
            del self.worst[oldest]
        if worst:
            self.worst[second] = worst


def _is_of(rule: Rule, family: Family, arm: Arm) -> bool:
    if rule.metric.family != family:
        return False
    return arm != "control" if rule.arm == "any" else arm == rule.arm


def _whole_count(population_cells: PopulationCells, family: Family) -> int:
    name = "pairs" if family == "pairs" else "requests"
    return sum(cell.counters.get(name, 0) for cell in population_cells.cells if cell.dimension == ALL)


def _missing(population_cells: PopulationCells) -> Vec:
    """Halves that never became a pair: they stand under no difference, whatever the arms differ in."""
    vec: Vec = {}
    for cell in population_cells.cells:
        if cell.dimension == ALL:
            lost = {
                name: count for name, count in cell.counters.items() if name not in ("pairs", "renormalised")
            }
            add_into(vec, coverage_vec(lost))
    return vec


def _drops(population_cells: PopulationCells) -> Vec:
    dropped = sum(cell.counters.get("dropped", 0) for cell in population_cells.cells if cell.dimension == ALL)
    return coverage_vec({"dropped": dropped}) if dropped else {}


def _collect(worst: Worst, cell: Cell) -> None:
    if cell.worst and (cell.dimension == ALL or cell.dimension in LOCATING):
        scope = (cell.dimension, cell.value)
        worst[scope] = worst_of((*worst.get(scope, ()), *cell.worst))


def _telling(findings: tuple[Finding, ...], place: Scope | None, whole: Scope) -> Finding:
    """Of all scopes over the limit the located one, else the whole, else the worst."""
    for wanted in (place, whole):
        for finding in findings:
            if finding.scope == wanted:
                return finding
    return findings[0]
