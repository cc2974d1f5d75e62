"""The machine: total functions from (memory, evidence, policy) to (memory, what happened, reason). Pure.

A trip of the roll-out is absorbing; only a pass promotes; missing evidence can only hold. Nothing here knows
how evidence was gathered, or what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from pipeline.core.cells import node_and_context
from pipeline.core.gate.coverage import CoverageVerdict
from pipeline.core.gate.left_out import Exclusion
from pipeline.core.gate.policy import ACTIONS, TRIPS, ActionName, Policy
from pipeline.core.gate.rules import Finding, RuleVerdict
from pipeline.core.gate.state import RolloutMemory
from pipeline.core.gate.versions import fallback_split, split
from schemas.control import Cause, RolloutSpec
from schemas.versions import version_keys

Kind: TypeAlias = Literal[
    "command", "refused", "trip", "step", "pause", "promote", "gap", "eject", "narrow", "hold", "close",
    "advise",
]  # fmt: skip
LEVEL_2_AFTER: Final = 3
"""Trips in a row that make the next one a level-2 roll-back (R2)."""
SEGMENTS_MOST: Final = 8
"""Segments that a generation may lose: a version that fails in more is at fault itself."""


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
        return _trip(memory, spec, tripping, tripping[0].rule.action)
    if evidence.fresh:
        return Outcome(memory, None, "fresh evidence may only trip")
    coverage = evidence.coverage
    assert coverage is not None
    left_out = [
        outcome
        for leave_out in (_eject, _narrow)
        if (outcome := leave_out(memory, evidence, policy, spec, tripping)) is not None
    ]
    if left_out:
        return min(left_out, key=lambda outcome: outcome.kind != "trip")
    if memory.state == "observing":
        pausing = tuple(verdict for verdict in tripping if verdict.rule.action == "pause")
        if pausing:
            return Outcome(_paused(memory), "pause", f"over the limit: {_names(pausing)}", pausing)
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
    same_canary = before is not None and version_keys(spec.arms)["canary"] in before.weights
    tripped = before is not None and before.state == "tripped" and not before.retired
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
        streak=before.streak if before is not None and same_canary and tripped else 0,
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
        streak=0,
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


def _names(verdicts: Sequence[RuleVerdict]) -> str:
    return ", ".join(verdict.rule.id for verdict in verdicts)


def _trip(
    memory: RolloutMemory,
    spec: RolloutSpec,
    tripping: tuple[RuleVerdict, ...],
    action: ActionName,
    why: str = "",
) -> Outcome:
    """Once per generation, and for good. A router that loses the gate must not return to what tripped."""
    weights = fallback_split(spec) if action == "fallback" else split(spec, 0.0)
    streak = memory.streak + 1
    level: Literal[1, 2] = 2 if action == "rollback_l2" or streak >= LEVEL_2_AFTER else 1
    reason = f"{action}: {_names(tripping)}{why}"
    if level == 2 and action != "rollback_l2":
        reason += f"; level 2 after {streak} trips in a row"
    after = replace(
        memory, state="tripped", weights=weights, last_promoted=weights, level=level, streak=streak
    )
    return Outcome(after, "trip", reason, tripping)


def _eject(
    memory: RolloutMemory,
    evidence: Evidence,
    policy: Policy,
    spec: RolloutSpec,
    tripping: tuple[RuleVerdict, ...],
) -> Outcome | None:
    """Nodes that rules of this action find over their limit get nothing more; None: no such node is left.

    More of them than the policy's share of the canary's nodes: it is not the nodes, but what runs on them.
    """
    ejecting = [verdict for verdict in tripping if verdict.rule.action == "eject_node"]
    found = {node for verdict in ejecting for node in _nodes_of(verdict.findings)}
    new = sorted(found - {one.value for one in memory.ejected})
    if not new:
        return None
    told = f"eject_node: {', '.join(new)}"
    if why := _too_many_nodes(memory, new, ejecting, policy):
        return _trip(memory, spec, tripping, "rollback_l1", f"; {told}: {why}: the version is at fault")
    since = evidence.second + 1
    ejected = (*memory.ejected, *(Exclusion("node", node, since) for node in new))
    after = replace(_step_anew(memory, evidence), ejected=ejected)
    return Outcome(after, "eject", f"{told} ({_names(tripping)})", tripping)


def _narrow(
    memory: RolloutMemory,
    evidence: Evidence,
    policy: Policy,
    spec: RolloutSpec,
    tripping: tuple[RuleVerdict, ...],
) -> Outcome | None:
    """The segment that carries a deviation is kept from the canary; None: no rule of this action says more.

    A deviation that no segment carries is the whole roll-out's, and so is one in too many.
    """
    narrowing = [verdict for verdict in tripping if verdict.rule.action == "narrow"]
    places = [verdict.located for verdict in narrowing]
    known = {(one.dimension, one.value) for one in memory.excluded}
    new = sorted({(place.dimension, place.value) for place in places if place is not None} - known)
    if not new and None not in places:
        return None
    why = ""
    if None in places:
        why = "no class of traffic carries it"
    elif len(known) + len(new) > SEGMENTS_MOST:
        why = f"more than {SEGMENTS_MOST} segments"
    else:
        nodes = [value for dimension, value in new if dimension == "node"]
        why = _too_many_nodes(memory, nodes, narrowing, policy) if nodes else ""
    if why:
        return _trip(memory, spec, tripping, "rollback_l1", f"; narrow: {why}: the version is at fault")
    since = evidence.second + 1
    excluded = (*memory.excluded, *(Exclusion(dimension, value, since) for dimension, value in new))
    state = "narrowed" if memory.state == "observing" else memory.state
    after = replace(_step_anew(memory, evidence), state=state, excluded=excluded)
    segments = ", ".join(f"{dimension}={value}" for dimension, value in new)
    return Outcome(after, "narrow", f"narrow: without {segments} ({_names(tripping)})", tripping)


def _too_many_nodes(
    memory: RolloutMemory, new: Sequence[str], verdicts: Sequence[RuleVerdict], policy: Policy
) -> str:
    """Why these nodes may not be left out, too; "" if they may."""
    gone = {one.value for one in (*memory.ejected, *memory.excluded) if one.dimension == "node"}
    out = gone | set(new)
    seen = out.union(*(verdict.nodes for verdict in verdicts))
    share = policy.ejection.max_share
    if len(out) > share * len(seen):
        return f"{len(out)} of {len(seen)} nodes, at most {float(share * 100):g} % may be left out"
    return "none of its nodes would be left" if len(out) == len(seen) else ""


def _nodes_of(findings: Sequence[Finding]) -> Iterator[str]:
    """The nodes of findings in the scopes node and node_context."""
    for finding in findings:
        dimension, value = finding.scope
        if dimension == "node":
            yield value
        elif dimension == "node_context":
            yield node_and_context(value)[0]


def _step_anew(memory: RolloutMemory, evidence: Evidence) -> RolloutMemory:
    """What was seen of those that are left out proves nothing about the rest: the weight step begins anew."""
    return replace(memory, step_start=evidence.complete_at, step_pairs=0)


def _paused(memory: RolloutMemory) -> RolloutMemory:
    # What else stands as a cause is of an earlier ejection.
    return replace(memory, state="paused", cause=None)


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
    if memory.excluded:
        return Outcome(memory, None, "segments are excluded: promoting the rest is an operator's")
    if spec.steps[-1] == 100:
        return Outcome(promote(memory, spec), "promote", "pass at 100 %")
    return Outcome(memory, None, f"the last step is {spec.steps[-1]:g} %: promoting is an operator's")
