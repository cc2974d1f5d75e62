"""What operators, gate and routers say to each other: spec, command, directive, decision, applied.

JSON on the wire, always. Names and meaning: docs/events.md.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from schemas.columns import RejectKind
from schemas.events import Arm, DurationUs, Generation, Name, Text, TimeUs, Version

DEFAULT_STEPS: Final = (1, 5, 10, 25, 50, 100)

CommandName = Literal[
    "start", "pause", "resume", "step", "new_generation", "abort", "promote", "retire", "snapshot", "policy"
]
RolloutState = Literal["observing", "paused", "narrowed", "promoted", "tripped"]
DecisionKind = Literal[
    "command", "refused", "trip", "step", "pause", "promote", "gap", "eject", "narrow", "hold", "close",
    "advise", "reassert",
]  # fmt: skip
Verdict = Literal["pass", "trip", "not_enough_data", "error"]
Percent = Annotated[float, Meta(ge=0, le=100)]
MAX_EPOCH: Final = 2**53 - 1
"""Epochs are exact in every JSON reader; a gate that comes here goes on in the next generation."""
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
MAX_GENERATION: Final = 2**31 - 1
"""The greatest that `Generation` holds."""


class ArmSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An arm: what runs on it and on which nodes (glob patterns)."""

    model_version: Name
    prompt_version: Text | None = None
    data_version: Text | None = None
    system_version: Text | None = None
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1)]


class RolloutSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A roll-out as an operator asks for it. Without `fallback` it is refused (G9)."""

    v: Version = 1
    rollout: Name
    arms: dict[Arm, ArmSpec]
    fallback: Name
    steps: Annotated[tuple[Percent, ...], Meta(min_length=1)] = DEFAULT_STEPS
    policy: str | None = None
    """Policy text (YAML). Absent: the shipped default policy, which enforces."""
    policy_hash: str | None = None
    labels: dict[str, str] = {}


class Expects(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Compare-and-set: the command is refused unless the roll-out stands exactly here."""

    generation: Generation
    epoch: Annotated[int, Meta(ge=0)]


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operator's command, on `klaxon.commands`, key = rollout. `start` carries {"spec": RolloutSpec}."""

    v: Version
    command_id: Name
    rollout: Name
    ts_us: TimeUs
    command: CommandName
    arguments: dict[str, object] = {}
    by: Name
    expects: Expects | None = None


class Segment(Struct, frozen=True, kw_only=True):
    """A class of traffic: one value of one dimension."""

    dimension: str
    value: str


class Located(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a deviation sits (G7). Shares in 0..1."""

    dimension: str
    value: str
    share_of_excess: float
    share_of_traffic: float


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a directive says what it says (X5)."""

    rule: str
    capability: str | None = None
    metric: str | None = None
    value: float | None = None
    bound: float | None = None
    limit: float | None = None
    window_us: int | None = None
    samples: int | None = None
    evidence: float | None = None
    """Of a sequential rule: how many times its stake betting against "nothing is over the limit" has won …"""
    evidence_bound: float | None = None
    """… and where that trips."""
    level: float | None = None
    """With `baseline` and `baseline_samples`: as in Evaluation, of a rule relative to the baseline."""
    baseline: float | None = None
    baseline_samples: int | None = None
    coverage: float | None = None
    scope: str | None = None
    located: Located | None = None
    pair_ids: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Further rules that tripped at the same evaluation."""


class Directive(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole desired state of a roll-out, on `klaxon.control` (compacted), key = rollout."""

    v: int = 1
    rollout: Name
    generation: Generation
    epoch: Epoch
    ts_us: TimeUs
    lease_until_us: TimeUs
    dead_man_us: DurationUs
    state: RolloutState
    weights: dict[str, Percent]
    """version → percent, sum 100."""
    last_promoted: dict[str, Percent]
    ejected_nodes: tuple[str, ...] = ()
    excluded_segments: tuple[Segment, ...] = ()
    level: Literal[0, 1, 2] = 0
    fallback: str
    cause: Cause | None = None
    policy_hash: str = ""


class Evaluation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rule in one scope, as a decision saw it."""

    rule: str
    scope: str
    verdict: Verdict
    metric: str
    value: float | None = None
    limit: float | None = None
    samples: int = 0
    reason: str = ""
    level: float | None = None
    """Of a rule relative to the baseline, whose `value` is a ratio: what the canary measures, in the
    metric's unit (µs, tokens per second) …"""
    baseline: float | None = None
    """… and what its like of the baseline does."""
    baseline_samples: int | None = None


class Inputs(Struct, frozen=True, kw_only=True):
    """The input vector of a decision: replayed at it, the gate writes identical bytes."""

    offsets: dict[str, int]
    """"topic/partition" (finals), "~topic/partition" (fresh) → source offset read through."""
    command_offset: int
    complete_through: int
    """Newest complete second (seconds since the epoch), −1 if none."""
    now_us: TimeUs


class Decision(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision, on `klaxon.decisions`: the directive it led to, its inputs, every rule's evaluation."""

    v: int = 1
    kind: DecisionKind
    directive: Directive | None
    inputs: Inputs
    evaluations: tuple[Evaluation, ...] = ()
    evaluations_left_out: int = 0
    """Of parts of a large fleet: those that say least."""
    command_id: str | None = None
    reason: str = ""


class Rollout(Struct, frozen=True, kw_only=True):
    """`klaxon.rollouts`: the spec and the policy text in force, with its hash."""

    v: int = 1
    rollout: Name
    spec: RolloutSpec
    policy: str
    policy_hash: str
    command_offset: int


class Applied(Struct, frozen=True, kw_only=True):
    """`klaxon.applied`: a router holds this directive since then."""

    v: int = 1
    rollout: Name
    router: Name
    generation: Generation
    epoch: int
    applied_us: TimeUs


class Aborted(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A roll-out in a directive file: nothing but its fallback version gets traffic there."""

    by: Name
    ts_us: TimeUs
    fallback: Name | None = None
    """For a router that has no directive; one that has goes by the directive's own."""


class DirectiveFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `klaxon rollout abort --router FILE` writes for `klaxon router --file FILE`, without Kafka."""

    v: Version
    aborted: dict[Name, Aborted]


class DeadLetter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`klaxon.dead-letter`: what could not be read, and where it stands; no payload unless configured."""

    v: int = 1
    topic: str
    partition: int
    offset: int
    position: int | None
    """Index of the event inside its record; null: the whole record."""
    field: str
    reason: str
    """Without the values that were sent."""
    kind: RejectKind = "value"
    sha256: str
    payload: str | None = None
