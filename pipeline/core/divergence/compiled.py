"""Scoring by the compiled kernel where there is one; numpy (pairs.py) is its oracle, and takes the rest.

Which of them scores a pair is a matter of the installation and of the pair itself, never of its batch. Their
last bits differ: what one made is not judged together with what the other made (`KERNEL`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence import pairs
from pipeline.core.divergence.gathering import Half, Matched
from pipeline.core.divergence.measures import MEASURES
from pipeline.core.divergence.pairs import Outcome, PairScores
from schemas.columns import I8

_VERSION: Final = 2
"""Of kernel.c, positions.h and columns.h: raised whenever a bit of what they say changes."""
_COUNTED: Final = ("positions", "invalid", "agreed", "first_difference", "ended_together")
_MEASURED: Final = (*MEASURES, "kl_lower_max")
_OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


def _load() -> tuple[Callable[..., None], str] | None:
    """The kernel, and the kind of vectors that it uses; None: there is none, or one of an older version."""
    try:
        from pipeline.core.divergence.kernel import VECTORS, VERSION, score
    except ImportError:
        return None
    return (score, VECTORS[0]) if VERSION == _VERSION else None


_LOADED: Final = _load()
KERNEL: Final = "numpy" if _LOADED is None else f"compiled/{_VERSION}"
"""What scores here. Part of what makes the content of a bucket (`ContentSettings.hash`)."""
KERNEL_SAID: Final = "numpy" if _LOADED is None else f"compiled, {_LOADED[1]}"
"""The same for people."""


def score_pairs(some: Sequence[tuple[Half, Half]]) -> PairScores:
    """Score (baseline, other) pairs, see `score_matched`."""
    return score_matched(Matched.of(some))


def score_matched(matched: Matched) -> PairScores:
    """Score pairs; see `pairs.score_matched`. The same pair gets the same bits whatever batch it is in."""
    return pairs.score_matched(matched) if _LOADED is None else _score(_LOADED[0], matched)


def _score(kernel: Callable[..., None], matched: Matched) -> PairScores:
    n = matched.n
    counted, measured = np.empty((1 + len(_COUNTED), n), dtype=np.int64), np.empty((len(_MEASURED), n))
    kernel(matched.records, _contiguous(matched.record), _contiguous(matched.event), counted, measured)
    outcomes, renormalised = counted[0], np.zeros(n, dtype=np.bool_)
    columns: dict[str, NDArray[Any]] = {
        **dict(zip(_COUNTED, counted[1:], strict=True)),
        **dict(zip(_MEASURED, measured, strict=True)),
        "renormalised": renormalised,
    }
    left = (outcomes < 0).nonzero()[0]
    if len(left):
        others = pairs.score_matched(
            Matched(matched.records, matched.record[:, left], matched.event[:, left])
        )
        outcomes[left] = [_OUTCOMES.index(outcome) for outcome in others.outcome]
        for name, column in columns.items():
            column[left] = getattr(others, name)
    columns["ended_together"] = columns["ended_together"].astype(np.int8)
    return PairScores(n=n, outcome=tuple(map(_OUTCOMES.__getitem__, outcomes.tolist())), **columns)


def _contiguous(places: I8) -> I8:
    return np.ascontiguousarray(places, dtype=np.int64)
