"""Seconds of both arms into blocks of slow requests (statistics.md §0.4), per scope. Pure.

Everything here follows from the buckets of the last `reach` seconds: after a restart it is read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeline.core.gate.metrics import Vec, add_into
from pipeline.core.gate.relative import is_baseline
from pipeline.core.gate.windows import Scope
from pipeline.core.statistics.betting import Growth, growth_of
from pipeline.core.statistics.slow_share import BLOCK_S, LOOK_BACK_S, Block, block_start, p99_bin


@dataclass(slots=True)
class Blocks:
    """The block under way, and the baseline before it. `bins`: the ratio; `kept_s`: of `compared`."""

    bins: int
    kept_s: int
    like: Callable[[Scope], Scope]
    """Where the content keeps the baseline's cell that a scope is compared with."""
    start: int | None = None
    _now: dict[Scope, Vec] = field(default_factory=dict)
    _before: deque[tuple[int, dict[Scope, Vec]]] = field(default_factory=deque)
    """(block, the baseline's in it) of the last 300 s."""
    _compared: deque[tuple[int, dict[Scope, int]]] = field(default_factory=deque)
    """(block, requests of the canary that were compared, per scope)."""

    def fold(
        self, second: int, content: Mapping[Scope, Vec], judged: Callable[[Scope], bool]
    ) -> dict[Scope, tuple[Growth, int]]:
        """Add a complete second; what the blocks that end with it say of each scope."""
        found: dict[Scope, tuple[Growth, int]] = {}
        start = block_start(second)
        if self.start is not None and start != self.start:
            found = self._close(judged)
        self.start = start
        for scope, vec in content.items():
            if is_baseline(scope) or judged(scope):
                add_into(self._now.setdefault(scope, {}), vec)
        if second == start + BLOCK_S - 1:
            found |= self._close(judged)
        while self._compared and self._compared[0][0] + BLOCK_S <= second - self.kept_s + 1:
            self._compared.popleft()
        return found

    @property
    def compared(self) -> int:
        """Requests of the canary that were compared lately, in the level that has most."""
        levels: dict[str, int] = {}
        for _, samples in self._compared:
            for (dimension, _value), count in samples.items():
                levels[dimension] = levels.get(dimension, 0) + count
        return max(levels.values(), default=0)

    def _close(self, judged: Callable[[Scope], bool]) -> dict[Scope, tuple[Growth, int]]:
        start = self.start
        assert start is not None
        while self._before and self._before[0][0] < start - LOOK_BACK_S:
            self._before.popleft()
        found: dict[Scope, tuple[Growth, int]] = {}
        compared: dict[Scope, int] = {}
        for scope in filter(judged, self._now):
            canary, like = self._now[scope], self.like(scope)
            p99 = self._p99_before(like)
            requests = sum(canary.values())
            if p99 is None or requests <= 0:
                continue
            block = Block.of(canary, self._now.get(like, {}), p99, self.bins)
            found[scope] = growth_of((block.ratio,)), requests
            if block.baseline_requests > 0:
                compared[scope] = requests
        self._before.append((start, {at: held for at, held in self._now.items() if is_baseline(at)}))
        if compared:
            self._compared.append((start, compared))
        self._now, self.start = {}, None
        return found

    def _p99_before(self, like: Scope) -> int | None:
        total: Vec = {}
        for _, content in self._before:
            add_into(total, content.get(like, {}))
        return p99_bin(total)
