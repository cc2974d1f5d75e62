"""Two captures compared: paired, scored, and judged once as the fixed sample they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from pipeline.core.captures.halves import Stated, halves
from pipeline.core.divergence import ESTIMATOR, Half, PairScores
from pipeline.core.divergence.details import PairDetails, Positions, describe_pairs, perplexity_ratio
from pipeline.core.divergence.interval import LEAST_PAIRS, t_interval
from pipeline.core.divergence.llama_kld import KldStatistics, Mean, kld_statistics
from schemas.answers.positions import Answer, Reading, Skipped, SkipReason
from schemas.columns import ETA_BY_PRECISION, F8

Mode: TypeAlias = Literal["auto", "free", "forced"]
Verdict: TypeAlias = Literal["pass", "trip", "not_enough_data"]

CONFIDENCE: Final = 0.9
MEANS: Final = ("kl_lower", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree")
DETAILS: Final = ("behaviour_offset", "entropy_lower_p", "entropy_lower_q")
"""Further means."""
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
    scores, details, positions = describe_pairs(pairs, limit)
    for outcome in scores.outcome:
        if outcome != "scored":
            skipped[outcome] += 1
    rows = [row for row, outcome in enumerate(scores.outcome) if outcome == "scored"]
    judged = _judge(rows, scores, skipped, limit)
    return Comparison(
        judged[0],
        {
            **_summary(rows, scores, details, positions),
            "interval": judged[1],
            "verdict": judged[0],
            "limit": limit,
            "mode": mode,
            "estimator": ESTIMATOR,
            "eta": eta,
            "skipped": dict(sorted(skipped.items())),
            "note": NOTE,
            "statistics": _statistics(positions),
            "per_pair": [_per_pair(names[row], row, scores, details) for row in rows],
        },
    )


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
    rows: Sequence[int], scores: PairScores, skipped: Mapping[SkipReason, int], limit: float
) -> tuple[Verdict, list[float] | None]:
    """The verdict and the interval it rests on."""
    interval = t_interval([float(scores.kl_lower[row]) for row in rows], CONFIDENCE)
    if interval is None:
        return "not_enough_data", None
    verdict: Verdict = "not_enough_data"
    if interval[0] > limit:
        verdict = "trip"
    elif interval[1] <= limit and not skipped.get("forced_mismatch"):
        verdict = "pass"
    return verdict, list(interval)


def _summary(
    rows: Sequence[int], scores: PairScores, details: PairDetails, positions: Positions
) -> dict[str, Any]:
    """Over all pairs. Each mean is one over pairs, of `delta_p` over those that have any."""

    def mean(values: F8, among: Sequence[int] = rows) -> float | None:
        return sum(float(values[row]) for row in among) / len(among) if among else None

    compared = sum(int(scores.positions[row]) for row in rows)
    stretch = compared + sum(int(scores.invalid[row]) for row in rows)
    return {
        "pairs": len(rows),
        "positions": compared,
        "coverage": compared / stretch if stretch else None,
        "mean": {
            **{name: mean(getattr(scores, name)) for name in MEANS},
            **{name: mean(getattr(details, name)) for name in DETAILS},
            "delta_p": mean(details.delta_p, [row for row in rows if details.common[row]]),
            "over_limit": mean(details.over_limit),
        },
        "perplexity_ratio": perplexity_ratio(positions),
    }


def _statistics(positions: Positions) -> dict[str, Any] | None:
    """llama.cpp's statistics over all compared positions, of the lists instead of whole vocabularies."""
    common = positions.common
    found = kld_statistics(
        positions.kl_lower,
        positions.top1_agree,
        positions.logprob_p[common],
        positions.logprob_q[common],
    )
    return None if found is None else _plain(found)


def _plain(found: KldStatistics) -> dict[str, Any]:
    plain: dict[str, Any] = {"perplexity_ratio": found.perplexity_ratio}
    for field in fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Mean):
            plain[field.name] = {"value": value.value, "error": value.error}
        else:
            plain[field.name] = {f"{share:g}": at for share, at in value.items()}
    return plain


def _per_pair(name: str, row: int, scores: PairScores, details: PairDetails) -> dict[str, Any]:
    first, together = int(scores.first_difference[row]), int(scores.ended_together[row])
    return {
        "prompt_id": name,
        "positions": int(scores.positions[row]),
        "unreadable_positions": int(scores.invalid[row]),
        "coverage": float(details.coverage[row]),
        "agreed": int(scores.agreed[row]),
        "first_difference": first if first >= 0 else None,
        "ended_together": bool(together) if together >= 0 else None,
        "kl_lower_max": float(scores.kl_lower_max[row]),
        "kl_lower_p95": float(details.kl_lower_p95[row]),
        "over_limit": float(details.over_limit[row]),
        **{measure: float(getattr(scores, measure)[row]) for measure in MEANS},
        **{measure: float(getattr(details, measure)[row]) for measure in DETAILS},
        "delta_p": float(details.delta_p[row]) if details.common[row] else None,
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
