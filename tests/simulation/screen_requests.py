"""Which traffic cannot trip a rule of requests: by arrays, as `screen` does it for rules of pairs.

A quantile's bin, a share and a ratio are worked out from windows of the same integer counts, for all
seconds at once; the blocks of slow requests a second time from statistics.md §0.4. What is left out here
would not have tripped (`test_screen_requests`); what is not is judged by the gate's own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from pipeline.core.bins import bin_lowers, bin_of, bin_uppers
from pipeline.core.cells import ALL
from pipeline.core.evidence import Dimension
from pipeline.core.gate.metrics import over_from
from pipeline.core.gate.policy import Policy, Rule, alpha_ledger
from pipeline.core.gate.relative import baseline_dimension, baseline_scope
from pipeline.core.gate.windows import Scope
from pipeline.core.statistics.slow_share import BLOCK_S, LEAST_SAMPLES, LOOK_BACK_S, bins_of
from schemas.columns import F8, I8, Bool
from schemas.events import Arm
from tests.simulation.betting import BETS
from tests.simulation.cells import node_names, request_dimensions
from tests.simulation.screen import MARGIN, bet, windows
from tests.simulation.traffic import Requests

TRAFFIC: Final[Mapping[Arm, str]] = {"baseline": "user", "canary": "shadow"}
Answered = Mapping[Arm, Requests]


def may_trip(
    answered: Answered, nodes: int, policy: Policy, rules: frozenset[str], length_s: int
) -> frozenset[str]:
    """Those of the rules that the gate must judge on these `length_s` seconds: no other can trip."""
    found = set()
    for rule in policy.rules:
        if rule.id not in rules:
            continue
        if rule.sequential:
            bound = next(share.bound for share in alpha_ledger(policy) if share.rule.id == rule.id)
            trips = greatest(answered, nodes, rule, length_s) >= MARGIN * bound
        else:
            trips = is_held(answered, nodes, rule, length_s)
        if trips:
            found.add(rule.id)
    return frozenset(found)


def is_held(answered: Answered, nodes: int, rule: Rule, length_s: int) -> bool:
    """Whether any scope stands over the limit for as long as the rule asks, or might."""
    seen = _Seen(answered, nodes, rule, length_s)
    look = _ratios if rule.relative_to else _shares if rule.metric.statistic == "share" else _quantiles
    return any(_runs(enough, over, rule.hold_steps) for enough, over in look(seen))


def _runs(enough: Bool, over: Bool, steps: int) -> bool:
    """Whether it is over so long without a second that says it is not; too few samples say nothing."""
    at = np.flatnonzero(enough & over)
    if not len(at):
        return False
    breaks = np.cumsum(enough & ~over)[at]
    starts = np.flatnonzero(np.concatenate(([True], np.diff(breaks) != 0)))
    ends = np.append(starts[1:], len(at)) - 1
    return bool((at[ends] - at[starts] + 1 >= steps).any())


class _Seen:
    """The values of one rule, by arm: where they are counted, per second."""

    def __init__(self, answered: Answered, nodes: int, rule: Rule, length_s: int) -> None:
        """Nothing is counted yet."""
        self.rule, self.length_s = rule, length_s
        self.bins: dict[Arm, I8] = {}
        self.second: dict[Arm, I8] = {}
        self.dimensions: dict[Arm, list[Dimension]] = {}
        for arm, made in answered.items():
            part = made.second < length_s
            self.second[arm] = made.second[part]
            values = made.itl_us if rule.metric.measure == "itl_us" else made.ttft_us
            self.bins[arm] = bin_of(rule.metric.kind, values[part])
            every = request_dimensions(made, node_names(arm, nodes), TRAFFIC[arm])
            self.dimensions[arm] = [Dimension(each.name, each.values, each.codes[part]) for each in every]

    def counts(self, arm: Arm, names: frozenset[str]) -> Iterator[tuple[Dimension, I8]]:
        """Of these dimensions, (length, values) counts of the window that ends with each second."""
        for each in self.dimensions[arm]:
            if each.name in names:
                width, member = len(each.values), each.codes >= 0
                place = self.second[arm][member] * width + each.codes[member]
                found = np.bincount(place, minlength=self.length_s * width)
                yield each, windows(found, self.length_s, self.rule.window_s)

    def scopes(self, arm: Arm, names: frozenset[str], least: int) -> Iterator[tuple[Scope, Bool]]:
        """Scopes of these dimensions with `least` values in any window of the rule, and which values."""
        for each, count in self.counts(arm, names):
            for code in np.flatnonzero(count.max(axis=0) >= least).tolist():
                yield (each.name, each.values[code]), each.codes == code

    def windows(self, arm: Arm, which: Bool, bins: int) -> I8:
        """(length, bins) counts of the window that ends with each second."""
        place = self.second[arm][which] * bins + self.bins[arm][which]
        return windows(np.bincount(place, minlength=self.length_s * bins), self.length_s, self.rule.window_s)

    @property
    def width(self) -> int:
        """Bins up to the greatest value of any arm."""
        return 1 + max((int(held.max()) for held in self.bins.values() if len(held)), default=0)

    def users(self) -> Iterator[tuple[Arm, Bool]]:
        """What a rule of the whole roll-out judges, arm by arm."""
        assert self.rule.scopes == ("rollout",)
        for arm, second in self.second.items():
            if self.rule.arm in (arm, "any") and self.rule.traffic in ("all", TRAFFIC[arm]):
                yield arm, np.ones(len(second), dtype=np.bool_)


def _shares(seen: _Seen) -> Iterator[tuple[Bool, Bool]]:
    rule = seen.rule
    assert rule.metric.over is not None
    first = over_from(rule.metric.kind, rule.metric.over)
    numerator, denominator = rule.limit_ratio
    count, over = _counted(seen, lambda bins: bins >= first)
    yield count >= rule.min_samples, over * denominator > numerator * count


def _quantiles(seen: _Seen) -> Iterator[tuple[Bool, Bool]]:
    """Over if the rank's bin lies over the limit: fewer values below that bin than the rank."""
    rule = seen.rule
    assert rule.metric.quantile is not None
    first = over_from(rule.metric.kind, int(rule.limit))
    count, below = _counted(seen, lambda bins: bins < first)
    yield count >= rule.min_samples, below < _rank(rule, count)


def _counted(seen: _Seen, counts: Callable[[I8], Bool]) -> tuple[I8, I8]:
    """(length,) values in the window, and those of them that count."""
    total = np.zeros((2, seen.length_s), dtype=np.int64)
    for arm, which in seen.users():
        at, held = seen.second[arm][which], seen.bins[arm][which]
        total[0] += np.bincount(at, minlength=seen.length_s)
        total[1] += np.bincount(at[counts(held)], minlength=seen.length_s)
    both = [windows(each, seen.length_s, seen.rule.window_s).reshape(-1) for each in total]
    return both[0], both[1]


def _rank(rule: Rule, count: I8) -> I8:
    assert rule.metric.quantile is not None
    numerator, denominator = rule.metric.quantile.as_integer_ratio()
    rank = np.maximum(1, -(-numerator * count // denominator))
    return count + 1 - rank if rule.metric.per_second else rank


def most(answered: Answered, nodes: int, rule: Rule, length_s: int) -> int:
    """The most samples that a ruler ever has on both sides of any of its scopes."""
    seen = _Seen(answered, nodes, rule, length_s)
    names = frozenset(ALL if name == "rollout" else name for name in rule.scopes)
    likes = {
        (each.name, value): count[:, code]
        for each, count in seen.counts("baseline", frozenset(map(baseline_dimension, names)))
        for code, value in enumerate(each.values)
    }
    found = 0
    for each, count in seen.counts("canary", names):
        for code, value in enumerate(each.values):
            like = likes.get(baseline_scope((each.name, value)))
            if like is not None:
                found = max(found, int(np.minimum(count[:, code], like).max()))
    return found


def _ratios(seen: _Seen) -> Iterator[tuple[Bool, Bool]]:
    """Of every scope that has enough samples on both sides at any time."""
    rule, width = seen.rule, seen.width
    names = frozenset(ALL if name == "rollout" else name for name in rule.scopes)
    likes = dict(seen.scopes("baseline", frozenset(map(baseline_dimension, names)), rule.min_samples))
    lowers, uppers = bin_lowers(rule.metric.kind), bin_uppers(rule.metric.kind)
    numerator, denominator = rule.limit_ratio
    for scope, which in seen.scopes("canary", names, rule.min_samples):
        like = likes.get(baseline_scope(scope))
        if like is None:
            continue
        counts, bins = [], []
        for arm, members in (("canary", which), ("baseline", like)):
            held = np.cumsum(seen.windows(arm, members, width), axis=1)  # type: ignore[arg-type]
            counts.append(held[:, -1])
            bins.append((held < _rank(rule, held[:, -1])[:, None]).sum(axis=1))
        mine, base = (np.minimum(each, width - 1) for each in bins)
        over = (lowers[mine] + 1) * denominator > numerator * uppers[base]
        yield np.minimum(*counts) >= rule.min_samples, over & (mine > 0) & (base > 0)


def greatest(answered: Answered, nodes: int, rule: Rule, length_s: int) -> float:
    """The most that the weighted evidence of all strata comes to at the end of any block."""
    assert rule.scopes == ("stratum",)
    seen = _Seen(answered, nodes, rule, length_s)
    blocks, width, further = length_s // BLOCK_S, seen.width, bins_of(rule.limit)
    likes = dict(seen.scopes("baseline", frozenset(rule.scopes), 1))
    found: list[tuple[F8, I8]] = []
    names: list[tuple[bytes, bytes]] = []
    for scope, which in seen.scopes("canary", frozenset(rule.scopes), 1):
        if scope not in likes:
            continue
        mine = _blocks(seen, "canary", which, blocks, width)
        ratio, at = _block_ratios(mine, _blocks(seen, "baseline", likes[scope], blocks, width), further)
        if len(at):
            found.append((ratio, at))
            names.append((scope[0].encode(), scope[1].encode()))
    if not found:
        return 0.0
    ratios = np.concatenate([ratio for ratio, _ in found])
    when = np.concatenate([at for _, at in found])
    which_scope = np.repeat(np.arange(len(found)), [len(at) for _, at in found])
    order = np.argsort(when, kind="stable")
    grown = 1 + (ratios[order, None] - 1) * BETS
    bounds = np.flatnonzero(np.concatenate(([True], np.diff(when[order]) != 0, [True])))
    return bet(grown, which_scope[order], bounds, [0] * len(found), names)


def _blocks(seen: _Seen, arm: Arm, which: Bool, blocks: int, width: int) -> I8:
    """(blocks, width) counts."""
    block = seen.second[arm][which] // BLOCK_S
    inside = block < blocks
    place = block[inside] * width + seen.bins[arm][which][inside]
    return np.bincount(place, minlength=blocks * width).reshape(blocks, width)


def _block_ratios(canary: I8, baseline: I8, further: int) -> tuple[F8, I8]:
    """Y of every block that counts, and which those are."""
    blocks, width = canary.shape
    before = windows(baseline.reshape(-1), blocks, LOOK_BACK_S // BLOCK_S)
    before = np.concatenate((np.zeros((1, width), dtype=np.int64), before[:-1]))
    total = before.sum(axis=1)
    p99 = (np.cumsum(before, axis=1) < -(-99 * total // 100)[:, None]).sum(axis=1)
    bins = np.arange(width)
    slow = np.where(bins > (p99 + further)[:, None], canary, 0).sum(axis=1)
    base_slow = np.where(bins > p99[:, None], baseline, 0).sum(axis=1)
    n, base = canary.sum(axis=1), baseline.sum(axis=1)
    at = np.flatnonzero((total >= LEAST_SAMPLES) & (n > 0))
    share = np.maximum((base_slow[at] + 1) / (base[at] + 1), 0.015)
    return slow[at] / n[at] / share, at
