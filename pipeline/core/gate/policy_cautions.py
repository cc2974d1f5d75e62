"""What a policy says that its author may not mean: rules known to cry wolf, rules that can never fire. Pure.

A caution is no mistake: the policy is obeyed as it stands. What only observes gets none for crying wolf.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from pipeline.core.bins import LATENCY_MAX_US, SCORE_MAX
from pipeline.core.gate.policy import ACTIONS, Policy, Rule
from schemas.buckets import SCORE_ONE

Code: TypeAlias = Literal[
    "nothing_enforces", "short_latency_window", "thin_tail", "floor_estimator", "never_over", "never_first",
    "needs_control", "few_for_ratio",
]  # fmt: skip

SHORT_WINDOW_S: Final = 10
"""B2's: a latency quantile over so short a window follows every burst."""
BEYOND_TAIL: Final = 10
"""Values that must lie beyond a quantile for it to be more than the few slowest requests."""
RATIO_SAMPLES: Final = 1_000
"""On both sides of a ratio of quantiles that is judged by its value (statistics.md §0.4)."""
HEALTHY_FLOOR: Final = Fraction(161, 1000)
"""Mean `kl_floor` of a healthy canary with a calibrated 8-bit cache; of other batch shapes alone 0.063."""


class Caution(Struct, frozen=True, kw_only=True):
    """`rule` None: it is about the whole policy."""

    code: Code
    rule: str | None
    sentence: str
    remedy: str


def cautions(policy: Policy) -> tuple[Caution, ...]:
    """All of them, in the policy's order."""
    found: list[Caution] = []
    if not any(rule.enforcing for rule in policy.rules):
        found.append(
            Caution(
                code="nothing_enforces",
                rule=None,
                sentence="no rule enforces: nothing trips, and no weight step is taken by itself",
                remedy="that is how a first week may look; then `mode: enforce`",
            )
        )
    for rule in policy.rules:
        if rule.enforcing:
            found += _crying_wolf(rule)
        found += _never_over(rule)
        found += _never_first(rule, policy)
        found += _needs_control(rule)
    return tuple(found)


def _crying_wolf(rule: Rule) -> Iterable[Caution]:
    metric = rule.metric
    if metric.statistic == "quantile" and not rule.sequential:
        assert metric.quantile is not None
        if rule.window_s <= SHORT_WINDOW_S:
            yield Caution(
                code="short_latency_window",
                rule=rule.id,
                sentence=f"{metric.label} over {rule.window_s} s follows every burst; B2's latency rule, p95"
                " of 10 s three times in a row, trips a healthy service within 20 minutes at any rate",
                remedy="a window of 60 s or more, or `mode: observe`",
            )
        beyond = rule.min_samples * (1 - metric.quantile)
        if rule.relative_to is not None:
            if rule.min_samples < RATIO_SAMPLES:
                yield Caution(
                    code="few_for_ratio",
                    rule=rule.id,
                    sentence=f"a ratio of two {metric.label} of {rule.min_samples} samples is noise: of equal"
                    " arms one's p99 over 60 s is 1.15 times the other's for 30 s always at 2 requests/s,"
                    " and in 10 to 82 % of 20 minutes at 20/s",
                    remedy=f"min_samples: {RATIO_SAMPLES}, `evidence: anytime`, or `mode: observe`",
                )
        elif beyond < BEYOND_TAIL:
            needed = -int(-BEYOND_TAIL // (1 - metric.quantile))
            yield Caution(
                code="thin_tail",
                rule=rule.id,
                sentence=f"{metric.label} of {rule.min_samples} samples rests on the"
                f" {max(1, int(beyond) + 1)} slowest of them, and slow requests come in bursts",
                remedy=f"min_samples: {needed}, or `mode: observe`",
            )
    if metric.name == "kl_floor" and rule.limit < HEALTHY_FLOOR:
        yield Caution(
            code="floor_estimator",
            rule=rule.id,
            sentence=f"kl_floor of a healthy canary was measured at 0.063 to {float(HEALTHY_FLOOR):g} nats:"
            " its 1e-9 floor makes tokens that one list lacks look impossible",
            remedy="metric: kl_lower, which never exceeds the true divergence, or `mode: observe`",
        )


def _never_over(rule: Rule) -> Iterable[Caution]:
    metric = rule.metric
    if rule.relative_to is not None:
        return
    if metric.statistic == "share":
        most = Fraction(1)
    else:
        most = Fraction(SCORE_MAX, SCORE_ONE) if metric.kind != "latency" else Fraction(LATENCY_MAX_US)
    if rule.limit >= most:
        yield Caution(
            code="never_over",
            rule=rule.id,
            sentence=f"its action, {rule.action}, never fires: nothing can be over the limit",
            remedy="a limit that a sick canary would exceed",
        )


def _never_first(rule: Rule, policy: Policy) -> Iterable[Caution]:
    """A milder action at a limit that a severer rule reaches first, all else being equal or stricter."""
    if not rule.enforcing:
        return
    for other in policy.rules:
        if (
            other.enforcing
            and ACTIONS.index(other.action) > ACTIONS.index(rule.action)
            and other.limit <= rule.limit
            and _judges_as_much(other, rule)
        ):
            yield Caution(
                code="never_first",
                rule=rule.id,
                sentence=f"its action, {rule.action}, never fires: {other.id} is over its own limit whenever"
                f" this rule is, and the severer action ({other.action}) wins",
                remedy="a limit below that rule's, or leave one of them out",
            )
            return


def _needs_control(rule: Rule) -> Iterable[Caution]:
    if rule.metric.measure == "excess" and rule.enforcing:
        yield Caution(
            code="needs_control",
            rule=rule.id,
            sentence="it compares canary with control: where a spec has no control arm it is not judged,"
            " never passes, and no weight step is taken",
            remedy="arms.control in the spec, with the baseline's version",
        )


def _judges_as_much(other: Rule, rule: Rule) -> bool:
    return (
        (other.metric, other.relative_to, other.evidence, other.window_s, other.arm, other.traffic)
        == (rule.metric, rule.relative_to, rule.evidence, rule.window_s, rule.arm, rule.traffic)
        and other.min_samples <= rule.min_samples
        and other.hold_steps <= rule.hold_steps
        and set(rule.scopes) <= set(other.scopes)
    )
