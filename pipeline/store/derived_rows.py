"""Records of our own workers (pairs, final buckets, decisions) → columns of the archive's tables. Pure.

Such a record is ours, but the topic is open to others: whatever does not fit a column is refused whole,
with the field that does not, and never reaches an insert. One of a version that this process does not read
raises UnknownVersionError instead: it is not malformed, only not for us.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pipeline.store.rows import MAX_TIME_US, ROW_BYTES, Rows, place
from schemas.buckets import SCORE_ONE, Cell, Distribution, FinalBuckets, Population
from schemas.columns import Rejected
from schemas.control import Decision
from schemas.events import ARMS
from schemas.pairs import PairBatch
from schemas.records import UnknownVersionError, read_json, read_msgpack

_I4: Final = (-(2**31), 2**31 - 1)
_U4: Final = (0, 2**32 - 1)
_U8: Final = (0, 2**63 - 1)
_MAX_SECOND: Final = MAX_TIME_US // 1_000_000
SIGNATURE_BYTES: Final = 16
STATEMENT: Final = "statement"
CELL: Final = "cell"


class _RefusedError(Exception):
    """A field that does not fit; becomes a `Rejected`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason


def pair_rows(value: bytes, offset: int, append_us: int) -> Rows | Rejected:
    """Rows of `pair_scores`; scores in nats."""
    try:
        return _pair_rows(read_msgpack(value, PairBatch), offset, append_us)
    except UnknownVersionError:
        raise
    except _RefusedError as refused:
        return Rejected(None, refused.field, refused.reason)
    except msgspec.MsgspecError as error:
        return Rejected(None, "record", str(error))


def bucket_rows(value: bytes, offset: int, append_us: int) -> Rows | Rejected:
    """Rows of `final_buckets`: one statement, then one row per cell, in the record's order."""
    try:
        return _bucket_rows(read_msgpack(value, FinalBuckets), len(value), offset, append_us)
    except UnknownVersionError:
        raise
    except _RefusedError as refused:
        return Rejected(None, refused.field, refused.reason)
    except msgspec.MsgspecError as error:
        return Rejected(None, "record", str(error))


def decision_rows(value: bytes, key: bytes | None, offset: int, append_us: int) -> Rows | Rejected:
    """The row of `decisions`."""
    try:
        return _decision_rows(read_json(value, Decision), value, key, offset, append_us)
    except UnknownVersionError:
        raise
    except _RefusedError as refused:
        return Rejected(None, refused.field, refused.reason)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Rejected(None, "record", str(error))


_PAIR_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "generation": _I4,
    "differs": (0, 15),
    "input_tokens": _I4,
    "event_us": (0, MAX_TIME_US + 86_400_000_000),
    "formed_us": (0, MAX_TIME_US),
    "first_offset": _U8,
    "first_position": _U4,
    "positions": _U4,
    "agreed": _U4,
    "first_difference": _U4,
}
_PAIR_SCORES: Final = (
    "kl_lower",
    "kl_lower_max",
    "kl_floor",
    "js_lower",
    "tv_lower",
    "cosine",
    "top1_agree",
    "control_kl_lower",
)
_PAIR_TEXTS: Final = ("rollout", "model_version", "baseline_version", "node", "baseline_node", "request_type")


def _pair_rows(batch: PairBatch, offset: int, append_us: int) -> Rows:
    n = len(batch.signature)
    for name in PairBatch.__struct_fields__:
        column = getattr(batch, name)
        if isinstance(column, list) and name != "dictionary" and len(column) != n:
            raise _RefusedError(name, f"{len(column)} values for {n} pairs")
    if not 0 <= batch.partition <= _I4[1]:
        raise _RefusedError("partition", f"{batch.partition} is no partition")
    if not 0 <= batch.offset <= _U8[1]:
        raise _RefusedError("offset", f"{batch.offset} is no offset")
    rows = place(offset, append_us, range(n), n)
    rows |= {
        "source_part": [batch.partition] * n,
        "source_off": [batch.offset] * n,
        "estimator": [batch.estimator] * n,
        "arm": [_item(ARMS, code, "arm") for code in batch.arm],
        "signature": [_hex16(text, "signature") for text in batch.signature],
        "pair_id": ["" if text is None else _hex16(text, "pair_id") for text in batch.pair_id],
        "ended_together": batch.ended_together,
        "late": batch.late,
    }
    for name in _PAIR_TEXTS:
        rows[name] = [
            None if code is None else _item(batch.dictionary, code, name) for code in getattr(batch, name)
        ]
    for name, limits in _PAIR_RANGES.items():
        rows[name] = _in_range(getattr(batch, name), limits, name)
    for name in _PAIR_SCORES:
        rows[name] = [None if score is None else score / SCORE_ONE for score in getattr(batch, name)]
    return Rows(n, rows, n * ROW_BYTES)


_CELL_COLUMNS: Final = (
    "entry",
    "second",
    "statement",
    "rollout",
    "generation",
    "arm",
    "model_version",
    "differs",
    "dimension",
    "value",
    "counters",
    "measures",
    "worst",
)


def _bucket_rows(final: FinalBuckets, size: int, offset: int, append_us: int) -> Rows:
    statement = f"{final.closed_from}/{final.part}/{final.parts}"
    entries: list[tuple[Any, ...]] = [
        (
            STATEMENT,
            _second_us(final.closed_through, "closed_through"),
            statement,
            *_population(None),
            *("", "", {}, {}, []),
        )
    ]
    for second in final.seconds:
        at_us = _second_us(second.second, "second")
        for content in second.contents:
            population = _population(content.population)
            for cell in content.cells:
                entries.append((CELL, at_us, "", *population, *_cell(cell)))
    n = len(entries)
    rows = place(offset, append_us, range(n), n)
    rows |= dict(zip(_CELL_COLUMNS, map(list, zip(*entries, strict=True)), strict=True))
    constants = {
        "source_topic": final.topic,
        "source_part": _within(final.partition, _U4, "partition"),
        "gating_part": _within(final.gating_partition, _U4, "gating_partition"),
        "closed_from": _second_us(final.closed_from, "closed_from"),
        "closed_through": _second_us(final.closed_through, "closed_through"),
        "whole_from": _second_us(final.whole_from, "whole_from"),
        "source_off": _within(final.offset, _U8, "offset"),
        "settings_hash": final.settings_hash,
        "record_part": _within(final.part, _U4, "part"),
        "record_parts": _within(final.parts, _U4, "parts"),
    }
    rows |= {name: [constant] * n for name, constant in constants.items()}
    return Rows(n, rows, n * ROW_BYTES + 4 * size)


def _population(population: Population | None) -> tuple[str, int, str, str, int]:
    if population is None:
        return "", -1, "", "", 0
    return (
        population.rollout,
        -1 if population.generation is None else _within(population.generation, (0, _I4[1]), "generation"),
        population.arm,
        population.model_version or "",
        _within(population.differs, (0, 15), "differs"),
    )


def _cell(cell: Cell) -> tuple[Any, ...]:
    _fits_i8(cell.counters.values(), "counters")
    _fits_i8((score for score, _ in cell.worst), "worst")
    measures = {name: _distribution(found, name) for name, found in cell.measures.items()}
    worst = [(score, found.hex()) for score, found in cell.worst]
    return cell.dimension, cell.value, cell.counters, measures, worst


def _distribution(found: Distribution, name: str) -> tuple[Any, ...]:
    _fits_i8([found.count, found.sum, found.min, found.max, *found.counts], name)
    try:
        array("i", found.bins)
    except OverflowError:
        _in_range(found.bins, _I4, name)
        raise
    return found.count, found.sum, found.min, found.max, found.bins, found.counts


def _decision_rows(decision: Decision, value: bytes, key: bytes | None, offset: int, append_us: int) -> Rows:
    directive, inputs = decision.directive, decision.inputs
    cause = directive.cause if directive else None
    located = cause.located if cause else None
    _fits_i8(inputs.offsets.values(), "inputs.offsets")
    row: dict[str, Any] = {
        "kind": decision.kind,
        "rollout": directive.rollout if directive else (key or b"").decode("utf-8", "replace"),
        "weights": dict(directive.weights) if directive else {},
        "last_promoted": dict(directive.last_promoted) if directive else {},
        "ejected_nodes": list(directive.ejected_nodes) if directive else [],
        "excluded_segments": [(s.dimension, s.value) for s in directive.excluded_segments]
        if directive
        else [],
        "cause_value": cause.value if cause else None,
        "pair_ids": list(cause.pair_ids) if cause else [],
        "also": list(cause.also) if cause else [],
        "located_dimension": located.dimension if located else None,
        "located_value": located.value if located else None,
        "share_of_excess": located.share_of_excess if located else None,
        "share_of_traffic": located.share_of_traffic if located else None,
        "command_id": decision.command_id,
        "reason": decision.reason,
        "now_us": inputs.now_us,
        "complete_through": None
        if inputs.complete_through < 0
        else _second_us(inputs.complete_through, "inputs.complete_through"),
        "command_offset": _within(inputs.command_offset, (-1, _U8[1]), "inputs.command_offset"),
        "offsets": dict(inputs.offsets),
        "evaluations": [
            (
                e.rule,
                e.scope,
                e.verdict,
                e.metric,
                e.value,
                e.limit,
                _within(e.samples, _U8, "samples"),
                e.reason,
            )
            for e in decision.evaluations
        ],
        "record": value.decode("utf-8"),
    }
    for name in _DIRECTIVE_FIELDS:
        row[name] = _small(getattr(directive, name) if directive else None, name)
    for name in _CAUSE_FIELDS:
        row[name] = _small(getattr(cause, name) if cause else None, name)
    rows = place(offset, append_us, [0], 1)
    rows |= {name: [content] for name, content in row.items()}
    return Rows(1, rows, ROW_BYTES + 3 * len(value))


_DIRECTIVE_FIELDS: Final = (
    "generation",
    "epoch",
    "ts_us",
    "lease_until_us",
    "dead_man_us",
    "state",
    "level",
    "fallback",
    "policy_hash",
)
_CAUSE_FIELDS: Final = (
    "rule",
    "capability",
    "metric",
    "bound",
    "limit",
    "window_us",
    "samples",
    "coverage",
    "scope",
)


def _small(value: Any, name: str) -> Any:
    if isinstance(value, int):
        _fits_i8((value,), name)
    return value


def _second_us(second: int, name: str) -> int:
    return _within(second, (0, _MAX_SECOND), name) * 1_000_000


def _within(value: int, limits: tuple[int, int], name: str) -> int:
    if not limits[0] <= value <= limits[1]:
        raise _RefusedError(name, f"{value} is not within {limits[0]}..{limits[1]}")
    return value


def _in_range(values: Sequence[int | None], limits: tuple[int, int], name: str) -> list[int | None]:
    there = [value for value in values if value is not None]
    if there:
        _within(min(there), limits, name)
        _within(max(there), limits, name)
    return list(values)


def _fits_i8(values: Any, name: str) -> None:
    try:
        array("q", values)
    except OverflowError:
        raise _RefusedError(name, "a number does not fit 64 bits") from None


def _item(items: Sequence[str], code: int, name: str) -> str:
    if not 0 <= code < len(items):
        raise _RefusedError(name, f"code {code} of {len(items)}")
    return items[code]


def _hex16(text: bytes, name: str) -> str:
    if len(text) != SIGNATURE_BYTES:
        raise _RefusedError(name, f"{len(text)} bytes instead of {SIGNATURE_BYTES}")
    return text.hex()
