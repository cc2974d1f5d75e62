"""Where a deviation sits (G7). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pipeline.core.gate.left_out import place_of
from pipeline.core.gate.metrics import excess_of, samples_of
from pipeline.core.gate.policy import Rule
from pipeline.core.gate.relative import Lookup, excesses
from pipeline.core.gate.rules import LOCATING, whole_scope
from pipeline.core.gate.windows import Scope
from schemas.control import Located

EXCESS_SHARE: Final = 0.8
TRAFFIC_SHARE: Final = 0.5


def locate(rule: Rule, scopes: Iterable[Scope], found: Scope, lookup: Lookup) -> Located | None:
    """The class that carries ≥ 80 % of the excess on ≤ 50 % of the traffic; None: it is everywhere.

    Excess is what single values have over the rule's limit, added up: it needs no guess of a healthy level,
    and nested classes can be compared. Of a rule relative to the baseline it is what the canary has over the
    baseline's own level, at the threshold of the scope `found` to be over. Of several classes, the one
    whose share of excess stands highest over its share of traffic is named; ties go to the smaller one, then
    in order of dimension and value. Two faulty nodes of ten are no single class: none is named.
    """
    known = sorted(scope for scope in scopes if scope[0] in LOCATING)
    return _named(rule, known, whole_scope(rule), found, lookup)


def locate_inside(rule: Rule, scopes: Iterable[Scope], found: Scope, lookup: Lookup) -> Located | None:
    """Of a part that trips on its own: the class inside it that carries as much of the part's excess on as
    little of the part's traffic, by the same rule; None: all of it. The shares told are of the roll-out.

    The roll-out's healthy values have an excess, too: few of many, and more than a thin class can have. They
    keep it under 80 % of the roll-out's, not of its own part's (G6).
    """
    known = sorted(scope for scope in scopes if _is_inside(scope, found))
    return _named(rule, known, found, found, lookup)


def _named(rule: Rule, known: Sequence[Scope], part: Scope, found: Scope, lookup: Lookup) -> Located | None:
    """Of the classes `known`, the one that carries the excess of `part`."""
    whole = whole_scope(rule)
    compared = sorted({whole, part, *known})
    if rule.relative_to is None:
        excess: Mapping[Scope, float] = {scope: excess_of(rule, lookup(scope)) for scope in compared}
    else:
        excess = excesses(rule, found, compared, lookup)
    samples = {scope: samples_of(rule, lookup(scope)) for scope in compared}
    if excess.get(part, 0) <= 0 or samples[part] <= 0:
        return None
    ranked = []
    for scope in known:
        if scope == part or scope not in excess:
            continue
        share, traffic = excess[scope] / excess[part], samples[scope] / samples[part]
        if share >= EXCESS_SHARE and traffic <= TRAFFIC_SHARE:
            ranked.append((traffic - share, traffic, LOCATING.index(scope[0]), scope))
    if not ranked:
        return None
    scope = min(ranked)[-1]
    total = excess.get(whole, 0)
    share = excess[scope] / total if total > 0 else 1.0
    return Located(
        dimension=scope[0],
        value=scope[1],
        share_of_excess=round(min(share, 1.0), 6),
        share_of_traffic=round(samples[scope] / max(samples[whole], samples[scope]), 6),
    )


def _is_inside(scope: Scope, part: Scope) -> bool:
    """Whether a class is a smaller one of this part: a node's contexts, a context's longer ones."""
    inner, outer = place_of(scope), place_of(part)
    if inner is None or outer is None or scope == part:
        return False
    return outer.node in (None, inner.node) and inner.limit >= outer.limit
