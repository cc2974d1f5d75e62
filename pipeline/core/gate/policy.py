"""What a policy says, as frozen types. `policy_reading` makes them of plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal, TypeAlias

Family: TypeAlias = Literal["pairs", "requests"]
Statistic: TypeAlias = Literal["mean", "quantile", "share"]
ActionName: TypeAlias = Literal["advise", "pause", "fallback", "rollback_l1", "rollback_l2"]
Mode: TypeAlias = Literal["enforce", "observe"]
ArmName: TypeAlias = Literal["canary", "baseline", "control", "any"]
Traffic: TypeAlias = Literal["all", "user", "shadow"]

ACTIONS: Final[tuple[ActionName, ...]] = ("advise", "pause", "fallback", "rollback_l1", "rollback_l2")
"""Mildest first."""
TRIPS: Final[frozenset[ActionName]] = frozenset({"fallback", "rollback_l1", "rollback_l2"})
"""Actions that end a generation: absorbing, once."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a rule measures: one quantity of a family of cells, and the statistic taken of it.

    `unit`: how many integer units of the cells make one unit of the policy (2³⁰ for nats, 1 for µs).
    `over`: for a share, the integer limit a value must exceed to be counted; an edge of the histogram.
    """

    name: str
    family: Family
    measure: str
    kind: Literal["latency", "score"]
    statistic: Statistic
    unit: int
    quantile: Fraction | None = None
    over: int | None = None

    @property
    def label(self) -> str:
        """Name and statistic, as decisions show it: `kl_lower mean`, `ttft_us p99`."""
        if self.statistic == "quantile":
            assert self.quantile is not None
            return f"{self.name} p{float(self.quantile * 100):g}"
        if self.statistic == "mean":
            return f"{self.name} mean"
        assert self.over is not None
        return f"{self.name} {self.over / 1000:g} ms"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `limit` is exact, in the metric's own unit: nats, µs, or a share of 1."""

    id: str
    capability: str | None
    metric: Metric
    window_s: int
    limit: Fraction
    min_samples: int
    hold_steps: int
    """Evaluations (one a second) that must be over the limit in a row; 1: the first one trips."""
    scopes: tuple[str, ...]
    action: ActionName
    mode: Mode
    arm: ArmName
    traffic: Traffic
    limit_ratio: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The limit in the cells' integer units, as numerator and denominator: read at every evaluation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit_ratio", (self.limit * self.metric.unit).as_integer_ratio())

    @property
    def enforcing(self) -> bool:
        """Whether it may move anything, and whether a promotion needs its pass."""
        return self.mode == "enforce" and self.action != "advise"

    @property
    def reach_s(self) -> int:
        """Seconds of buckets that decide its verdict at one moment: more are never needed."""
        return self.window_s if self.hold_steps == 1 else self.hold_steps + 2 * self.window_s


@dataclass(frozen=True, slots=True)
class Coverage:
    """Scored ÷ (scored + unmatched + drops) over the window: below `limit` no step, or a pause."""

    limit: Fraction
    window_s: int
    min_samples: int
    action: Literal["hold", "pause"]


@dataclass(frozen=True, slots=True)
class Progression:
    """How a roll-out climbs. `auto`: by itself on pass; `manual`: by an operator's `step` on pass."""

    mode: Literal["auto", "manual"]
    min_pairs: int
    """Scored pairs since the weight step began, at least (D4)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy. `hash` is the SHA-256 of its text."""

    rules: tuple[Rule, ...]
    coverage: Coverage
    progression: Progression
    hash: str
    text: str

    @property
    def window_s(self) -> int:
        """The longest window whose evidence a promotion needs."""
        return max(self.coverage.window_s, *(rule.window_s for rule in self.rules))

    @property
    def reach_s(self) -> int:
        """Seconds of buckets needed to judge one moment exactly as if everything had been read."""
        return max(self.coverage.window_s, *(rule.reach_s for rule in self.rules))
