"""How many pairs a verdict needs (D4). Pure.

n = ceil((z_(1−α/2) + z_power)² · r · (CV / lift)²): a test of fixed size, of the mean of a pair's score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

MOST_PAIRS: Final = 10**12
"""More than that no fleet mirrors: an answer above it is refused."""
PASS_CAP: Final = 4.0
"""What a pair counts at most, in nats, when a pass is tested."""
_SHARE: Final = 0.75
_BET: Final = 0.9
"""The greater bet of the test for a pass, and its share of the stake: they bound how soon it can end."""


class SampleSizeError(ValueError):
    """A number no plan can be made with. `field`: the attribute of `Plan`; the message says what fits."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be found out, and how surely. Raises SampleSizeError.

    `variance_ratio`: how much non-determinism enlarges the variance of a pair's score; `cv`: its standard
    deviation over its mean without that; `lift`: the relative change of the mean to be seen.
    """

    alpha: float = 0.05
    power: float = 0.8
    variance_ratio: float = 1.8
    cv: float = 1.0
    lift: float = 0.1
    one_sided: bool = False
    unpaired: bool = False
    """Two arms that answer different requests: n is of each."""

    def __post_init__(self) -> None:
        for name in ("alpha", "power"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise SampleSizeError(name, f"{value:g}: a chance between 0 and 1 is expected, such as 0.05")
        if self.power <= self.alpha:
            raise SampleSizeError(
                "power",
                f"{self.power:g}: at most alpha ({self.alpha:g}), which no data at all would reach;"
                " 0.8 or 0.9 is usual",
            )
        for name in ("variance_ratio", "cv", "lift"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise SampleSizeError(name, f"{value:g}: a finite number above 0 is expected")


def pairs_needed(plan: Plan) -> int:
    """Pairs (per arm where `unpaired`). Raises SampleSizeError where it is over MOST_PAIRS."""
    real = pairs_needed_real(plan)
    if not real <= MOST_PAIRS:
        raise SampleSizeError(
            "lift", f"{plan.lift:g}: it takes over {MOST_PAIRS:.0e} pairs; look for a greater lift"
        )
    return math.ceil(real)


def pairs_needed_real(plan: Plan) -> float:
    """The same before it is rounded up; may be infinite."""
    normal = NormalDist()
    tail = plan.alpha if plan.one_sided else plan.alpha / 2
    # From the lower tail: 1 − tail loses what a small alpha says.
    z = -normal.inv_cdf(tail) + normal.inv_cdf(plan.power)
    ratio = plan.variance_ratio + (1 if plan.unpaired else 0)
    spread = plan.cv / plan.lift
    return z * z * ratio * spread * spread


def fewest_pairs_to_pass(limit: float, alpha: float = 0.05) -> int:
    """About how many pairs a weight step's pass needs whatever they score: 290 at 0.05 nats and 0.05.

    A pass is tested anew at each step by betting on min(score, PASS_CAP) until the stake grew by 1/alpha.
    Nearly all of that is the greater bet, which a perfect pair multiplies by 1 + 0.9 · limit /
    (PASS_CAP − limit); bit-identical answers pass a few pairs sooner, all others need more.

    Raises SampleSizeError unless 0 < limit < PASS_CAP and 0 < alpha < 1.
    """
    if not 0 < limit < PASS_CAP:
        raise SampleSizeError(
            "limit", f"{limit:g}: a divergence between 0 and {PASS_CAP:g} nats is expected, such as 0.05"
        )
    if not 0 < alpha < 1:
        raise SampleSizeError("alpha", f"{alpha:g}: a chance between 0 and 1 is expected, such as 0.05")
    needed = math.log(1 / (_SHARE * alpha)) / math.log1p(_BET * limit / (PASS_CAP - limit))
    return max(1, math.ceil(needed))
