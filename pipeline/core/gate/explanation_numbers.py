"""Metrics, values, times and places of decisions as people say them. Pure; knows nothing but the record."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LABEL: Final = re.compile(r"(?P<name>\w+) (?P<statistic>mean|p[0-9.]+|(?P<over>[0-9.]+ ms))")
DIVERGENCES: Final = frozenset({"kl_lower", "js_lower", "tv_lower"})
"""Metrics that are certified: no vocabulary that fits the lists has a smaller one."""
_SIDES: Final = ": "
"""Between a metric's label and the sides of a ratio: `ttft_us p99: canary / baseline`."""
_OF_PAIRS: Final = ("kl_", "js_", "tv_", "cosine", "top1_", "behaviour_", "delta_", "excess")
_NATS: Final = ("kl_", "js_", "entropy_", "excess")
_MEANT: Final = {
    "ttft": "time to the first token",
    "itl": "time between tokens",
    "duration": "whole duration",
}
"""Quantities by the name of their metric, without `_us` and `_over_share`."""
CLOSE: Final = 17
"""Digits that tell any two doubles apart."""


def metric_words(label: str | None) -> str:
    """`mean kl_lower`, `p99 of ttft_us (time to the first token)`, `share of requests over 500 ms …`.

    `label` as decisions carry it; one of a metric that this release does not know stays as it is.
    """
    measured, _, sides = (label or "").partition(_SIDES)
    found = _LABEL.fullmatch(measured)
    if found is None:
        return label or "metric"
    ratio = f", {sides.replace(' / ', ' over ')}," if sides else ""
    name, statistic = found["name"], found["statistic"]
    meant = _MEANT.get(name.removesuffix("_us").removesuffix("_over_share"))
    if found["over"]:
        until = "to the first token" if name.startswith("ttft") else f"of {meant or name}"
        return f"share of requests over {found['over']} {until}{ratio}"
    explained = f"{name} ({meant})" if meant else name
    return f"mean {explained}{ratio}" if statistic == "mean" else f"{statistic} of {explained}{ratio}"


def amount(label: str | None, value: float, apart_from: float | None = None) -> str:
    """The value with its unit, in as few digits as tell it from `apart_from`, three at least."""
    if _SIDES in (label or ""):
        return f"{_digits(value, apart_from)} ×"
    name = (label or "").partition(" ")[0]
    if name == "coverage":
        return _digits(value, apart_from)
    if name.endswith("_share"):
        return f"{_digits(100 * value, None if apart_from is None else 100 * apart_from)} %"
    if name.endswith("_us"):
        scaled = None if apart_from is None else apart_from / 1000
        return f"{_digits(value / 1000, scaled)} ms"
    unit = " nats" if name.startswith(_NATS) else " tokens/s" if name == "tokens_per_s" else ""
    return f"{_digits(value, apart_from)}{unit}"


def counted_as(label: str | None, samples: int) -> str:
    """`112 pairs`, `1,204 requests`: what a metric's samples are."""
    name = (label or "").partition(" ")[0]
    if name.startswith(_OF_PAIRS):
        noun = "pair"
    elif name == "coverage":
        noun = "mirrored request"
    elif name.endswith(("_us", "_share", "_per_s")):
        noun = "request"
    else:
        noun = "sample"
    return f"{samples:,} {noun}{'' if samples == 1 else 's'}"


def is_certified(label: str | None) -> bool:
    """Whether the metric is a lower bound of what it stands for."""
    return (label or "").partition(" ")[0] in DIVERGENCES


def place_words(scope: str | None) -> str:
    """`the whole roll-out`, `node_context gpu-3|>2048`."""
    if scope in (None, "rollout"):
        return "the whole roll-out"
    assert scope is not None
    return scope.replace("=", " ", 1)


def share_words(share: float) -> str:
    """`97 %`; what is there is never said to be nothing."""
    if 0 < share < 0.01:
        return "under 1 %"
    return f"{share:.0%}".replace("%", " %")


def moment(at_us: int) -> str:
    """`2026-11-30 12:03:04 UTC`. Times that no calendar holds are said as they are."""
    try:
        return f"{_EPOCH + timedelta(microseconds=at_us):%Y-%m-%d %H:%M:%S} UTC"
    except OverflowError:
        return f"{at_us} µs"


def time_of_day(at_us: int) -> str:
    """`12:03:04 UTC`."""
    return moment(at_us).partition(" ")[2]


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)


def _digits(value: float, apart_from: float | None) -> str:
    for digits in range(3, CLOSE):
        text = f"{value:.{digits}g}"
        if apart_from is None or value == apart_from or text != f"{apart_from:.{digits}g}":
            return _plain(text)
    return _plain(repr(value))


def _plain(text: str) -> str:
    """Without an exponent where that is short."""
    number = float(text)
    return f"{number:,.0f}" if "e+" in text and abs(number) < 1e9 else text
