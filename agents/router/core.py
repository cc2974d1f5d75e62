"""What a router obeys: the greatest directive, its lease, and the dead-man rule. No clock, no I/O.

A directive is the whole desired state of a roll-out, so one record is enough to be right. It is applied
only when its (generation, epoch) is greater than every one seen; the same (generation, epoch) again renews
the lease. An expired lease forbids any increase; `dead_man_us` after the last sign of the gate the router
returns to the last promoted split.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from schemas.control import Directive


class Outcome(StrEnum):
    """What became of a directive."""

    APPLIED = "applied"
    RENEWED = "renewed"
    STALE = "stale"
    """Its (generation, epoch) is older than one already seen, or it is the same record again."""
    EXPIRED = "expired"
    """Its lease is over and it would raise a version under test; the weights stay as they were."""


@dataclass(frozen=True, slots=True)
class Effective:
    """What the router does: version → percent, sum 100; nodes that get nothing."""

    weights: dict[str, float]
    ejected_nodes: tuple[str, ...]
    lease_valid: bool
    dead_man: bool
    """True when the gate has been silent for too long and the last promoted split holds."""


class RouterState:
    """One roll-out in one router. Memory: two directives."""

    def __init__(self) -> None:
        self._seen: Directive | None = None
        self._obeyed: Directive | None = None

    @property
    def directive(self) -> Directive | None:
        """The directive obeyed, with its latest lease; None before the first record."""
        return self._obeyed

    def apply(self, directive: Directive, now_us: int) -> Outcome:
        """Take in one record of the control topic, in log order; says what became of it.

        A decrease is obeyed whatever its lease says: it may be a trip that a late router reads first.
        """
        seen = self._seen
        if seen is not None and _key(directive) < _key(seen):
            return Outcome.STALE
        again = seen is not None and _key(directive) == _key(seen)
        if again and seen is not None and directive.lease_until_us <= seen.lease_until_us:
            return Outcome.STALE
        self._seen = directive
        if now_us > directive.lease_until_us and self._raises(directive, now_us):
            if self._obeyed is None:
                self._obeyed = msgspec.structs.replace(directive, weights=directive.last_promoted)
            return Outcome.EXPIRED
        renewed = again and self._obeyed is not None and _key(self._obeyed) == _key(directive)
        changed = self._obeyed is None or self._obeyed.weights != directive.weights
        self._obeyed = directive
        return Outcome.RENEWED if renewed and not changed else Outcome.APPLIED

    def _raises(self, directive: Directive, now_us: int) -> bool:
        """Whether it gives a version more than now and more than the last promoted split did.

        Weight that goes back to the promoted version is no increase; promoted is what the directive obeyed
        so far says, for a promotion is an increase itself. Before the first record the promoted split is
        what holds."""
        held = self.effective(now_us)
        current = directive.last_promoted if held is None else held.weights
        promoted = (self._obeyed or directive).last_promoted
        return any(
            weight > max(current.get(version, 0.0), promoted.get(version, 0.0))
            for version, weight in directive.weights.items()
            if version != directive.fallback
        )

    def effective(self, now_us: int) -> Effective | None:
        """What holds at `now_us`; None before the first record."""
        obeyed = self._obeyed
        if obeyed is None:
            return None
        valid = now_us <= obeyed.lease_until_us
        silent = not valid and now_us > obeyed.ts_us + obeyed.dead_man_us
        # A trip outlives the gate: going back to an older split must not undo it.
        fall_back = silent and obeyed.state != "tripped"
        weights = obeyed.last_promoted if fall_back else obeyed.weights
        return Effective(dict(weights), obeyed.ejected_nodes, valid, silent)

    def effective_weights(self, now_us: int) -> dict[str, float]:
        """Version → percent at `now_us`, sum 100; empty before the first record."""
        held = self.effective(now_us)
        return {} if held is None else held.weights


def _key(directive: Directive) -> tuple[int, int]:
    return (directive.generation, directive.epoch)
