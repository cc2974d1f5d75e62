"""Which rules can be judged by sequential evidence (`evidence: anytime`), and why others cannot. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from pipeline.core.gate.policy import LEAVING_OUT, Rule
from pipeline.core.statistics.capped import CAP
from pipeline.core.statistics.noise_floor import shifted_limit
from pipeline.core.statistics.slow_share import QUANTILE
from schemas.buckets import SCORE_ONE

LEAST_ALPHA: Final = Fraction(1, 10**6)
MOST_ALPHA: Final = Fraction(1, 2)
LEAST_LIMIT: Final = Fraction(1, SCORE_ONE)
"""Nothing finer is recorded; far below it a ratio to the limit would be no finite number any more."""
POSSIBLE: Final = "kl_lower mean, kl_floor mean, excess mean, and ttft_us p99 with relative_to: baseline"


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a rule cannot be judged so: the key at fault, and the problem with its remedy."""

    key: str
    problem: str


def why_not_sequential(rule: Rule) -> Unfit | None:
    """None where it can."""
    metric = rule.metric
    if rule.action in LEAVING_OUT:
        return Unfit(
            "action", f"{rule.action}: what is left out goes by point evidence; anytime is of the roll-out"
        )
    if metric.family == "requests":
        relative = rule.relative_to == "baseline"
        if metric.name != "ttft_us" or metric.quantile != QUANTILE or not relative:
            return Unfit("evidence", f"anytime evidence is of {POSSIBLE}; for {metric.label} use point")
        if rule.arm != "canary":
            return Unfit("arm", f"{rule.arm!r}: anytime evidence compares the canary; leave arm out")
        if rule.traffic != "all":
            return Unfit("traffic", f"{rule.traffic!r}: anytime evidence is of all traffic; leave it out")
        if rule.limit <= 1:
            return Unfit("limit", "a ratio above 1 is expected, such as 1.15")
        return None
    limit = shifted_limit(rule.limit) if metric.measure == "excess" else rule.limit
    if not LEAST_LIMIT <= limit < CAP:
        return Unfit(
            "limit",
            f"anytime evidence needs a limit above 0 and below {CAP:g} nats, what a pair counts at most;"
            " scores are no finer than 1e-9",
        )
    return None
