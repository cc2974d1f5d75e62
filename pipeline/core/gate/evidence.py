"""The evidence of one roll-out: which cells are its own, its windows, and what its rules say.

Which populations belong to it is decided here (V1, generations), because only the gate knows the spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal

from pipeline.core.cells import ALL
from pipeline.core.gate.anytime import Origin, SequentialRule
from pipeline.core.gate.coverage import CoverageVerdict, JudgedCoverage, coverage_vec, dropped_vec, lost_vec
from pipeline.core.gate.left_out import NOTHING, LeftOut
from pipeline.core.gate.location import locate, locate_inside
from pipeline.core.gate.metrics import EXCESS, Vec, add_into
from pipeline.core.gate.policy import LEAVING_OUT, Family, Policy, Rule, alpha_ledger
from pipeline.core.gate.proof import Worst, WorstPairs, collect_worst, proofs
from pipeline.core.gate.relative import Lookup
from pipeline.core.gate.rules import WHOLE, Finding, JudgedRule, RuleVerdict, told_as, whole_scope
from pipeline.core.gate.sides import BaselineSide, Judged, Remaining, Side
from pipeline.core.gate.sources import Placed
from pipeline.core.gate.state import RolloutMemory, RuleMemory
from pipeline.core.gate.versions import differing_mask
from pipeline.core.gate.windows import Scope
from schemas.buckets import Population, PopulationCells
from schemas.control import Cause, Located, RolloutSpec
from schemas.events import Arm
from schemas.topics import Topic

FAMILIES: Final[dict[str, Family]] = {Topic.REQUESTS.value: "requests", Topic.LOGITS.value: "pairs"}
"""Source topic → family of its cells; telemetry has none of a roll-out's."""
Unknown = Callable[[int, int], str]
"""(first, last) second → what of them is unknown, "" if nothing."""
ALPHA_LEAST: Final = 1e-6
"""Of α: so much is another policy given whatever came before it, or nothing could trip any more."""
Takers = dict[str, tuple[Side, ...]]
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
    left_out: LeftOut = NOTHING
    """What the canary gets no more."""
    alpha_left: float = 1.0
    """How much of α the generation's earlier policies left."""
    rules: list[Judged] = field(default_factory=list)
    coverage: JudgedCoverage = field(init=False)
    worst: WorstPairs = field(init=False)
    mismatched: int = 0
    """Pairs and requests seen whose versions are not those under test."""
    _left_out_of_all: LeftOut = NOTHING
    """Of it, what is compared of no arm."""
    _masks: dict[Arm, int] = field(default_factory=dict)
    _takers: dict[tuple[Family, Arm], Takers] = field(default_factory=dict)
    """As far as asked for."""

    def __post_init__(self) -> None:
        self._left_out_of_all = self.left_out.of_any_node()
        self.rules = self._judged()
        self._silence()
        self.coverage = JudgedCoverage.of(self.policy.coverage)
        self.worst = WorstPairs(self.policy.window_s)
        self._masks = {arm: differing_mask(self.spec, arm) for arm in self.spec.arms}

    @classmethod
    def of(cls, memory: RolloutMemory, spec: RolloutSpec, policy: Policy) -> RolloutEvidence:
        """Empty windows for what this memory says is running."""
        return cls(
            spec,
            policy,
            memory.generations,
            memory.start_second,
            memory.evidence_from,
            memory.left_out,
            memory.alpha_left,
        )

    def _judged(self) -> list[Judged]:
        shares = {share.rule.id: share for share in alpha_ledger(self.policy, self.alpha_left)}
        origin = Origin(self.spec.rollout, self.generations.start, self.policy.hash, self.evidence_from)
        points = {rule.id: JudgedRule.of(rule) for rule in self.policy.rules if not rule.sequential}
        beside = tuple(points.values())
        control = "control" in self.spec.arms
        return [
            points.get(rule.id)
            or SequentialRule.of(rule, shares[rule.id], origin, beside, has_control=control)
            for rule in self.policy.rules
        ]

    @property
    def sequential(self) -> list[SequentialRule]:
        """Rules that remember what no bucket says any more."""
        return [judged for judged in self.rules if isinstance(judged, SequentialRule)]

    def alpha_after(self) -> float:
        """How much of α is left for another policy of this generation: the capital of the rules that share.

        It goes on as that policy's, and never grows in the mean: so α holds for the generation, however often
        its policy changes. More than 1 is not given on, and never less than ALPHA_LEAST.
        """
        shared = [one.processes.capital for one in self.sequential if one.share.shared]
        if not shared:
            return self.alpha_left
        return max(ALPHA_LEAST, min(1.0, self.alpha_left * math.fsum(shared) / len(shared)))

    def resume(self, memories: Mapping[str, RuleMemory], folded: int) -> int:
        """Go on from the records of a predecessor, by rule; returns how many rules begin anew after `folded`,
        for want of one that is theirs."""
        return sum(not one.resume(memories.get(one.rule.id), folded) for one in self.sequential)

    @property
    def folded(self) -> int | None:
        """The newest folded second."""
        return self.coverage.window.end

    def fold(
        self, second: int, contents: Iterable[tuple[Family, PopulationCells]], step_start: int = 0
    ) -> int:
        """Add a complete second; returns how many pairs of canary and baseline were scored in it.

        `step_start`: from which second on the present weight step counts.
        """
        for one in self.sequential:
            one.begin_step(step_start)
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
                        add_into(covered, lost_vec(population_cells))
                continue
            for side, content in zip(self._sides(family, population.arm), per_rule, strict=True):
                if side is not None:
                    for cell in population_cells.cells:
                        if cell.dimension in side.wanted:
                            side.take(content, cell, second)
            if family == "pairs" and population.arm == "baseline":
                add_into(covered, dropped_vec(population_cells))
            if family == "pairs" and population.arm == "canary":
                for cell in population_cells.cells:
                    if cell.dimension == ALL:
                        add_into(covered, coverage_vec(cell.counters))
                    for part, sign in self.left_out.parts(cell, second):
                        if part.dimension == ALL:
                            pairs += sign * part.counters.get("pairs", 0)
                        if sign > 0:
                            collect_worst(worst, part)
        for judged, content in zip(self.rules, per_rule, strict=True):
            judged.fold(second, content)
        self.coverage.window.fold(second, {WHOLE: covered} if covered else {})
        self.worst.fold(second, worst)
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
            # What cannot trip on fresh evidence takes none.
            sides = [
                side
                for judged, side in zip(self.rules, self._sides(family, population.arm), strict=True)
                if side is not None and isinstance(judged, JudgedRule) and judged.may_trip_ahead
            ]
            found = self._takers[family, population.arm] = {
                dimension: tuple(side for side in sides if dimension in side.wanted)
                for dimension in frozenset().union(*(side.wanted for side in sides))
            }
        return found

    def _sides(self, family: Family, arm: Arm) -> list[Side | None]:
        """Every rule as cells of this arm meet it; None: they are no evidence for it."""
        return [self._side(judged, family, arm) for judged in self.rules]

    def _side(self, judged: Judged, family: Family, arm: Arm) -> Side | None:
        if arm == "baseline" and judged.rule.relative_to == arm and judged.rule.metric.family == family:
            # The control goes on getting copies of everything.
            left_out = self._left_out_of_all if judged.rule.arm == "canary" else NOTHING
            return BaselineSide.of(judged, left_out)
        if not _is_of(judged.rule, family, arm):
            return None
        return Remaining.of(judged, self.left_out) if arm == "canary" and self.left_out.exclusions else judged

    def leave_out(self, left_out: LeftOut, opened: Iterable[tuple[Family, Placed]]) -> None:
        """The canary gets no more of this from now on. `opened`: the cells of open seconds.

        Folded seconds stay as they are: each exclusion says from which second on it holds.
        """
        cells = list(opened)
        for family, placed in cells:
            self.patch(family, placed, -1)
        self.left_out, self._left_out_of_all = left_out, left_out.of_any_node()
        self._takers.clear()
        self._silence()
        for family, placed in cells:
            self.patch(family, placed, 1)

    def _silence(self) -> None:
        for judged in self.rules:
            if judged.rule.arm in ("canary", "any"):
                judged.leave_out(self.left_out)

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
        return tuple(
            self._placed(judged, judged.judge(self._unknown(unknown, judged.rule.window_s)))
            for judged in self.rules
        )

    def _placed(self, judged: Judged, verdict: RuleVerdict) -> RuleVerdict:
        """A trip that leaves something out says what carries it, and of how many nodes."""
        rule = verdict.rule
        if verdict.verdict != "trip" or not rule.enforcing or rule.action not in LEAVING_OUT:
            return verdict
        scopes = list(judged.window.scopes())
        nodes = tuple(value for dimension, value in scopes if dimension == "node")
        located = self._located(rule, scopes, verdict.findings[0].scope, judged.window.total)
        return replace(verdict, located=located, nodes=nodes)

    def _located(self, rule: Rule, scopes: Iterable[Scope], found: Scope, lookup: Lookup) -> Located | None:
        return locate(rule, self._judged_on(scopes), found, lookup)

    def _judged_on(self, scopes: Iterable[Scope]) -> Iterator[Scope]:
        """Those of which nothing is left out."""
        return (one for one in scopes if not self.left_out.covers(one))

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
        lookup = partial(window.ahead, end=end) if fresh else window.total
        over = first.findings[0].scope
        located = self._located(rule, scopes, over, lookup)
        if located is None and over != whole_scope(rule):
            located = locate_inside(rule, self._judged_on(scopes), over, lookup)
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
            metric=rule.label,
            value=finding.reading.value,
            bound=finding.reading.bound,
            limit=float(rule.limit),
            window_us=rule.window_s * 1_000_000,
            samples=finding.reading.samples,
            evidence=judged.evidence if isinstance(judged, SequentialRule) else None,
            evidence_bound=judged.share.bound if isinstance(judged, SequentialRule) else None,
            level=finding.reading.level,
            baseline=finding.reading.baseline,
            baseline_samples=finding.reading.baseline_samples,
            coverage=coverage,
            scope=told_as(rule, finding.scope),
            located=located,
            pair_ids=proof,
            also=tuple(verdict.rule.id for verdict in tripping[1:]),
        )

    def _worst_of(
        self, scope: Scope, after: int, end: int, opened: Iterable[Placed]
    ) -> Iterator[tuple[int, bytes]]:
        yield from self.worst.of(scope, after, end)
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


def _is_of(rule: Rule, family: Family, arm: Arm) -> bool:
    if rule.metric.family != family:
        return False
    return arm != "control" if rule.arm == "any" else arm == rule.arm


def _whole_count(population_cells: PopulationCells, family: Family) -> int:
    name = "pairs" if family == "pairs" else "requests"
    return sum(cell.counters.get(name, 0) for cell in population_cells.cells if cell.dimension == ALL)


def _telling(findings: tuple[Finding, ...], place: Scope | None, whole: Scope) -> Finding:
    """Of all scopes over the limit the located one, else the whole, else the worst."""
    for wanted in (place, whole):
        for finding in findings:
            if finding.scope == wanted:
                return finding
    return findings[0]
