"""What a roll-out's next weight step has and lacks: samples, seconds, time, and how long that takes. Pure.

The gate writes it beside its memory, for people: `klaxon status` reads it there. Nothing is decided by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from pipeline.core.gate.coverage import CoverageVerdict, JudgedCoverage, lost_by_reason
from pipeline.core.gate.metrics import COUNT, VALUE, Vec, samples_of
from pipeline.core.gate.rules import WHOLE, JudgedRule, RuleVerdict, told_as, whole_scope
from pipeline.core.gate.sources import Why
from pipeline.core.gate.windows import Scope, Window
from schemas.control import Verdict

RATE_S: Final = 60
"""The present rate is that of the last so many complete seconds, or of the window where that is shorter."""


Samples: TypeAlias = Callable[[Mapping[Scope, Vec]], int]
"""Of a second's content."""


class UnknownSeconds(Struct, frozen=True, kw_only=True):
    """Seconds `first`..`last` of a source that nobody knows whole."""

    source: str
    first: int
    last: int
    why: Why


class RuleProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule, or coverage, at the newest complete second."""

    rule: str
    enforcing: bool = True
    verdict: Verdict
    reason: str = ""
    scope: str = "rollout"
    """Where samples are counted: the whole roll-out, or the part that has most of them."""
    value: float | None = None
    limit: float
    samples: int
    needed: int
    window_s: int
    per_s: float
    """Samples a second, at present."""
    unknown: tuple[UnknownSeconds, ...] = ()
    """Of its window, the newest first; at most a few of them."""
    more_pairs: int | None = 0
    """What the test for a pass of a sequential rule lacks, at the present mean; null: it cannot come so."""
    ready_in_s: int | None = None
    """When it passes if all goes on as at present: 0 it does; null: not by waiting."""
    lost: dict[str, int] = {}
    """Coverage: mirrored requests that were not scored, by reason."""

    @property
    def missing(self) -> int:
        """Samples it lacks."""
        return max(0, self.needed - self.samples)


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the next weight step has and lacks. Seconds are event time."""

    second: int
    """The newest complete second judged."""
    percent: float
    next_percent: float | None = None
    """null: it stands at its last step."""
    manual: bool = False
    """Steps are an operator's."""
    lasting_s: int = 0
    """How long the present step has to last yet."""
    pairs: int
    """Scored since the step began."""
    pairs_needed: int
    pairs_per_s: float = 0.0
    rules: tuple[RuleProgress, ...] = ()
    coverage: RuleProgress
    ready_in_s: int | None = None
    """When the step is due if all goes on as at present: 0 now; null: not by waiting."""


class StepNeeds(Struct, frozen=True, kw_only=True):
    """The part of a Progress that the roll-out's memory and policy say."""

    percent: float
    next_percent: float | None
    manual: bool
    lasting_s: int
    pairs: int
    pairs_needed: int


def progress_of(
    second: int,
    needs: StepNeeds,
    rules: Sequence[tuple[JudgedRule, RuleVerdict, Sequence[UnknownSeconds], int | None]],
    coverage: tuple[JudgedCoverage, CoverageVerdict, Sequence[UnknownSeconds]],
    observed_s: int,
) -> Progress:
    """Put together what is known at `second`; `observed_s`: seconds since the generation began.

    For each rule, and for coverage: what it judges, its verdict, what of its window is unknown; for a rule
    also how many pairs its test for a pass lacks at the present mean, None: it cannot come so.
    """
    told = tuple(_rule(*one, observed_s) for one in rules)
    covered = _coverage(*coverage, observed_s)
    pairs_per_s = _rate(coverage[0].window, lambda content: content.get(WHOLE, {}).get(VALUE, 0), observed_s)
    waits: list[int | None] = [one.ready_in_s for one in (*told, covered) if one.enforcing]
    waits.append(needs.lasting_s)
    left = needs.pairs_needed - needs.pairs
    waits.append(0 if left <= 0 else (math.ceil(left / pairs_per_s) if pairs_per_s else None))
    by_waiting = [wait for wait in waits if wait is not None]
    never = len(by_waiting) < len(waits) or not any(one.enforcing for one in told)
    return Progress(
        second=second,
        percent=needs.percent,
        next_percent=needs.next_percent,
        manual=needs.manual,
        lasting_s=needs.lasting_s,
        pairs=needs.pairs,
        pairs_needed=needs.pairs_needed,
        pairs_per_s=pairs_per_s,
        rules=told,
        coverage=covered,
        ready_in_s=None if never else max(by_waiting),
    )


def time_to_samples(
    per_second: Mapping[int, int], end: int, window_s: int, needed: int, rate: float
) -> int | None:
    """Seconds after `end` until a window holds `needed` samples, if they come at `rate`; None: never.

    `per_second`: what the window that ends at `end` holds. What it holds now leaves it second by second.
    """
    held = sum(per_second.values())
    if held >= needed:
        return 0
    if rate <= 0:
        return None
    for second in sorted(per_second):
        # Until this one leaves, the count only grows.
        waited = math.ceil((needed - held) / rate)
        if waited < second + window_s - end:
            return waited
        held -= per_second[second]
    waited = math.ceil((needed - held) / rate)
    return waited if waited <= window_s else None


def _rule(
    judged: JudgedRule,
    verdict: RuleVerdict,
    unknown: Sequence[UnknownSeconds],
    more_pairs: int | None,
    observed_s: int,
) -> RuleProgress:
    # A sequential rule may share the window of a point rule, whose name and mode are its own.
    rule, window = verdict.rule, judged.window
    assert window.end is not None
    scope = _counted_in(judged)

    counted = judged.counted(scope)

    def samples(content: Mapping[Scope, Vec]) -> int:
        return samples_of(rule, content.get(counted, {}))

    rate = _rate(window, samples, min(observed_s, rule.window_s))
    name = told_as(rule, scope)
    said = next((one for one in verdict.evaluations if one.scope == name), None)
    ready = None
    if verdict.verdict == "pass":
        ready = 0
    elif verdict.verdict == "not_enough_data" and not any(
        one.reason.startswith("over") for one in verdict.evaluations
    ):
        held = _per_second(window, samples)
        enough = time_to_samples(held, window.end, rule.window_s, rule.min_samples, rate)
        ready = _later(enough, _known_in(unknown, window.end, rule.window_s))
        ready = _later(ready, _time_for(more_pairs, rate))
    return RuleProgress(
        rule=rule.id,
        enforcing=rule.enforcing,
        verdict=verdict.verdict,
        reason=verdict.reason,
        scope=name,
        value=None if said is None else said.value,
        limit=float(rule.limit),
        samples=judged.samples(counted),
        needed=rule.min_samples,
        window_s=rule.window_s,
        per_s=rate,
        unknown=tuple(unknown),
        more_pairs=more_pairs,
        ready_in_s=ready,
    )


def _coverage(
    judged: JudgedCoverage, verdict: CoverageVerdict, unknown: Sequence[UnknownSeconds], observed_s: int
) -> RuleProgress:
    window, coverage = judged.window, judged.coverage
    assert window.end is not None

    def expected(content: Mapping[Scope, Vec]) -> int:
        return content.get(WHOLE, {}).get(COUNT, 0)

    rate = _rate(window, expected, min(observed_s, coverage.window_s))
    ready = None
    if verdict.verdict == "pass":
        ready = 0
    elif not verdict.low:
        held = _per_second(window, expected)
        enough = time_to_samples(held, window.end, coverage.window_s, coverage.min_samples, rate)
        ready = _later(enough, _known_in(unknown, window.end, coverage.window_s))
    return RuleProgress(
        rule="coverage",
        verdict=verdict.verdict,
        reason=verdict.reason,
        value=verdict.value,
        limit=float(coverage.limit),
        samples=verdict.expected,
        needed=coverage.min_samples,
        window_s=coverage.window_s,
        per_s=rate,
        unknown=tuple(unknown),
        ready_in_s=ready,
        lost=lost_by_reason(window.total(WHOLE)),
    )


def _counted_in(judged: JudgedRule) -> Scope:
    """The scope whose samples decide whether the rule may pass."""
    whole = whole_scope(judged.rule)
    if "rollout" in judged.rule.scopes:
        return whole
    parts = [scope for scope in judged.window.scopes() if scope[0] in judged.rule.scopes]
    return max(parts, key=judged.samples, default=whole)


def _per_second(window: Window, samples: Samples) -> dict[int, int]:
    return {second: count for second, content in window.seconds.items() if (count := samples(content))}


def _rate(window: Window, samples: Samples, observed_s: int) -> float:
    """A second, over the last RATE_S of the observed ones. Looks at no more: it is asked for every rule."""
    over_s = min(observed_s, RATE_S)
    if over_s <= 0 or window.end is None:
        return 0.0
    total = 0
    for second in reversed(window.seconds):
        if second <= window.end - over_s:
            break
        total += samples(window.seconds[second])
    return total / over_s


def _time_for(pairs: int | None, rate: float) -> int | None:
    """Seconds until so many have come; None: never."""
    if not pairs:
        return pairs
    return math.ceil(pairs / rate) if rate > 0 else None


def _known_in(unknown: Sequence[UnknownSeconds], end: int, window_s: int) -> int | None:
    """When the newest unknown second leaves the window; None: they go on up to its end."""
    newest = max((part.last for part in unknown), default=None)
    if newest is None:
        return 0
    return None if newest >= end else newest + window_s - end


def _later(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
