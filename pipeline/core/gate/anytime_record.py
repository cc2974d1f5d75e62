"""Whether a sequential rule's record can be what betting led to: one that cannot be is none. Pure.

A record is trusted for as long as its generation lives: a stake or a test for a pass that stands there would
trip or promote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.core.gate.state import RuleMemory
from pipeline.core.statistics import capped

_ROUNDING = 1e-9


def sound(memory: RuleMemory, logs: Sequence[float], folded: int, limit: float | None) -> bool:
    """`logs`: its test for a pass; `folded`: the newest second of the roll-out; `limit`: in nats, None where
    no pairs are judged."""
    least = (memory.samples, memory.pass_pairs, *memory.buckets, *memory.scope_samples)
    if min(least) < 0 or max(least) >= 1 << 62:
        return False
    if memory.folded > folded:
        return False
    if memory.folded < memory.evidence_from and (memory.scopes or memory.samples or memory.pass_pairs):
        return False
    if limit is None:
        return not any(logs)
    best = capped.growth_of((0.0,), limit)
    worst = capped.growth_of((capped.CAP,), limit)
    slack = _ROUNDING * (memory.pass_pairs + 1)
    return all(
        math.isfinite(log) and memory.pass_pairs * low - slack <= log <= memory.pass_pairs * high + slack
        for log, low, high in zip(logs, worst, best, strict=True)
    )
