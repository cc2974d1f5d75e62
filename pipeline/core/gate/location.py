"""Where a deviation sits (G7), and the pairs that prove it (X5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.core.gate.metrics import Vec, excess_of, samples_of
from pipeline.core.gate.policy import Rule
from pipeline.core.gate.rules import LOCATING
from pipeline.core.gate.windows import Scope
from schemas.control import Located

EXCESS_SHARE: Final = 0.8
TRAFFIC_SHARE: Final = 0.5
PROOFS: Final = 20
"""Most pair ids that a cause carries."""


def locate(rule: Rule, vectors: Mapping[Scope, Vec], whole: Scope) -> Located | None:
    """The class that carries ≥ 80 % of the excess on ≤ 50 % of the traffic; None: it is everywhere.

    Excess is what single values have over the rule's limit, added up; it needs no guess of a healthy level,
    and nested classes can be compared. Of several, the one whose share of excess stands highest over its
    share of traffic is named; ties go to the smaller one, then in order of dimension and value.
    """
    total_excess = excess_of(rule, vectors.get(whole, {}))
    total_samples = samples_of(rule, vectors.get(whole, {}))
    if total_excess <= 0 or total_samples <= 0:
        return None
    best: tuple[float, float, int, str] | None = None
    found: Located | None = None
    for scope, vec in vectors.items():
        dimension, value = scope
        if dimension not in LOCATING:
            continue
        excess = excess_of(rule, vec) / total_excess
        traffic = samples_of(rule, vec) / total_samples
        if excess < EXCESS_SHARE or traffic > TRAFFIC_SHARE:
            continue
        rank = (traffic - excess, traffic, LOCATING.index(dimension), value)
        if best is None or rank < best:
            best = rank
            found = Located(
                dimension=dimension,
                value=value,
                share_of_excess=round(min(excess, 1.0), 6),
                share_of_traffic=round(traffic, 6),
            )
    return found


def proofs(worst: Iterable[tuple[int, bytes]]) -> tuple[str, ...]:
    """The ids of the worst pairs, hex, worst first, at most PROOFS, each once."""
    ids: dict[bytes, None] = {}
    for _, pair_id in sorted(worst, reverse=True):
        ids[pair_id] = None
        if len(ids) == PROOFS:
            break
    return tuple(pair_id.hex() for pair_id in ids)
