"""Number columns of requests and logits: order and type on the wire, and the limits of each.

The limits come from the event types of `schemas.events`, so that both encodings refuse the same values.
Columns of one type stand together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np
from msgspec import Struct

from schemas.columns import ABSENT, LOGIT_LABELS, REQUEST_LABELS
from schemas.events import LogitEvent, RequestEvent

Wire = Literal["<i8", "<i4", "<f8", "<u2", "|i1", "|u1"]


@dataclass(frozen=True, slots=True, eq=False)
class NumberColumn:
    """One number per event. `optional`: ABSENT is allowed as well; `flag`: 0 or 1 and read as bool."""

    name: str
    wire: Wire
    low: float
    high: float
    optional: bool = False
    flag: bool = False
    itemsize: int = field(init=False)
    least: float = field(init=False)
    """Least of the values that are allowed without a gap: `low`, or ABSENT beside an integer's range."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", np.dtype(self.wire).itemsize)
        joins = self.optional and self.wire != "<f8"
        object.__setattr__(self, "least", min(self.low, ABSENT) if joins else self.low)


@dataclass(frozen=True, slots=True)
class NumberGroup:
    """Consecutive columns of one wire type."""

    wire: Wire
    columns: tuple[NumberColumn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What an envelope of this kind holds, in wire order. There is one of each kind."""

    kind: str
    groups: tuple[NumberGroup, ...]
    labels: tuple[str, ...]
    optional_labels: tuple[bool, ...]
    """Which labels may be absent."""
    numbers: tuple[NumberColumn, ...]
    """The columns of all groups."""


def _bounds(event: type[Struct], name: str) -> tuple[float, float, bool]:
    """Low, high and optionality of a number field, from its annotations."""
    info = msgspec.inspect.type_info(event)
    assert isinstance(info, msgspec.inspect.StructType)
    field = next(f for f in info.fields if f.name == name)
    kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            assert kind.ge is not None, name
            assert kind.le is not None, name
            return kind.ge, kind.le, not field.required
    raise AssertionError(f"{event.__name__}.{name} is no number")


def _number(event: type[Struct], name: str, wire: Wire) -> NumberColumn:
    low, high, optional = _bounds(event, name)
    return NumberColumn(name, wire, low, high, optional)


def _flag(name: str) -> NumberColumn:
    return NumberColumn(name, "|u1", 0, 1, flag=True)


def _code(name: str, codes: int) -> NumberColumn:
    return NumberColumn(name, "|u1", 0, codes - 1)


def _layout(
    kind: str, event: type[Struct], columns: tuple[NumberColumn, ...], labels: tuple[str, ...]
) -> Layout:
    groups: list[NumberGroup] = []
    for wire in ("<i8", "<i4", "<f8", "<u2", "|i1", "|u1"):
        members = tuple(c for c in columns if c.wire == wire)
        if not members:
            continue
        groups.append(NumberGroup(wire, members))
    info = msgspec.inspect.type_info(event)
    assert isinstance(info, msgspec.inspect.StructType)
    required = {f.name for f in info.fields if f.required}
    numbers = tuple(column for group in groups for column in group.columns)
    return Layout(kind, tuple(groups), labels, tuple(name not in required for name in labels), numbers)


_SEED: Final = NumberColumn("seed", "<i8", -(2**63), 2**63 - 1)


def _common(event: type[Struct]) -> tuple[NumberColumn, ...]:
    return (
        _number(event, "ts_us", "<i8"),
        _number(event, "duration_us", "<i8"),
        _SEED,
        _number(event, "generation", "<i4"),
        _number(event, "input_tokens", "<i4"),
        _number(event, "cached_tokens", "<i4"),
        _number(event, "max_tokens", "<i4"),
        _number(event, "temperature", "<f8"),
        _number(event, "top_p", "<f8"),
        _code("arm", 3),
        _flag("has_pair_id"),
        _flag("has_seed"),
    )


REQUEST_LAYOUT: Final = _layout(
    "requests",
    RequestEvent,
    (
        *_common(RequestEvent),
        _number(RequestEvent, "ttft_us", "<i8"),
        _number(RequestEvent, "itl_us", "<i8"),
        _number(RequestEvent, "output_tokens", "<i4"),
        _number(RequestEvent, "parse_depth", "<i4"),
        _number(RequestEvent, "status", "<u2"),
        NumberColumn("stream", "|i1", 0, 1, optional=True),
        _flag("shadow"),
    ),
    REQUEST_LABELS,
)

ETAS: Final = (1e-6, 5e-5, 5e-4)
"""η by its code on the wire."""

LOGIT_LAYOUT: Final = _layout(
    "logits",
    LogitEvent,
    (
        *_common(LogitEvent),
        NumberColumn("expected_arms", "|u1", 1, 7),
        _code("definition", 3),
        _code("source", 2),
        _code("kind", 2),
        _code("eta", len(ETAS)),
        _code("identity", 2),
        NumberColumn("k", "|u1", 0, 20),
        NumberColumn("length", "<u2", 0, 65_535),
        NumberColumn("ended", "|i1", 0, 1, optional=True),
    ),
    LOGIT_LABELS,
)
