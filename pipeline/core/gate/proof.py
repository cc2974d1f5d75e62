"""The pairs that prove a deviation (X5): the worst of each second, as long as a window reaches back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final, TypeAlias

from pipeline.core.cells import ALL, worst_of
from pipeline.core.gate.rules import LOCATING
from pipeline.core.gate.windows import Scope
from schemas.buckets import Cell

PROOFS: Final = 20
"""Most pair ids that a cause carries."""
WORST_SCOPES: Final = 2_048
"""Scopes of a folded second whose worst pairs are kept: the whole's, and the worst parts'."""
Worst: TypeAlias = dict[Scope, list[tuple[int, bytes]]]
"""Scope → score and id of its worst pairs."""


@dataclass(slots=True)
class WorstPairs:
    """The canary's worst pairs of each folded second, by scope. `window_s`: of the longest window."""

    window_s: int
    by_second: dict[int, Worst] = field(default_factory=dict)

    def fold(self, second: int, worst: Worst) -> None:
        """Add a complete second, and forget those that no window reaches any more."""
        while self.by_second and (oldest := next(iter(self.by_second))) <= second - self.window_s:
            del self.by_second[oldest]
        if len(worst) > WORST_SCOPES:
            worst = dict(
                nlargest(WORST_SCOPES, worst.items(), key=lambda held: (held[0][0] == ALL, held[1], held[0]))
            )
        if worst:
            self.by_second[second] = worst

    def of(self, scope: Scope, after: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Those of a scope in the seconds after `after`, `end` among them."""
        for second, worst in self.by_second.items():
            if after < second <= end:
                yield from worst.get(scope, ())


def collect_worst(worst: Worst, cell: Cell) -> None:
    """Add a cell's worst pairs to those of its second."""
    if cell.worst and (cell.dimension == ALL or cell.dimension in LOCATING):
        scope = (cell.dimension, cell.value)
        worst[scope] = worst_of((*worst.get(scope, ()), *cell.worst))


def proofs(worst: Iterable[tuple[int, bytes]]) -> tuple[str, ...]:
    """The ids of the worst pairs, hex, worst first, at most PROOFS, each once."""
    ids: dict[bytes, None] = {}
    for _, pair_id in sorted(worst, reverse=True):
        ids[pair_id] = None
        if len(ids) == PROOFS:
            break
    return tuple(pair_id.hex() for pair_id in ids)
