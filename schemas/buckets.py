"""One-second buckets as they travel: cells, populations, final and fresh records.

msgpack arrays (`application/vnd.klaxon.buckets+msgpack`). Everything is an integer, so merging is
associative, exact and independent of order: µs for times, tokens for lengths, 2⁻³⁰ nats for scores. Workers
make thousands of them a second; nothing in them refers back (gc=False).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from schemas.events import Arm

SCORE_ONE: Final = 1 << 30
"""Scores, shares and cosines travel as integers in units of 2⁻³⁰."""


WORST_KEPT: Final = 3


class Population(Struct, frozen=True, array_like=True, gc=False):
    """Whose evidence it is, by what the events themselves say. Part of every bucket's key.

    The gate, which alone knows specs and generations, brings populations to roll-outs.
    """

    rollout: str
    generation: int | None
    arm: Arm
    """For pairs: the arm that is compared with the baseline."""
    model_version: str | None
    """None where it cannot be known: the half that would say so is missing."""
    differs: int = 0
    """Pairs: bit mask of the version dimensions in which the halves differ: 1 model, 2 prompt, 4 data,
    8 system."""


class Distribution(Struct, array_like=True, gc=False):
    """Count, integer sum, extremes and a sparse histogram of one quantity.

    `bins` ascending; empty `bins` where the quantity keeps no histogram. With count 0, min = max = 0.
    """

    count: int
    sum: int
    min: int
    max: int
    bins: list[int]
    counts: list[int]


class Cell(Struct, array_like=True, gc=False):
    """One class of traffic inside one population and second."""

    dimension: str
    value: str
    counters: dict[str, int]
    measures: dict[str, Distribution]
    worst: list[tuple[int, bytes]]
    """Up to WORST_KEPT (score, pair id or signature), greatest first, ties by greater id: merging is
    exact."""


class PopulationCells(Struct, array_like=True, gc=False):
    """All cells of one population in one second. Telemetry has no population: cells by node."""

    population: Population | None
    cells: list[Cell]


class Second(Struct, array_like=True, gc=False):
    """One second's content."""

    second: int
    """Seconds since the epoch."""
    contents: list[PopulationCells]


class FinalBuckets(Struct, array_like=True):
    """`klaxon.buckets`: these seconds of one source are closed; nothing can enter them any more.

    Closed are all seconds `closed_from..closed_through`, both inclusive; those not in `seconds` are empty for
    this gating partition. `parts` records make one such statement, in order, each whole seconds or a slice of
    one second's cells; it holds when the last part is read.
    """

    v: int
    topic: str
    partition: int
    gating_partition: int
    closed_from: int
    closed_through: int
    whole_from: int
    """Seconds before it were not seen whole by this worker and are never published: unknown, never empty."""
    offset: int
    """Offset of the source read through when the last of these seconds closed: the record that closed it."""
    settings_hash: str
    part: int
    parts: int
    seconds: list[Second]


class FreshCells(Struct, array_like=True):
    """`klaxon.partials`: cells of open seconds that changed, each whole.

    The newest `offset` wins per cell.
    """

    v: int
    topic: str
    partition: int
    gating_partition: int
    offset: int
    whole_from: int
    settings_hash: str
    seconds: list[Second]
