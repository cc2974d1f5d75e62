"""How often a worker flushes, and how much of it may be on its way to the broker."""

from __future__ import annotations

from typing import Final

FLUSH_EVERY_S: Final = 0.025
"""Half of the 50 ms within which a changed cell is out; the other half is the broker's."""
FLUSH_TIMES: Final = 4
FLUSH_LATEST_S: Final = 0.1
"""A pause is at least so many times as long as a flush computed, but no longer than this. Under load many
events are then counted at once, and a cell that changes all the time is published less often."""
BEHIND_TIMES: Final = 9
BEHIND_LATEST_S: Final = 1.0
"""The same of a worker that is behind: about a tenth of its time goes into what it publishes. What waits
unread is late by more than such a pause."""
GATHER_S: Final = 0.01
"""Records that wait are read before a flush, for at most so long: what a producer sends at one moment to many
partitions is counted at once, not half of it a pause later."""
GATHER_STEP_S: Final = 0.002
MOST_UNACKNOWLEDGED: Final = 2
"""Flushes at a time: the next is computed while one is on its way to the broker, and waits while two are."""


def pause_s(spent_s: float, *, behind: bool) -> float:
    """How long to wait after a flush that computed for so long, until the next."""
    times, latest_s = (BEHIND_TIMES, BEHIND_LATEST_S) if behind else (FLUSH_TIMES, FLUSH_LATEST_S)
    return min(max(FLUSH_EVERY_S, times * spent_s), latest_s)
