"""The betting of statistics.md 0.1 written down a second time, with what keeps it honest left out on demand.

A control: the simulation must see the false trips of a test that lacks the weights of its scopes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from pipeline.core.bins import bin_lowers
from schemas.buckets import SCORE_ONE, Cell
from schemas.columns import F8
from tests.simulation.scores import LIMIT

BETS: Final = np.array([0.8, 0.4, 0.2, 0.1, 0.05, 0.02])
LEVELS: Final = {"all": 0, "node": 1, "context": 2, "request_type": 2, "node_context": 3}
Scope = tuple[str, str]


def restart_weight(b: int) -> float:
    """w_b and v_k: sums to 1 over b = 1, 2, …"""
    return float(np.log(2) * (1 / np.log(b + 1) - 1 / np.log(b + 2)))


def bets(seconds: Mapping[int, list[Cell]], limit: float = LIMIT) -> Iterator[tuple[int, dict[Scope, float]]]:
    """Second by second: every scope's E."""
    ratio = bin_lowers("score") / (limit * SCORE_ONE)
    logs: F8 = np.log1p(np.outer(ratio - 1, BETS))
    states: dict[Scope, F8] = {}
    buckets: dict[Scope, int] = {}
    found: dict[Scope, float] = {}
    for second in sorted(seconds):
        for cell in seconds[second]:
            if cell.dimension not in LEVELS:
                continue
            scope, held = (cell.dimension, cell.value), cell.measures["kl_lower"]
            grown = np.exp(np.array(held.counts) @ logs[held.bins])
            buckets[scope] = buckets.get(scope, 0) + 1
            before = states.get(scope, np.zeros(len(BETS)))
            states[scope] = (before + restart_weight(buckets[scope])) * grown
            found[scope] = float(states[scope].mean())
        yield second, found


def weighted(order: dict[Scope, int], found: Mapping[Scope, float]) -> float:
    """Σ of E by weight; `order` remembers as the how-manieth of its level a scope appeared."""
    counts = [0] * 4
    for scope in order:
        counts[LEVELS[scope[0]]] += 1
    for scope in sorted(scope for scope in found if scope not in order):
        level = LEVELS[scope[0]]
        counts[level] += 1
        order[scope] = counts[level]
    return sum(restart_weight(order[scope]) * value for scope, value in found.items()) / 4
