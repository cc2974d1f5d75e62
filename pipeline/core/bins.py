"""Where values fall: integer edge tables of the sparse histograms (decisions.md §4).

A table is the sorted distinct integers round-half-even(anchor · 1.15^(j / steps)) from 1 to the first that
reaches its top, preceded by −1 and 0: bin k covers (edge[k], edge[k + 1]], so bin 0 holds exactly zero, and
"share of values over the anchor" is exact. Values beyond the last edge fall into the last bin. The tables are
computed in decimal arithmetic: the same integers on every machine.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Final, Literal, TypeAlias

import numpy as np

from schemas.buckets import SCORE_ONE
from schemas.columns import I8

BIN_LAYOUT: Final = 1
"""Version of the tables below; part of the settings hash, so different layouts are never mixed."""

Kind: TypeAlias = Literal["latency", "score", "excess"]

SCORE_MAX: Final = 1 << 40
"""Scores are cut at 1,024 nats (units of 2⁻³⁰): the largest real one is 15.6, and sums stay in 64 bits."""
EXCESS_SHIFT: Final = round(0.1 * SCORE_ONE)
"""c₀ of statistics.md §0.3: the paired difference is recorded as canary − control + 0.1 nats."""
LATENCY_MAX_US: Final = 86_400_000_000

KIND_OF_MEASURE: Final[dict[str, Kind]] = {
    "ttft_us": "latency",
    "itl_us": "latency",
    "duration_us": "latency",
    "kl_lower": "score",
    "kl_floor": "score",
    "kl_renormalised": "score",
    "excess": "excess",
}
"""Measures that keep a histogram, and in which table; all others keep count, sum, min and max only."""


_BASE: Final = Decimal("1.15")


def _edges(anchor: int, steps: int, top: int) -> I8:
    """The table of one kind; `steps` bins make a factor of 1.15."""
    context = Context(prec=60)
    fractions = [context.power(_BASE, context.divide(Decimal(j), Decimal(steps))) for j in range(steps)]
    edges = {-1, 0}
    for direction in (1, -1):
        whole = 0 if direction > 0 else -1
        while True:
            # Whole powers of the base apart: they are exact, and one of them falls on a half.
            octave = context.multiply(Decimal(anchor), context.power(_BASE, Decimal(whole)))
            run = [int(context.multiply(octave, each).to_integral_value()) for each in fractions]
            edges.update(edge for edge in run if edge >= 1)
            if run[-1] < 1 or run[-1] >= top:
                break
            whole += direction
    table = sorted(edges)
    beyond = next(at for at, edge in enumerate(table) if edge >= top)
    return np.array(table[: beyond + 1], dtype=np.int64)


_TABLES: Final[dict[Kind, I8]] = {
    "latency": _edges(500_000, 7, LATENCY_MAX_US),
    "score": _edges(round(0.05 * SCORE_ONE), 8, SCORE_MAX),
    "excess": _edges(EXCESS_SHIFT, 32, SCORE_MAX + EXCESS_SHIFT),
}


def bin_count(kind: Kind) -> int:
    """Number of bins of a kind; bins are 0 … bin_count − 1."""
    return len(_TABLES[kind]) - 1


def bin_of(kind: Kind, values: I8) -> I8:
    """Bin of each integer value (µs, or 2⁻³⁰ nats), in the same shape; values below 0 fall into bin 0."""
    # Without the edges −1 below and the last one above, whatever is beyond them falls into the bins beside.
    return np.searchsorted(_TABLES[kind][1:-1], values, side="left")


def latency_bin(values: I8) -> I8:
    """(n,) bins of latencies in µs; relative width 1.15^(1/7), 500 ms is an edge."""
    return bin_of("latency", values)


def score_bin(values: I8) -> I8:
    """(n,) bins of scores in 2⁻³⁰ nats; relative width 1.15^(1/8) < 1.02, 0.05 nats is an edge."""
    return bin_of("score", values)


def bin_lower(kind: Kind, k: int) -> int:
    """Lower edge of bin k, never below 0. Every value of a bin but bin 0 is greater than it."""
    return max(int(_TABLES[kind][k]), 0)


def bin_upper(kind: Kind, k: int) -> int:
    """Upper edge of bin k; no value of the bin is greater, except that the last bin is open."""
    return int(_TABLES[kind][k + 1])


def bin_lowers(kind: Kind) -> I8:
    """(bin_count,) all lower edges, for vectorised callers. Read-only view."""
    lowers = np.maximum(_TABLES[kind][:-1], 0)
    lowers.flags.writeable = False
    return lowers


def bin_uppers(kind: Kind) -> I8:
    """(bin_count,) all upper edges. Read-only view."""
    uppers = _TABLES[kind][1:].view()
    uppers.flags.writeable = False
    return uppers
