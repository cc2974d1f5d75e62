"""Rulers relative to the baseline: the canary's quantile against the baseline's, like with like (G2, G7).

Both arms stand in one window; the baseline's cells under dimensions of their own. Which of them a scope is
compared with: a stratum with the same stratum, a node with the whole baseline, a node's context class with
that class of the baseline, anything else with its equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from pipeline.core.bins import bin_lower, bin_upper
from pipeline.core.cells import ALL, node_and_context
from pipeline.core.gate.metrics import Reading, Vec, bin_middle, over_from, quantile_bin
from pipeline.core.gate.policy import Rule
from pipeline.core.gate.windows import Scope

Lookup: TypeAlias = Callable[[Scope], Mapping[int, int]]
"""Scope → its window; empty where there is nothing."""
_SIDE: Final = "baseline "
"""Before the dimension of a baseline's cell; no cell's dimension holds a space."""


def baseline_dimension(dimension: str) -> str:
    """Of the baseline's cells that those of this dimension are compared with."""
    return {"node": ALL, "node_context": "context"}.get(dimension, dimension)


def baseline_scope(scope: Scope) -> Scope:
    """The baseline's scope that this one of the canary's is compared with, as a cell names it."""
    dimension, value = scope
    if dimension == "node":
        return ALL, ""
    if dimension == "node_context":
        return "context", node_and_context(value)[1]
    return scope


def held_as(scope: Scope) -> Scope:
    """Where the window keeps this cell of the baseline."""
    return _SIDE + scope[0], scope[1]


def is_baseline(scope: Scope) -> bool:
    """Whether the window keeps a cell of the baseline here."""
    return scope[0].startswith(_SIDE)


def compare(rule: Rule, scope: Scope, lookup: Lookup) -> Reading:
    """The canary's quantile against `limit` times the baseline's.

    Over only if it is for every pair of values that the two bins can hold: canary ≥ lower edge + 1,
    baseline ≤ upper edge, all integers. So the histogram's resolution never trips anything; at 1.15, which is
    seven bins, the canary's bin must be the eighth above the baseline's or a later one. Without `min_samples`
    on both sides nothing is compared.
    """
    mine, like = lookup(scope), lookup(held_as(baseline_scope(scope)))
    samples, baseline_samples = sum(mine.values()), sum(like.values())
    if min(samples, baseline_samples) < rule.min_samples:
        return Reading(max(samples, 0), None, None, False, baseline_samples=max(baseline_samples, 0))
    held, base = quantile_bin(rule.metric, mine), quantile_bin(rule.metric, like)
    level, baseline = bin_middle(rule.metric, held), bin_middle(rule.metric, base)
    if not base:
        # All of it at 0: there is nothing to multiply.
        return Reading(samples, None, None, False, _told(rule, level), None, baseline_samples)
    lower, upper = bin_lower(rule.metric.kind, held), bin_upper(rule.metric.kind, base)
    numerator, denominator = rule.limit_ratio
    return Reading(
        samples,
        level / baseline,
        lower / upper,
        held > 0 and (lower + 1) * denominator > numerator * upper,
        _told(rule, level),
        _told(rule, baseline),
        baseline_samples,
    )


def excesses(rule: Rule, found: Scope, scopes: Iterable[Scope], lookup: Lookup) -> dict[Scope, float]:
    """How many values each scope has over a threshold beyond the share that its like of the baseline has.

    The threshold is one for all, `limit` times the baseline's quantile where the rule found the deviation
    (`found`), so that what they carry can be compared and adds up. Scopes without a like are left out.
    """
    base = lookup(held_as(baseline_scope(found)))
    if not base:
        return {}
    at = bin_upper(rule.metric.kind, quantile_bin(rule.metric, base))
    numerator, denominator = rule.limit_ratio
    over = over_from(rule.metric.kind, -(-numerator * at // denominator))
    told: dict[Scope, float] = {}
    for scope in scopes:
        mine, like = lookup(scope), lookup(held_as(baseline_scope(scope)))
        samples, baseline_samples = sum(mine.values()), sum(like.values())
        if samples > 0 and baseline_samples > 0:
            own = sum(count for held, count in like.items() if held >= over) / baseline_samples
            told[scope] = sum(count for held, count in mine.items() if held >= over) - own * samples
    return told


def scarcer(scope: Scope, samples: Callable[[Vec], int], lookup: Callable[[Scope], Vec]) -> Scope:
    """Of a scope and its like, as the window keeps them, the one with fewer samples."""
    like = held_as(baseline_scope(scope))
    return like if samples(lookup(like)) < samples(lookup(scope)) else scope


def _told(rule: Rule, middle: int) -> float | None:
    """A level in the unit that people know the metric by."""
    if rule.metric.per_second:
        return 1_000_000 / middle if middle else None
    return middle / rule.metric.unit
