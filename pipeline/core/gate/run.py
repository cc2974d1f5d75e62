"""One roll-out in its gating partition: memory, evidence, and the directives that follow. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final

from msgspec.structs import replace

from pipeline.core.gate.anytime import SequentialRule
from pipeline.core.gate.evidence import RolloutEvidence, Unknown
from pipeline.core.gate.machine import Evidence, not_ready, settle_s
from pipeline.core.gate.orders import Standing
from pipeline.core.gate.outbid import next_epoch
from pipeline.core.gate.policy import Policy
from pipeline.core.gate.progress import Progress, StepNeeds, UnknownSeconds, progress_of
from pipeline.core.gate.settings import GateSettings
from pipeline.core.gate.state import Forgotten, RolloutMemory, StateChange
from pipeline.core.gate.versions import fallback_key
from schemas.control import Directive, Evaluation, RolloutSpec, Segment, Verdict

EVALUATIONS_TOLD: Final = 300
"""Most that a decision holds: with the longest names half of what a record may have."""
_SAYS: Final[tuple[Verdict, ...]] = ("trip", "error")
LONGEST_DEAD_MAN_US: Final = 86_400_000_000
"""The most that a directive can say."""


@dataclass(slots=True)
class Run:
    """A roll-out as one gate process holds it."""

    memory: RolloutMemory
    spec: RolloutSpec
    policy: Policy
    evidence: RolloutEvidence
    said_generation: int
    """Generation of the newest directive that a gate wrote."""
    contested: bool = False
    """The control topic says something else than the memory, or says it with another key."""
    last: Evidence | None = None
    """The newest judged complete second."""
    renewed_us: int = 0
    written_rules: frozenset[str] = frozenset()
    """Rules whose records stand in `klaxon.state`."""
    restored_through: int | None = None
    """Folded before the restart: seconds up to it fill the windows and are not judged again."""

    def next_directive(self, settings: GateSettings, now_us: int, *, sees: bool) -> Directive:
        """The next epoch's, which passes whatever contested it; a lease only while the gate sees."""
        self.memory = next_epoch(self.memory)
        if sees:
            self.memory = replace(self.memory, vouched_us=now_us)
        self.contested = False
        self.said_generation = self.memory.generation
        self.renewed_us = now_us
        return self.directive(settings, now_us, now_us + (settings.lease_us if sees else 0))

    def directive(self, settings: GateSettings, now_us: int, lease_until_us: int) -> Directive:
        """What the memory says.

        Without a lease the dead man's deadline stays where it was: a blind gate that speaks is no sign that
        anybody sees.
        """
        memory = self.memory
        dead_man_us = settings.dead_man_us
        if lease_until_us <= now_us:
            dead_man_us = min(max(memory.vouched_us + dead_man_us - now_us, 0), LONGEST_DEAD_MAN_US)
        return Directive(
            rollout=memory.rollout,
            generation=memory.generation,
            epoch=memory.epoch,
            ts_us=now_us,
            lease_until_us=lease_until_us,
            dead_man_us=dead_man_us,
            state=memory.state,
            weights=memory.weights,
            last_promoted=memory.last_promoted,
            ejected_nodes=tuple(sorted(one.value for one in memory.ejected)),
            excluded_segments=tuple(
                Segment(dimension=one.dimension, value=one.value) for one in memory.excluded
            ),
            level=memory.level,
            fallback=fallback_key(self.spec),
            cause=memory.cause,
            policy_hash=self.policy.hash,
        )

    def judge(self, second: int, settings: GateSettings, unknown: Unknown, now_us: int) -> Evidence:
        """Everything the rules say of the newest folded second; `last` from now on."""
        self.last = Evidence(
            second,
            self.evidence.judge(unknown),
            self.evidence.judge_coverage(unknown),
            fresh=False,
            current=settings.current(second, now_us),
            complete_at=second + 1 + settings.lateness_s,
        )
        return self.last

    def records(self) -> tuple[StateChange, ...]:
        """All that is remembered of it, and what no longer is. Once a transaction: they count as written."""
        rules = () if self.memory.final else tuple(one.memory for one in self.evidence.sequential)
        names = frozenset(rule.rule for rule in rules)
        rollout = self.memory.rollout
        gone = [Forgotten(rollout=rollout, rule=rule) for rule in sorted(self.written_rules - names)]
        self.written_rules = names
        return (self.memory, *rules, *gone)

    def standing(self, settings: GateSettings, now_us: int) -> Standing:
        """The roll-out as an operator's command finds it."""
        last = self.last
        if last is not None:
            last = dataclasses.replace(last, current=settings.current(last.second, now_us))
        reason = not_ready(self.memory, last, self.policy, settings.join_timeout_s)
        return Standing(self.memory, self.spec, self.policy, reason, self.evidence.alpha_after())

    def progress(
        self, settings: GateSettings, unknown: Callable[[int, int], list[UnknownSeconds]]
    ) -> Progress | None:
        """What the next weight step has and lacks; None where nothing is judged, or was judged yet.

        `unknown`: (first, last) second → what of them is unknown, and whose.
        """
        memory, last, steps = self.memory, self.last, self.spec.steps
        if memory.final or last is None or last.coverage is None:
            return None

        def lacks(window_s: int) -> list[UnknownSeconds]:
            return unknown(max(memory.evidence_from, last.second - window_s + 1), last.second)

        left_s = memory.step_start + settle_s(self.policy, settings.join_timeout_s) - last.second
        needs = StepNeeds(
            percent=steps[memory.step],
            next_percent=steps[memory.step + 1] if memory.step + 1 < len(steps) else None,
            manual=self.policy.progression.mode == "manual",
            lasting_s=max(0, left_s),
            pairs=memory.step_pairs,
            pairs_needed=self.policy.progression.min_pairs,
        )
        return progress_of(
            last.second,
            needs,
            [
                (
                    judged.point if isinstance(judged, SequentialRule) else judged,
                    verdict,
                    lacks(judged.rule.window_s),
                    judged.pairs_left() if isinstance(judged, SequentialRule) else 0,
                )
                for judged, verdict in zip(self.evidence.rules, last.verdicts, strict=True)
            ],
            (self.evidence.coverage, last.coverage, lacks(self.policy.coverage.window_s)),
            last.second - max(memory.evidence_from, memory.start_second) + 1,
        )


def telling(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """At most EVALUATIONS_TOLD of them, in their order: of the whole, of what trips, is over its limit or in
    error, then of the parts with most samples. All parts of a thousand nodes would be too large a record."""
    if len(evaluations) <= EVALUATIONS_TOLD:
        return tuple(evaluations)

    def rank(at: int) -> tuple[bool, int, int, int]:
        one = evaluations[at]
        said = _SAYS.index(one.verdict) if one.verdict in _SAYS else len(_SAYS)
        if one.reason.startswith("over"):
            said = min(said, 1)
        return one.scope != "rollout", said, -one.samples, at

    kept = nsmallest(EVALUATIONS_TOLD, range(len(evaluations)), key=rank)
    return tuple(evaluations[at] for at in sorted(kept))


def every_evaluation(evidence: Evidence) -> tuple[Evaluation, ...]:
    """Of the rules in the policy's order, then of coverage. Not of fresh evidence."""
    assert evidence.coverage is not None
    rules = (one for verdict in evidence.verdicts for one in verdict.evaluations)
    return (*rules, evidence.coverage.evaluation)
