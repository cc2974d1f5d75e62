"""What pairing comes to, item by item in log order: pairs, paired differences and counts.

Made by the thousand a second, so nothing in them refers back (gc=False), and what can be said of many at once
is said when they are settled.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from pipeline.core.groups import Arrival
from schemas.buckets import Population


class Pairs(Struct, frozen=True, eq=False, gc=False):
    """Pairs that formed at one place in the log, of halves that waited for each other alone."""

    baselines: list[Arrival]
    others: list[Arrival]
    """The half that is compared with each."""
    formed_us: int
    closed_through: int
    """Newest second that was closed then."""


class Pair(Struct, eq=False, gc=False):
    """A pair of a larger group: its halves, and where in the log it formed."""

    baseline: Arrival
    other: Arrival
    formed_us: int
    closed_through: int
    control: Pair | None = None
    """Canary: the control's pair, where it was formed before."""
    kl_lower: int | None = None
    """Set when scored and comparable with others."""


class Excess(Struct, frozen=True, eq=False, gc=False):
    """Canary and control of one prompt are both formed: their difference counts in this second (X3)."""

    canary: Pair
    control: Pair
    second: int


class Count(Struct, frozen=True, eq=False, gc=False):
    """Something that is no evidence but counts, in the cell `all` of a population."""

    second: int
    population: Population
    name: str
    n: int


Formed: TypeAlias = Pairs | Pair | Excess | Count


def rows_of(formed: Formed) -> int:
    """How many rows of evidence it makes."""
    return len(formed.baselines) if isinstance(formed, Pairs) else 1
