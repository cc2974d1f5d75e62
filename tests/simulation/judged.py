"""One generation under a policy: seconds of cells in, the rules that trip out. The gate's own evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pipeline.core.gate.anytime import SequentialRule
from pipeline.core.gate.evidence import RolloutEvidence
from pipeline.core.gate.metrics import read, samples_of
from pipeline.core.gate.policy import Family, Policy
from pipeline.core.gate.rules import JudgedRule, RuleVerdict, scope_label
from schemas.buckets import Cell, Population, PopulationCells
from schemas.events import Arm
from tests.simulation.answers import ROLLOUT, VERSIONS, spec

PAIRS: Final = Population(ROLLOUT, 1, "canary", VERSIONS["canary"], 1)
REQUESTS: Final[Mapping[Arm, Population]] = {
    arm: Population(ROLLOUT, 1, arm, VERSIONS[arm]) for arm in ("baseline", "canary")
}
Seconds = Mapping[int, list[Cell]]


@dataclass(frozen=True, slots=True)
class Trip:
    """A rule that trips at the end of a second, and the scope it names first."""

    rule: str
    second: int
    scope: str


@dataclass(slots=True)
class Generation:
    """Windows of one generation, judged every second; a rule that tripped is asked no more.

    With `again` it begins anew instead, as a new generation would.
    """

    policy: Policy
    rules: frozenset[str] | None = None
    """Judge these only; each keeps its share of alpha. None: all."""
    again: bool = False
    evidence: RolloutEvidence = field(init=False)
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.evidence = self._fresh()

    def _fresh(self) -> RolloutEvidence:
        evidence = RolloutEvidence(spec(control=True), self.policy, range(1, 2), 0, 0)
        if self.rules is not None:
            judged = [one for one in evidence.rules if one.rule.id in self.rules]
            windows = [one.point for one in judged if isinstance(one, SequentialRule)]
            # A sequential rule may share the window of a point rule, which is folded with it then.
            evidence.rules = [
                one for one in evidence.rules if any(one is each for each in (*judged, *windows))
            ]
        return evidence

    def _begin_anew(self, at: int) -> None:
        before, after = self.evidence.rules[at], self._fresh().rules[at]
        if isinstance(after, SequentialRule) and isinstance(before, SequentialRule):
            if not after.own_window:
                after.point = before.point
        else:
            for one in self.evidence.rules:
                if isinstance(one, SequentialRule) and one.point is before:
                    one.point = after
        self.evidence.rules[at] = after

    @property
    def judged(self) -> frozenset[str]:
        """Ids of the rules that are judged."""
        return frozenset(one.rule.id for one in self.evidence.rules if self._asks(one.rule.id))

    def _asks(self, rule: str) -> bool:
        return (self.rules is None or rule in self.rules) and rule not in self.done

    def wanted(self, family: Family) -> frozenset[str]:
        """Dimensions that any rule of a family judges or compares with; none that only locates."""
        found = {"all"}
        for judged in self.evidence.rules:
            rule = judged.rule
            if rule.metric.family == family:
                found |= {"all" if name == "rollout" else name for name in rule.scopes}
                found |= {"traffic"} if rule.traffic != "all" else set()
                found |= {"context"} if rule.relative_to is not None else set()
        return frozenset(found)

    def fold(self, second: int, pairs: Seconds, requests: Mapping[Arm, Seconds] | None = None) -> list[Trip]:
        """Add a complete second, then judge."""
        contents: list[tuple[Family, PopulationCells]] = []
        if found := pairs.get(second):
            contents.append(("pairs", PopulationCells(PAIRS, found)))
        for arm, seconds in (requests or {}).items():
            if found := seconds.get(second):
                contents.append(("requests", PopulationCells(REQUESTS[arm], found)))
        self.evidence.fold(second, contents)
        trips = []
        for at, judged in enumerate(self.evidence.rules):
            if not self._asks(judged.rule.id) or not may_trip(judged):
                continue
            verdict: RuleVerdict = judged.judge("")
            if verdict.verdict != "trip":
                continue
            trips.append(Trip(judged.rule.id, second, scope_label(verdict.findings[0].scope)))
            if self.again:
                self._begin_anew(at)
            else:
                self.done.add(judged.rule.id)
        return trips


def may_trip(judged: Any) -> bool:
    """Whether asking the rule is worth it: `judge` writes an evaluation per scope, most of them in vain.

    No rule trips for which this is False: a sequential one needs its bound, one that holds a run, a mean or
    share a judged scope that is over the limit with enough samples. Others are always asked.
    """
    rule = judged.rule
    if not isinstance(judged, JudgedRule):
        return bool(judged.evidence >= judged.share.bound)
    if rule.hold_steps > 1:
        return bool(judged.runs)
    if rule.metric.statistic == "quantile":
        return True
    for scope in judged._judged(judged.window.totals):
        vec = judged.window.totals[scope]
        if samples_of(rule, vec) >= rule.min_samples and read(rule, vec).over:
            return True
    return False
