"""The machine: total functions from (memory, evidence, policy) to (memory, what happened, reason). Pure.

A trip of the roll-out is absorbing; only a pass promotes; missing evidence can only hold. Nothing here knows
how evidence was gathered, or what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from pipeline.core.gate.policy import ACTIONS, TRIPS, Policy
from pipeline.core.gate.rules import CoverageVerdict, RuleVerdict
from pipeline.core.gate.state import RolloutMemory
from pipeline.core.gate.versions import fallback_split, split, version_keys
from schemas.control import Cause, RolloutSpec

Kind: TypeAlias = Literal[
    "command", "refused", "trip", "step", "pause", "promote", "gap", "hold", "close", "advise"
]
LEVEL_2_AFTER: Final = 3
"""Trips in a row that make the next one a level-2 roll-back (R2)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a roll-out at one second."""

    second: int
    verdicts: tuple[RuleVerdict, ...]
    """One per rule, in the policy's order; on fresh evidence only those that trip."""
    coverage: CoverageVerdict | None
    """None on fresh evidence."""
    fresh: bool
    current: bool
    """The second is recent enough to raise a weight on it."""
    complete_at: int
    """Second of log time at which this second was complete: a weight step taken on it lasts from there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The memory afterwards. `kind` None: nothing happened. `tripping`: what is behind it, severest first."""

    memory: RolloutMemory
    kind: Kind | None
    reason: str
    tripping: tuple[RuleVerdict, ...] = ()


def settle_s(policy: Policy, join_timeout_s: int) -> int:
    """How long a weight step lasts at least: by then all evidence in the windows is its own."""
    return join_timeout_s + policy.window_s


def judge(
    memory: RolloutMemory, evidence: Evidence, policy: Policy, spec: RolloutSpec, join_timeout_s: int
) -> Outcome:
    """What the evidence of one second does to a roll-out. On fresh evidence it may only trip."""
    if memory.final:
        return Outcome(memory, None, f"{memory.state} is final")
    tripping = _tripping(evidence.verdicts)
    if tripping and tripping[0].rule.action in TRIPS:
        return _trip(memory, spec, tripping)
    if evidence.fresh:
        return Outcome(memory, None, "fresh evidence may only trip")
    coverage = evidence.coverage
    assert coverage is not None
    if memory.state == "observing":
        if tripping:
            names = ", ".join(verdict.rule.id for verdict in tripping)
            return Outcome(_paused(memory), "pause", f"over the limit: {names}", tripping)
        if coverage.low and policy.coverage.action == "pause":
            return Outcome(_paused(memory), "pause", coverage.reason)
    holds = coverage.low and policy.coverage.action == "hold"
    if holds != memory.holding and (holds or coverage.verdict == "pass"):
        kind: Kind = "hold" if holds else "close"
        reason = coverage.reason if holds else "coverage is back"
        return Outcome(replace(memory, holding=holds), kind, reason)
    advising = _advising(memory, evidence.verdicts)
    if advising:
        told = tuple(verdict.rule.id for verdict in advising)
        return Outcome(
            replace(memory, advised=(*memory.advised, *told)),
            "advise",
            f"over the limit, observed only: {', '.join(told)}",
            advising,
        )
    if policy.progression.mode == "manual":
        return Outcome(memory, None, "steps are an operator's")
    return _climb(memory, evidence, policy, spec, join_timeout_s)


def not_ready(memory: RolloutMemory, evidence: Evidence | None, policy: Policy, join_timeout_s: int) -> str:
    """Why the weight may not rise now; "" if it may. The one place that says what a pass needs."""
    if memory.state != "observing":
        return f"the roll-out is {memory.state}"
    if evidence is None or evidence.coverage is None:
        return "no complete second has been judged yet"
    if not evidence.current:
        return "the newest complete second is too old"
    if not any(verdict.rule.enforcing for verdict in evidence.verdicts):
        return "no rule enforces: nothing can pass"
    for verdict in evidence.verdicts:
        if verdict.rule.enforcing and verdict.verdict != "pass":
            said = verdict.verdict.replace("_", " ")
            return f"{verdict.rule.id}: {said}: {verdict.reason or 'over its limit'}"
    if evidence.coverage.verdict != "pass":
        return evidence.coverage.reason or f"coverage: {evidence.coverage.verdict.replace('_', ' ')}"
    left = memory.step_start + settle_s(policy, join_timeout_s) - evidence.second
    if left > 0:
        return f"the weight step has {left} s to last before it may be judged"
    if memory.step_pairs < policy.progression.min_pairs:
        return f"{memory.step_pairs} of {policy.progression.min_pairs} pairs in this weight step"
    return ""


def begin(
    spec: RolloutSpec, before: RolloutMemory | None, *, start_us: int, evidence_from: int
) -> RolloutMemory:
    """A new generation at its first weight step."""
    same_canary = before is not None and version_keys(spec)["canary"] in before.weights
    return RolloutMemory(
        rollout=spec.rollout,
        generation=1 if before is None else before.generation + 1,
        epoch=0 if before is None else before.epoch,
        decided_epoch=0,
        state="observing",
        step=0,
        step_start=-(-start_us // 1_000_000),
        start_us=start_us,
        evidence_from=evidence_from,
        folded=evidence_from - 1,
        weights=split(spec, spec.steps[0]),
        last_promoted=split(spec, 0.0),
        streak=before.streak if before is not None and same_canary and not before.retired else 0,
    )


def raise_weight(memory: RolloutMemory, spec: RolloutSpec, second: int) -> RolloutMemory:
    """The next weight step, lasting from `second`."""
    step = memory.step + 1
    return replace(
        memory, step=step, step_start=second, step_pairs=0, weights=split(spec, spec.steps[step]), cause=None
    )


def promote(memory: RolloutMemory, spec: RolloutSpec) -> RolloutMemory:
    """The canary is the version that everybody gets."""
    everything = split(spec, 100.0)
    return replace(
        memory, state="promoted", weights=everything, last_promoted=everything, cause=None, streak=0
    )


def abort(memory: RolloutMemory, spec: RolloutSpec, by: str) -> RolloutMemory:
    """An operator takes the canary out: as final as a trip, and no rule's fault."""
    nothing = split(spec, 0.0)
    return replace(
        memory,
        state="tripped",
        weights=nothing,
        last_promoted=nothing,
        level=1,
        cause=Cause(rule="abort", also=(f"by {by}",)),
    )


def _tripping(verdicts: Sequence[RuleVerdict]) -> tuple[RuleVerdict, ...]:
    """Enforcing verdicts that trip, the severest action first, then in the policy's order."""
    found = [verdict for verdict in verdicts if verdict.verdict == "trip" and verdict.rule.enforcing]
    return tuple(sorted(found, key=lambda verdict: -ACTIONS.index(verdict.rule.action)))


def _advising(memory: RolloutMemory, verdicts: Sequence[RuleVerdict]) -> tuple[RuleVerdict, ...]:
    """Verdicts that move nothing and have not been told in this generation."""
    return tuple(
        verdict
        for verdict in verdicts
        if verdict.verdict == "trip" and not verdict.rule.enforcing and verdict.rule.id not in memory.advised
    )


def _trip(memory: RolloutMemory, spec: RolloutSpec, tripping: tuple[RuleVerdict, ...]) -> Outcome:
    """Once per generation, and for good. A router that loses the gate must not return to what tripped."""
    action = tripping[0].rule.action
    weights = fallback_split(spec) if action == "fallback" else split(spec, 0.0)
    streak = memory.streak + 1
    level: Literal[1, 2] = 2 if action == "rollback_l2" or streak >= LEVEL_2_AFTER else 1
    names = ", ".join(verdict.rule.id for verdict in tripping)
    reason = f"{action}: {names}"
    if level == 2 and action != "rollback_l2":
        reason += f"; level 2 after {streak} trips in a row"
    after = replace(
        memory, state="tripped", weights=weights, last_promoted=weights, level=level, streak=streak
    )
    return Outcome(after, "trip", reason, tripping)


def _paused(memory: RolloutMemory) -> RolloutMemory:
    return replace(memory, state="paused")


def _climb(
    memory: RolloutMemory, evidence: Evidence, policy: Policy, spec: RolloutSpec, join_timeout_s: int
) -> Outcome:
    reason = not_ready(memory, evidence, policy, join_timeout_s)
    if reason:
        return Outcome(memory, None, reason)
    if memory.step + 1 < len(spec.steps):
        after = raise_weight(memory, spec, evidence.complete_at)
        return Outcome(
            after, "step", f"pass at {spec.steps[memory.step]:g} %: now {spec.steps[after.step]:g} %"
        )
    if spec.steps[-1] == 100:
        return Outcome(promote(memory, spec), "promote", "pass at 100 %")
    return Outcome(memory, None, f"the last step is {spec.steps[-1]:g} %: promoting is an operator's")
