"""The rules behind a decision: all that the log holds of each, and the sentences made of it (X5). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from pipeline.core.gate.answer import span
from pipeline.core.gate.explanation_numbers import (
    amount,
    counted_as,
    is_certified,
    listed,
    metric_words,
    place_words,
    share_words,
)
from pipeline.core.gate.location import EXCESS_SHARE, TRAFFIC_SHARE
from pipeline.core.gate.policy import Policy, Rule
from pipeline.core.gate.proof import PROOFS
from schemas.control import Cause, Decision, Evaluation, Located, RolloutSpec

_WON: Final = re.compile(r"E ([0-9.]+(?:e[+-]?[0-9]+)?) of ([0-9.]+(?:e[+-]?[0-9]+)?)")
"""How the evaluation of a sequential rule begins its reason."""
SCOPES_SAID: Final = 3
"""Parts of a rule over its limit that a sentence names."""
_BY_RULES: Final = ("trip", "pause", "eject", "narrow", "advise")
"""Kinds behind which rules stand: in any other a directive's cause is of an earlier decision."""


@dataclass(frozen=True, slots=True)
class Account:
    """What the log holds about one decision of a roll-out.

    `before`: the newest earlier one that was obeyed; `trips`: earlier trips, oldest first. `spec` and
    `policy` as they were in force then; None where the log keeps them no longer.
    """

    rollout: str
    decision: Decision
    before: Decision | None = None
    trips: tuple[Decision, ...] = ()
    spec: RolloutSpec | None = None
    policy: Policy | None = None


class Reason(Struct, frozen=True, kw_only=True):
    """One rule behind a decision, with all that is known of it. Times in µs, shares in 0..1."""

    rule: str
    capability: str | None = None
    metric: str | None = None
    value: float | None = None
    bound: float | None = None
    limit: float | None = None
    window_us: int | None = None
    samples: int | None = None
    evidence: float | None = None
    """Of a sequential rule: what its bets against "nothing is over the limit" have won, times the stake."""
    evidence_bound: float | None = None
    level: float | None = None
    """Of a rule relative to the baseline, whose `value` is a ratio: what the canary measures …"""
    baseline: float | None = None
    """… and what the baseline does, on the same traffic."""
    baseline_samples: int | None = None
    coverage: float | None = None
    scope: str | None = None
    located: Located | None = None
    pair_ids: tuple[str, ...] = ()
    action: str | None = None
    hold_s: int | None = None
    """How long without a break it had to be over; null: unknown, or one evaluation sufficed."""
    also_in: tuple[str, ...] = ()
    """Further scopes in which it was over its limit."""
    traffic: str | None = None
    """Which requests it judges: all, user, shadow; null: unknown."""


def reasons_of(account: Account) -> Iterable[Reason]:
    """The cause, then the other rules that were over their limits at that moment."""
    decision = account.decision
    if decision.kind not in _BY_RULES:
        return
    rules = {} if account.policy is None else {rule.id: rule for rule in account.policy.rules}
    tripping: dict[str, list[Evaluation]] = {}
    for one in decision.evaluations:
        if one.verdict == "trip":
            tripping.setdefault(one.rule, []).append(one)
    cause = None if decision.kind == "advise" else cause_of(decision)
    said = set(re.split(r"[ ,:;()]+", decision.reason))
    if cause is not None and decision.reason and cause.rule not in said:
        # A node was ejected earlier, and what is told now has another reason, coverage for instance.
        cause = None
    named: tuple[str, ...] = ()
    if cause is not None:
        yield _of_cause(cause, rules.get(cause.rule), tripping.get(cause.rule, []))
        named = tuple(rule for rule in cause.also if rule != cause.rule)
        # What only observes stands in the evaluations too; it is behind nothing.
    elif decision.kind == "advise":
        named = tuple(rule for rule in tripping if rule in said) or tuple(tripping)
    else:
        # An older release wrote no cause; the reason of a pause by coverage names no rule.
        named = tuple(rule for rule in tripping if rule in said)
    for rule in named:
        yield _of_evaluations(rule, rules.get(rule), tripping.get(rule, []))


def _of_cause(cause: Cause, rule: Rule | None, tripping: list[Evaluation]) -> Reason:
    place = cause.scope or "rollout"
    return Reason(
        rule=cause.rule,
        capability=cause.capability,
        metric=cause.metric,
        value=cause.value,
        bound=cause.bound,
        limit=cause.limit,
        window_us=cause.window_us,
        samples=cause.samples,
        evidence=cause.evidence,
        evidence_bound=cause.evidence_bound,
        level=cause.level,
        baseline=cause.baseline,
        baseline_samples=cause.baseline_samples,
        coverage=cause.coverage,
        scope=cause.scope,
        located=cause.located,
        pair_ids=cause.pair_ids[:PROOFS],
        action=None if rule is None else rule.action,
        hold_s=_hold_s(rule),
        traffic=None if rule is None else rule.traffic,
        # The evidence of a sequential rule is one sum: no scope trips beside another.
        also_in=() if cause.evidence is not None else _scopes(tripping, place),
    )


def _of_evaluations(name: str, rule: Rule | None, tripping: list[Evaluation]) -> Reason:
    """The whole roll-out if it was over there, else the part that was over most; of sequential evidence,
    whose sum is told with the whole, the part that carries it."""
    known = Reason(
        rule=name,
        capability=None if rule is None else rule.capability,
        window_us=None if rule is None else rule.window_s * 1_000_000,
        action=None if rule is None else rule.action,
        hold_s=_hold_s(rule),
    )
    if not tripping:
        return known
    said = max(tripping, key=lambda one: (one.scope == "rollout", one.value or 0.0))
    won = _WON.match(said.reason)
    if won:
        said = next((one for one in tripping if one.scope != said.scope), said)
    return Reason(
        rule=name,
        capability=known.capability,
        metric=said.metric,
        value=said.value,
        limit=said.limit,
        window_us=known.window_us,
        samples=said.samples,
        evidence=float(won[1]) if won else None,
        evidence_bound=float(won[2]) if won else None,
        level=said.level,
        baseline=said.baseline,
        baseline_samples=said.baseline_samples,
        scope=said.scope,
        action=known.action,
        hold_s=known.hold_s,
        also_in=() if won else _scopes(tripping, said.scope),
    )


def _scopes(tripping: list[Evaluation], but: str) -> tuple[str, ...]:
    return tuple(one.scope for one in tripping if one.scope != but)


def _hold_s(rule: Rule | None) -> int | None:
    return None if rule is None or rule.hold_steps == 1 else rule.hold_steps


def finding(one: Reason, *, start: bool = False) -> str:
    """`rule G3-divergence (G3) found …`: rule, metric, value, window, place, limit, samples, coverage."""
    capability = f" ({one.capability})" if one.capability else ""
    rule = f"{'Rule' if start else 'rule'} {one.rule}{capability}"
    sequential = one.evidence is not None and one.evidence_bound is not None
    text = f"{rule} had its evidence together" if sequential else f"{rule} was over its limit"
    if one.metric is None or one.value is None:
        return text
    over = f" over {span(one.window_us // 1_000_000)}" if one.window_us else ""
    held = f", for {span(one.hold_s)} without a break" if one.hold_s else ""
    limit = "" if one.limit is None else f" (limit {amount(one.metric, one.limit)})"
    samples = "" if one.samples is None else f", from {counted_as(one.metric, one.samples)}"
    if one.baseline is not None and one.level is not None:
        # Of a ratio both sides are said, in the unit of what is measured.
        measured = (one.metric or "").partition(": ")[0]
        limit += f": {amount(measured, one.level)} against {amount(measured, one.baseline)}"
        samples += "" if one.baseline_samples is None else f" against {one.baseline_samples:,}"
    coverage = "" if one.coverage is None else f" at coverage {one.coverage:.3g}"
    if one.evidence is not None and one.evidence_bound is not None:
        return (
            f"{text}: {one.evidence:.3g} where {one.evidence_bound:.3g} trips. It comes from"
            f" {place_words(one.scope)}, with {metric_words(one.metric)}"
            f" {amount(one.metric, one.value, one.limit)}{over}{limit}{samples}{coverage}"
        )
    return (
        f"{text}{held}: {metric_words(one.metric)} {amount(one.metric, one.value, one.limit)}{over} in"
        f" {place_words(one.scope)}{limit}{samples}{coverage}"
    )


def details(one: Reason) -> Iterable[str]:
    """Where it sits, which pairs prove it, and what cannot have caused it."""
    if one.evidence is not None and one.evidence_bound:
        yield (
            f"Evidence adds up over the generation, however often it is looked at: while nothing is over the"
            f" limit, the chance that this rule ever trips is at most {100 / one.evidence_bound:.3g} %."
        )
    yield _where(one)
    if one.also_in:
        said = [place_words(scope) for scope in one.also_in[:SCOPES_SAID]]
        more = len(one.also_in) - len(said)
        yield f"It was over in {listed([*said, f'{more} more'] if more else said)} too."
    if one.pair_ids:
        only = "The pair that proves it" if len(one.pair_ids) == 1 else "Pairs that prove it, the worst first"
        yield f"{only}: {', '.join(one.pair_ids)}."
    if is_certified(one.metric):
        yield "Every value is a certified lower bound, so truncated candidate lists cannot have caused it."
    elif one.bound is not None and one.value is not None and one.bound < one.value:
        yield f"It is certainly not below {amount(one.metric, one.bound)}: the histogram's resolution did" + (
            " not cause it."
        )


def _where(one: Reason) -> str:
    located = one.located
    if located is None:
        if one.metric is None or one.scope not in (None, "rollout"):
            return ""
        if one.traffic not in (None, "all"):
            return f"No place is known of it: the rule judges {one.traffic} traffic as one."
        return (
            f"It is not confined to one class of traffic: none carries {share_words(EXCESS_SHARE)} of the"
            f" excess on at most {share_words(TRAFFIC_SHARE)} of the traffic."
        )
    shares = (
        f"{share_words(located.share_of_excess)} of the excess on {share_words(located.share_of_traffic)} of"
        " the traffic."
    )
    if f"{located.dimension}={located.value}" == one.scope:
        return f"That cell carries {shares}"
    return f"The deviation sits in {located.dimension} {located.value}, which carries {shares}"


def others(reasons: Iterable[Reason]) -> Iterable[str]:
    for one in reasons:
        yield f"At the same moment {finding(one)}."


def cause_of(decision: Decision) -> Cause | None:
    """The cause that its directive carries; it may be of an earlier decision."""
    return None if decision.directive is None else decision.directive.cause


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]
