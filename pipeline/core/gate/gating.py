"""The gate of one gating partition: evidence in, decisions out. No clock, no I/O; never blocks.

Calls come one at a time. Each Effect is one transaction and describes the state right after it; the caller
writes effects in order, before the next call. After a crash a new core restores what was written, reads the
finals again from `read_from()`, all of them before the first judgement, and the same decisions follow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from pipeline.core.gate.evidence import NOBODY, RolloutEvidence, Takers
from pipeline.core.gate.intake import Contents, Intake
from pipeline.core.gate.machine import Evidence, Kind, Outcome, judge
from pipeline.core.gate.observed import evidence_gauges, rollout_gauges
from pipeline.core.gate.orders import Moment, Obeyed, Parser, Refused, gap, obey
from pipeline.core.gate.outbid import above
from pipeline.core.gate.policy import Family
from pipeline.core.gate.restart import resumed
from pipeline.core.gate.run import Run, every_evaluation, telling
from pipeline.core.gate.settings import Effect, GateSettings, ReadFrom
from pipeline.core.gate.sources import Change
from pipeline.core.gate.state import (
    COMMAND_IDS_KEPT,
    PartitionMemory,
    StateChange,
    StateRecord,
)
from schemas.buckets import FinalBuckets, FreshCells, Population
from schemas.control import Command, Decision, Directive, Evaluation, Inputs, Rollout
from schemas.topics import Topic

__all__ = ["Effect", "GateCore", "GateSettings", "ReadFrom"]

SLACK_S: Final = 30
"""How much further back than the longest window finals are read after a restore."""


class GateCore:
    """Everything one gating partition decides. `sources`: topic → number of partitions."""

    def __init__(self, partition: int, sources: Mapping[str, int], settings: GateSettings) -> None:
        self.partition = partition
        self.settings = settings
        self._intake = Intake(partition, sources, settings.settings_hash)
        self._runs: dict[str, Run] = {}
        self._commands = self._with_settings(PartitionMemory(partition=partition, command_offset=-1))
        self._remembered = self._commands
        """As it stands in `klaxon.state`."""
        self._remembered_us = 0
        self._counts = dict.fromkeys(
            ("foreign_directives", "orphan_states", "commands_repeated", "evidence_begun_anew"), 0
        )

    # --- after a restart -------------------------------------------------------------------------------

    def restore(
        self,
        states: Iterable[StateRecord],
        control: Iterable[tuple[str, Directive | None]],
        rollouts: Iterable[Rollout],
        restated: Collection[str] = (),
    ) -> None:
        """Take over what a predecessor wrote, each topic read to its end, the newest record per key.

        `control`: key and directive (None: a tombstone, or none) in log order, the greatest one among them.
        `restated`: roll-outs whose directive is the gate's own and is to be written once more all the same.

        Raises PipelineError if a policy that was obeyed once cannot be read any more.
        """
        found = resumed(states, control, rollouts, self.settings, restated)
        self._runs |= found.runs
        if found.commands is not None:
            self._commands = self._with_settings(found.commands)
            self._remembered = found.commands
        for name, times in found.counts.items():
            self._count(name, times)

    def _with_settings(self, memory: PartitionMemory) -> PartitionMemory:
        """With what this gate runs with."""
        told = self.settings
        return replace(memory, settings_hash=told.hash, content_hash=told.settings_hash)

    def read_from(self) -> ReadFrom:
        """Where the caller reads on after `restore`."""
        command_offset = max(self._commands.command_offset, self._commands.answered + 1, 0)
        live = [run for run in self._runs.values() if not run.memory.final]
        if not live:
            return ReadFrom(None, None, command_offset)
        finals_s = min(run.memory.folded - run.policy.reach_s for run in live) - SLACK_S
        fresh_s = min(run.memory.folded for run in live)
        return ReadFrom(max(finals_s, 0) * 1_000_000, max(fresh_s, 0) * 1_000_000, command_offset)

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
            at: tuple[int, Population | None] | None = None
            takers = NOBODY
            for second, population, cell in cells:
                if at is None or at[1] is not population or at[0] != second:
                    # Cells of one population and second follow each other.
                    at = second, population
                    takers = self._takers(family, second, population)
                for judged in takers.get(cell.dimension, ()):
                    judged.patch(second, cell, sign)

    def _takers(self, family: Family, second: int, population: Population | None) -> Takers:
        run = None if population is None else self._runs.get(population.rollout)
        if run is None or run.memory.final:
            return NOBODY
        return run.evidence.takers(family, second, population)

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
        standing = None if run is None else run.standing(self.settings, now_us)
        moment = Moment(now_us, self._intake.done, self._evidence_from(now_us))
        parser = Parser(self.settings.parse_policy, self.settings.default_policy)
        try:
            obeyed = obey(command, standing, moment, parser)
        except Refused as refusal:
            return [*effects, self._refuse(command, run, str(refusal), now_us)]
        return [*effects, self._enact(command, run, obeyed, now_us)]

    def answered(self, offset: int) -> None:
        """Every command up to this record was obeyed, refused or turned away: no successor reads them again.
        That is written with what is written next, at the latest after `renew_us`."""
        if offset > self._commands.answered:
            self._commands = replace(self._commands, answered=offset)

    def knows(self, command_id: str) -> bool:
        """Whether a command of this id was answered; of the last COMMAND_IDS_KEPT."""
        return command_id in self._commands.command_ids

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

    def on_foreign(self, name: str, directives: Sequence[Directive | None], now_us: int) -> list[Effect]:
        """Records of the control topic under this roll-out's key that no gate wrote; None: no directive (a
        tombstone, or what nobody can read). The gate's own is written above them, sight or not.

        A tombstone of a retired roll-out only strikes it off the topic.
        """
        self._count("foreign_directives", len(directives))
        run = self._runs.get(name)
        found = [directive for directive in directives if directive is not None]
        if run is None or (run.memory.retired and not found):
            return []
        memory = run.memory
        for directive in found:
            memory = above(memory, directive)
        if memory.generation != run.memory.generation and not memory.final:
            run.evidence.renumber(memory.generations, self._intake.open_cells())
        run.memory = memory
        return [self._reassert(run, now_us)]

    def reassert(self, now_us: int) -> list[Effect]:
        """After `restore`, at once: what the control topic says otherwise, or in another key's name, is said
        again."""
        return [self._reassert(run, now_us) for _, run in sorted(self._runs.items()) if run.contested]

    def renew(self, now_us: int) -> list[Effect]:
        """Every `renew_us` and roll-out its state, and its directive with a new lease while the gate sees.

        Whose turn comes within half of that time goes along: they fall into step, and one transaction does
        for all of them, not one each.
        """
        live = {name: run for name, run in self._runs.items() if not run.memory.retired}
        if not live:
            return self._remember(now_us)
        ages_us = {name: now_us - run.renewed_us for name, run in live.items()}
        if max(ages_us.values(), default=0) < self.settings.renew_us:
            return []
        effects: list[Effect] = []
        for name, run in sorted(live.items()):
            if ages_us[name] < self.settings.renew_us // 2:
                continue
            run.renewed_us = now_us
            directive = None
            progress = run.progress(self.settings, self._intake.unknown_parts)
            run.memory = replace(run.memory, blind=self._why_blind(run, now_us), progress=progress)
            if not run.memory.blind:
                directive = run.next_directive(self.settings, now_us, sees=True)
            effects.append(Effect(name, directive, None, self._states(run)))
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
        return self._runs[name].standing(self.settings, now_us).not_ready

    def names(self) -> tuple[str, ...]:
        """The roll-outs of this partition, in order."""
        return tuple(sorted(self._runs))

    def gauges(self) -> dict[str, int]:
        """Sizes and counts for monitoring: everything that grows with traffic is among them."""
        return {
            "rollouts": len(self._runs),
            **evidence_gauges(self._runs.values()),
            **self._intake.gauges(),
            **self._counts,
        }

    def rollout_gauges(self, most: int) -> dict[str, dict[str, int]]:
        """The same of each roll-out, the `most` that began last: its state, share of traffic and coverage."""
        return rollout_gauges(self._runs.values(), most)

    # --- one second ------------------------------------------------------------------------------------

    def _fold(self, run: Run, second: int, contents: Contents, now_us: int) -> list[Effect]:
        """One second of one roll-out: at most a gap and one decision."""
        memory = run.memory
        if memory.final or second < memory.evidence_from:
            return []
        refilling = run.restored_through is not None and second <= run.restored_through
        if refilling and second < memory.folded - run.policy.reach_s:
            return []
        pairs = run.evidence.fold(second, contents.get(memory.rollout, ()), memory.step_start)
        if refilling:
            if second == run.restored_through:
                # An operator may ask before the next one.
                run.judge(second, self.settings, self._intake.unknown, now_us)
            return []
        effects = self._tell_gap(run, second, now_us)
        counted = pairs if second >= memory.step_start else 0
        run.memory = replace(run.memory, folded=second, step_pairs=run.memory.step_pairs + counted)
        judged = run.judge(second, self.settings, self._intake.unknown, now_us)
        outcome = judge(run.memory, judged, run.policy, run.spec, self.settings.join_timeout_s)
        run.memory = replace(outcome.memory, waiting=outcome.reason if outcome.kind is None else "")
        if outcome.kind is not None:
            effects.append(self._conclude(run, judged, outcome, now_us))
        if outcome.kind in ("eject", "narrow"):
            run.evidence.leave_out(run.memory.left_out, self._intake.open_cells())
            run.judge(second, self.settings, self._intake.unknown, now_us)
        return effects

    def _conclude(self, run: Run, evidence: Evidence, outcome: Outcome, now_us: int) -> Effect:
        assert outcome.kind is not None
        if outcome.kind in ("trip", "pause", "eject", "narrow") and outcome.tripping:
            cause = run.evidence.cause(outcome.tripping, evidence.second, (), fresh=False)
            run.memory = replace(run.memory, cause=cause)
        inputs = self._intake.inputs_at(evidence.second, self._commands.command_offset, now_us)
        return self._decide(run, outcome.kind, outcome.reason, every_evaluation(evidence), inputs)

    def _tell_gap(self, run: Run, second: int, now_us: int) -> list[Effect]:
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

    def _refuse(self, command: Command, run: Run | None, reason: str, now_us: int) -> Effect:
        """Recorded with the directive that stands; nothing is published on the control topic."""
        decision = Decision(
            kind="refused",
            directive=None if run is None else run.directive(self.settings, now_us, now_us),
            inputs=self._inputs_now(now_us),
            command_id=command.command_id,
            reason=f"{command.command.replace('_', '-')}: {reason}",
        )
        states = (self._partition(),) if run is None else self._states(run)
        return Effect(command.rollout, None, decision, states)

    def _enact(self, command: Command, run: Run | None, obeyed: Obeyed, now_us: int) -> Effect:
        evaluations: tuple[Evaluation, ...] = ()
        if command.command in ("step", "promote") and run is not None and run.last is not None:
            evaluations = every_evaluation(run.last)
        rollout = None
        if run is None or obeyed.fresh_evidence:
            evidence = RolloutEvidence.of(obeyed.memory, obeyed.spec, obeyed.policy)
            written = frozenset[str]() if run is None else run.written_rules
            run = Run(
                obeyed.memory,
                obeyed.spec,
                obeyed.policy,
                evidence,
                obeyed.memory.generation,
                written_rules=written,
            )
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
        run: Run,
        kind: Kind,
        reason: str,
        evaluations: tuple[Evaluation, ...],
        inputs: Inputs,
        command_id: str | None = None,
        rollout: Rollout | None = None,
    ) -> Effect:
        """One transaction: the next epoch's directive, the decision, the memory after it."""
        now_us = inputs.now_us
        directive = run.next_directive(self.settings, now_us, sees=not self._why_blind(run, now_us))
        run.memory = replace(run.memory, decided_epoch=directive.epoch)
        told = telling(evaluations)
        decision = Decision(
            kind=kind,
            directive=directive,
            inputs=inputs,
            evaluations=told,
            evaluations_left_out=len(evaluations) - len(told),
            command_id=command_id,
            reason=reason,
        )
        if run.memory.final:
            run.evidence = RolloutEvidence.of(run.memory, run.spec, run.policy)
        return Effect(run.memory.rollout, directive, decision, self._states(run), rollout)

    def _states(self, run: Run) -> tuple[StateChange, ...]:
        """All that is remembered with a roll-out."""
        return (*run.records(), self._partition())

    def _partition(self) -> PartitionMemory:
        self._remembered = self._commands
        return self._commands

    def _remember(self, now_us: int) -> list[Effect]:
        """Where no roll-out's record takes it along: however many commands are turned away, one a renewal."""
        if self._commands == self._remembered or now_us - self._remembered_us < self.settings.renew_us:
            return []
        self._remembered_us = now_us
        return [Effect("", None, None, (self._partition(),))]

    def _reassert(self, run: Run, now_us: int) -> Effect:
        """The directive once more, with numbers that pass every foreign one.

        Where they are of another generation, the history says so: it holds what begins each number.
        """
        before = run.said_generation
        run.memory = replace(run.memory, blind=self._why_blind(run, now_us))
        directive = run.next_directive(self.settings, now_us, sees=not run.memory.blind)
        decision = None
        if directive.generation != before:
            run.memory = replace(run.memory, decided_epoch=directive.epoch)
            decision = Decision(
                kind="reassert",
                directive=directive,
                inputs=self._inputs_now(now_us),
                reason=f"a foreign directive used up numbers: the run of generation {before} goes on as"
                f" generation {directive.generation}",
            )
        return Effect(run.memory.rollout, directive, decision, self._states(run))

    def _why_blind(self, run: Run, now_us: int) -> str:
        """A final state needs no sight: it only says again what routers may return to anyway."""
        return "" if run.memory.final else self.blind(run.memory.rollout, now_us)

    def _inputs_now(self, now_us: int) -> Inputs:
        return self._intake.inputs_now(self._commands.command_offset, now_us)

    def _count(self, name: str, times: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + times
