"""What a policy says, as frozen types. `policy_reading` makes them of plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, Literal, TypeAlias

from pipeline.core.bins import Kind
from pipeline.core.statistics.slow_share import BLOCK_S, LOOK_BACK_S

Family: TypeAlias = Literal["pairs", "requests"]
Statistic: TypeAlias = Literal["mean", "quantile", "share"]
ActionName: TypeAlias = Literal[
    "advise", "pause", "narrow", "eject_node", "fallback", "rollback_l1", "rollback_l2"
]
Mode: TypeAlias = Literal["enforce", "observe"]
ArmName: TypeAlias = Literal["canary", "baseline", "control", "any"]
Traffic: TypeAlias = Literal["all", "user", "shadow"]
EvidenceName: TypeAlias = Literal["point", "anytime"]

ACTIONS: Final[tuple[ActionName, ...]] = (
    "advise", "pause", "narrow", "eject_node", "fallback", "rollback_l1", "rollback_l2",
)  # fmt: skip
"""Mildest first."""
ALPHA: Final = Fraction(1, 20)
BLOCKS_REACH_S: Final = LOOK_BACK_S + 2 * BLOCK_S
"""How far before its window the blocks of a rule about slow requests reach."""
LEAVING_OUT: Final[frozenset[ActionName]] = frozenset({"narrow", "eject_node"})
"""Actions that keep the canary from a class of traffic or a node, and let the rest go on."""
TRIPS: Final[frozenset[ActionName]] = frozenset({"fallback", "rollback_l1", "rollback_l2"})
"""Actions that end a generation: absorbing, once."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a rule measures: one quantity of a family of cells, and the statistic taken of it.

    `unit`: how many integer units of the cells make one unit of the policy (2³⁰ for nats, 1 for µs).
    `over`: for a share, the integer limit a value must exceed to be counted; an edge of the histogram.
    `offset`: what the cells add to each value, in their units.
    """

    name: str
    family: Family
    measure: str
    kind: Kind
    statistic: Statistic
    unit: int
    quantile: Fraction | None = None
    over: int | None = None
    offset: int = 0
    per_second: bool = False
    """The metric is the reciprocal of what the cells hold, and less of it is worse: tokens per second of the
    time between tokens. A quantile from below is one from above there."""

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
    evidence: EvidenceName = "point"
    relative_to: Literal["baseline"] | None = None
    """The limit is a ratio: how many times worse than the baseline's like it may be."""
    limit_ratio: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The limit in the cells' integer units, as numerator and denominator: read at every evaluation."""

    def __post_init__(self) -> None:
        unit, offset = self.metric.unit, self.metric.offset
        ratio = self.limit if self.relative_to is not None else self.limit * unit + offset
        object.__setattr__(self, "limit_ratio", ratio.as_integer_ratio())

    @property
    def label(self) -> str:
        """What is compared with the limit: `kl_lower mean`, `ttft_us p99: canary / baseline`."""
        if self.relative_to is None:
            return self.metric.label
        sides = (self.relative_to, self.arm) if self.metric.per_second else (self.arm, self.relative_to)
        return f"{self.metric.label}: {' / '.join(sides)}"

    @property
    def enforcing(self) -> bool:
        """Whether it may move anything, and whether a promotion needs its pass."""
        return self.mode == "enforce" and self.action != "advise"

    @property
    def reach_s(self) -> int:
        """Seconds of buckets that decide its verdict at one moment: more are never needed."""
        if self.sequential and self.metric.statistic == "quantile":
            return self.window_s + BLOCKS_REACH_S
        return self.window_s if self.hold_steps == 1 else self.hold_steps + 2 * self.window_s

    @property
    def sequential(self) -> bool:
        """Whether it trips by evidence that may be looked at all the time (`evidence: anytime`)."""
        return self.evidence == "anytime"


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
class Ejection:
    """How many of the canary's nodes may be left out before the version is at fault, as a share of them."""

    max_share: Fraction


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy. `hash` is the SHA-256 of its text."""

    rules: tuple[Rule, ...]
    coverage: Coverage
    progression: Progression
    hash: str
    text: str
    alpha: Fraction = ALPHA
    """The chance of a false trip in a generation that all enforcing sequential rules share."""
    ejection: Ejection = Ejection(Fraction(1, 5))

    @property
    def window_s(self) -> int:
        """The longest window whose evidence a promotion needs."""
        return max(self.coverage.window_s, *(rule.window_s for rule in self.rules))

    @property
    def reach_s(self) -> int:
        """Seconds of buckets needed to judge one moment exactly as if everything had been read."""
        return max(self.coverage.window_s, *(rule.reach_s for rule in self.rules))


@dataclass(frozen=True, slots=True)
class AlphaShare:
    """What one sequential rule may be wrong by. `trip`: the chance that it ever trips in a generation while
    nothing is over its limit; `shared`: that is its part of the policy's α, else all of it, for it ends no
    generation. `passing`: the same for a pass while the mean is at the limit; every rule has all of it,
    because a promotion needs every rule's pass."""

    rule: Rule
    trip: Fraction
    passing: Fraction
    shared: bool

    @property
    def bound(self) -> float:
        """Evidence that trips: 1 / `trip`."""
        return float(1 / self.trip)


def alpha_ledger(policy: Policy, left: float = 1.0) -> tuple[AlphaShare, ...]:
    """Who spends the policy's α, in its order (statistics.md §0.1 "Alpha"): α / R for each of R enforcing
    sequential rules that end a generation. `left`: how much of α the generation's earlier policies left."""
    sharing = [rule for rule in policy.rules if rule.sequential and rule.enforcing and rule.action in TRIPS]
    return tuple(
        AlphaShare(
            rule,
            policy.alpha * Fraction(left) / len(sharing) if rule in sharing else policy.alpha,
            policy.alpha,
            rule in sharing,
        )
        for rule in policy.rules
        if rule.sequential
    )
