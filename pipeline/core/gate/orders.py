"""Operators' commands: what each asks of a roll-out, and why it may be refused. Pure.

A refusal is an answer, never an error: it is recorded with its reason, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from pipeline.core.gate.machine import Outcome, abort, begin, promote, raise_weight
from pipeline.core.gate.policy import Policy
from pipeline.core.gate.state import RolloutMemory
from pipeline.core.gate.versions import SpecError, check_spec
from pipeline.errors import PipelineError
from schemas.control import Command, CommandName, RolloutSpec


class Refused(Exception):  # noqa: N818 (an answer, not an error)
    """The command is not obeyed; the message says why and what to do instead."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A roll-out as a command finds it."""

    memory: RolloutMemory
    spec: RolloutSpec
    policy: Policy
    not_ready: str
    """Why the weight may not rise now; "" if it may."""
    alpha_left: float
    """How much of α another policy would find."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a command is obeyed: the gate's time, the newest folded second (−1 if none), and the first second
    whose evidence can count."""

    now_us: int
    folded: int
    evidence_from: int


@dataclass(frozen=True, slots=True)
class Obeyed:
    """What holds afterwards. `fresh_evidence`: windows start anew (new generation or policy, R5)."""

    memory: RolloutMemory
    spec: RolloutSpec
    policy: Policy
    reason: str
    fresh_evidence: bool = False


@dataclass(frozen=True, slots=True)
class Parser:
    """How policy text is read, and the text where a spec brings none."""

    parse: Callable[[str], Policy]
    default: str


def obey(command: Command, standing: Standing | None, moment: Moment, parser: Parser) -> Obeyed:
    """Carry a command out, or raise Refused."""
    _check_expectation(command, standing)
    if command.command == "start":
        return _start(command, standing, moment, parser)
    if command.command == "snapshot":
        raise Refused("snapshot: this gate keeps none; there is nothing to do")
    if standing is None or standing.memory.retired:
        raise Refused(f"there is no roll-out {command.rollout!r}; start it first")
    if command.command == "policy":
        return _policy(command, standing, moment, parser)
    if command.command == "new_generation":
        return _new_generation(command, standing, moment, parser)
    memory, reason = _SIMPLE[command.command](command, standing, moment)
    return Obeyed(memory, standing.spec, standing.policy, reason)


def _check_expectation(command: Command, standing: Standing | None) -> None:
    """Compare-and-set. Renewals raise the epoch but change nothing: any since the last decision is right."""
    expects = command.expects
    if expects is None:
        return
    if standing is None:
        raise Refused(f"stale: generation {expects.generation} was expected, but there is no such roll-out")
    memory = standing.memory
    if expects.generation != memory.generation or not memory.decided_epoch <= expects.epoch <= memory.epoch:
        raise Refused(
            f"stale: generation {expects.generation}, epoch {expects.epoch} was expected; it stands at"
            f" generation {memory.generation}, decided in epoch {memory.decided_epoch}, now {memory.epoch}"
        )


def _start(command: Command, standing: Standing | None, moment: Moment, parser: Parser) -> Obeyed:
    if standing is not None and not standing.memory.retired:
        memory = standing.memory
        raise Refused(
            f"{command.rollout!r} exists: generation {memory.generation}, {memory.state}; use new-generation,"
            " or retire it first"
        )
    spec = _spec(command)
    if spec is None:
        raise Refused("start carries no spec; put it under arguments.spec")
    policy = _parse_policy(spec, parser)
    before = None if standing is None else standing.memory
    memory = begin(spec, before, start_us=moment.now_us, evidence_from=moment.evidence_from)
    return Obeyed(memory, spec, policy, f"started at {spec.steps[0]:g} %", fresh_evidence=True)


def _new_generation(command: Command, standing: Standing, moment: Moment, parser: Parser) -> Obeyed:
    given = _spec(command)
    if given is None and standing.memory.state == "promoted":
        raise Refused("promoted: the canary is what everybody gets; a new generation needs a new spec")
    spec = given or standing.spec
    policy = standing.policy if given is None else _parse_policy(given, parser)
    memory = begin(spec, standing.memory, start_us=moment.now_us, evidence_from=moment.evidence_from)
    reason = f"generation {memory.generation} at {spec.steps[0]:g} %"
    return Obeyed(memory, spec, policy, reason, fresh_evidence=True)


def _policy(command: Command, standing: Standing, moment: Moment, parser: Parser) -> Obeyed:
    """Loading it and zeroing the windows is one change (R5)."""
    if standing.memory.final:
        raise Refused(f"{standing.memory.state} is final; a new generation can bring a new policy")
    text = command.arguments.get("policy")
    if not isinstance(text, str):
        raise Refused("policy carries no text; put it under arguments.policy")
    spec = replace(standing.spec, policy=text, policy_hash=None)
    policy = _parse_policy(spec, parser)
    memory = replace(
        standing.memory,
        evidence_from=max(moment.evidence_from, standing.memory.folded + 1),
        folded=max(moment.evidence_from, standing.memory.folded + 1) - 1,
        step_start=-(-moment.now_us // 1_000_000),
        step_pairs=0,
        holding=False,
        advised=(),
        alpha_left=standing.alpha_left,
    )
    return Obeyed(memory, spec, policy, f"policy {policy.hash[:12]}", fresh_evidence=True)


def _pause(_: Command, standing: Standing, __: Moment) -> tuple[RolloutMemory, str]:
    memory = _moving(standing, "pause")
    if memory.state == "paused":
        raise Refused("it is paused already")
    return replace(memory, state="paused", cause=None), "paused by an operator"


def _resume(_: Command, standing: Standing, __: Moment) -> tuple[RolloutMemory, str]:
    """Go on. What was left out of a narrowed roll-out stays out: only a new generation brings it back."""
    memory = _moving(standing, "resume")
    if memory.state not in ("paused", "narrowed"):
        raise Refused(f"it is {memory.state}, neither paused nor narrowed")
    without = "".join(f" without {one.dimension}={one.value}" for one in memory.excluded)
    return replace(memory, state="observing", cause=None), f"resumed{without}"


def _step(_: Command, standing: Standing, moment: Moment) -> tuple[RolloutMemory, str]:
    memory = _moving(standing, "step")
    steps = standing.spec.steps
    if memory.step + 1 >= len(steps):
        raise Refused(f"it stands at its last step, {steps[-1]:g} %; use promote")
    if standing.not_ready:
        raise Refused(f"no pass: {standing.not_ready}")
    after = raise_weight(memory, standing.spec, max(moment.folded + 1, -(-moment.now_us // 1_000_000)))
    return after, f"{steps[memory.step]:g} % to {steps[after.step]:g} %"


def _promote(_: Command, standing: Standing, __: Moment) -> tuple[RolloutMemory, str]:
    memory = _moving(standing, "promote")
    if standing.not_ready:
        raise Refused(f"no pass: {standing.not_ready}")
    return promote(memory, standing.spec), "promoted by an operator"


def _abort(command: Command, standing: Standing, _: Moment) -> tuple[RolloutMemory, str]:
    memory = _moving(standing, "abort")
    return abort(memory, standing.spec, command.by), "aborted by an operator"


def _retire(_: Command, standing: Standing, __: Moment) -> tuple[RolloutMemory, str]:
    memory = standing.memory
    if not memory.final:
        raise Refused(f"it is {memory.state}; abort or promote it first")
    return replace(memory, retired=True), "retired"


_SIMPLE: Final[Mapping[CommandName, Callable[[Command, Standing, Moment], tuple[RolloutMemory, str]]]] = {
    "pause": _pause,
    "resume": _resume,
    "step": _step,
    "promote": _promote,
    "abort": _abort,
    "retire": _retire,
}


def _moving(standing: Standing, what: str) -> RolloutMemory:
    if standing.memory.final:
        raise Refused(
            f"{standing.memory.state} is final in this generation: {what} cannot undo it; new-generation"
        )
    return standing.memory


def _spec(command: Command) -> RolloutSpec | None:
    """The spec a command carries, checked."""
    given = command.arguments.get("spec")
    if given is None:
        return None
    if isinstance(given, dict) and not given.get("fallback"):
        raise Refused("spec.fallback is missing: name the version to fall back to (G9)")
    try:
        spec = msgspec.convert(given, RolloutSpec)
        check_spec(spec, command.rollout)
    except msgspec.ValidationError as error:
        raise Refused(f"spec: {error}") from None
    except SpecError as error:
        raise Refused(f"spec.{error}") from None
    return spec


def _parse_policy(spec: RolloutSpec, parser: Parser) -> Policy:
    try:
        policy = parser.parse(parser.default if spec.policy is None else spec.policy)
    except PipelineError as error:
        raise Refused(f"policy: {error}") from None
    if spec.policy_hash is not None and spec.policy_hash != policy.hash:
        raise Refused(f"policy_hash is {spec.policy_hash}, but the policy's text has {policy.hash}")
    return policy


def gap(memory: RolloutMemory, first: int, last: int, source: str) -> Outcome:
    """Seconds are no longer retained: nobody can say what they held, so an operator must resume."""
    after = memory
    if not memory.final and memory.state != "paused":
        # What else stands as a cause is of an earlier ejection.
        after = replace(memory, state="paused", cause=None)
    return Outcome(
        after, "gap", f"seconds {first}..{last} of {source} are no longer retained; resume when checked"
    )
