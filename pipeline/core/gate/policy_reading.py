"""Reading a policy: plain data into the frozen types of `policy`.

Nothing is guessed: an unknown key or value is a PolicyMistake, and so is evidence this gate cannot give.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal

import numpy as np

from pipeline.core.bins import EXCESS_SHIFT, Kind, bin_count, bin_lower, bin_of, bin_upper
from pipeline.core.gate.policy import (
    ACTIONS,
    ALPHA,
    LEAVING_OUT,
    ActionName,
    ArmName,
    Coverage,
    Ejection,
    EvidenceName,
    Family,
    Metric,
    Policy,
    Progression,
    Rule,
    Statistic,
    Traffic,
)
from pipeline.core.gate.policy_sequential import LEAST_ALPHA, MOST_ALPHA, why_not_sequential
from pipeline.core.gate.policy_values import (
    Path,
    PolicyMistake,
    read_choice,
    read_duration_us,
    read_integer,
    read_mapping,
    read_number,
    read_share,
    read_text,
    read_whole_seconds,
)
from pipeline.core.spelling import nearest
from schemas.buckets import SCORE_ONE

PAIR_SCOPES: Final = (
    "rollout", "node", "context", "node_context", "request_type", "hardware", "sampling", "region",
)  # fmt: skip
REQUEST_SCOPES: Final = (*PAIR_SCOPES, "stratum")
LONGEST_WINDOW_S: Final = 3600
_METRICS: Final[Mapping[str, tuple[Family, str, Kind, tuple[Statistic, ...]]]] = {
    "kl_lower": ("pairs", "kl_lower", "score", ("mean",)),
    "kl_floor": ("pairs", "kl_floor", "score", ("mean",)),
    "excess": ("pairs", "excess", "excess", ("mean",)),
    "ttft_us": ("requests", "ttft_us", "latency", ("mean", "quantile")),
    "itl_us": ("requests", "itl_us", "latency", ("mean", "quantile")),
    "duration_us": ("requests", "duration_us", "latency", ("mean", "quantile")),
    "ttft_over_share": ("requests", "ttft_us", "latency", ("share",)),
    "duration_over_share": ("requests", "duration_us", "latency", ("share",)),
    "tokens_per_s": ("requests", "itl_us", "latency", ("quantile",)),
}
_PER_SECOND: Final = ("tokens_per_s",)
_NODE_SCOPES: Final = ("node", "node_context")
_RULE_KEYS: Final = (
    "id", "capability", "metric", "statistic", "over", "window", "step", "limit", "evidence", "min_samples",
    "hold", "consecutive", "scope", "action", "mode", "arm", "traffic", "relative_to", "description",
)  # fmt: skip
_ARMS: Final[tuple[ArmName, ...]] = ("canary", "baseline", "control", "any")
EVIDENCE: Final[tuple[EvidenceName, ...]] = ("point", "anytime")
_TRAFFIC: Final[tuple[Traffic, ...]] = ("all", "user", "shadow")
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_QUANTILE: Final = re.compile(r"p([0-9]{1,2}(?:\.[0-9]{1,3})?)")


def read_policy(data: object, text: str, digest: str) -> Policy:
    """Plain data as frozen types. Raises PolicyMistake at the first value that cannot be obeyed."""
    top = read_mapping(
        data,
        (),
        ("version", "rules", "sequential", "coverage", "progression", "ejection", "description"),
    )
    version = top.get("version", 1)
    if version != 1 or isinstance(version, bool):
        raise PolicyMistake(("version",), f"{version!r} is no version this gate reads; it reads 1")
    entries = top.get("rules")
    if not isinstance(entries, list) or not entries:
        raise PolicyMistake(("rules",), "a list of at least one rule is expected")
    rules = tuple(_rule(entry, ("rules", at)) for at, entry in enumerate(entries))
    seen: set[str] = set()
    for at, rule in enumerate(rules):
        if rule.id in seen:
            raise PolicyMistake(("rules", at, "id"), f"{rule.id!r} stands twice; give each rule its own id")
        seen.add(rule.id)
    return Policy(
        rules,
        _coverage(top.get("coverage", {}), ("coverage",)),
        _progression(top.get("progression", {}), ("progression",)),
        digest,
        text,
        alpha=_alpha(top.get("sequential", {}), ("sequential",)),
        ejection=_ejection(top.get("ejection", {}), ("ejection",)),
    )


def _rule(data: object, path: Path) -> Rule:
    entry = read_mapping(data, path, _RULE_KEYS)
    rule_id = read_text(entry, path, "id")
    if not _ID.fullmatch(rule_id):
        raise PolicyMistake((*path, "id"), f"{rule_id!r}: letters, digits, '_', '.', '-', at most 64")
    capability = entry.get("capability")
    if capability is not None and not isinstance(capability, str):
        raise PolicyMistake((*path, "capability"), f"{capability!r}: text such as G3 is expected")
    evidence = read_choice(entry, path, "evidence", EVIDENCE, "point")
    metric = _metric(entry, path)
    relative_to = _relative_to(entry, path, metric)
    window_s = read_whole_seconds(entry, path, "window", least=1, most=LONGEST_WINDOW_S)
    if "step" in entry and read_duration_us(entry["step"], (*path, "step")) != 1_000_000:
        raise PolicyMistake((*path, "step"), f"{entry['step']!r}: windows move by 1s; no other step")
    arm = _arm(entry, path, metric, relative_to)
    scopes = _scopes(entry, path, metric)
    action = _action(entry, path, scopes, arm)
    traffic = _traffic(entry, path, metric, scopes, action)
    rule = Rule(
        id=rule_id,
        capability=capability,
        metric=metric,
        window_s=window_s,
        limit=_limit(entry, path, metric) if relative_to is None else _ratio(entry, path),
        min_samples=read_integer(entry, path, "min_samples", least=1, most=10**9, default=100),
        hold_steps=_hold(entry, path),
        scopes=scopes,
        action=action,
        mode=read_choice(entry, path, "mode", ("enforce", "observe"), "enforce"),
        arm=arm,
        traffic=traffic,
        evidence=evidence,
        relative_to=relative_to,
    )
    if evidence == "anytime":
        for key in ("hold", "consecutive"):
            if key in entry:
                raise PolicyMistake(
                    (*path, key), f"`{key}` goes with evidence: point; anytime evidence adds up by itself"
                )
        if (fault := why_not_sequential(rule)) is not None:
            raise PolicyMistake((*path, fault.key), fault.problem)
    return rule


def _relative_to(entry: Mapping[str, object], path: Path, metric: Metric) -> Literal["baseline"] | None:
    where = (*path, "relative_to")
    value = entry.get("relative_to")
    if value is None:
        if metric.per_second:
            raise PolicyMistake(
                path,
                f"{metric.name} needs `relative_to: baseline`; an absolute limit is one of itl_us: 20 tokens"
                " per second are 50ms between tokens",
            )
        return None
    if value == "past":
        raise PolicyMistake(where, "'past' is not supported by this version; supported: baseline")
    read_choice(entry, path, "relative_to", ("baseline",), "baseline")
    if metric.family == "pairs":
        raise PolicyMistake(
            where, f"{metric.name} is a distance from the baseline already; leave relative_to out"
        )
    if metric.statistic != "quantile":
        raise PolicyMistake(
            where, f"{metric.label}: quantiles are compared with the baseline's; take one such as p50 or p99"
        )
    return "baseline"


def _arm(
    entry: Mapping[str, object], path: Path, metric: Metric, relative_to: Literal["baseline"] | None
) -> ArmName:
    where = (*path, "arm")
    arm = read_choice(entry, path, "arm", _ARMS, "canary")
    if metric.family == "pairs" and arm not in ("canary", "control"):
        raise PolicyMistake(where, f"{arm!r}: a divergence is of canary or control against the baseline")
    if metric.measure == "excess" and arm != "canary":
        raise PolicyMistake(where, f"{arm!r}: excess is the canary's over the control's; leave it out")
    if relative_to is not None and arm not in ("canary", "control"):
        raise PolicyMistake(where, f"{arm!r}: canary or control is compared with the baseline")
    return arm


def _traffic(
    entry: Mapping[str, object], path: Path, metric: Metric, scopes: tuple[str, ...], action: ActionName
) -> Traffic:
    where = (*path, "traffic")
    traffic = read_choice(entry, path, "traffic", _TRAFFIC, "all")
    if traffic != "all" and (metric.family != "requests" or scopes != ("rollout",)):
        raise PolicyMistake(where, f"{traffic!r} goes with a request metric in the scope rollout only")
    if action == "narrow" and traffic != "all":
        raise PolicyMistake(where, "narrow looks at all traffic for the class that is at fault")
    return traffic


def _action(entry: Mapping[str, object], path: Path, scopes: tuple[str, ...], arm: ArmName) -> ActionName:
    if "action" not in entry:
        raise PolicyMistake(path, f"action is missing; one of {', '.join(ACTIONS)}")
    action = read_choice(entry, path, "action", ACTIONS, "pause")
    if action in LEAVING_OUT and arm != "canary":
        raise PolicyMistake((*path, "action"), f"{action} takes from the canary: arm must be canary")
    if action == "eject_node" and not set(scopes) <= set(_NODE_SCOPES):
        raise PolicyMistake(
            (*path, "scope"), f"eject_node judges nodes: scope must be of {', '.join(_NODE_SCOPES)}"
        )
    return action


def _metric(entry: Mapping[str, object], path: Path) -> Metric:
    name = read_text(entry, path, "metric")
    if name == "coverage":
        raise PolicyMistake(
            (*path, "metric"), "coverage is no rule; its limit stands in the section `coverage`"
        )
    if name not in _METRICS:
        raise PolicyMistake((*path, "metric"), f"unknown metric {name!r}{nearest(name, _METRICS)}")
    family, measure, kind, statistics = _METRICS[name]
    unit = 1 if kind == "latency" else SCORE_ONE
    over = entry.get("over")
    if statistics == ("share",):
        if "statistic" in entry:
            raise PolicyMistake((*path, "statistic"), f"{name} is a share already; leave statistic out")
        if over is None:
            raise PolicyMistake(path, f"{name} needs `over`, the limit of one request, such as over: 500ms")
        return Metric(name, family, measure, kind, "share", 1, None, _edge(over, (*path, "over"), kind))
    if over is not None:
        raise PolicyMistake((*path, "over"), f"`over` goes with ttft_over_share, not with {name}")
    statistic = entry.get("statistic", None if kind == "latency" else "mean")
    if statistic is None:
        raise PolicyMistake(path, f"{name} needs `statistic`: {_allowed(statistics)}")
    if statistic == "mean" and "mean" in statistics:
        offset = EXCESS_SHIFT if kind == "excess" else 0
        return Metric(name, family, measure, kind, "mean", unit, offset=offset)
    found = _QUANTILE.fullmatch(statistic) if isinstance(statistic, str) else None
    if found is None or "quantile" not in statistics or not Fraction(found[1]):
        raise PolicyMistake((*path, "statistic"), f"{statistic!r} is none of {name}: {_allowed(statistics)}")
    quantile = Fraction(found[1]) / 100
    return Metric(name, family, measure, kind, "quantile", unit, quantile, per_second=name in _PER_SECOND)


def _allowed(statistics: Sequence[Statistic]) -> str:
    told = {"mean": "mean", "quantile": "a quantile such as p50, p99, p99.9"}
    return ", or ".join(words for name, words in told.items() if name in statistics)


def _edge(value: object, path: Path, kind: Kind) -> int:
    """A limit of single requests must be an edge of the histogram: then the share over it is exact."""
    us = read_duration_us(value, path)
    held = _bin_holding(kind, us)
    if us not in (bin_lower(kind, held), bin_upper(kind, held)):
        below, above = bin_lower(kind, held), bin_upper(kind, held)
        raise PolicyMistake(
            path, f"{value!r} is no edge of the latency histogram; the nearest are {below}us and {above}us"
        )
    return us


def _bin_holding(kind: Kind, value: int) -> int:
    return min(int(bin_of(kind, np.array([value], dtype=np.int64))[0]), bin_count(kind) - 1)


def _limit(entry: Mapping[str, object], path: Path, metric: Metric) -> Fraction:
    if "limit" not in entry:
        raise PolicyMistake(path, "limit is missing")
    value = entry["limit"]
    where = (*path, "limit")
    if metric.statistic == "share":
        return read_share(value, where)
    if metric.kind == "latency":
        return Fraction(read_duration_us(value, where))
    limit = read_number(value, where)
    if limit < 0:
        raise PolicyMistake(where, f"{value!r}: a divergence is never below 0")
    if metric.kind == "excess" and not limit:
        raise PolicyMistake(where, f"{value!r}: a tolerance above 0 is expected, such as 0.01")
    return limit


def _ratio(entry: Mapping[str, object], path: Path) -> Fraction:
    """How many times the baseline's level a metric may be."""
    if "limit" not in entry:
        raise PolicyMistake(path, "limit is missing")
    ratio = read_number(entry["limit"], (*path, "limit"))
    if ratio < 1:
        raise PolicyMistake(
            (*path, "limit"),
            f"{entry['limit']!r}: a ratio to the baseline is expected, at least 1, like 1.15",
        )
    return ratio


def _hold(entry: Mapping[str, object], path: Path) -> int:
    if "hold" in entry and "consecutive" in entry:
        raise PolicyMistake((*path, "consecutive"), "`hold` and `consecutive` say the same; keep one")
    if "hold" in entry:
        return read_whole_seconds(entry, path, "hold", least=1, most=600)
    return read_integer(entry, path, "consecutive", least=1, most=600, default=1)


def _scopes(entry: Mapping[str, object], path: Path, metric: Metric) -> tuple[str, ...]:
    value = entry.get("scope", ["rollout"])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise PolicyMistake(
            (*path, "scope"), "a scope or a list of them is expected, such as [rollout, node]"
        )
    known = PAIR_SCOPES if metric.family == "pairs" else REQUEST_SCOPES
    for at, name in enumerate(names):
        where = (*path, "scope", at) if isinstance(value, list) else (*path, "scope")
        if not isinstance(name, str) or name not in known:
            raise PolicyMistake(where, f"unknown scope {name!r} of {metric.name}{nearest(str(name), known)}")
        if names.count(name) > 1:
            raise PolicyMistake(where, f"scope {name!r} stands twice")
    return tuple(names)


def _alpha(data: object, path: Path) -> Fraction:
    entry = read_mapping(data, path, ("alpha",))
    alpha = read_share(entry.get("alpha", float(ALPHA)), (*path, "alpha"))
    if not LEAST_ALPHA <= alpha <= MOST_ALPHA:
        raise PolicyMistake(
            (*path, "alpha"),
            f"{entry['alpha']!r}: the chance of a false trip is expected,"
            f" {float(LEAST_ALPHA):g}..{float(MOST_ALPHA):g}, such as 0.05",
        )
    return alpha


def _coverage(data: object, path: Path) -> Coverage:
    entry = read_mapping(data, path, ("limit", "window", "min_samples", "action"))
    return Coverage(
        read_share(entry.get("limit", 0.9), (*path, "limit")),
        read_whole_seconds({"window": "5m", **entry}, path, "window", least=1, most=LONGEST_WINDOW_S),
        read_integer(entry, path, "min_samples", least=1, most=10**9, default=100),
        read_choice(entry, path, "action", ("hold", "pause"), "hold"),
    )


def _ejection(data: object, path: Path) -> Ejection:
    entry = read_mapping(data, path, ("max_share",))
    return Ejection(read_share(entry.get("max_share", 0.2), (*path, "max_share")))


def _progression(data: object, path: Path) -> Progression:
    entry = read_mapping(data, path, ("mode", "min_pairs"))
    return Progression(
        read_choice(entry, path, "mode", ("auto", "manual"), "auto"),
        read_integer(entry, path, "min_pairs", least=1, most=10**9, default=300),
    )
