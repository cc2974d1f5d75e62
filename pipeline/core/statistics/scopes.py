"""Many scopes as one test: the weighted sum of their evidence (statistics.md §0.1 "Scopes"). Pure.

Levels (roll-out, node, context, node × context, …) share the weight alike; inside a level the k-th scope to
appear holds v_k = ln 2 · (1/ln(k+1) − 1/ln(k+2)). They appear by complete second, within one by the bytes of
dimension and value. An average of e-processes is one: that Σ weight · E ever reaches 1/α has the chance α,
over all scopes together. The scope with the largest term is where the fault sits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TypeAlias

from pipeline.core.statistics.betting import restart_weight, unspent

ScopeKey: TypeAlias = tuple[str, str]
"""(dimension, value) of a cell."""


@dataclass(slots=True)
class Weights:
    """Who holds how much. `levels`: the dimensions that share, each a level."""

    levels: tuple[str, ...]
    of: dict[ScopeKey, float] = field(default_factory=dict)
    """In order of appearance."""
    _ranks: dict[str, int] = field(default_factory=dict)

    def appear(self, scopes: Iterable[ScopeKey]) -> None:
        """Scopes of the next complete second; those known stay as they are."""
        for scope in sorted({one for one in scopes if one not in self.of}, key=by_bytes):
            level = scope[0]
            assert level in self.levels
            rank = self._ranks[level] = self._ranks.get(level, 0) + 1
            self.of[scope] = restart_weight(rank) / len(self.levels)

    @property
    def unspent(self) -> float:
        """Of 1, the weight of scopes that are yet to appear."""
        return math.fsum(unspent(self._ranks.get(level, 0)) for level in self.levels) / len(self.levels)


def weighted(weights: Mapping[ScopeKey, float], evidence: Mapping[ScopeKey, float]) -> float:
    """Σ weight · E over the scopes that have evidence; correctly rounded, so it depends on no order."""
    return math.fsum(weights[scope] * held for scope, held in evidence.items())


def largest(
    weights: Mapping[ScopeKey, float], evidence: Mapping[ScopeKey, float], most: int
) -> list[ScopeKey]:
    """The scopes with the `most` largest terms, the largest first; ties go to the one that appeared first,
    as `evidence` has them."""
    return nlargest(most, evidence, key=lambda scope: weights[scope] * evidence[scope])


def by_bytes(scope: ScopeKey) -> tuple[bytes, bytes]:
    """What scopes that appear in one second are ordered by."""
    return scope[0].encode(), scope[1].encode()
