"""What the judge finds: a line for people, and what became of how many things for the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, get_args

Kind = Literal["lost", "doubled", "false_trip", "missed_trip", "wrong"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SHOWN: Final = 8


class Finding(str):
    """One difference. `wrong`: there once, but not what it should be."""

    __slots__ = ("count", "kind")
    kind: Kind
    count: int

    def __new__(cls, kind: Kind, text: str, count: int = 1) -> Finding:
        made = super().__new__(cls, text)
        made.kind = kind
        made.count = count
        return made


def more_or_less(said: int, expected: int, text: str) -> Finding:
    """Something is there `said` times and not `expected` times."""
    return Finding("lost" if said < expected else "doubled", text, abs(said - expected))


def totals(found: Iterable[Finding]) -> Counter[Kind]:
    """How many things of each kind."""
    counted: Counter[Kind] = Counter()
    for finding in found:
        counted[finding.kind] += finding.count
    return counted


def shortened(found: list[Finding]) -> list[Finding]:
    """The first few, and how many more there are of each kind; the totals stay the same."""
    if len(found) <= SHOWN:
        return found
    rest = totals(found[SHOWN:])
    return [
        *found[:SHOWN],
        *(Finding(kind, f"… and {count} more {kind}", count) for kind, count in rest.items()),
    ]
