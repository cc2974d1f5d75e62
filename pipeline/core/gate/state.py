"""The gate's memory as it is written to `klaxon.state`, and as the machine changes it.

JSON, one record per roll-out, one per sequential rule of it, and one per gating partition. Point rules
remember nothing: what they say follows from the buckets, which are read again. A record is written with every
decision and every few seconds.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from pipeline.core.gate.left_out import Exclusion, LeftOut
from pipeline.core.gate.progress import Progress
from schemas.control import Cause, RolloutState
from schemas.records import check_json_version

COMMAND_IDS_KEPT: Final = 256


class RolloutMemory(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rollout"):
    """Everything about a roll-out that does not follow from spec, policy and buckets. Seconds: event time."""

    v: int = 1
    rollout: str
    rule: str = ""
    """Empty: the roll-out itself. Rules with a memory of their own have records of their own."""
    generation: int
    epoch: int
    first_generation: int = 0
    """Where foreign directives used generation numbers up: the first number of this run; else 0."""
    decided_epoch: int
    """Epoch of the last decision; greater epochs only renewed the lease."""
    state: RolloutState
    step: int
    """Index into the spec's steps."""
    step_start: int
    """Second from which the weight step counts as lasting."""
    step_pairs: int = 0
    """Pairs scored in complete seconds since the step began."""
    start_us: int
    """When the generation began: events without one count for it from the next whole second."""
    evidence_from: int
    """First second whose buckets count; later ones were zeroed with a new generation or policy."""
    folded: int
    """Newest second folded; evidence_from − 1 if none."""
    weights: dict[str, float]
    last_promoted: dict[str, float]
    level: Literal[0, 1, 2] = 0
    streak: int = 0
    """Consecutive generations of this canary version that tripped (R2)."""
    cause: Cause | None = None
    holding: bool = False
    """Coverage is below its limit: no weight step until it recovers."""
    advised: tuple[str, ...] = ()
    """Rules that only observe or advise and have spoken in this generation."""
    ejected: tuple[Exclusion, ...] = ()
    """Nodes of the canary that get nothing more in this generation."""
    excluded: tuple[Exclusion, ...] = ()
    """Segments that the canary gets no more in this generation."""
    alpha_left: float = 1.0
    """How much of α earlier policies of this generation left for the present one."""
    retired: bool = False
    gaps_told: int = -1
    """Last second of the last gap that was recorded: each is told once."""
    waiting: str = ""
    """What the next weight step waits for, as the newest folded second left it."""
    blind: str = ""
    """Why the lease was not renewed; "" where it was."""
    progress: Progress | None = None
    """What each rule has and lacks, as the last renewal found it. For people; nothing is decided by it."""
    vouched_us: int = 0
    """When a lease was given last: the dead man's time counts from there."""

    @property
    def key(self) -> str:
        """The record's key."""
        return f"{self.rollout}/{self.rule}"

    @property
    def left_out(self) -> LeftOut:
        """Ejected nodes and excluded segments."""
        return LeftOut((*self.ejected, *self.excluded))

    @property
    def final(self) -> bool:
        """Nothing but an operator's new generation moves it."""
        return self.retired or self.state in ("tripped", "promoted")

    @property
    def generations(self) -> range:
        """The numbers that events of this run carry."""
        return range(self.first_generation or self.generation, self.generation + 1)

    @property
    def start_second(self) -> int:
        """First whole second of the generation."""
        return -(-self.start_us // 1_000_000)


class RuleMemory(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="rule"):
    """What a sequential rule holds of a roll-out and does not follow from the buckets that are kept.

    Exact: floats stand as little-endian float64, and folding goes on with the same bits. `generation`,
    `policy_hash` and `evidence_from` say whose it is: another run begins anew.
    """

    v: int = 1
    rollout: str
    rule: str
    generation: int
    """The first number of the run."""
    policy_hash: str
    evidence_from: int
    folded: int
    """Newest second in it."""
    samples: int = 0
    """Values of the whole roll-out in it."""
    scopes: tuple[tuple[str, str], ...] = ()
    """In order of appearance, which gives them their weights."""
    stakes: bytes = b""
    """Six a scope."""
    buckets: tuple[int, ...] = ()
    scope_samples: tuple[int, ...] = ()
    pass_logs: bytes = b""
    """The test for a pass: the logarithms of its two products."""
    pass_pairs: int = 0
    pass_from: int = -1
    """First second of the weight step that it is of."""

    @property
    def key(self) -> str:
        """The record's key."""
        return f"{self.rollout}/{self.rule}"


class Forgotten(Struct, frozen=True, kw_only=True):
    """A record that is struck off the topic: a tombstone."""

    rollout: str
    rule: str

    @property
    def key(self) -> str:
        """The record's key."""
        return f"{self.rollout}/{self.rule}"


class PartitionMemory(Struct, frozen=True, kw_only=True, tag="partition"):
    """How far a gating partition's commands were obeyed."""

    v: int = 1
    partition: int
    command_offset: int
    """Offset of the last command obeyed, or refused on klaxon.decisions; −1 if none."""
    answered: int = -1
    """Up to this offset all commands have an answer, those turned away too. They are not read again: what was
    turned away would be obeyed once keys and clocks have moved on, and the other way about."""
    settings_hash: str = ""
    """Of the settings that the gate which wrote this runs with: gates that differ are told apart by it."""
    content_hash: str = ""
    """Of those among them that seconds must be made with; "" where a gate of an older release wrote this."""
    command_ids: tuple[str, ...] = ()
    """The last ids obeyed or refused, oldest first: a command sent twice is obeyed once."""

    @property
    def key(self) -> str:
        """The record's key; no roll-out's, because a name is never empty."""
        return "/"


StateRecord: TypeAlias = RolloutMemory | RuleMemory | PartitionMemory
StateChange: TypeAlias = StateRecord | Forgotten

_DECODER: Final = msgspec.json.Decoder(StateRecord)


class StateError(Exception):
    """A record of `klaxon.state` that this version cannot read."""


def encode_state(record: StateChange) -> bytes | None:
    """The record's value; None: a tombstone."""
    return None if isinstance(record, Forgotten) else msgspec.json.encode(record)


def decode_state(value: bytes) -> StateRecord:
    """Read a value. Raises StateError, and UnknownVersionError for what a newer gate wrote."""
    check_json_version(value)
    try:
        return _DECODER.decode(value)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"klaxon.state holds a record this version cannot read: {error}") from None
