"""Why nothing is deciding about a roll-out: every obstacle, the outermost first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from pipeline.core.gate.progress import Progress, RuleProgress, UnknownSeconds
from pipeline.core.gate.sources import OTHERWISE, Why
from schemas.control import RolloutState

Code: TypeAlias = Literal[
    "retired", "final", "gate_away", "blind", "lease_over", "paused", "narrowed", "not_judged",
    "no_canary_traffic", "too_few_samples", "unknown_seconds", "over_limit", "coverage", "error", "settling",
    "too_few_pairs", "too_little_evidence", "nothing_enforces", "manual",
]  # fmt: skip

SAME_SETTINGS: Final = (
    "give all workers the same `content` section and release, and all of them the scoring kernel or none"
)
"""Remedy where seconds were made otherwise. Workers: the gate, too, and where this is read."""
NAMED: Final = 3
"""Sources that a sentence names."""
BECAUSE: Final[dict[Why, str]] = {
    "warming_up": "its worker began too late to see them whole",
    "other_settings": OTHERWISE,
    "not_retained": "no longer kept by the broker",
    "waited_too_long": "they waited too long for other sources",
    "not_closed": "not closed yet",
    "unheard": "from before it was heard",
}


class Obstacle(Struct, frozen=True, kw_only=True):
    """Something that stands between a roll-out and its next decision."""

    code: Code
    sentence: str
    remedy: str
    ready_in_s: int | None = None
    """When it is gone if all goes on as at present; null: not by waiting."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the gate's topics tell of a roll-out. `told_us`: when the gate last wrote its memory; it is away
    after `silent_after_us` without. `lease_until_us`: of the newest directive, None if there is none."""

    rollout: str
    generation: int
    state: RolloutState
    retired: bool
    paused_by: str | None
    """The rule behind a pause; None: an operator, coverage or a gap."""
    blind: str
    evidence_from: int
    progress: Progress | None
    told_us: int
    lease_until_us: int | None
    silent_after_us: int


def obstacles(told: Told, now_us: int) -> tuple[Obstacle, ...]:
    """Everything that keeps the weight from moving, outermost first. Empty: the next step is due."""
    name = told.rollout
    if told.retired:
        return (Obstacle(code="retired", sentence="it is retired", remedy="`klaxon rollout start SPEC`"),)
    if told.state in ("tripped", "promoted"):
        sentence = f"{told.state} is final until a new generation"
        return (Obstacle(code="final", sentence=sentence, remedy=f"`klaxon rollout new-generation {name}`"),)
    unseen = [*_unseen(told, now_us), *_paused(told)]
    # What a gate that sees nothing last said of the evidence is no answer.
    blind = any(one.code in ("gate_away", "blind") for one in unseen)
    return (*unseen, *(() if blind else _held(told)))


def _unseen(told: Told, now_us: int) -> Iterable[Obstacle]:
    """What keeps the gate from seeing or speaking."""
    age_us = now_us - told.told_us
    away = age_us > told.silent_after_us
    if away:
        yield Obstacle(
            code="gate_away",
            sentence=f"no gate has written for {span(age_us // 1_000_000)}",
            remedy="start `klaxon worker gate`",
        )
    elif told.blind:
        yield Obstacle(
            code="blind",
            sentence=told.blind,
            remedy=SAME_SETTINGS
            if OTHERWISE in told.blind
            else "`klaxon worker pair` closes klaxon.logits, `klaxon worker measure` the others: start the"
            " one that is missing, or wait while it catches up",
        )
    if told.lease_until_us is not None and (over_us := now_us - told.lease_until_us) > 0:
        yield Obstacle(
            code="lease_over",
            sentence=f"the lease ran out {span(over_us // 1_000_000)} ago: routers raise no weight",
            remedy="the gate renews it as soon as it runs and sees"
            if away or told.blind
            else "look at the log of `klaxon worker gate`: it has not renewed it",
        )


def _paused(told: Told) -> Iterable[Obstacle]:
    if told.state == "narrowed":
        rule = "" if told.paused_by is None else f" by {told.paused_by}"
        yield Obstacle(
            code="narrowed",
            sentence=f"it is narrowed{rule}: a segment gets no canary, the weight holds until an operator"
            " resumes it",
            remedy=f"`klaxon rollout resume {told.rollout}` goes on without the segment;"
            f" `klaxon rollout new-generation {told.rollout}` begins anew with it",
        )
    if told.state == "paused":
        rule = "" if told.paused_by is None else f" by {told.paused_by}"
        yield Obstacle(
            code="paused",
            sentence=f"it is paused{rule}: the weight holds until an operator resumes it",
            remedy=f"`klaxon rollout resume {told.rollout}`",
        )


def _held(told: Told) -> Iterable[Obstacle]:
    """What keeps a gate that sees from raising the weight."""
    name, progress = told.rollout, told.progress
    if progress is None or progress.second < told.evidence_from:
        yield Obstacle(
            code="not_judged",
            sentence="no complete second of this generation has been judged yet",
            remedy="wait: a second is complete once every source has closed it",
        )
        return
    enforcing = [rule for rule in progress.rules if rule.enforcing]
    if not enforcing:
        yield Obstacle(
            code="nothing_enforces",
            sentence="no rule of the policy enforces: nothing can pass",
            remedy=f"`klaxon rollout policy {name} FILE` with a rule of `mode: enforce`",
        )
    if enforcing and not progress.coverage.samples and not any(rule.samples for rule in enforcing):
        yield _no_traffic(told, enforcing, progress.coverage)
        return
    for rule in enforcing:
        yield from _rule(rule)
    yield from _coverage(progress.coverage)
    yield from _step(name, progress)


def _no_traffic(told: Told, enforcing: list[RuleProgress], coverage: RuleProgress) -> Obstacle:
    names = ", ".join(rule.rule for rule in enforcing)
    window_s = max(coverage.window_s, *(rule.window_s for rule in enforcing))
    unknown = coverage.unknown or next((rule.unknown for rule in enforcing if rule.unknown), ())
    known = f"; of that time {_unknown(unknown)}" if unknown else ""
    return Obstacle(
        code="no_canary_traffic",
        sentence=f"no canary traffic: not one sample for {names} in the last {span(window_s)}{known}",
        remedy=f"do gateways mirror to the canary, and do events carry rollout {told.rollout},"
        f" generation {told.generation} and the version of the spec? `klaxon.dead-letter` holds refused ones",
    )


def _rule(rule: RuleProgress) -> Iterable[Obstacle]:
    if rule.verdict == "pass":
        return
    if rule.verdict == "error":
        yield Obstacle(
            code="error",
            sentence=f"{rule.rule}: {rule.reason}",
            remedy=f"it leaves the window within {span(rule.window_s)}; compare the workers' versions",
        )
    elif rule.reason.startswith("over") or ": over the limit" in rule.reason or rule.verdict == "trip":
        yield Obstacle(
            code="over_limit",
            sentence=f"{rule.rule}: {rule.reason or 'over its limit'}",
            remedy="look at the canary: `klaxon rollout status` shows the numbers",
        )
    if rule.verdict != "not_enough_data":
        return
    if rule.missing:
        yield Obstacle(
            code="too_few_samples",
            sentence=f"{rule.rule}: {rule.samples} of {rule.needed} samples in {span(rule.window_s)},"
            f" {rule.missing} missing; {_pace(rule)}",
            remedy=_more(rule),
            ready_in_s=rule.ready_in_s,
        )
    if rule.unknown:
        yield _unknown_obstacle(rule)
    if not rule.missing and not rule.unknown and not rule.reason.startswith("over"):
        ready = rule.ready_in_s
        yield Obstacle(
            code="too_little_evidence",
            sentence=f"{rule.rule}: {rule.reason}" + (f"; {_pace(rule)}" if rule.more_pairs else ""),
            remedy="wait" if ready is not None else "the reason says what is missing",
            ready_in_s=ready,
        )


def _coverage(coverage: RuleProgress) -> Iterable[Obstacle]:
    if coverage.verdict == "pass":
        return
    if coverage.reason.startswith("coverage"):
        lost = ", ".join(f"{count} {reason}" for reason, count in coverage.lost.items())
        yield Obstacle(
            code="coverage",
            sentence=f"{coverage.reason}: of {coverage.samples} mirrored requests not scored: {lost}",
            remedy="no_canary: the canary's answers do not arrive; no_baseline: the baseline's; dropped: a"
            " producer's queue was full; late: its clock or connection; see docs/events.md",
        )
        return
    if coverage.missing:
        yield Obstacle(
            code="too_few_samples",
            sentence=f"coverage: {coverage.samples} of {coverage.needed} mirrored requests in"
            f" {span(coverage.window_s)}, {coverage.missing} missing; {_pace(coverage)}"
            + ("; " + coverage.reason.partition("; ")[2] if "; " in coverage.reason else ""),
            remedy=_more(coverage),
            ready_in_s=coverage.ready_in_s,
        )
    if coverage.unknown:
        yield _unknown_obstacle(coverage)


def _step(name: str, progress: Progress) -> Iterable[Obstacle]:
    """What the weight step itself needs beside passing rules."""
    if progress.lasting_s:
        yield Obstacle(
            code="settling",
            sentence=f"the weight step at {progress.percent:g} % has {span(progress.lasting_s)} to last",
            remedy="wait",
            ready_in_s=progress.lasting_s,
        )
    missing = progress.pairs_needed - progress.pairs
    if missing > 0:
        rate = progress.pairs_per_s
        ready = None if not rate else -int(-missing // rate)
        pace = "none comes at present" if ready is None else f"about {span(ready)} at {rate:.3g}/s"
        yield Obstacle(
            code="too_few_pairs",
            sentence=f"{progress.pairs} of {progress.pairs_needed} pairs in this weight step; {pace}",
            remedy="mirror a greater share of the traffic, or lower progression.min_pairs",
            ready_in_s=ready,
        )
    if progress.next_percent is None and progress.percent != 100:
        yield Obstacle(
            code="manual",
            sentence=f"it stands at its last step, {progress.percent:g} %",
            remedy=f"`klaxon rollout promote {name}`, once everything passes",
        )
    elif progress.manual:
        yield Obstacle(
            code="manual",
            sentence="the policy leaves steps to an operator",
            remedy=f"`klaxon rollout step {name}`, once everything passes",
        )


def _pace(rule: RuleProgress) -> str:
    if not rule.per_s:
        return "none comes at present"
    if rule.ready_in_s is not None:
        return f"about {span(rule.ready_in_s)} at {rule.per_s:.3g}/s"
    if rule.per_s * rule.window_s < rule.needed:
        return f"never at {rule.per_s:.3g}/s, which is {rule.per_s * rule.window_s:.3g} in its window"
    return f"at {rule.per_s:.3g}/s"


def _more(rule: RuleProgress) -> str:
    if rule.ready_in_s is not None:
        return "wait"
    return "raise the canary's share or the share that is mirrored, lengthen `window`, or lower `min_samples`"


def _unknown_obstacle(rule: RuleProgress) -> Obstacle:
    mended = any(part.why == "other_settings" for part in rule.unknown)
    ready = rule.ready_in_s
    gone = "" if ready is None else f"; they leave its window in {span(ready)}"
    return Obstacle(
        code="unknown_seconds",
        sentence=f"{rule.rule}: {_unknown(rule.unknown)}{gone}",
        remedy=SAME_SETTINGS if mended else "wait until they leave it",
        ready_in_s=ready,
    )


def _unknown(parts: tuple[UnknownSeconds, ...]) -> str:
    """Whose seconds, how many, why."""
    told = [
        f"{part.last - part.first + 1} s of {part.source} {'are' if part.last > part.first else 'is'} unknown"
        f" ({BECAUSE[part.why]})"
        for part in parts[:NAMED]
    ]
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return ", ".join(told) + more


def span(seconds: int) -> str:
    """A time as people say it: `40 s`, `5 min`, `5 min 20 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
