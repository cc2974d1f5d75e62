"""Scores of pairs, compiled from kernel.c and its headers. Absent where nothing could compile it."""

from collections.abc import Sequence
from typing import Final

from schemas.columns import F8, I8, LogitColumns

ROWS: Final[int]
"""Lists are at most so long, else the pair is not taken."""
VERSION: Final[int]
VECTORS: Final[tuple[str, ...]]
"""The kinds of vectors that this processor has, the best first. The same bits, whichever is used."""

def score(
    records: Sequence[LogitColumns], record: I8, event: I8, counted: I8, measured: F8, vectors: int = 0, /
) -> None:
    """Score n pairs into `counted` (6, n) and `measured` (7, n).

    `record`, `event` (2, n): see `Matched`. Rows of `counted`: the outcome (place in `Outcome`; −1: not
    taken, and the other rows mean nothing), then `positions`, `invalid`, `agreed`, `first_difference` and
    `ended_together`. Rows of `measured`: means of the MEASURES, and `kl_lower_max`.
    `vectors`: place in VECTORS.
    Raises IndexError if an event is none of its record's, or says that it goes beyond it.
    """
