"""One rule over its windows: verdicts per scope, and the rule's own.

`hold` and `consecutive` follow from bucket contents alone: a run of evaluations over the limit, one a second,
is a memo of what the windows said, and folding the same seconds again gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from typing import Final

from pipeline.core.cells import ALL
from pipeline.core.gate.left_out import NOTHING, LeftOut
from pipeline.core.gate.metrics import (
    COUNT,
    EvidenceError,
    Reading,
    Vec,
    add_into,
    extract,
    read,
    samples_of,
)
from pipeline.core.gate.policy import LEAVING_OUT, TRIPS, Rule
from pipeline.core.gate.relative import (
    Lookup,
    baseline_scope,
    compare,
    is_baseline,
    scarcer,
)
from pipeline.core.gate.windows import Scope, Window
from schemas.buckets import Cell
from schemas.control import Evaluation, Located, Verdict

WHOLE: Final[Scope] = (ALL, "")
LOCATING: Final = ("node", "context", "request_type", "hardware", "sampling", "region", "node_context")
"""Dimensions in which a deviation is located (G7)."""
HOLDS_LESS: Final = "it holds less than what is left out of it"


THIN_TOLD: Final = 16
"""Parts with too few samples that a verdict names, those with most of them: a fleet has thousands."""


@dataclass(frozen=True, slots=True)
class Run:
    """Evaluations over the limit without a break: from `since` to `last`, in seconds."""

    since: int
    last: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A scope of a rule that is over its limit, for as long as the rule asks."""

    scope: Scope
    reading: Reading


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """What a rule says at one moment, one evaluation per scope that says anything. `findings`: why it trips,
    worst first."""

    rule: Rule
    verdict: Verdict
    reason: str
    evaluations: tuple[Evaluation, ...]
    findings: tuple[Finding, ...] = ()
    located: Located | None = None
    """Of trips that leave something out: the class that carries the excess; None: none does."""
    nodes: tuple[str, ...] = ()
    """Of the same trips: the canary's nodes in the window."""


def scope_label(scope: Scope) -> str:
    """How decisions name a scope: `rollout`, `node=gpu-3`, `node_context=gpu-3|>2048`."""
    return "rollout" if scope == WHOLE else f"{scope[0]}={scope[1]}"


def told_as(rule: Rule, scope: Scope) -> str:
    """The same under a rule, whose whole may be a part of the traffic."""
    return "rollout" if scope == whole_scope(rule) else scope_label(scope)


def whole_scope(rule: Rule) -> Scope:
    """The cell that stands for the whole roll-out under this rule."""
    return WHOLE if rule.traffic == "all" else ("traffic", rule.traffic)


@dataclass(slots=True)
class JudgedRule:
    """A rule with its window. Seconds go in in order; verdicts come out."""

    rule: Rule
    window: Window
    wanted: frozenset[str]
    """Dimensions whose cells are added up: judged ones, and those that locate a trip."""
    runs: dict[Scope, Run] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    """Seconds whose cells contradict themselves, and how."""
    dirty: set[Scope] = field(default_factory=set)
    left_out: LeftOut = NOTHING
    """What the canary gets no more: not judged."""
    begins: int = -1
    """First second that counts: with what was left out since, the rule began anew."""
    seen_end: int | None = None
    """Where fresh evidence was judged last."""

    @classmethod
    def of(cls, rule: Rule) -> JudgedRule:
        """An empty one."""
        if rule.traffic != "all":
            wanted = {"traffic"}
        else:
            # What moves nothing needs no place.
            wanted = {ALL, *rule.scopes, *(LOCATING if rule.enforcing else ())}
        return cls(rule, Window(rule.window_s), frozenset(wanted))

    @property
    def may_trip_ahead(self) -> bool:
        """Whether fresh evidence says anything to it."""
        return self.rule.action in TRIPS and self.rule.enforcing

    def take(self, into: dict[Scope, Vec], cell: Cell, second: int, sign: int = 1) -> None:
        """Add one cell's part to the content of a second."""
        if second < self.begins:
            return
        try:
            vec = extract(self.rule, cell)
        except EvidenceError as error:
            self.broken[second] = str(error)
            return
        if vec:
            add_into(into.setdefault((cell.dimension, cell.value), {}), vec, sign)

    def patch(self, second: int, cell: Cell, sign: int) -> None:
        """Add one cell to an open second, or take it out."""
        try:
            vec = extract(self.rule, cell)
        except EvidenceError:
            return
        if vec:
            scope = (cell.dimension, cell.value)
            self.window.patch(second, scope, vec, sign)
            self.dirty.add(scope)

    def leave_out(self, left_out: LeftOut) -> None:
        """The canary gets no more of this. A rule that judges what holds others, too, begins anew without it.

        Else what it saw of the segment that it has just excluded would be said to be everywhere.
        """
        self.left_out = left_out
        if self.rule.action not in LEAVING_OUT:
            return
        # Of a node that is ejected no other node's cells hold anything.
        begins = left_out.begins(apart_from="node" if self.rule.action == "eject_node" else None)
        if begins > self.begins:
            self.begins = begins
            self.window = Window(self.rule.window_s, self.window.end)
            self.runs.clear()
            self.broken.clear()
            self.dirty.clear()

    def fold(self, second: int, content: Mapping[Scope, Vec]) -> None:
        """Add a complete second and bring the runs up to it."""
        self.window.fold(second, self.without_contradictions(second, content))
        for at in [at for at in self.broken if at <= second - self.rule.window_s]:
            del self.broken[at]
        if self.rule.hold_steps == 1:
            return
        for scope in self._judged(self.window.scopes()):
            run = self._next_run(self.runs.get(scope), self.reading(scope), second)
            if run is None:
                self.runs.pop(scope, None)
            else:
                self.runs[scope] = run
        for scope in [scope for scope, run in self.runs.items() if second - run.last > self.rule.window_s]:
            del self.runs[scope]

    def without_contradictions(self, second: int, content: Mapping[Scope, Vec]) -> Mapping[Scope, Vec]:
        """Without scopes of which more is left out than they hold: where a cell found no room among too many,
        its parts are taken out of nothing. What is left is no evidence; of the whole, or where anything is
        left at all, it blocks a pass."""
        if not self.left_out.exclusions:
            return content
        found: dict[Scope, Vec] = {}
        for scope, vec in content.items():
            counted = self.rule.metric.statistic == "quantile" or COUNT in vec
            if vec and (min(vec.values()) < 0 or not counted):
                if scope == whole_scope(self.rule) or max(vec.values()) > 0:
                    self.broken[second] = f"{scope_label(scope)}: {HOLDS_LESS}"
            else:
                found[scope] = vec
        return found

    def judge(self, unknown: str) -> RuleVerdict:
        """The verdict at the newest folded second. `unknown`: what of the window is unknown, or ""."""
        second = self.window.end
        assert second is not None
        return self._conclude(
            *self._look(self.window.scopes(), self.window.total, self.runs.get, second), unknown
        )

    def judge_ahead(self, end: int) -> RuleVerdict | None:
        """On fresh evidence, with the window ending at `end`; None unless it trips. May only trip."""
        if not self.may_trip_ahead:
            return None
        moved = end != self.seen_end
        self.seen_end = end
        # What the baseline's cells change is compared with many scopes.
        every = moved or any(is_baseline(scope) for scope in self.dirty)
        candidates = self.window.open_scopes() if every else sorted(self.dirty)
        self.dirty.clear()
        if not any(self._trips_ahead(scope, end) for scope in self._judged(candidates)):
            return None
        return self.survey(end)

    def survey(self, end: int) -> RuleVerdict:
        """Every scope with the window ending at `end`, fresh evidence included."""
        ahead = partial(self._run_ahead, end=end)
        return self._conclude(*self._look(self.window.open_scopes(), self._ahead(end), ahead, end), "")

    def _look(
        self, scopes: Iterable[Scope], lookup: Lookup, run_of: Callable[[Scope], Run | None], second: int
    ) -> tuple[list[Evaluation], list[Finding]]:
        """Every scope with enough samples; of the others the whole, and those that lack least."""
        whole = whole_scope(self.rule)
        readings = {scope: self._reading(scope, lookup) for scope in self._judged({*scopes, whole})}
        thin = [
            scope
            for scope, reading in readings.items()
            if scope != whole and not reading.enough(self.rule.min_samples)
        ]
        if len(thin) > THIN_TOLD:
            told = set(nsmallest(THIN_TOLD, thin, key=lambda scope: (-readings[scope].samples, scope)))
            for scope in thin:
                if scope not in told:
                    del readings[scope]
        evaluations: list[Evaluation] = []
        findings: list[Finding] = []
        for scope, reading in readings.items():
            evaluation, finding = self._evaluate(scope, reading, run_of(scope), second)
            evaluations.append(evaluation)
            if finding is not None:
                findings.append(finding)
        return evaluations, findings

    def _trips_ahead(self, scope: Scope, end: int) -> bool:
        reading = self._reading(scope, self._ahead(end))
        if not reading.over or not reading.enough(self.rule.min_samples):
            return False
        if self.rule.hold_steps == 1:
            return True
        run = self._run_ahead(scope, end)
        return run is not None and run.last == end and end - run.since + 1 >= self.rule.hold_steps

    def _run_ahead(self, scope: Scope, end: int) -> Run | None:
        """The run as it would stand at `end`, second by second from the newest folded one."""
        run = self.runs.get(scope)
        if self.rule.hold_steps == 1:
            return run
        first = min(self.window.open, default=end) if self.window.end is None else self.window.end + 1
        for second in range(max(first, end - self.rule.reach_s), end + 1):
            reading = self._reading(scope, partial(self.window.ending_at, end=second))
            run = self._next_run(run, reading, second)
        return run

    def _next_run(self, run: Run | None, reading: Reading, second: int) -> Run | None:
        """Too few samples neither confirm nor break; a gap longer than the window breaks."""
        if not reading.enough(self.rule.min_samples):
            return run
        if not reading.over:
            return None
        if run is None or second - run.last > self.rule.window_s:
            return Run(second, second)
        return Run(run.since, second)

    def _judged(self, scopes: Iterable[Scope]) -> list[Scope]:
        """Those of `scopes` the rule judges; others only locate."""
        whole = whole_scope(self.rule)
        wanted = "rollout" in self.rule.scopes
        return sorted(
            scope
            for scope in scopes
            if (wanted if scope == whole else scope[0] in self.rule.scopes)
            and not self.left_out.covers(scope)
        )

    def _reading(self, scope: Scope, lookup: Lookup) -> Reading:
        """What a scope says, its windows being those of `lookup`."""
        if self.rule.relative_to is not None:
            return compare(self.rule, scope, lookup)
        return read(self.rule, lookup(scope))

    def _ahead(self, end: int) -> Lookup:
        return partial(self.window.ahead, end=end)

    def _evaluate(
        self, scope: Scope, reading: Reading, run: Run | None, second: int
    ) -> tuple[Evaluation, Finding | None]:
        rule = self.rule
        verdict: Verdict
        finding = None
        reason = ""
        if not reading.enough(rule.min_samples) or reading.value is None:
            verdict, reason = "not_enough_data", _lacking(rule, scope, reading)
        elif not reading.over:
            verdict = "pass"
        elif rule.hold_steps == 1 or (run is not None and second - run.since + 1 >= rule.hold_steps):
            verdict, finding = "trip", Finding(scope, reading)
        else:
            steps = 0 if run is None else second - run.since + 1
            verdict, reason = "not_enough_data", f"over the limit for {steps} of {rule.hold_steps} s"
        evaluation = Evaluation(
            rule=rule.id,
            scope=told_as(rule, scope),
            verdict=verdict,
            metric=rule.label,
            value=reading.value,
            limit=float(rule.limit),
            samples=reading.samples,
            reason=reason,
            level=reading.level,
            baseline=reading.baseline,
            baseline_samples=reading.baseline_samples,
        )
        return evaluation, finding

    def _conclude(self, evaluations: list[Evaluation], findings: list[Finding], unknown: str) -> RuleVerdict:
        """A part of the roll-out can only trip; the pass is the whole's, where the rule judges the whole."""
        done = tuple(evaluations)
        if findings:
            findings.sort(key=lambda found: (-(found.reading.value or 0.0), found.scope))
            return RuleVerdict(self.rule, "trip", "", done, tuple(findings))
        if self.broken:
            return RuleVerdict(self.rule, "error", next(iter(self.broken.values())), done)
        if unknown:
            return RuleVerdict(self.rule, "not_enough_data", unknown, done)
        waiting = [one for one in done if one.reason.startswith("over")]
        if waiting:
            return RuleVerdict(self.rule, "not_enough_data", f"{waiting[0].scope}: {waiting[0].reason}", done)
        deciding = [one for one in done if one.scope == "rollout"] or list(done)
        if any(one.verdict == "pass" for one in deciding):
            return RuleVerdict(self.rule, "pass", "", done)
        reason = deciding[0].reason if deciding else f"0 of {self.rule.min_samples} samples"
        return RuleVerdict(self.rule, "not_enough_data", reason, done)

    def reading(self, scope: Scope) -> Reading:
        """What the folded window of a scope says."""
        return self._reading(scope, self.window.total)

    def samples(self, scope: Scope) -> int:
        """Values in the folded window of a scope."""
        return samples_of(self.rule, self.window.total(scope))

    def counted(self, scope: Scope) -> Scope:
        """Where the window keeps the values that a verdict about this scope may lack: of a relative rule
        the arm that has fewer."""
        if self.rule.relative_to is None:
            return scope
        return scarcer(scope, partial(samples_of, self.rule), self.window.total)


def _lacking(rule: Rule, scope: Scope, reading: Reading) -> str:
    """Why a scope cannot be judged."""
    if reading.samples < rule.min_samples or reading.baseline_samples is None:
        return f"{reading.samples} of {rule.min_samples} samples"
    like = scope_label(baseline_scope(scope))
    if reading.baseline_samples < rule.min_samples:
        held = f"{reading.baseline_samples} of {rule.min_samples}"
        return f"not compared: {held} samples of the baseline in {like}"
    return f"not compared: the baseline is at 0 in {like}"
