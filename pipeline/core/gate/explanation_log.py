"""Which decision is asked for, what stood before it, and a verdict's history: a fold over the log. Pure.

Decisions go in in the log's order, each once; what is kept of them has a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from pipeline.core.gate.explanation_reasons import Account
from schemas.control import Decision, DecisionKind, Rollout, Verdict

TRIPS_KEPT: Final = 8
ROLLOUTS_KEPT: Final = 64
ROWS_KEPT: Final = 20_000
"""Evaluations that a history holds: the newest."""
MOVING: Final[frozenset[DecisionKind]] = frozenset(
    {"command", "trip", "step", "pause", "promote", "gap", "eject", "narrow"}
)
"""Kinds that may change state or weights; the others only say something."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which decision: the newest that fits all of these."""

    generation: int | None = None
    epoch: int | None = None
    """The one behind the directive of this epoch: its own, or the newest before it."""
    at_us: int | None = None
    """The newest that had fallen then."""

    def fits(self, decision: Decision) -> bool:
        """Whether it may be the one."""
        directive = decision.directive
        if self.generation is not None and (directive is None or directive.generation != self.generation):
            return False
        if self.epoch is not None and (
            directive is None or directive.epoch > self.epoch or decision.kind == "refused"
        ):
            return False  # a refusal is behind no directive, it only carries the one that stands
        return self.at_us is None or decision.inputs.now_us <= self.at_us

    @property
    def newest(self) -> bool:
        """Whether it is simply the newest."""
        return self == Wanted()


class HistoryRow(Struct, frozen=True, kw_only=True):
    """What one rule said in one scope when a decision fell."""

    at_us: int
    kind: DecisionKind
    generation: int | None
    epoch: int | None
    rule: str
    scope: str
    verdict: Verdict
    metric: str
    value: float | None
    limit: float | None
    samples: int
    reason: str


@dataclass(slots=True)
class DecisionLog:
    """Folds the decisions of one roll-out."""

    rollout: str
    wanted: Wanted
    keeps_history: bool = False
    found: Account | None = None
    """The decision asked for."""
    standing: Account | None = None
    """The newest one up to it that moved something, where that is another one."""
    read: int = 0
    rows: deque[HistoryRow] = field(default_factory=lambda: deque(maxlen=ROWS_KEPT))
    rows_dropped: int = 0
    last_generation: int | None = None
    first_us: int | None = None
    _moved: Account | None = None
    _before: Decision | None = None
    _trips: deque[Decision] = field(default_factory=lambda: deque(maxlen=TRIPS_KEPT))

    def take(self, decision: Decision) -> None:
        """The next decision of this roll-out."""
        self.read += 1
        directive = decision.directive
        if self.first_us is None:
            self.first_us = decision.inputs.now_us
        account = Account(self.rollout, decision, self._before, tuple(self._trips))
        if _moves(decision):
            self._moved = account
        if self.wanted.fits(decision):
            self.found = account
            self.standing = None if self._moved is account else self._moved
        if self.keeps_history:
            self._keep(decision)
        if directive is not None:
            self.last_generation = directive.generation
        if directive is not None and decision.kind != "refused":
            self._before = decision
        if decision.kind == "trip":
            self._trips.append(decision)

    def _keep(self, decision: Decision) -> None:
        directive = decision.directive
        for one in decision.evaluations:
            self.rows_dropped += len(self.rows) == ROWS_KEPT
            self.rows.append(
                HistoryRow(
                    at_us=decision.inputs.now_us,
                    kind=decision.kind,
                    generation=None if directive is None else directive.generation,
                    epoch=None if directive is None else directive.epoch,
                    rule=one.rule,
                    scope=one.scope,
                    verdict=one.verdict,
                    metric=one.metric,
                    value=one.value,
                    limit=one.limit,
                    samples=one.samples,
                    reason=one.reason,
                )
            )


def in_force(rollouts: Iterable[Rollout], decision: Decision) -> Rollout | None:
    """Spec and policy as they were when it fell; None where they are kept no longer. In the log's order."""
    found = None
    for one in rollouts:
        if one.command_offset <= decision.inputs.command_offset:
            found = one
    return found


def telling(rows: Iterable[HistoryRow]) -> tuple[list[HistoryRow], int]:
    """The rows that a person wants, by rule, scope and time; and how many scopes are left out.

    The whole roll-out always; of its parts those that were over their limit once.
    """
    listed = list(rows)
    over = {(one.rule, one.scope) for one in listed if one.verdict == "trip" or one.reason.startswith("over")}
    shown = [one for one in listed if one.scope == "rollout" or (one.rule, one.scope) in over]
    left_out = {(one.rule, one.scope) for one in listed} - {(one.rule, one.scope) for one in shown}
    shown.sort(key=lambda one: (one.rule, one.scope != "rollout", one.scope, one.at_us))
    return shown, len(left_out)


def _moves(decision: Decision) -> bool:
    """A retired roll-out stands where it stood."""
    return decision.kind in MOVING and not decision.reason.startswith("retire")
