"""What pairing comes to, item by item in log order: pairs, paired differences and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pipeline.core.groups import Arrival, Group
from schemas.buckets import Population


@dataclass(slots=True, eq=False)
class Pair:
    """A formed pair: its halves, and when it counts."""

    group: Group
    baseline: Arrival
    other: Arrival
    arm: int
    """The arm that is compared with the baseline."""
    second: int
    """The bucket it counts in."""
    late: bool
    event_us: int
    """Later of the two completions."""
    formed_us: int
    control: Pair | None = None
    """Canary: the control's pair, where it was formed before."""
    kl_lower: int | None = None
    """Set when scored and comparable with others."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Canary and control of one prompt are both formed: their difference counts in this second (X3)."""

    canary: Pair
    control: Pair
    second: int


@dataclass(frozen=True, slots=True)
class Count:
    """Something that is no evidence but counts, in the cell `all` of a population."""

    second: int
    population: Population
    name: str
    n: int


Formed: TypeAlias = Pair | Excess | Count
