"""Reading a policy: plain data into the frozen types of `policy`.

Every mistake is a PolicyMistake that carries the path of the value, so that whoever read the file can name
its line. Nothing is guessed: an unknown key or value is a mistake, and so is evidence this gate cannot give.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, TypeAlias, TypeVar

import numpy as np

from pipeline.core.bins import bin_count, bin_lower, bin_of, bin_upper
from pipeline.core.gate.policy import (
    ACTIONS,
    ActionName,
    ArmName,
    Coverage,
    Family,
    Metric,
    Policy,
    Progression,
    Rule,
    Statistic,
    Traffic,
)
from pipeline.core.spelling import nearest
from schemas.buckets import SCORE_ONE

T = TypeVar("T", bound=str)
Path: TypeAlias = tuple[str | int, ...]

PAIR_SCOPES: Final = (
    "rollout", "node", "context", "node_context", "request_type", "hardware", "sampling", "region",
)  # fmt: skip
REQUEST_SCOPES: Final = (*PAIR_SCOPES, "stratum")
LONGEST_WINDOW_S: Final = 3600


class PolicyMistake(Exception):  # noqa: N818 (it is the operator's mistake, and is called so)
    """A value of a policy that cannot be obeyed; `path` is where it stands, the message holds the remedy."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


_METRICS: Final[Mapping[str, tuple[Family, str, Literal["latency", "score"], tuple[Statistic, ...]]]] = {
    "kl_lower": ("pairs", "kl_lower", "score", ("mean",)),
    "kl_floor": ("pairs", "kl_floor", "score", ("mean",)),
    "ttft_us": ("requests", "ttft_us", "latency", ("mean", "quantile")),
    "itl_us": ("requests", "itl_us", "latency", ("mean", "quantile")),
    "duration_us": ("requests", "duration_us", "latency", ("mean", "quantile")),
    "ttft_over_share": ("requests", "ttft_us", "latency", ("share",)),
    "duration_over_share": ("requests", "duration_us", "latency", ("share",)),
}
_RULE_KEYS: Final = (
    "id", "capability", "metric", "statistic", "over", "window", "step", "limit", "evidence", "min_samples",
    "hold", "consecutive", "scope", "action", "mode", "arm", "traffic", "relative_to", "description",
)  # fmt: skip
_ARMS: Final[tuple[ArmName, ...]] = ("canary", "baseline", "control", "any")
_TRAFFIC: Final[tuple[Traffic, ...]] = ("all", "user", "shadow")
_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)[ \t]*(us|µs|ms|s|m|h)")
_PERCENT: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)[ \t]*%")
_UNITS_US: Final = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_QUANTILE: Final = re.compile(r"p([0-9]{1,2}(?:\.[0-9]{1,3})?)")


def read_policy(data: object, text: str, digest: str) -> Policy:
    """Plain data as frozen types. Raises PolicyMistake at the first value that cannot be obeyed."""
    top = _mapping(data, (), ("version", "rules", "coverage", "progression", "description"))
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
    )


def _rule(data: object, path: Path) -> Rule:
    entry = _mapping(data, path, _RULE_KEYS)
    rule_id = _text(entry, path, "id")
    if not _ID.fullmatch(rule_id):
        raise PolicyMistake((*path, "id"), f"{rule_id!r}: letters, digits, '_', '.', '-', at most 64")
    capability = entry.get("capability")
    if capability is not None and not isinstance(capability, str):
        raise PolicyMistake((*path, "capability"), f"{capability!r}: text such as G3 is expected")
    if "relative_to" in entry:
        raise PolicyMistake(
            (*path, "relative_to"), "comparing with another arm is not supported yet; give an absolute limit"
        )
    _evidence(entry, path)
    metric = _metric(entry, path)
    window_s = _whole_seconds(entry, path, "window", least=1, most=LONGEST_WINDOW_S)
    if "step" in entry and _duration_us(entry["step"], (*path, "step")) != 1_000_000:
        raise PolicyMistake((*path, "step"), f"{entry['step']!r}: windows move by 1s; no other step")
    arm = _choice(entry, path, "arm", _ARMS, "canary")
    if metric.family == "pairs" and arm not in ("canary", "control"):
        raise PolicyMistake(
            (*path, "arm"), f"{arm!r}: a divergence is of canary or control against the baseline"
        )
    scopes = _scopes(entry, path, metric)
    traffic = _choice(entry, path, "traffic", _TRAFFIC, "all")
    if traffic != "all" and (metric.family != "requests" or scopes != ("rollout",)):
        raise PolicyMistake(
            (*path, "traffic"), f"{traffic!r} goes with a request metric in the scope rollout only"
        )
    return Rule(
        id=rule_id,
        capability=capability,
        metric=metric,
        window_s=window_s,
        limit=_limit(entry, path, metric),
        min_samples=_integer(entry, path, "min_samples", least=1, most=10**9, default=100),
        hold_steps=_hold(entry, path),
        scopes=scopes,
        action=_action(entry, path),
        mode=_choice(entry, path, "mode", ("enforce", "observe"), "enforce"),
        arm=arm,
        traffic=traffic,
    )


def _evidence(entry: Mapping[str, object], path: Path) -> None:
    evidence = entry.get("evidence", "point")
    if evidence == "anytime":
        raise PolicyMistake(
            (*path, "evidence"),
            "'anytime' is not supported by this version; supported: 'point' (the estimate against its limit)",
        )
    _choice(entry, path, "evidence", ("point",), "point")


def _action(entry: Mapping[str, object], path: Path) -> ActionName:
    if entry.get("action") in ("narrow", "eject_node"):
        raise PolicyMistake(
            (*path, "action"),
            f"{entry['action']!r} is not supported by this version; supported: {', '.join(ACTIONS)}",
        )
    if "action" not in entry:
        raise PolicyMistake(path, f"action is missing; one of {', '.join(ACTIONS)}")
    return _choice(entry, path, "action", ACTIONS, "pause")


def _metric(entry: Mapping[str, object], path: Path) -> Metric:
    name = _text(entry, path, "metric")
    if name == "coverage":
        raise PolicyMistake(
            (*path, "metric"), "coverage is no rule; its limit stands in the section `coverage`"
        )
    if name not in _METRICS:
        raise PolicyMistake((*path, "metric"), f"unknown metric {name!r}{nearest(name, _METRICS)}")
    family, measure, kind, statistics = _METRICS[name]
    unit = SCORE_ONE if kind == "score" else 1
    over = entry.get("over")
    if statistics == ("share",):
        if "statistic" in entry:
            raise PolicyMistake((*path, "statistic"), f"{name} is a share already; leave statistic out")
        if over is None:
            raise PolicyMistake(path, f"{name} needs `over`, the limit of one request, such as over: 500ms")
        return Metric(name, family, measure, kind, "share", 1, None, _edge(over, (*path, "over"), kind))
    if over is not None:
        raise PolicyMistake((*path, "over"), f"`over` goes with ttft_over_share, not with {name}")
    statistic = entry.get("statistic", "mean" if kind == "score" else None)
    if statistic is None:
        raise PolicyMistake(path, f"{name} needs `statistic`: mean, or a quantile such as p99")
    if statistic == "mean":
        return Metric(name, family, measure, kind, "mean", unit)
    found = _QUANTILE.fullmatch(statistic) if isinstance(statistic, str) else None
    if found is None or "quantile" not in statistics or not Fraction(found[1]):
        allowed = "mean" if statistics == ("mean",) else "mean, or a quantile such as p50, p99, p99.9"
        raise PolicyMistake((*path, "statistic"), f"{statistic!r} is none of {name}: {allowed}")
    return Metric(name, family, measure, kind, "quantile", unit, Fraction(found[1]) / 100)


def _edge(value: object, path: Path, kind: Literal["latency", "score"]) -> int:
    """A limit of single requests must be an edge of the histogram: then the share over it is exact."""
    us = _duration_us(value, path)
    held = _bin_holding(kind, us)
    if us not in (bin_lower(kind, held), bin_upper(kind, held)):
        below, above = bin_lower(kind, held), bin_upper(kind, held)
        raise PolicyMistake(
            path, f"{value!r} is no edge of the latency histogram; the nearest are {below}us and {above}us"
        )
    return us


def _bin_holding(kind: Literal["latency", "score"], value: int) -> int:
    return min(int(bin_of(kind, np.array([value], dtype=np.int64))[0]), bin_count(kind) - 1)


def _limit(entry: Mapping[str, object], path: Path, metric: Metric) -> Fraction:
    if "limit" not in entry:
        raise PolicyMistake(path, "limit is missing")
    value = entry["limit"]
    where = (*path, "limit")
    if metric.statistic == "share":
        return _share(value, where)
    if metric.kind == "latency":
        return Fraction(_duration_us(value, where))
    limit = _number(value, where)
    if limit < 0:
        raise PolicyMistake(where, f"{value!r}: a divergence is never below 0")
    return limit


def _hold(entry: Mapping[str, object], path: Path) -> int:
    if "hold" in entry and "consecutive" in entry:
        raise PolicyMistake((*path, "consecutive"), "`hold` and `consecutive` say the same; keep one")
    if "hold" in entry:
        return _whole_seconds(entry, path, "hold", least=1, most=600)
    return _integer(entry, path, "consecutive", least=1, most=600, default=1)


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


def _coverage(data: object, path: Path) -> Coverage:
    entry = _mapping(data, path, ("limit", "window", "min_samples", "action"))
    return Coverage(
        _share(entry.get("limit", 0.9), (*path, "limit")),
        _whole_seconds({"window": "5m", **entry}, path, "window", least=1, most=LONGEST_WINDOW_S),
        _integer(entry, path, "min_samples", least=1, most=10**9, default=100),
        _choice(entry, path, "action", ("hold", "pause"), "hold"),
    )


def _progression(data: object, path: Path) -> Progression:
    entry = _mapping(data, path, ("mode", "min_pairs"))
    return Progression(
        _choice(entry, path, "mode", ("auto", "manual"), "auto"),
        _integer(entry, path, "min_pairs", least=1, most=10**9, default=300),
    )


def _mapping(data: object, path: Path, known: Sequence[str]) -> Mapping[str, object]:
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise PolicyMistake(path, f"keys are expected here: {', '.join(known)}")
    for key in data:
        if key not in known:
            raise PolicyMistake((*path, key), f"unknown key {key!r}{nearest(key, known)}")
    return data


def _text(entry: Mapping[str, object], path: Path, key: str) -> str:
    value = entry.get(key)
    if key not in entry:
        raise PolicyMistake(path, f"{key} is missing")
    if not isinstance(value, str) or not value:
        raise PolicyMistake((*path, key), f"{value!r}: text is expected")
    return value


def _choice(entry: Mapping[str, object], path: Path, key: str, known: Sequence[T], default: T) -> T:
    value = entry.get(key, default)
    for name in known:
        if value == name:
            return name
    raise PolicyMistake((*path, key), f"unknown {key} {value!r}{nearest(str(value), known)}")


def _integer(
    entry: Mapping[str, object], path: Path, key: str, *, least: int, most: int, default: int
) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PolicyMistake((*path, key), f"{value!r}: a whole number {least}..{most} is expected")
    return value


def _number(value: object, path: Path) -> Fraction:
    """Exactly the decimal that stands in the file: 0.05 is 1/20, not the nearest double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyMistake(path, f"{value!r}: a number is expected")
    try:
        return Fraction(repr(value))
    except ValueError:
        raise PolicyMistake(path, f"{value!r}: a finite number is expected") from None


def _share(value: object, path: Path) -> Fraction:
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value)
        if found is None:
            raise PolicyMistake(path, f"{value!r}: a share such as 0.05 or 5% is expected")
        share = Fraction(found[1]) / 100
    else:
        share = _number(value, path)
    if not 0 <= share <= 1:
        raise PolicyMistake(path, f"{value!r}: a share lies in 0..1 (or 0%..100%)")
    return share


def _duration_us(value: object, path: Path) -> int:
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise PolicyMistake(path, f"{value!r}: a duration with its unit is expected, such as 500ms, 30s, 5m")
    us = Fraction(found[1]) * _UNITS_US[found[2]]
    if us.denominator != 1 or us <= 0:
        raise PolicyMistake(path, f"{value!r}: a duration above 0 in whole microseconds is expected")
    return int(us)


def _whole_seconds(entry: Mapping[str, object], path: Path, key: str, *, least: int, most: int) -> int:
    if key not in entry:
        raise PolicyMistake(path, f"{key} is missing, such as {key}: 60s")
    us = _duration_us(entry[key], (*path, key))
    if us % 1_000_000 or not least * 1_000_000 <= us <= most * 1_000_000:
        raise PolicyMistake((*path, key), f"{entry[key]!r}: whole seconds, {least}s..{most}s, are expected")
    return us // 1_000_000
