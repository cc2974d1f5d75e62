"""Single values of a policy as they stand in its file: durations, shares, names, whole numbers.

Every mistake is a PolicyMistake that carries the path of the value, so that whoever read the file can name
its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final, TypeAlias, TypeVar

from pipeline.core.spelling import nearest

T = TypeVar("T", bound=str)
Path: TypeAlias = tuple[str | int, ...]
_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)[ \t]*(us|µs|ms|s|m|h)")
_PERCENT: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)[ \t]*%")
_UNITS_US: Final = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}


class PolicyMistake(Exception):  # noqa: N818 (it is the operator's mistake, and is called so)
    """A value of a policy that cannot be obeyed; `path` is where it stands, the message holds the remedy."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path = path


def read_mapping(data: object, path: Path, known: Sequence[str]) -> Mapping[str, object]:
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise PolicyMistake(path, f"keys are expected here: {', '.join(known)}")
    for key in data:
        if key not in known:
            raise PolicyMistake((*path, key), f"unknown key {key!r}{nearest(key, known)}")
    return data


def read_text(entry: Mapping[str, object], path: Path, key: str) -> str:
    value = entry.get(key)
    if key not in entry:
        raise PolicyMistake(path, f"{key} is missing")
    if not isinstance(value, str) or not value:
        raise PolicyMistake((*path, key), f"{value!r}: text is expected")
    return value


def read_choice(entry: Mapping[str, object], path: Path, key: str, known: Sequence[T], default: T) -> T:
    value = entry.get(key, default)
    for name in known:
        if value == name:
            return name
    raise PolicyMistake((*path, key), f"unknown {key} {value!r}{nearest(str(value), known)}")


def read_integer(
    entry: Mapping[str, object], path: Path, key: str, *, least: int, most: int, default: int
) -> int:
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PolicyMistake((*path, key), f"{value!r}: a whole number {least}..{most} is expected")
    return value


def read_number(value: object, path: Path) -> Fraction:
    """Exactly the decimal that stands in the file: 0.05 is 1/20, not the nearest double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyMistake(path, f"{value!r}: a number is expected")
    try:
        return Fraction(repr(value))
    except ValueError:
        raise PolicyMistake(path, f"{value!r}: a finite number is expected") from None


def read_share(value: object, path: Path) -> Fraction:
    if isinstance(value, str):
        found = _PERCENT.fullmatch(value)
        if found is None:
            raise PolicyMistake(path, f"{value!r}: a share such as 0.05 or 5% is expected")
        share = Fraction(found[1]) / 100
    else:
        share = read_number(value, path)
    if not 0 <= share <= 1:
        raise PolicyMistake(path, f"{value!r}: a share lies in 0..1 (or 0%..100%)")
    return share


def read_duration_us(value: object, path: Path) -> int:
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise PolicyMistake(path, f"{value!r}: a duration with its unit is expected, such as 500ms, 30s, 5m")
    us = Fraction(found[1]) * _UNITS_US[found[2]]
    if us.denominator != 1 or us <= 0:
        raise PolicyMistake(path, f"{value!r}: a duration above 0 in whole microseconds is expected")
    return int(us)


def read_whole_seconds(entry: Mapping[str, object], path: Path, key: str, *, least: int, most: int) -> int:
    if key not in entry:
        raise PolicyMistake(path, f"{key} is missing, such as {key}: 60s")
    us = read_duration_us(entry[key], (*path, key))
    if us % 1_000_000 or not least * 1_000_000 <= us <= most * 1_000_000:
        raise PolicyMistake((*path, key), f"{entry[key]!r}: whole seconds, {least}s..{most}s, are expected")
    return us // 1_000_000
