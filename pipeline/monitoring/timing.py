"""How long something took, counted in fixed steps: what a Prometheus histogram is made of. No clock."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

EDGES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper ends of the steps, inclusive; longer than the last counts too."""


class Timing:
    """Durations of one kind since the process began. Memory: one integer per step."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        """Durations per step, the last one without an upper end."""
        self.sum_s = 0.0

    def took(self, duration_s: float) -> None:
        """One more; a clock that stepped back took no time."""
        duration_s = max(duration_s, 0.0)
        self.counts[bisect_left(EDGES_S, duration_s)] += 1
        self.sum_s += duration_s
