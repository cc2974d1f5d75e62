"""One rule over its windows: verdicts per scope, and the rule's own.

`hold` and `consecutive` follow from bucket contents alone: a run of evaluations over the limit, one a second,
is a memo of what the windows said, and folding the same seconds again gives the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.core.cells import ALL
from pipeline.core.gate.metrics import (
    COUNT,
    EXCESS,
    VALUE,
    EvidenceError,
    Reading,
    Vec,
    add_into,
    extract,
    read,
    samples_of,
)
from pipeline.core.gate.policy import TRIPS, Coverage, Rule
from pipeline.core.gate.windows import Scope, Window
from schemas.buckets import Cell
from schemas.control import Evaluation, Verdict

WHOLE: Final[Scope] = (ALL, "")
LOCATING: Final = ("node", "context", "request_type", "hardware", "sampling", "region", "node_context")
"""Dimensions in which a deviation is located (G7)."""
LOST: Final = (
    "no_canary", "no_baseline", "no_control", "ambiguous", "late", "definition_mismatch", "no_position",
    "dropped", "other",
)  # fmt: skip
"""Why a mirrored request was not scored, as coverage tells it: a slot of its vectors each."""


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
    """What a rule says at one moment, one evaluation per scope. `findings`: why it trips, worst first."""

    rule: Rule
    verdict: Verdict
    reason: str
    evaluations: tuple[Evaluation, ...]
    findings: tuple[Finding, ...] = ()


def scope_label(scope: Scope) -> str:
    """How decisions name a scope: `rollout`, `node=gpu-3`, `node_context=gpu-3|>2048`."""
    return "rollout" if scope == WHOLE else f"{scope[0]}={scope[1]}"


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
    seen_end: int | None = None
    """Where fresh evidence was judged last."""

    @classmethod
    def of(cls, rule: Rule) -> JudgedRule:
        """An empty one."""
        if rule.traffic != "all":
            wanted = {"traffic"}
        else:
            wanted = {ALL, *rule.scopes, *(LOCATING if rule.action in TRIPS else ())}
        return cls(rule, Window(rule.window_s), frozenset(wanted))

    def take(self, into: dict[Scope, Vec], cell: Cell, second: int, sign: int = 1) -> None:
        """Add one cell's part to the content of a second."""
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

    def fold(self, second: int, content: Mapping[Scope, Vec]) -> None:
        """Add a complete second and bring the runs up to it."""
        self.window.fold(second, content)
        for at in [at for at in self.broken if at <= second - self.rule.window_s]:
            del self.broken[at]
        if self.rule.hold_steps == 1:
            return
        for scope in self._judged(self.window.scopes()):
            run = self._next_run(self.runs.get(scope), self._read(scope), second)
            if run is None:
                self.runs.pop(scope, None)
            else:
                self.runs[scope] = run
        for scope in [scope for scope, run in self.runs.items() if second - run.last > self.rule.window_s]:
            del self.runs[scope]

    def judge(self, unknown: str) -> RuleVerdict:
        """The verdict at the newest folded second. `unknown`: what of the window is unknown, or ""."""
        second = self.window.end
        assert second is not None
        evaluations: list[Evaluation] = []
        findings: list[Finding] = []
        for scope in self._judged({*self.window.scopes(), whole_scope(self.rule)}):
            evaluation, finding = self._evaluate(scope, self._read(scope), self.runs.get(scope), second)
            evaluations.append(evaluation)
            if finding is not None:
                findings.append(finding)
        return self._conclude(evaluations, findings, unknown)

    def judge_ahead(self, end: int) -> RuleVerdict | None:
        """On fresh evidence, with the window ending at `end`; None unless it trips. May only trip."""
        if self.rule.action not in TRIPS or not self.rule.enforcing:
            return None
        moved = end != self.seen_end
        self.seen_end = end
        candidates = self.window.open_scopes() if moved else sorted(self.dirty)
        self.dirty.clear()
        if not any(self._trips_ahead(scope, end) for scope in self._judged(candidates)):
            return None
        return self.survey(end)

    def survey(self, end: int) -> RuleVerdict:
        """Every scope with the window ending at `end`, fresh evidence included."""
        evaluations: list[Evaluation] = []
        findings: list[Finding] = []
        for scope in self._judged({*self.window.open_scopes(), whole_scope(self.rule)}):
            reading = read(self.rule, self.window.ahead(scope, end))
            evaluation, finding = self._evaluate(scope, reading, self._run_ahead(scope, end), end)
            evaluations.append(evaluation)
            if finding is not None:
                findings.append(finding)
        return self._conclude(evaluations, findings, "")

    def _trips_ahead(self, scope: Scope, end: int) -> bool:
        reading = read(self.rule, self.window.ahead(scope, end))
        if not reading.over or reading.samples < self.rule.min_samples:
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
            run = self._next_run(run, read(self.rule, self.window.ending_at(scope, second)), second)
        return run

    def _next_run(self, run: Run | None, reading: Reading, second: int) -> Run | None:
        """Too few samples neither confirm nor break; a gap longer than the window breaks."""
        if reading.samples < self.rule.min_samples:
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
            scope for scope in scopes if (wanted if scope == whole else scope[0] in self.rule.scopes)
        )

    def _read(self, scope: Scope) -> Reading:
        return read(self.rule, self.window.total(scope))

    def _evaluate(
        self, scope: Scope, reading: Reading, run: Run | None, second: int
    ) -> tuple[Evaluation, Finding | None]:
        rule = self.rule
        verdict: Verdict
        finding = None
        reason = ""
        if reading.samples < rule.min_samples:
            verdict, reason = "not_enough_data", f"{reading.samples} of {rule.min_samples} samples"
        elif not reading.over:
            verdict = "pass"
        elif rule.hold_steps == 1 or (run is not None and second - run.since + 1 >= rule.hold_steps):
            verdict, finding = "trip", Finding(scope, reading)
        else:
            steps = 0 if run is None else second - run.since + 1
            verdict, reason = "not_enough_data", f"over the limit for {steps} of {rule.hold_steps} s"
        label = "rollout" if scope == whole_scope(rule) else scope_label(scope)
        evaluation = Evaluation(
            rule=rule.id,
            scope=label,
            verdict=verdict,
            metric=rule.metric.label,
            value=reading.value,
            limit=float(rule.limit),
            samples=reading.samples,
            reason=reason,
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

    def samples(self, scope: Scope) -> int:
        """Values in the folded window of a scope."""
        return samples_of(self.rule, self.window.total(scope))


@dataclass(frozen=True, slots=True)
class CoverageVerdict:
    """`value` = scored ÷ expected over the window; None where nothing was expected."""

    verdict: Verdict
    value: float | None
    expected: int
    low: bool
    reason: str
    evaluation: Evaluation


@dataclass(slots=True)
class JudgedCoverage:
    """How much of what was mirrored could be scored."""

    coverage: Coverage
    window: Window

    @classmethod
    def of(cls, coverage: Coverage) -> JudgedCoverage:
        """An empty one."""
        return cls(coverage, Window(coverage.window_s))

    def judge(self, unknown: str) -> CoverageVerdict:
        """At the newest folded second. Too few expected pairs: not enough data, and not `low`."""
        total = self.window.total(WHOLE)
        expected, scored = total.get(COUNT, 0), total.get(VALUE, 0)
        value = scored / expected if expected else None
        low = expected >= self.coverage.min_samples and scored < self.coverage.limit * expected
        verdict: Verdict = "pass"
        reason = ""
        mismatched = total.get(EXCESS, 0)
        if expected < self.coverage.min_samples:
            verdict = "not_enough_data"
            reason = f"{expected} of {self.coverage.min_samples} mirrored requests"
            if mismatched:
                reason += f"; {mismatched} pairs not compared: their versions are not those under test"
        elif low:
            verdict = "not_enough_data"
            reason = f"coverage {scored / expected:.3f} is below {float(self.coverage.limit):g}"
        elif unknown:
            verdict, reason = "not_enough_data", unknown
        evaluation = Evaluation(
            rule="coverage",
            scope="rollout",
            verdict=verdict,
            metric="coverage",
            value=value,
            limit=float(self.coverage.limit),
            samples=expected,
            reason=reason,
        )
        return CoverageVerdict(verdict, value, expected, low, reason, evaluation)


def coverage_vec(counters: Mapping[str, int]) -> Vec:
    """What a pair cell adds to coverage: expected = scored + unmatched except duplicates + reported drops."""
    scored = counters.get("pairs", 0) + counters.get("renormalised", 0)
    vec: Vec = {}
    add_into(vec, {COUNT: scored, VALUE: scored})
    for name, count in counters.items():
        lost = "dropped" if name == "dropped" else name.removeprefix("unmatched.")
        if lost != "duplicate" and (lost != name or name == "dropped"):
            add_into(vec, {COUNT: count, _lost_slot(lost): count})
    return vec


def lost_by_reason(vec: Mapping[int, int]) -> dict[str, int]:
    """What a coverage vector lacks, by reason, the greatest first."""
    found = {name: count for name in LOST if (count := vec.get(_lost_slot(name), 0))}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _lost_slot(reason: str) -> int:
    return EXCESS + 1 + LOST.index(reason if reason in LOST else "other")
