"""Two captures compared: paired, scored, and judged once as the fixed sample they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pipeline.core.captures.answers import Answer, Reading, Skipped, SkipReason
from pipeline.core.captures.halves import Stated, halves
from pipeline.core.divergence import ESTIMATOR, Half, PairScores, score_pairs
from pipeline.core.divergence.interval import LEAST_PAIRS, t_interval
from schemas.columns import ETA_BY_PRECISION

Mode: TypeAlias = Literal["auto", "free", "forced"]
Verdict: TypeAlias = Literal["pass", "trip", "not_enough_data"]

CONFIDENCE: Final = 0.9
MEANS: Final = ("kl_lower", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree")
NOTE: Final = (
    "one-shot comparison of a fixed sample; for a roll-out that is watched all the time use the gate, "
    "whose evidence may be looked at again and again"
)


@dataclass(frozen=True, slots=True)
class Captured:
    """One answer of a capture. `key` pairs it with the other side's, None: by order."""

    key: str | None
    reading: Reading
    forced: bool = False
    definition: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome. `result` is plain data, ready for JSON; its fields are part of the command's contract."""

    verdict: Verdict
    result: Mapping[str, Any]


def compare_captures(
    baseline: Sequence[Captured], canary: Sequence[Captured], limit: float, mode: Mode
) -> Comparison:
    """Pair by key where every answer has one, else by order; score; judge the mean of `kl_lower`.

    `trip` when the low end of the two-sided 90 % t-interval over pairs is above `limit`, `pass` when its high
    end is not, else `not_enough_data`; so too with fewer than LEAST_PAIRS pairs. Nor do pairs that could not
    be forced let the rest pass: those are the pairs that agree, chosen by the outcome.
    """
    skipped: Counter[SkipReason] = Counter()
    eta = max(_eta(baseline), _eta(canary))
    names: list[str] = []
    pairs: list[tuple[Half, Half]] = []
    for name, ours, theirs in _paired(baseline, canary, skipped):
        pair = _pair(ours, theirs, mode, eta, skipped)
        if pair is not None:
            names.append(name)
            pairs.append(pair)
    scores = score_pairs(pairs)
    for outcome in scores.outcome:
        if outcome != "scored":
            skipped[outcome] += 1
    rows = [row for row, outcome in enumerate(scores.outcome) if outcome == "scored"]
    return _judge(names, rows, scores, skipped, limit, mode, eta)


def _eta(side: Sequence[Captured]) -> float:
    decimals = max((item.reading.decimals() for item in side if isinstance(item.reading, Answer)), default=0)
    return next(eta for least, eta in ETA_BY_PRECISION if decimals >= least)


def _paired(
    baseline: Sequence[Captured], canary: Sequence[Captured], skipped: Counter[SkipReason]
) -> Iterator[tuple[str, Captured, Captured]]:
    if any(item.key is None for item in (*baseline, *canary)):
        theirs: dict[str, Captured] = {str(number): item for number, item in enumerate(canary, start=1)}
        ours: dict[str, Captured] = {str(number): item for number, item in enumerate(baseline, start=1)}
    else:
        theirs = {str(item.key): item for item in canary}
        ours = {str(item.key): item for item in baseline}
    for name, item in ours.items():
        if name in theirs:
            yield item.key or theirs[name].key or name, item, theirs[name]
    for reason, left, right in (
        ("only_in_baseline", ours, theirs),
        ("only_in_canary", theirs, ours),
    ):
        alone = len(left.keys() - right.keys())
        if alone:
            skipped[reason] += alone  # type: ignore[index]  # both are literals of SkipReason


def _pair(
    ours: Captured, theirs: Captured, mode: Mode, eta: float, skipped: Counter[SkipReason]
) -> tuple[Half, Half] | None:
    a, b = ours.reading, theirs.reading
    for reading in (a, b):
        if isinstance(reading, Skipped):
            skipped[reading.reason] += 1
        elif reading.other_choices:
            skipped["other_choices"] += reading.other_choices
    if isinstance(a, Skipped) or isinstance(b, Skipped):
        return None
    forced = mode == "forced" or (mode == "auto" and theirs.forced)
    pair = halves(a, b, (Stated(ours.definition, eta), Stated(theirs.definition, eta)), forced)
    if isinstance(pair, Skipped):
        skipped[pair.reason] += 1
        return None
    return pair


def _judge(
    names: Sequence[str],
    rows: Sequence[int],
    scores: PairScores,
    skipped: Counter[SkipReason],
    limit: float,
    mode: Mode,
    eta: float,
) -> Comparison:
    interval = t_interval([float(scores.kl_lower[row]) for row in rows], CONFIDENCE)
    verdict: Verdict = "not_enough_data"
    if interval is not None and interval[0] > limit:
        verdict = "trip"
    elif interval is not None and interval[1] <= limit and not skipped["forced_mismatch"]:
        verdict = "pass"
    return Comparison(
        verdict,
        {
            "pairs": len(rows),
            "positions": sum(int(scores.positions[row]) for row in rows),
            "mean": {
                name: sum(float(getattr(scores, name)[row]) for row in rows) / len(rows) if rows else None
                for name in MEANS
            },
            "interval": list(interval) if interval is not None else None,
            "verdict": verdict,
            "limit": limit,
            "mode": mode,
            "estimator": ESTIMATOR,
            "eta": eta,
            "skipped": dict(sorted(skipped.items())),
            "note": NOTE,
            "per_pair": [_per_pair(names[row], row, scores) for row in rows],
        },
    )


def _per_pair(name: str, row: int, scores: PairScores) -> dict[str, Any]:
    first, together = int(scores.first_difference[row]), int(scores.ended_together[row])
    return {
        "prompt_id": name,
        "positions": int(scores.positions[row]),
        "unreadable_positions": int(scores.invalid[row]),
        "agreed": int(scores.agreed[row]),
        "first_difference": first if first >= 0 else None,
        "ended_together": bool(together) if together >= 0 else None,
        "kl_lower_max": float(scores.kl_lower_max[row]),
        **{measure: float(getattr(scores, measure)[row]) for measure in MEANS},
    }


def what_is_missing(comparison: Comparison) -> str:
    """Why there is no verdict, for people."""
    result = comparison.result
    unforced = result["skipped"].get("forced_mismatch", 0)
    if unforced:
        return (
            f"{unforced} of {unforced + result['pairs']} pairs could not be forced: CANARY did not score "
            "BASELINE's tokens there; compare free-running answers with --mode free"
        )
    if result["interval"] is None:
        return f"{result['pairs']} comparable pairs; an interval needs at least {LEAST_PAIRS}"
    low, high = result["interval"]
    return (
        f"the interval {low:.4g} to {high:.4g} holds the limit {result['limit']:g}; more prompts narrow it "
        f"(now {result['pairs']} pairs, {result['positions']} positions)"
    )
