"""What a gate goes on with after a restart, from what its predecessor wrote. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pipeline.core.gate.evidence import RolloutEvidence
from pipeline.core.gate.outbid import Topmost, take_over
from pipeline.core.gate.run import Run
from pipeline.core.gate.settings import GateSettings
from pipeline.core.gate.state import PartitionMemory, RolloutMemory, RuleMemory, StateRecord
from schemas.control import Directive, Rollout


@dataclass(frozen=True, slots=True)
class Resumed:
    """Of one gating partition."""

    runs: dict[str, Run]
    """By roll-out; their windows are empty."""
    commands: PartitionMemory | None
    """None: no command was read yet."""
    counts: Counter[str]
    """`orphan_states`, `foreign_directives`, `evidence_begun_anew`: what was not as it should be."""


def resumed(
    states: Iterable[StateRecord],
    control: Iterable[tuple[str, Directive | None]],
    rollouts: Iterable[Rollout],
    settings: GateSettings,
    restated: Collection[str] = (),
) -> Resumed:
    """As `GateCore.restore`, whose arguments these are."""
    known = {rollout.rollout: rollout for rollout in rollouts}
    topmost: dict[str, Topmost] = {}
    for name, directive in control:
        topmost.setdefault(name, Topmost()).read(directive)
    commands: PartitionMemory | None = None
    memories: list[RolloutMemory] = []
    rules: dict[str, dict[str, RuleMemory]] = {}
    for one in states:
        if isinstance(one, PartitionMemory):
            commands = one
        elif isinstance(one, RuleMemory):
            rules.setdefault(one.rollout, {})[one.rule] = one
        else:
            memories.append(one)
    runs: dict[str, Run] = {}
    counts: Counter[str] = Counter()
    for state in memories:
        rollout = known.get(state.rollout)
        if rollout is None:
            counts["orphan_states"] += 1
            continue
        said = topmost.get(state.rollout)
        memory, contested = take_over(state, said or Topmost())
        if contested and said is not None:
            counts["foreign_directives"] += 1
        policy = settings.parse_policy(rollout.policy)
        evidence = RolloutEvidence.of(memory, rollout.spec, policy)
        held = rules.pop(state.rollout, {})
        if not memory.final:
            counts["evidence_begun_anew"] += evidence.resume(held, memory.folded)
        runs[state.rollout] = Run(
            memory,
            rollout.spec,
            policy,
            evidence,
            said_generation=state.generation,
            contested=contested or state.rollout in restated,
            restored_through=memory.folded,
            written_rules=frozenset(held),
        )
    counts["orphan_states"] += sum(map(len, rules.values()))
    return Resumed(runs, commands, counts)
