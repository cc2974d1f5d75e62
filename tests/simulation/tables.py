"""What the runs came to: counts, shares and medians, and the tables of docs/statistics.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from pipeline.core.gate.policy import Policy, Rule
from tests.simulation.rows import AA, SIMULATED, Delay, Hours, Outcome, Row, Seen
from tests.simulation.scores import HEALTHY_MEAN

DOUBT: Final = 0.01
"""More false trips than alpha allows in this share of simulations at most: then the simulation fails."""
ALL_DAY: Final = 1_000
"""More trips a day than that are not told apart."""


@dataclass(frozen=True, slots=True)
class Results:
    """Outcomes by row, and the policy they are of."""

    policy: Policy
    rows: Sequence[Row]
    outcomes: Mapping[str, Sequence[Outcome]]

    def of(self, kind: type[Row]) -> list[Row]:
        """Rows of one kind, in order."""
        return [row for row in self.rows if isinstance(row, kind)]  # type: ignore[arg-type]

    def seen(self, row: Row, rule: str) -> list[Seen | None]:
        """Per run the rule's first trip, or None."""
        return [
            next((seen for seen in outcome.trips if seen.rule == rule), None)
            for outcome in self.outcomes.get(row.name, ())
        ]


def is_anytime(rule: Rule) -> bool:
    """Whether alpha is promised of it."""
    return rule.sequential


def false_trips(results: Results) -> tuple[int, int]:
    """Of the A/A roll-outs (rows `aa …`): how many there were, and in how many an anytime rule tripped."""
    rules = {rule.id for rule in results.policy.rules if is_anytime(rule) and rule.enforcing}
    outcomes = [
        outcome
        for row in results.of(AA)
        if row.name.startswith("aa ")
        for outcome in results.outcomes.get(row.name, ())
    ]
    tripped = sum(any(seen.rule in rules for seen in outcome.trips) for outcome in outcomes)
    return len(outcomes), tripped


def is_over(trips: int, runs: int, alpha: float) -> bool:
    """Whether so many trips are more than a chance of alpha each would bring about: P(≥ trips) < DOUBT."""
    return trips > 0 and tail(trips, runs, alpha) < DOUBT


def tail(trips: int, runs: int, alpha: float) -> float:
    """P(at least so many of `runs` trip) where each does with the chance alpha."""
    below = math.fsum(
        math.exp(
            math.lgamma(runs + 1) - math.lgamma(k + 1) - math.lgamma(runs - k + 1)
            + k * math.log(alpha) + (runs - k) * math.log1p(-alpha)
        )
        for k in range(trips)
    )  # fmt: skip
    return max(0.0, 1 - below)


def markdown(results: Results) -> dict[str, str]:
    """The tables by name."""
    return {
        "aa": _aa(results),
        "days": _days(results, [row for row in results.of(Hours) if row.name.endswith("requests/s")]),
        "samples": _samples(results, [row for row in results.of(Hours) if row.name.endswith("requests/s")]),
        "stress": _days(results, [row for row in results.of(Hours) if not row.name.endswith("requests/s")]),
        "delay": _delay(results, [row for row in results.of(Delay) if not row.name.startswith("G6")]),
        "g6": _delay(results, [row for row in results.of(Delay) if row.name.startswith("G6")]),
    }


def _simulated(results: Results) -> list[Rule]:
    return [rule for rule in results.policy.rules if rule.metric.measure in SIMULATED]


def _pair_rules(results: Results) -> list[Rule]:
    return [rule for rule in _simulated(results) if rule.metric.family == "pairs"]


def _aa(results: Results) -> str:
    rules = _pair_rules(results)
    kinds = ["anytime" if is_anytime(rule) else "point" for rule in rules]
    named = [f"`{rule.id}` ({kind})" for rule, kind in zip(rules, kinds, strict=True)]
    lines = [("roll-outs of 10,000 pairs", "runs", *named)]
    for row in results.of(AA):
        runs = len(results.outcomes.get(row.name, ()))
        told = [_share(sum(seen is not None for seen in results.seen(row, rule.id)), runs) for rule in rules]
        lines.append((row.name, f"{runs:,}", *told))
    return _table(lines)


def _share(count: int, runs: int) -> str:
    return f"{count / runs:.3f}" if count else "0" if runs else "–"


def _days(results: Results, rows: Iterable[Row]) -> str:
    held = list(rows)
    lines = [("trips per day", *(row.name for row in held))]
    for rule in _simulated(results):
        lines.append((f"`{rule.id}` ({rule.mode})", *(per_day(results, row, rule) for row in held)))
    spent = [f"{days(results, row):.1f}" for row in held]
    lines.append(("days simulated", *spent))
    return _table(lines)


def _samples(results: Results, rows: Sequence[Row]) -> str:
    lines = [("most samples on both sides of a scope", *(row.name for row in rows), "needed")]
    for rule in results.policy.rules:
        found = [
            max(
                (
                    outcome.most[rule.id]
                    for outcome in results.outcomes.get(row.name, ())
                    if rule.id in outcome.most
                ),
                default=None,
            )
            for row in rows
        ]
        if rule.relative_to is not None and not rule.sequential:
            told = ["–" if most is None else f"{most:,}" for most in found]
            lines.append((f"`{rule.id}`", *told, f"{rule.min_samples:,}"))
    return _table(lines)


def days(results: Results, row: Row) -> float:
    """Days of traffic that this row simulated."""
    assert isinstance(row, Hours)
    return len(results.outcomes.get(row.name, ())) * row.hours / 24


def per_day(results: Results, row: Row, rule: Rule) -> str:
    """How often the rule trips a day in this row; – where the row differs in what the rule does not see."""
    assert isinstance(row, Hours)
    if rule.metric.family == "requests" and row.mean != HEALTHY_MEAN:
        return "–"
    count = sum(
        seen.rule == rule.id for outcome in results.outcomes.get(row.name, ()) for seen in outcome.trips
    )
    total = days(results, row)
    if not total:
        return "–"
    if count / total > ALL_DAY:
        return f"> {ALL_DAY:,}"
    return f"{count / total:,.2g}" if count < 10 * total else f"{count / total:,.0f}"


def _delay(results: Results, rows: Iterable[Row]) -> str:
    rules = _pair_rules(results)
    lines = [("fault", "runs", *(f"`{rule.id}`" for rule in rules))]
    for row in rows:
        runs = len(results.outcomes.get(row.name, ()))
        lines.append((row.name, f"{runs}", *(delay(results, row, rule.id) for rule in rules)))
    return _table(lines)


def delay(results: Results, row: Row, rule: str) -> str:
    """`pairs median/p90, seconds median`; how many never tripped, if any."""
    seen = [one for one in results.seen(row, rule) if one is not None]
    runs = len(results.outcomes.get(row.name, ()))
    if len(seen) * 2 <= runs:
        return f"{len(seen)} of {runs}"
    pairs = [one.affected for one in seen]
    late = "" if len(seen) == runs else f" ({len(seen)} of {runs})"
    seconds = median(one.seconds for one in seen)
    return f"{median(pairs):.0f}/{np.quantile(pairs, 0.9):.0f}, {seconds:.0f} s{late}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---", *("--:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))
