"""Which traffic cannot trip a rule of pairs: by arrays, for hundreds of roll-outs; the gate judges the rest.

The gate's own rules cost too much for days of healthy traffic in which nothing happens. A mean over its
window is compared in the same integers; evidence that adds up is worked out a second time (statistics.md
§0.1) and compared with a margin. `test_screen` shows that what is left out here would not have tripped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.bins import bin_lowers, bin_of
from pipeline.core.cells import ALL
from pipeline.core.evidence import Dimension
from pipeline.core.gate.policy import Policy, Rule, alpha_ledger
from schemas.columns import F8, I8
from tests.simulation.betting import BETS, restart_weight
from tests.simulation.cells import node_names
from tests.simulation.traffic import REQUEST_TYPES, Pairs

CEILING: Final = 1e30
MARGIN: Final = 0.99
"""Evidence that comes so near its bound is left to the gate."""


def may_trip(made: Pairs, nodes: int, policy: Policy, rules: frozenset[str]) -> frozenset[str]:
    """Those of the rules that the gate must judge on this traffic: no other can trip."""
    found = set()
    for rule in policy.rules:
        if rule.id not in rules or made.n == 0:
            continue
        if rule.sequential:
            bound = next(share.bound for share in alpha_ledger(policy) if share.rule.id == rule.id)
            if greatest(made, nodes, rule) >= MARGIN * bound:
                found.add(rule.id)
        elif rule.hold_steps > 1 or rule.metric.measure != "kl_lower" or is_over(made, nodes, rule):
            found.add(rule.id)
    return frozenset(found)


def is_over(made: Pairs, nodes: int, rule: Rule) -> bool:
    """Whether the mean of any window of any scope is over the limit with enough samples."""
    numerator, denominator = rule.limit_ratio
    length = int(made.second[-1]) - int(made.second[0]) + 1
    at = made.second - made.second[0]
    for scope in _scopes(made, nodes, rule):
        member = scope.codes >= 0
        width = len(scope.values)
        place = at[member] * width + scope.codes[member]
        count = windows(np.bincount(place, minlength=length * width), length, rule.window_s)
        # Whole numbers below 2⁵³: exact as floats.
        sums = np.bincount(place, made.score[member].astype(np.float64), length * width)
        total = windows(sums.astype(np.int64), length, rule.window_s)
        if ((count >= rule.min_samples) & (total * denominator > numerator * count)).any():
            return True
    return False


def windows(per_second: I8, length: int, window_s: int) -> I8:
    """(length, …) sums over the last `window_s` seconds of values a second."""
    total = np.cumsum(per_second.reshape(length, -1), axis=0)
    total[window_s:] -= total[:-window_s].copy()
    return total


def greatest(made: Pairs, nodes: int, rule: Rule) -> float:
    """The most that the weighted evidence of all scopes comes to at the end of any second."""
    over, under = rule.limit_ratio
    kind = rule.metric.kind
    growth_of_one: F8 = np.log1p(np.outer(bin_lowers(kind) * under / over - 1, BETS))
    values = made.excess if kind == "excess" else made.score
    counted = np.flatnonzero(values >= 0)
    if not len(counted):
        return 0.0
    made = dataclasses.replace(
        made, **{each.name: getattr(made, each.name)[counted] for each in dataclasses.fields(made)}
    )
    bins = bin_of(kind, values[counted])
    parts = _scopes(made, nodes, rule)
    levels = sorted({part.name for part in parts})
    rows, scopes, base = [], [], 0
    level_of: list[int] = []
    names: list[tuple[bytes, bytes]] = []
    for part in parts:
        member = np.flatnonzero(part.codes >= 0)
        rows.append(member)
        scopes.append(part.codes[member] + base)
        base += len(part.values)
        level_of += [levels.index(part.name)] * len(part.values)
        names += [(part.name.encode(), value.encode()) for value in part.values]
    row, scope = np.concatenate(rows), np.concatenate(scopes)
    order = np.argsort(made.second[row] * base + scope, kind="stable")
    row, scope = row[order], scope[order]
    second = made.second[row]
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(second) != 0) | (np.diff(scope) != 0))))
    growth = np.add.reduceat(growth_of_one[bins[row]], starts, axis=0)
    which, when = scope[starts], second[starts]
    bounds = np.flatnonzero(np.concatenate(([True], np.diff(when) != 0, [True])))
    weight = 1 / len(rule.scopes)
    return weight * bet(np.exp(np.minimum(growth, 600.0)), which, bounds, level_of, names)


def bet(
    grown: F8, which: I8, bounds: I8, level_of: Sequence[int], names: Sequence[tuple[bytes, bytes]]
) -> float:
    """Of levels that weigh 1 each. `grown` of cell i, of the scope `which[i]`; `bounds`: where seconds begin,
    and the end."""
    seconds = len(bounds) - 1
    restarts = np.array([0.0, *(restart_weight(b) for b in range(1, seconds + 1))])
    stakes, buckets = np.zeros((len(names), len(BETS))), np.zeros(len(names), dtype=np.int64)
    evidence, weights = np.zeros(len(names)), np.zeros(len(names))
    known = np.zeros(len(names), dtype=np.bool_)
    ranks = [0] * (max(level_of) + 1)
    most = 0.0
    for at in range(seconds):
        cells = slice(bounds[at], bounds[at + 1])
        here = which[cells]
        if not known[here].all():
            for new in sorted(here[~known[here]].tolist(), key=names.__getitem__):
                ranks[level_of[new]] += 1
                weights[new] = restart_weight(ranks[level_of[new]])
                known[new] = True
        buckets[here] += 1
        held = np.minimum((stakes[here] + restarts[buckets[here]][:, None]) * grown[cells], CEILING)
        stakes[here] = held
        evidence[here] = held.mean(axis=1)
        most = max(most, float(weights @ evidence))
    return most


def _scopes(made: Pairs, nodes: int, rule: Rule) -> list[Dimension]:
    """Of the rule; nested contexts are one dimension each, of the same name."""
    node = Dimension("node", node_names("canary", nodes), made.node)
    nested, crossed = ev.contexts(made.input_tokens, node)
    every = [
        ev.constant(ALL, "", made.n),
        node,
        *nested,
        Dimension("request_type", REQUEST_TYPES, made.request_type),
        *crossed,
    ]
    wanted = {ALL if name == "rollout" else name for name in rule.scopes}
    assert wanted <= {each.name for each in every} | {"context", "node_context"}
    return [each for each in every if each.name in wanted]
