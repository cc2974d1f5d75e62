"""Formed pairs and counts, in log order, into evidence and into rows for `klaxon.pairs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.bins import EXCESS_SHIFT, SCORE_MAX
from pipeline.core.cells import ALL, UNKNOWN
from pipeline.core.divergence import ESTIMATOR, PairScores
from pipeline.core.evidence import SECOND_US, Dimension, Evidence
from pipeline.core.groups import Arrival
from schemas.buckets import SCORE_ONE, Population
from schemas.columns import ABSENT, F8, I8
from schemas.events import ARMS
from schemas.pairs import PairBatch
from schemas.topics import MAX_RECORD_BYTES

RENORMALISED: Final = f"{ESTIMATOR} renormalised"
"""Estimator named on batches of pairs that were made of logits: never mixed with the others in one mean."""
_ROWS_PER_BATCH: Final = 1024

SCORES: Final = ("kl_lower", "kl_lower_max", "kl_floor", "js_lower", "tv_lower", "cosine", "top1_agree")


@dataclass(slots=True)
class Pair:
    """A formed pair. What it says of itself is read once; the halves are let go after scoring."""

    baseline: Arrival | None
    other: Arrival | None
    population: Population
    second: int
    """The bucket it counts in."""
    late: bool
    event_us: int
    formed_us: int
    rollout: str
    signature: bytes
    pair_id: bytes | None
    baseline_version: str
    first_offset: int
    first_position: int
    node: str
    baseline_node: str
    request_type: str | None
    hardware: str | None
    region: str | None
    temperature: float
    input_tokens: int
    control: Pair | None = None
    """Canary: the control's pair, where it was formed before."""
    kl_lower: int | None = None
    """Set when scored and comparable with others."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Canary and control of one prompt are both formed: their difference counts in this second (X3)."""

    canary: Pair
    control: Pair
    second: int


@dataclass(frozen=True, slots=True)
class Count:
    """Something that is no evidence but counts, in the cell `all` of a population."""

    second: int
    population: Population
    name: str
    n: int


@dataclass(frozen=True, slots=True)
class PairRow:
    """A scored pair as it will travel; `scores` in the order of SCORES, units of 2⁻³⁰."""

    pair: Pair
    renormalised: bool
    positions: int
    agreed: int
    first_difference: int | None
    ended_together: bool | None
    scores: tuple[int, ...]
    control_kl_lower: int | None


@dataclass(slots=True)
class _Rows:
    """Rows of evidence while they are gathered."""

    seconds: list[int] = field(default_factory=list)
    populations: dict[Population, int] = field(default_factory=dict)
    population: list[int] = field(default_factory=list)
    pairs: list[Pair | None] = field(default_factory=list)
    values: list[dict[str, int]] = field(default_factory=list)
    """Counters and measures of a row, by name."""

    def add(self, second: int, population: Population, pair: Pair | None, values: dict[str, int]) -> None:
        self.seconds.append(second)
        self.population.append(self.populations.setdefault(population, len(self.populations)))
        self.pairs.append(pair)
        self.values.append(values)


COUNTERS: Final = ("pairs", "renormalised", "excess_left_out")
MEASURES: Final = (
    "kl_lower",
    "kl_floor",
    "js_lower",
    "tv_lower",
    "cosine",
    "top1_agree",
    "positions",
    "kl_renormalised",
    "excess",
)


def to_units(scores: F8) -> I8:
    """Scores in nats (or shares) as integers of 2⁻³⁰, rounded half to even, cut at ±1,024."""
    return np.clip(np.rint(scores * SCORE_ONE), -SCORE_MAX, SCORE_MAX).astype(np.int64)


def settle(pending: Sequence[Pair | Excess | Count], scores: PairScores) -> tuple[Evidence, list[PairRow]]:
    """What was formed since the last time, in log order, as evidence; and every scored pair as a row.

    `scores` are those of the pairs in `pending`, in the same order.
    """
    units = {name: to_units(getattr(scores, name)).tolist() for name in SCORES}
    rows = _Rows()
    scored: list[PairRow] = []
    at = 0
    for item in pending:
        if isinstance(item, Count):
            rows.add(item.second, item.population, None, {item.name: item.n})
        elif isinstance(item, Excess):
            _add_excess(rows, item)
        else:
            row = _add_pair(rows, item, scores, {name: units[name][at] for name in SCORES}, at)
            if row is not None:
                scored.append(row)
            at += 1
    return _evidence(rows), scored


def _add_pair(rows: _Rows, pair: Pair, scores: PairScores, units: dict[str, int], at: int) -> PairRow | None:
    pair.baseline = pair.other = None
    formed = pair.formed_us // SECOND_US
    if scores.outcome[at] != "scored":
        rows.add(formed, pair.population, None, {f"unmatched.{scores.outcome[at]}": 1})
        return None
    renormalised = bool(scores.renormalised[at])
    positions = int(scores.positions[at])
    if not renormalised:
        pair.kl_lower = units["kl_lower"]
    if pair.late:
        rows.add(formed, pair.population, None, {"unmatched.late": 1})
    elif renormalised:
        rows.add(
            pair.second,
            pair.population,
            pair,
            {"renormalised": 1, "kl_renormalised": units["kl_lower"]},
        )
    else:
        values = {name: units[name] for name in SCORES if name != "kl_lower_max"}
        rows.add(pair.second, pair.population, pair, {"pairs": 1, "positions": positions, **values})
    first = int(scores.first_difference[at])
    ended = int(scores.ended_together[at])
    return PairRow(
        pair=pair,
        renormalised=renormalised,
        positions=positions,
        agreed=int(scores.agreed[at]),
        first_difference=None if first == ABSENT else first,
        ended_together=None if ended == ABSENT else bool(ended),
        scores=tuple(units[name] for name in SCORES),
        control_kl_lower=pair.control.kl_lower if pair.control is not None and not renormalised else None,
    )


def _add_excess(rows: _Rows, item: Excess) -> None:
    canary, control = item.canary.kl_lower, item.control.kl_lower
    if canary is None or control is None:
        return
    # A prompt on which the baseline does not reproduce itself tells nothing (statistics.md §0.3).
    if control > EXCESS_SHIFT:
        values = {"excess_left_out": 1}
    else:
        values = {"excess": canary - control + EXCESS_SHIFT}
    rows.add(item.second, item.canary.population, item.canary, values)


def _evidence(rows: _Rows) -> Evidence:
    n = len(rows.seconds)
    full = np.array([pair is not None for pair in rows.pairs], dtype=np.bool_)
    totals = {
        name for values, pair in zip(rows.values, rows.pairs, strict=True) if pair is None for name in values
    }
    names = [b"" if pair is None else pair.pair_id or pair.signature for pair in rows.pairs]
    kl_lower = _column(rows, "kl_lower")
    return Evidence(
        second=np.array(rows.seconds, dtype=np.int64),
        populations=tuple(rows.populations),
        population=np.array(rows.population, dtype=np.int64),
        dimensions=_dimensions(rows.pairs, full) if n else (),
        counters={name: _column(rows, name)[0] for name in COUNTERS},
        totals={name: _column(rows, name)[0] for name in sorted(totals)},
        measures={name: _column(rows, name) for name in MEASURES},
        ids=names,
        worst=kl_lower,
    )


def _column(rows: _Rows, name: str) -> tuple[I8, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    values = np.array([values.get(name, 0) for values in rows.values], dtype=np.int64)
    present = np.array([name in values for values in rows.values], dtype=np.bool_)
    return values, present


def _dimensions(
    pairs: Sequence[Pair | None], full: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> list[Dimension]:
    """Cells of pairs, in the order in which one pair claims them."""
    tokens = np.array([0 if pair is None else pair.input_tokens for pair in pairs], dtype=np.int64)
    temperature = np.array([ABSENT if pair is None else pair.temperature for pair in pairs], dtype=np.float64)
    node = ev.texts("node", ["" if pair is None else pair.node for pair in pairs])
    contexts = ev.contexts(tokens, node)
    nested, crossed = contexts[: len(contexts) // 2], contexts[len(contexts) // 2 :]
    parts = (
        node,
        *nested,
        ev.texts("request_type", ["" if pair is None else pair.request_type or UNKNOWN for pair in pairs]),
        ev.texts("hardware", ["" if pair is None else pair.hardware or UNKNOWN for pair in pairs]),
        ev.sampling(temperature),
        ev.texts("region", ["" if pair is None else pair.region or UNKNOWN for pair in pairs]),
        *crossed,
    )
    return [ev.constant(ALL, "", len(pairs)), *(ev.members(part, full) for part in parts)]


def batches(rows: Sequence[PairRow], partition: int, offset: int) -> Iterator[PairBatch]:
    """Rows as records of at most MAX_RECORD_BYTES, comparable pairs and renormalised ones apart."""
    encoder = msgspec.msgpack.Encoder()
    for estimator in (ESTIMATOR, RENORMALISED):
        chosen = [row for row in rows if row.renormalised == (estimator == RENORMALISED)]
        todo = [chosen[at : at + _ROWS_PER_BATCH] for at in range(0, len(chosen), _ROWS_PER_BATCH)]
        todo.reverse()
        while todo:
            piece = todo.pop()
            batch = _batch(piece, estimator, partition, offset)
            if len(piece) > 1 and len(encoder.encode(batch)) > MAX_RECORD_BYTES:
                todo += (piece[len(piece) // 2 :], piece[: len(piece) // 2])
            else:
                yield batch


def _batch(rows: Sequence[PairRow], estimator: str, partition: int, offset: int) -> PairBatch:
    dictionary: dict[str, int] = {}

    def code(text: str) -> int:
        return dictionary.setdefault(text, len(dictionary))

    def optional(text: str | None) -> int | None:
        return None if text is None else code(text)

    pairs = [row.pair for row in rows]
    scores = {name: [row.scores[at] for row in rows] for at, name in enumerate(SCORES)}
    columns = {
        "rollout": [code(pair.rollout) for pair in pairs],
        "model_version": [code(pair.population.model_version or "") for pair in pairs],
        "baseline_version": [code(pair.baseline_version) for pair in pairs],
        "node": [code(pair.node) for pair in pairs],
        "baseline_node": [code(pair.baseline_node) for pair in pairs],
    }
    request_type = [optional(pair.request_type) for pair in pairs]
    return PairBatch(
        v=1,
        partition=partition,
        offset=offset,
        estimator=estimator,
        dictionary=list(dictionary),
        arm=[ARMS.index(pair.population.arm) for pair in pairs],
        generation=[pair.population.generation for pair in pairs],
        differs=[pair.population.differs for pair in pairs],
        request_type=request_type,
        input_tokens=[pair.input_tokens for pair in pairs],
        signature=[pair.signature for pair in pairs],
        pair_id=[pair.pair_id for pair in pairs],
        event_us=[pair.event_us for pair in pairs],
        formed_us=[pair.formed_us for pair in pairs],
        first_offset=[pair.first_offset for pair in pairs],
        first_position=[pair.first_position for pair in pairs],
        positions=[row.positions for row in rows],
        agreed=[row.agreed for row in rows],
        first_difference=[row.first_difference for row in rows],
        ended_together=[row.ended_together for row in rows],
        late=[pair.late for pair in pairs],
        control_kl_lower=[row.control_kl_lower for row in rows],
        **columns,
        **scores,
    )
