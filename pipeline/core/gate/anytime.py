"""A rule judged by sequential evidence (`evidence: anytime`): it may be looked at every second, for weeks.

It trips when the weighted sum of its scopes' evidence reaches R/α, and passes by the capped test of the
weight step (statistics.md §0). Only complete seconds count, each once, in order; fresh evidence never trips
it. The window beside it is the point rule's: for the mean that a pass must show, the location, and people.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeAlias

from pipeline.core.bins import Kind, bin_lowers, bin_uppers
from pipeline.core.gate.anytime_blocks import Blocks
from pipeline.core.gate.anytime_record import sound
from pipeline.core.gate.anytime_scopes import Processes
from pipeline.core.gate.left_out import LeftOut
from pipeline.core.gate.metrics import Reading, Vec, add_into, samples_of
from pipeline.core.gate.policy import LEAVING_OUT, AlphaShare, Rule
from pipeline.core.gate.relative import baseline_scope, held_as
from pipeline.core.gate.rules import (
    HOLDS_LESS,
    Finding,
    JudgedRule,
    RuleVerdict,
    scope_label,
    told_as,
    whole_scope,
)
from pipeline.core.gate.state import RuleMemory
from pipeline.core.gate.windows import Scope, Window
from pipeline.core.statistics import betting, capped
from pipeline.core.statistics.slow_share import bins_of
from schemas.buckets import SCORE_ONE, Cell, Distribution
from schemas.control import Evaluation, Verdict

SCOPE_SAMPLES: Final = 10
"""In the scope that carries a trip, at least; `min_samples` is the whole roll-out's."""
POINT_SAMPLES: Final = 1_000
"""With so many on both sides a quantile's own ratio must be under its limit for a pass (§0.4)."""
TOLD: Final = 4
"""Scopes that a verdict names, those with the largest terms."""
Histogram: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Bins and their counts."""
_LOGS: Final = struct.Struct(f"<{len(capped.BETS)}d")


@lru_cache(maxsize=64)
def _trip_table(kind: Kind, over: int, under: int) -> betting.GrowthTable:
    return betting.growth_table(bin_lowers(kind).tolist(), (over, under))


@lru_cache(maxsize=64)
def _pass_table(kind: Kind, limit: float) -> betting.GrowthTable:
    return capped.growth_table(bin_uppers(kind).tolist(), SCORE_ONE, limit)


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose evidence it is: nothing is restored into a roll-out's other run, or under another policy."""

    rollout: str
    generation: int
    """The first number of the run."""
    policy_hash: str
    evidence_from: int


@dataclass(slots=True)
class SequentialRule:
    """A rule with its betting processes. The same methods as `JudgedRule`, which it holds for the window."""

    point: JudgedRule
    rule: Rule
    share: AlphaShare
    origin: Origin
    processes: Processes
    blocks: Blocks | None
    """Where requests are judged by blocks; pairs are by the second."""
    absent: str = ""
    """Why it cannot be judged in this roll-out at all; "" if it can."""
    folded: int = -1
    """Newest second in the processes: those up to it only fill windows, after a restart."""
    samples: int = 0
    """Values of the whole roll-out in the processes."""
    passing: capped.Capped = field(default_factory=capped.Capped)
    passing_from: int = -1
    """First second of the weight step that the test for a pass is of."""
    own_window: bool = True
    """False: `point` is another rule's, which is folded with it."""
    _last: RuleVerdict | None = None
    _second: dict[Scope, list[tuple[Distribution, int]]] = field(default_factory=dict)
    """Of the second that is being taken, with their signs."""

    @classmethod
    def of(
        cls, rule: Rule, share: AlphaShare, origin: Origin, beside: Sequence[JudgedRule], *, has_control: bool
    ) -> SequentialRule:
        """With no evidence yet. `beside`: point rules of the policy; the window of one that measures the same
        serves both."""
        blocks = None
        if rule.metric.statistic == "quantile":
            blocks = Blocks(bins_of(rule.limit), rule.window_s, _like)
        absent = ""
        if rule.metric.measure == "excess" and not has_control:
            absent = "not judged: the roll-out has no control arm; add arms.control to its spec"
        levels = [whole_scope(rule)[0] if name == "rollout" else name for name in rule.scopes]
        own = JudgedRule.of(rule)
        point = next((one for one in beside if blocks is None and _holds(one, own)), own)
        processes = Processes.of(levels)
        return cls(point, rule, share, origin, processes, blocks, absent, own_window=point is own)

    # --- what a JudgedRule has, too --------------------------------------------------------------------

    @property
    def window(self) -> Window:
        """Its point window."""
        return self.point.window

    @property
    def wanted(self) -> frozenset[str]:
        """Dimensions whose cells it takes."""
        return self.point.wanted if self.own_window else self._levels

    def take(self, into: dict[Scope, Vec], cell: Cell, second: int, sign: int = 1) -> None:
        """Add one cell's part to the content of a second."""
        if self.own_window:
            self.point.take(into, cell, second, sign)
        if self.blocks is not None:
            return
        found = cell.measures.get(self.rule.metric.measure)
        if found is None or not found.count:
            return
        scope = (cell.dimension, cell.value)
        if not self._judges(scope):
            return
        if sum(found.counts) != found.count or len(found.bins) != len(found.counts):
            self.point.broken[second] = f"{cell.dimension}={cell.value}: its histogram contradicts its values"
            return
        self._second.setdefault(scope, []).append((found, sign))

    def patch(self, second: int, cell: Cell, sign: int) -> None:
        """Fresh evidence is none."""

    def fold(self, second: int, content: Mapping[Scope, Vec]) -> None:
        """Add a complete second."""
        if self.own_window:
            content = self.point.without_contradictions(second, content)
            self.point.fold(second, content)
        counted = self._merged(second)
        buckets: dict[Scope, tuple[betting.Growth, int]] = {}
        if self.blocks is not None:
            buckets = self.blocks.fold(second, content, self._is_level)
        if second <= self.folded:
            return
        self.folded = second
        whole = whole_scope(self.rule)
        if self.blocks is None:
            self._fold_pairs(counted, whole, buckets)
        else:
            self.samples += samples_of(self.rule, content.get(whole, {}))
        self.processes.fold(buckets)

    def _merged(self, second: int) -> dict[Scope, Histogram]:
        """What the second holds of each scope. Also of seconds that only fill windows after a restart: what
        contradicts itself must block a pass there as it did before."""
        parts, self._second = self._second, {}
        found: dict[Scope, Histogram] = {}
        for scope, held in parts.items():
            bins, counts = _merged(held)
            if counts and min(counts) < 0:
                if scope == whole_scope(self.rule) or max(counts) > 0:
                    self.point.broken[second] = f"{scope_label(scope)}: {HOLDS_LESS}"
            elif bins:
                found[scope] = bins, counts
        return found

    def _fold_pairs(
        self,
        counted: Mapping[Scope, Histogram],
        whole: Scope,
        buckets: dict[Scope, tuple[betting.Growth, int]],
    ) -> None:
        trips = _trip_table(self.rule.metric.kind, *self.rule.limit_ratio)
        for scope, (bins, counts) in counted.items():
            pairs = sum(counts)
            if self._is_level(scope):
                buckets[scope] = betting.growth_of_bins(trips, bins, counts), pairs
            if scope == whole:
                self.samples += pairs
                if self.folded >= self.passing_from:
                    passes = _pass_table(self.rule.metric.kind, self._limit_nats)
                    self.passing.fold(betting.growth_of_bins(passes, bins, counts), pairs)

    def leave_out(self, left_out: LeftOut) -> None:
        """As JudgedRule.leave_out. What was bet on what is left out is in the sum no more; what it brought to
        the scopes around it stays."""
        self.processes.silence(left_out.covers if left_out.exclusions else None)
        self.point.leave_out(left_out)

    def begin_step(self, step_start: int) -> None:
        """From this second on it is the present weight step: the test for a pass begins anew with it."""
        if step_start != self.passing_from:
            self.passing_from = step_start
            self.passing = capped.Capped()

    def judge(self, unknown: str) -> RuleVerdict:
        """The verdict at the newest folded second. `unknown`: what of the window is unknown, or ""."""
        whole, label = whole_scope(self.rule), self._reason()
        reading = self._reading(whole)
        verdict, why = self._conclude(reading, unknown)
        reason = "; ".join(filter(None, (why, label)))
        findings: tuple[Finding, ...] = ()
        terms = self.processes.carrying(TOLD)
        if verdict == "trip":
            findings = (Finding(terms[0], self._reading(terms[0])),)
        evaluations = [self._evaluation(whole, verdict, reason, reading)]
        for scope in terms:
            if scope != whole:
                evaluations.append(self._part(scope, carries=bool(findings) and scope == terms[0]))
        self._last = RuleVerdict(self.rule, verdict, reason, tuple(evaluations), findings)
        return self._last

    def judge_ahead(self, _end: int) -> RuleVerdict | None:
        """On fresh evidence: never."""
        return None

    def counted(self, scope: Scope) -> Scope:
        """As JudgedRule.counted."""
        return self.point.counted(scope)

    def survey(self, _end: int) -> RuleVerdict:
        """What it said last: fresh evidence adds nothing."""
        return self._last or self.judge("no complete second has been judged yet")

    # --- its own ---------------------------------------------------------------------------------------

    @property
    def evidence(self) -> float:
        """Σ weight · E."""
        return self.processes.total

    @property
    def pass_bound(self) -> float:
        """K that passes."""
        return float(1 / self.share.passing)

    def pairs_left(self) -> int | None:
        """More pairs until the test for a pass is through, at the present mean; 0 it is, None: never so."""
        if self.blocks is not None:
            return 0
        reading = self._reading(whole_scope(self.rule))
        if reading.value is None:
            mean = 0.0
        else:
            mean = reading.value + self.rule.metric.offset / SCORE_ONE
        return capped.pairs_left(self.passing, max(mean, 0.0), self._limit_nats, float(self.share.passing))

    @property
    def memory(self) -> RuleMemory:
        """What does not follow from the buckets that are kept."""
        scopes, stakes, buckets, samples = self.processes.pack()
        return RuleMemory(
            rollout=self.origin.rollout,
            rule=self.rule.id,
            generation=self.origin.generation,
            policy_hash=self.origin.policy_hash,
            evidence_from=self.origin.evidence_from,
            folded=self.folded,
            samples=self.samples,
            scopes=scopes,
            stakes=stakes,
            buckets=buckets,
            scope_samples=samples,
            pass_logs=_LOGS.pack(*self.passing.logs),
            pass_pairs=self.passing.pairs,
            pass_from=self.passing_from,
        )

    def resume(self, memory: RuleMemory | None, folded: int) -> bool:
        """Go on from a record, if it is of this run; else from nothing, after `folded`. Whether it was."""
        self.folded = folded
        if memory is None or self.origin != Origin(
            memory.rollout, memory.generation, memory.policy_hash, memory.evidence_from
        ):
            return False
        processes = Processes.of(self.processes.weights.levels)
        processes.silence(self.processes.silent)
        try:
            processes.unpack(memory.scopes, memory.stakes, memory.buckets, memory.scope_samples)
            logs = list(_LOGS.unpack(memory.pass_logs))
        except (ValueError, struct.error):
            return False
        if not sound(memory, logs, folded, self._limit_nats if self.blocks is None else None):
            return False
        self.processes, self.folded, self.samples = processes, memory.folded, memory.samples
        self.passing = capped.Capped(logs, memory.pass_pairs)
        self.passing_from = memory.pass_from
        return True

    @property
    def _limit_nats(self) -> float:
        over, under = self.rule.limit_ratio
        return over / (under * SCORE_ONE)

    @property
    def _levels(self) -> frozenset[str]:
        return frozenset((*self.processes.weights.levels, whole_scope(self.rule)[0]))

    def _judges(self, scope: Scope) -> bool:
        return self._is_level(scope) or scope == whole_scope(self.rule)

    def _is_level(self, scope: Scope) -> bool:
        return scope[0] in self.processes.weights.levels

    def _reading(self, scope: Scope) -> Reading:
        return self.point.reading(scope)

    def _compared(self) -> int:
        """Values behind a pass: of the window, or of its blocks."""
        if self.blocks is not None:
            return self.blocks.compared
        return samples_of(self.rule, self.window.total(whole_scope(self.rule)))

    def _conclude(self, whole: Reading, unknown: str) -> tuple[Verdict, str]:
        """Of the whole rule, and what it waits for beside its evidence."""
        if self.absent:
            return "not_enough_data", self.absent
        bound, evidence, needed = self.share.bound, self.evidence, self.rule.min_samples
        if evidence >= bound:
            carrying = self.processes.carrying(1)[0]
            if self.samples < needed:
                return "not_enough_data", f"over its bound after {self.samples} of {needed} samples"
            if (held := self.processes.samples[carrying]) < SCOPE_SAMPLES:
                where = scope_label(carrying)
                return "not_enough_data", f"over its bound after {held} of {SCOPE_SAMPLES} samples in {where}"
            return "trip", ""
        if self.point.broken:
            return "error", next(iter(self.point.broken.values()))
        if unknown:
            return "not_enough_data", unknown
        compared = self._compared()
        if compared < needed:
            what = "samples" if self.blocks is None else "requests in blocks that both arms have"
            return "not_enough_data", f"{compared} of {needed} {what}"
        suspect = next((at for at, held in self.processes.counting.items() if held >= self.pass_bound), None)
        if suspect is not None:
            return "not_enough_data", f"over {self.pass_bound:.4g} in {scope_label(suspect)} alone"
        if (over := self._point_over(whole)) is not None:
            return "not_enough_data", over
        if self.blocks is None and self.passing.evidence < self.pass_bound:
            return "not_enough_data", ""
        return "pass", ""

    def _point_over(self, whole: Reading) -> str | None:
        """Whether the window's own value is over the limit: a pass never stands against what is seen now."""
        if self.blocks is None:
            return "over the limit in its window" if whole.over else None
        for scope in self.window.scopes():
            if self._is_level(scope):
                reading = self._reading(scope)
                if reading.over and reading.samples >= POINT_SAMPLES:
                    return f"over the limit in its window in {scope_label(scope)}"
        return None

    def _reason(self) -> str:
        """The evidence as people read it: `E 3.2 of 40, K 12 of 20: about 130 more pairs`."""
        if self.absent:
            return ""
        told = f"E {_amount(self.evidence)} of {self.share.bound:.4g}"
        if self.blocks is not None:
            return told
        told += f", K {_amount(self.passing.evidence)} of {self.pass_bound:.4g}"
        left = self.pairs_left()
        if left:
            told += f": about {left} more pairs"
        return told

    def _evaluation(self, scope: Scope, verdict: Verdict, reason: str, reading: Reading) -> Evaluation:
        return Evaluation(
            rule=self.rule.id,
            scope=told_as(self.rule, scope),
            verdict=verdict,
            metric=self.rule.label,
            value=reading.value,
            limit=float(self.rule.limit),
            samples=reading.samples,
            reason=reason,
        )

    def _part(self, scope: Scope, *, carries: bool) -> Evaluation:
        """A scope of the sum: it can only bring a trip about."""
        weight, evidence = self.processes.weights.of[scope], self.processes.evidence[scope]
        told = f"E {_amount(evidence)}, {_amount(weight * evidence)} of the sum"
        return self._evaluation(scope, "trip" if carries else "not_enough_data", told, self._reading(scope))


def _merged(parts: list[tuple[Distribution, int]]) -> Histogram:
    """Bins and counts of all of them together: of one source as they are."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0].bins, parts[0][0].counts
    total: Vec = {}
    for held, sign in parts:
        add_into(total, dict(zip(held.bins, held.counts, strict=True)), sign)
    return tuple(total), tuple(total.values())


def _holds(other: JudgedRule, own: JudgedRule) -> bool:
    """Whether the other rule's window holds all that this one's would."""

    def measured(rule: Rule) -> tuple[object, ...]:
        return rule.metric, rule.limit, rule.window_s, rule.arm, rule.traffic

    begins_anew = other.rule.action in LEAVING_OUT
    return measured(other.rule) == measured(own.rule) and own.wanted <= other.wanted and not begins_anew


def _like(scope: Scope) -> Scope:
    """Where the content keeps the baseline's cell that a scope is compared with."""
    return held_as(baseline_scope(scope))


def _amount(value: float) -> str:
    return f"{value:.3g}" if value < 1_000 else f"{value:.0f}" if value < 1e6 else f"{value:.1e}"
