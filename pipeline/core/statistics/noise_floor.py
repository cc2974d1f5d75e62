"""Is the canary further from the baseline than the baseline is from itself? (X3; statistics.md §0.3). Pure.

Per prompt x = KL(baseline, canary), z = KL(baseline, control). Prompts with z > c₀ are left out and counted:
the baseline does not reproduce itself there. The rest feed the betting of §0.1 with
Y = (x − z + c₀)/(d + c₀), d the tolerance: Y ≥ 0 without capping x. Buckets hold x − z + c₀: a mean over its
limit d + c₀.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

CONTROL_CAP: Final = Fraction(1, 10)
"""c₀ in nats, a constant of the bins: `bins.EXCESS_SHIFT` is the same in 2⁻³⁰ nats."""


def shifted(canary: float, control: float) -> float | None:
    """x − z + c₀; None for a prompt that is left out."""
    return canary - control + float(CONTROL_CAP) if control <= float(CONTROL_CAP) else None


def shifted_limit(tolerance: Fraction) -> Fraction:
    """What the mean of the shifted differences may be: d + c₀."""
    return tolerance + CONTROL_CAP
