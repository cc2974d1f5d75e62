"""What a router obeys: the greatest directive, its lease, the dead-man rule, and an abort on this machine.

No clock, no I/O. A directive is the whole desired state of a roll-out, so one record is enough to be right.
It is applied only when its (generation, epoch) is greater than every one seen. An expired lease forbids any
increase; `dead_man_us` after the last sign of the gate the router returns to the last promoted split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import msgspec

from schemas.control import Aborted, Directive, Segment
from schemas.control_log import numbers

SUM_TOLERANCE: Final = 1e-6


class Outcome(StrEnum):
    """What became of a directive."""

    APPLIED = "applied"
    RENEWED = "renewed"
    """It says what the one before said, with a new lease."""
    STALE = "stale"
    """Its (generation, epoch) is not greater than every one already seen."""
    EXPIRED = "expired"
    """Its lease is over and it would raise a version under test; the weights stay as they were."""


@dataclass(frozen=True, slots=True)
class Effective:
    """What the router does: version → percent, sum 100; nodes that get nothing."""

    weights: dict[str, float]
    """Empty: no version is known yet, and none under test gets anything."""
    ejected_nodes: tuple[str, ...]
    lease_valid: bool
    dead_man: bool
    """True when the gate has been silent for too long and the last promoted split holds."""
    excluded_segments: tuple[Segment, ...] = ()
    """Classes of traffic that versions under test get nothing of: for whoever knows a request's class."""
    aborted: bool = False
    """True while this machine's directive file takes every version but the fallback out."""


def is_split(directive: Directive) -> bool:
    """Whether its weights can be obeyed: they share out everything."""
    return all(
        abs(sum(weights.values()) - 100.0) <= SUM_TOLERANCE
        for weights in (directive.weights, directive.last_promoted)
    )


class RouterState:
    """One roll-out in one router. Memory: one directive, the numbers of the greatest, the latest time."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._obeyed: Directive | None = None
        self._latest_us = 0
        """The latest time seen under the directive obeyed: a clock that steps back renews no lease."""

    @property
    def directive(self) -> Directive | None:
        """The directive obeyed, with its latest lease; None before the first record."""
        return self._obeyed

    def has_seen(self, directive: Directive) -> bool:
        """Whether its numbers are not greater than every one seen."""
        return self._seen is not None and numbers(directive) <= self._seen

    def apply(self, directive: Directive, now_us: int) -> Outcome:
        """Take in one record of the control topic, in log order; says what became of it.

        A decrease is obeyed whatever its lease says: it may be a trip that a late router reads first.
        """
        if self.has_seen(directive):
            return Outcome.STALE
        self._seen = numbers(directive)
        if now_us > directive.lease_until_us and self._raises(directive, now_us):
            if self._obeyed is None:
                self._obeyed = msgspec.structs.replace(directive, weights=directive.last_promoted)
            return Outcome.EXPIRED
        before, self._obeyed, self._latest_us = self._obeyed, directive, now_us
        same = before is not None and _content(before) == _content(directive)
        return Outcome.RENEWED if same else Outcome.APPLIED

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

    def effective(self, now_us: int, *, unsure: bool = False) -> Effective | None:
        """What holds at `now_us`, or at a later time asked for before; None before the first record.

        `unsure`: whether this machine aborted the roll-out cannot be known; as if the gate were silent.
        """
        obeyed = self._obeyed
        if obeyed is None:
            return None
        now_us = self._latest_us = max(now_us, self._latest_us)
        valid = now_us <= obeyed.lease_until_us
        silent = not valid and now_us > obeyed.ts_us + obeyed.dead_man_us
        # A trip outlives the gate: going back to an older split must not undo it.
        fall_back = (silent or unsure) and obeyed.state != "tripped"
        weights = obeyed.last_promoted if fall_back else obeyed.weights
        return Effective(dict(weights), obeyed.ejected_nodes, valid, silent, obeyed.excluded_segments)

    def effective_weights(self, now_us: int) -> dict[str, float]:
        """Version → percent at `now_us`, sum 100; empty before the first record."""
        held = self.effective(now_us)
        return {} if held is None else held.weights

    def lease_until_us(self) -> int:
        """Of the directive obeyed; 0 before the first record."""
        return 0 if self._obeyed is None else self._obeyed.lease_until_us


def without_canary(held: Effective | None, directive: Directive | None, order: Aborted) -> Effective:
    """What holds under an abort on this machine, whatever the control topic says: only the fallback.

    The directive's own fallback, so that a mistaken name in a file raises nothing; the file's where there is
    no directive.
    """
    if held is None or directive is None:
        weights = {} if order.fallback is None else {order.fallback: 100.0}
        return Effective(weights, (), lease_valid=False, dead_man=False, aborted=True)
    weights = {**dict.fromkeys(directive.weights, 0.0), directive.fallback: 100.0}
    return replace(held, weights=weights, aborted=True)


def _content(directive: Directive) -> tuple[object, ...]:
    """What a router does by it; all else renews the lease, or says why."""
    return (
        directive.generation,
        directive.state,
        directive.weights,
        directive.ejected_nodes,
        directive.excluded_segments,
    )
