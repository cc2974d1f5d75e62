"""What the gate is told from outside, and what it hands out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.core.gate.policy import Policy
from pipeline.core.gate.state import StateChange
from schemas.control import Decision, Directive, Rollout


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Leases and content settings.

    `parse_policy` raises PipelineError with a message for the operator; it must be pure. `settings_hash` is
    the one of the buckets' content settings: evidence made with others is unknown.
    """

    lease_us: int
    renew_us: int
    dead_man_us: int
    blind_after_us: int
    join_timeout_us: int
    lateness_us: int
    settings_hash: str
    parse_policy: Callable[[str], Policy]
    default_policy: str

    @property
    def hash(self) -> str:
        """16 hex digits over everything here that decides: two gates of one group must agree on it."""
        deciding = (
            self.lease_us, self.renew_us, self.dead_man_us, self.blind_after_us, self.settings_hash,
            self.default_policy,
        )  # fmt: skip
        return hashlib.sha256(repr(deciding).encode()).hexdigest()[:16]

    @property
    def join_timeout_s(self) -> int:
        """Whole seconds, rounded up."""
        return -(-self.join_timeout_us // 1_000_000)

    @property
    def lateness_s(self) -> int:
        """Whole seconds, rounded up."""
        return -(-self.lateness_us // 1_000_000)

    def current(self, second: int, now_us: int) -> bool:
        """Whether a complete second is recent enough to raise a weight on it."""
        return now_us - (second + 1) * 1_000_000 <= self.blind_after_us


@dataclass(frozen=True, slots=True)
class Effect:
    """One transaction: everything in it is written, or nothing. `name` is the roll-out, the records' key.

    `directive` → control, `decision` → decisions, `rollout` → rollouts, all with key `name`; `states` →
    state, each with its own `key`, a tombstone where it is forgotten. All to the gating partition of the core
    that made it.
    """

    name: str
    directive: Directive | None
    decision: Decision | None
    states: tuple[StateChange, ...]
    rollout: Rollout | None = None


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Where to read from after a restore.

    `finals_from_us`, `fresh_from_us`: record time from which finals and fresh cells are needed; None: from
    the end, nothing was known before. `command_offset`: the record of commands to read first. It is the last
    one read unless all in it was answered, because a record may hold several; those obeyed are known by their
    ids.
    """

    finals_from_us: int | None
    fresh_from_us: int | None
    command_offset: int
