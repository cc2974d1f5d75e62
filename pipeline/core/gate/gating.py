"""The gate of one gating partition: evidence in, decisions out. No clock, no I/O; never blocks.

Calls come one at a time. Each Effect is one transaction and describes the state right after it; the caller
writes effects in order, before the next call. After a crash a new core restores what was written, reads the
finals again from `read_from()`, all of them before the first judgement, and the same decisions follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pipeline.core.gate.evidence import RolloutEvidence
from pipeline.core.gate.intake import Contents, Intake
from pipeline.core.gate.machine import Evidence, Kind, Outcome, judge, not_ready
from pipeline.core.gate.orders import Moment, Obeyed, Parser, Refused, Standing, gap, obey
from pipeline.core.gate.policy import Family, Policy
from pipeline.core.gate.settings import Effect, GateSettings, ReadFrom
from pipeline.core.gate.sources import Change, Placed
from pipeline.core.gate.state import COMMAND_IDS_KEPT, PartitionMemory, RolloutMemory, StateRecord
from pipeline.core.gate.versions import fallback_key
from schemas.buckets import FinalBuckets, FreshCells
from schemas.control import Command, Decision, Directive, Evaluation, Inputs, Rollout, RolloutSpec
from schemas.topics import Topic

__all__ = ["Effect", "GateCore", "GateSettings", "ReadFrom"]

SLACK_S: Final = 30
"""How much further back than the longest window finals are read after a restore."""


@dataclass(slots=True)
class _Run:
    """One roll-out in this partition."""

    memory: RolloutMemory
    spec: RolloutSpec
    policy: Policy
    evidence: RolloutEvidence
    last: Evidence | None = None
    """The newest judged complete second."""
    renewed_us: int = 0
    restored_through: int | None = None
    """Folded before the restart: seconds up to it fill the windows and are not judged again."""


class GateCore:
    """Everything one gating partition decides. `sources`: topic → number of partitions."""

    def __init__(self, partition: int, sources: Mapping[str, int], settings: GateSettings) -> None:
        self.partition = partition
        self.settings = settings
        self._intake = Intake(partition, sources, settings.settings_hash)
        self._runs: dict[str, _Run] = {}
        self._commands = PartitionMemory(partition=partition, command_offset=-1)
        self._counts: dict[str, int] = {}

    # --- after a restart -------------------------------------------------------------------------------

    def restore(
        self, states: Iterable[StateRecord], directives: Iterable[Directive], rollouts: Iterable[Rollout]
    ) -> None:
        """Take over what a predecessor wrote, each topic read to its end, the newest record per key.

        Raises PipelineError if a policy that was obeyed once cannot be read any more.
        """
        known = {rollout.rollout: rollout for rollout in rollouts}
        published = {directive.rollout: directive for directive in directives}
        for state in states:
            if isinstance(state, PartitionMemory):
                self._commands = state
                continue
            rollout = known.get(state.rollout)
            if rollout is None:
                self._count("orphan_states")
                continue
            memory = self._reconcile(state, published.get(state.rollout))
            policy = self.settings.parse_policy(rollout.policy)
            evidence = RolloutEvidence.of(memory, rollout.spec, policy)
            self._runs[state.rollout] = _Run(
                memory, rollout.spec, policy, evidence, restored_through=memory.folded
            )

    def read_from(self) -> ReadFrom:
        """Where the caller reads on after `restore`."""
        command_offset = max(self._commands.command_offset, 0)
        live = [run for run in self._runs.values() if not run.memory.final]
        if not live:
            return ReadFrom(None, None, command_offset)
        finals_s = min(run.memory.folded - run.policy.reach_s for run in live) - SLACK_S
        fresh_s = min(run.memory.folded for run in live)
        return ReadFrom(max(finals_s, 0) * 1_000_000, max(fresh_s, 0) * 1_000_000, command_offset)

    def _reconcile(self, memory: RolloutMemory, directive: Directive | None) -> RolloutMemory:
        """A record on the control topic that is not ours must not outlive us: our epoch passes it.

        Without transactions the directive may have been written and the state not: a trip wins.
        """
        if directive is None or directive.generation != memory.generation:
            return memory
        if directive.epoch <= memory.epoch:
            return memory
        self._count("foreign_directives")
        if directive.state == "tripped" and not memory.final:
            return replace(
                memory,
                epoch=directive.epoch,
                decided_epoch=directive.epoch,
                state="tripped",
                weights=directive.weights,
                last_promoted=directive.last_promoted,
                level=directive.level,
                cause=directive.cause,
            )
        return replace(memory, epoch=directive.epoch)

    # --- evidence in -----------------------------------------------------------------------------------

    def on_final(self, final: FinalBuckets) -> None:
        """A record of `klaxon.buckets`. One of another gating partition or an unknown source is counted."""
        self._apply(*self._intake.final(final))

    def on_fresh(self, fresh: FreshCells) -> None:
        """A record of `klaxon.partials`."""
        self._apply(*self._intake.fresh(fresh))

    def _apply(self, family: Family | None, change: Change) -> None:
        if family is None:
            return
        for sign, cells in ((-1, change.removed), (1, change.added)):
            for placed in cells:
                run = self._run_of(placed)
                if run is not None and not run.memory.final:
                    run.evidence.patch(family, placed, sign)

    def _run_of(self, placed: Placed) -> _Run | None:
        population = placed[1]
        return None if population is None else self._runs.get(population.rollout)

    # --- decisions out ---------------------------------------------------------------------------------

    def on_command(self, command: Command, offset: int, now_us: int) -> list[Effect]:
        """Obey or refuse: the last effect answers with the command's id. [] if it was read before.

        What is complete is judged first, so that a command that waited out a restart changes no verdict
        about the time before it. A record may hold several commands: they come with the same offset.
        """
        before = self._commands
        if offset < before.command_offset:
            return []
        if command.command_id in before.command_ids:
            self._commands = replace(before, command_offset=offset)
            self._count("commands_repeated")
            return []
        effects = self.judge_complete(now_us)
        ids = (*before.command_ids, command.command_id)[-COMMAND_IDS_KEPT:]
        self._commands = replace(before, command_offset=offset, command_ids=ids)
        run = self._runs.get(command.rollout)
        standing = None if run is None else self._standing(run, now_us)
        moment = Moment(now_us, self._intake.done, self._evidence_from(now_us))
        parser = Parser(self.settings.parse_policy, self.settings.default_policy)
        try:
            obeyed = obey(command, standing, moment, parser)
        except Refused as refusal:
            return [*effects, self._refuse(command, run, str(refusal), now_us)]
        return [*effects, self._enact(command, run, obeyed, now_us)]

    def judge_complete(self, now_us: int) -> list[Effect]:
        """Fold and judge every second that has become complete, in order."""
        target = self._intake.complete_through()
        if target is None:
            return []
        if self._intake.cursor is None:
            self._intake.begin(min(self._first_needed(target), target + 1))
        effects: list[Effect] = []
        for second in range(self._intake.done + 1, target + 1):
            contents = self._intake.take(second)
            for name in sorted(self._runs):
                effects += self._fold(self._runs[name], second, contents, now_us)
        self._intake.forget(max((run.policy.reach_s for run in self._runs.values()), default=0))
        return effects

    def judge_fresh(self, now_us: int) -> list[Effect]:
        """Judge what is known of open seconds. May only trip."""
        effects: list[Effect] = []
        for name in sorted(self._runs):
            run = self._runs[name]
            if run.memory.final:
                continue
            end, verdicts = run.evidence.judge_ahead()
            if not verdicts:
                continue
            evidence = Evidence(end, verdicts, None, fresh=True, current=False, complete_at=end)
            outcome = judge(run.memory, evidence, run.policy, run.spec, self.settings.join_timeout_s)
            if outcome.kind is None:
                continue
            opened = [placed for family, placed in self._intake.open_cells() if family == "pairs"]
            cause = run.evidence.cause(outcome.tripping, end, opened, fresh=True)
            run.memory = replace(outcome.memory, cause=cause)
            evaluations = tuple(one for verdict in verdicts for one in verdict.evaluations)
            inputs = self._inputs_now(now_us)
            effects.append(self._decide(run, outcome.kind, outcome.reason, evaluations, inputs))
        return effects

    def renew(self, now_us: int) -> list[Effect]:
        """Every `renew_us` and roll-out its state, and its directive with a new lease while the gate sees."""
        effects: list[Effect] = []
        for name in sorted(self._runs):
            run = self._runs[name]
            if run.memory.retired or now_us - run.renewed_us < self.settings.renew_us:
                continue
            run.renewed_us = now_us
            directive = None
            run.memory = replace(run.memory, blind="" if run.memory.final else self.blind(name, now_us))
            if not run.memory.blind:
                run.memory = replace(run.memory, epoch=run.memory.epoch + 1)
                directive = self._directive(run, now_us, now_us + self.settings.lease_us)
            effects.append(Effect(name, directive, None, (run.memory, self._commands)))
        return effects

    def blind(self, name: str, now_us: int) -> str:
        """Why the gate does not see this roll-out well enough to vouch for it; "" if it does.

        Raises KeyError for a roll-out that is not in this partition.
        """
        topics = {Topic.LOGITS.value}
        for rule in self._runs[name].policy.rules:
            if rule.enforcing and rule.metric.family == "requests":
                topics.add(Topic.REQUESTS.value)
        return self._intake.blind(topics, now_us, self.settings.blind_after_us)

    def not_ready(self, name: str, now_us: int) -> str:
        """Why this roll-out's weight may not rise now; "" if it may. Raises KeyError as `blind` does."""
        return self._standing(self._runs[name], now_us).not_ready

    def names(self) -> tuple[str, ...]:
        """The roll-outs of this partition, in order."""
        return tuple(sorted(self._runs))

    def gauges(self) -> dict[str, int]:
        """Sizes and counts for monitoring: everything that grows with traffic is among them."""
        evidence = [run.evidence for run in self._runs.values()]
        return {
            "rollouts": len(self._runs),
            "version_mismatches": sum(one.mismatched for one in evidence),
            "scopes": sum(len(judged.window.totals) for one in evidence for judged in one.rules),
            **self._intake.gauges(),
            **self._counts,
        }

    # --- one second ------------------------------------------------------------------------------------

    def _fold(self, run: _Run, second: int, contents: Contents, now_us: int) -> list[Effect]:
        """One second of one roll-out: at most a gap and one decision."""
        memory = run.memory
        if memory.final or second < memory.evidence_from:
            return []
        refilling = run.restored_through is not None and second <= run.restored_through
        if refilling and second < memory.folded - run.policy.reach_s:
            return []
        pairs = run.evidence.fold(second, contents.get(memory.rollout, ()))
        if refilling:
            if second == run.restored_through:
                run.last = self._evidence_of(run, second, now_us)  # an operator may ask before the next one
            return []
        effects = self._tell_gap(run, second, now_us)
        counted = pairs if second >= memory.step_start else 0
        run.memory = replace(run.memory, folded=second, step_pairs=run.memory.step_pairs + counted)
        run.last = self._evidence_of(run, second, now_us)
        outcome = judge(run.memory, run.last, run.policy, run.spec, self.settings.join_timeout_s)
        run.memory = replace(outcome.memory, waiting=outcome.reason if outcome.kind is None else "")
        if outcome.kind is not None:
            effects.append(self._conclude(run, run.last, outcome, now_us))
        return effects

    def _evidence_of(self, run: _Run, second: int, now_us: int) -> Evidence:
        """Everything the rules say of the newest folded second."""
        return Evidence(
            second,
            run.evidence.judge(self._intake.unknown),
            run.evidence.judge_coverage(self._intake.unknown),
            fresh=False,
            current=self._current(second, now_us),
            complete_at=second + 1 + self.settings.lateness_s,
        )

    def _conclude(self, run: _Run, evidence: Evidence, outcome: Outcome, now_us: int) -> Effect:
        assert outcome.kind is not None
        if outcome.kind in ("trip", "pause") and outcome.tripping:
            cause = run.evidence.cause(outcome.tripping, evidence.second, (), fresh=False)
            run.memory = replace(run.memory, cause=cause)
        inputs = self._intake.inputs_at(evidence.second, self._commands.command_offset, now_us)
        return self._decide(run, outcome.kind, outcome.reason, _evaluations(evidence), inputs)

    def _tell_gap(self, run: _Run, second: int, now_us: int) -> list[Effect]:
        """Record seconds that nobody keeps any more, once, when folding comes to their start."""
        effects: list[Effect] = []
        for first, last, source in self._intake.gaps(run.memory.evidence_from, run.restored_through):
            if first <= second and last > run.memory.gaps_told:
                outcome = gap(run.memory, first, last, source)
                run.memory = replace(outcome.memory, gaps_told=last)
                inputs = self._intake.inputs_at(second, self._commands.command_offset, now_us)
                effects.append(self._decide(run, "gap", outcome.reason, (), inputs))
        return effects

    def _first_needed(self, target: int) -> int:
        """The first second to fold: as far back as windows reach."""
        needed = [target + 1]
        for run in self._runs.values():
            if not run.memory.final:
                back = 0 if run.restored_through is None else run.policy.reach_s
                needed.append(max(run.memory.evidence_from, run.memory.folded + 1 - back))
        return min(needed)

    def _evidence_from(self, now_us: int) -> int:
        """The first second that can hold events of a generation that starts now: none before is open then."""
        earliest = -(-now_us // 1_000_000) - self.settings.lateness_s - 1
        return max(earliest, self._intake.done + 1, 0)

    # --- commands --------------------------------------------------------------------------------------

    def _standing(self, run: _Run, now_us: int) -> Standing:
        last = run.last
        if last is not None:
            last = Evidence(
                last.second,
                last.verdicts,
                last.coverage,
                fresh=False,
                current=self._current(last.second, now_us),
                complete_at=last.complete_at,
            )
        reason = not_ready(run.memory, last, run.policy, self.settings.join_timeout_s)
        return Standing(run.memory, run.spec, run.policy, reason)

    def _refuse(self, command: Command, run: _Run | None, reason: str, now_us: int) -> Effect:
        """Recorded with the directive that stands; nothing is published on the control topic."""
        decision = Decision(
            kind="refused",
            directive=None if run is None else self._directive(run, now_us, now_us),
            inputs=self._inputs_now(now_us),
            command_id=command.command_id,
            reason=f"{command.command.replace('_', '-')}: {reason}",
        )
        states: tuple[StateRecord, ...] = (self._commands,) if run is None else (run.memory, self._commands)
        return Effect(command.rollout, None, decision, states)

    def _enact(self, command: Command, run: _Run | None, obeyed: Obeyed, now_us: int) -> Effect:
        evaluations: tuple[Evaluation, ...] = ()
        if command.command in ("step", "promote") and run is not None and run.last is not None:
            evaluations = _evaluations(run.last)
        rollout = None
        if run is None or obeyed.fresh_evidence:
            evidence = RolloutEvidence.of(obeyed.memory, obeyed.spec, obeyed.policy)
            run = _Run(obeyed.memory, obeyed.spec, obeyed.policy, evidence)
            self._runs[command.rollout] = run
            for family, placed in self._intake.open_cells():
                evidence.patch(family, placed, 1)
            rollout = Rollout(
                rollout=command.rollout,
                spec=run.spec,
                policy=run.policy.text,
                policy_hash=run.policy.hash,
                command_offset=self._commands.command_offset,
            )
        run.memory = obeyed.memory
        reason = f"{command.command.replace('_', '-')}: {obeyed.reason}"
        inputs = self._inputs_now(now_us)
        return self._decide(run, "command", reason, evaluations, inputs, command.command_id, rollout)

    # --- records ---------------------------------------------------------------------------------------

    def _decide(
        self,
        run: _Run,
        kind: Kind,
        reason: str,
        evaluations: tuple[Evaluation, ...],
        inputs: Inputs,
        command_id: str | None = None,
        rollout: Rollout | None = None,
    ) -> Effect:
        """One transaction: the next epoch's directive, the decision, the memory after it."""
        now_us = inputs.now_us
        epoch = run.memory.epoch + 1
        run.memory = replace(run.memory, epoch=epoch, decided_epoch=epoch)
        run.renewed_us = now_us
        lease_us = self.settings.lease_us if self._sees(run, now_us) else 0
        directive = self._directive(run, now_us, now_us + lease_us)
        decision = Decision(
            kind=kind,
            directive=directive,
            inputs=inputs,
            evaluations=evaluations,
            command_id=command_id,
            reason=reason,
        )
        if run.memory.final:
            run.evidence = RolloutEvidence.of(run.memory, run.spec, run.policy)
        return Effect(run.memory.rollout, directive, decision, (run.memory, self._commands), rollout)

    def _directive(self, run: _Run, now_us: int, lease_until_us: int) -> Directive:
        memory = run.memory
        return Directive(
            rollout=memory.rollout,
            generation=memory.generation,
            epoch=memory.epoch,
            ts_us=now_us,
            lease_until_us=lease_until_us,
            dead_man_us=self.settings.dead_man_us,
            state=memory.state,
            weights=memory.weights,
            last_promoted=memory.last_promoted,
            level=memory.level,
            fallback=fallback_key(run.spec),
            cause=memory.cause,
            policy_hash=run.policy.hash,
        )

    def _sees(self, run: _Run, now_us: int) -> bool:
        """A final state needs no sight: it only says again what routers may return to anyway."""
        return run.memory.final or not self.blind(run.memory.rollout, now_us)

    def _current(self, second: int, now_us: int) -> bool:
        return now_us - (second + 1) * 1_000_000 <= self.settings.blind_after_us

    def _inputs_now(self, now_us: int) -> Inputs:
        return self._intake.inputs_now(self._commands.command_offset, now_us)

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1


def _evaluations(evidence: Evidence) -> tuple[Evaluation, ...]:
    assert evidence.coverage is not None
    rules = (one for verdict in evidence.verdicts for one in verdict.evaluations)
    return (*rules, evidence.coverage.evaluation)
