"""Columns of events → columns of the archive's tables. Pure.

Integers stay integers: µs are the ticks of `DateTime64(6)`. Absent is None. Column names are the event's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from schemas.columns import (
    ABSENT,
    DEFINITIONS,
    I8,
    IDENTITIES,
    KINDS,
    LABELS,
    REQUEST_LABELS,
    SOURCES,
    Decoded,
    LabelColumn,
    LabelsColumns,
    LogitColumns,
    RequestColumns,
    TelemetryColumns,
)
from schemas.events import ARMS, Gpu, NodeEvent
from schemas.tabulate import EXTRA_FIELDS, RequestExtras
from schemas.validity import valid_positions

Column = list[Any]
Columns = dict[str, Column]

EVENT_TIME_CUT_US: Final = 5_000_000
"""An event's time is at most this much after its record's append time."""
MAX_TIME_US: Final = 4_102_444_800_000_000
"""The year 2100: what a record's own timestamp is held to."""

ROW_BYTES: Final = 600
"""What a row is reckoned at, beside its variable parts."""

_GPU_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(Gpu))
_MAX_U8: Final = 2**64 - 1
_extras: Final = msgspec.json.Decoder(RequestExtras)
_node_event: Final = msgspec.json.Decoder(NodeEvent)


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows of one record: all of the table's columns but `topic`, `part` and those of the block."""

    n: int
    columns: Columns
    size_bytes: int
    """An estimate that bounds a block's memory."""


def held_time_us(append_us: int) -> int:
    """A record's timestamp held to 1970–2100, so that no producer's clock can break a block."""
    return min(max(append_us, 0), MAX_TIME_US)


def place(offset: int, append_us: int, positions: Iterable[int], n: int) -> Columns:
    """The columns that say where rows stand in the log."""
    return {"off": [offset] * n, "pos": list(positions), "append_us": [held_time_us(append_us)] * n}


def request_rows(decoded: Decoded[RequestColumns], offset: int, append_us: int) -> Rows:
    """Rows of `inference_log`."""
    columns = decoded.columns
    rows = place(offset, append_us, decoded.positions.tolist(), columns.n)
    rows |= _label_columns(columns, append_us, REQUEST_LABELS)
    rows |= {
        "shadow": columns.shadow.tolist(),
        "status": columns.status.tolist(),
        "ttft_us": _optional(columns.ttft_us),
        "output_tokens": columns.output_tokens.tolist(),
        "itl_us": _optional(columns.itl_us),
        "stream": _tristate(columns.stream),
        "parse_depth": _optional(columns.parse_depth),
    }
    rows |= _extra_columns(columns)
    variable = sum(map(len, columns.extras.values()))
    return Rows(columns.n, rows, columns.n * ROW_BYTES + variable)


def logit_rows(decoded: Decoded[LogitColumns], offset: int, append_us: int) -> Rows:
    """Rows of `logit_summaries`."""
    columns = decoded.columns
    rows = place(offset, append_us, decoded.positions.tolist(), columns.n)
    rows |= _label_columns(columns, append_us, LABELS)
    listed, sums = emitted_logprobs(columns)
    judged = (columns.kind == KINDS.index("logprobs")).tolist()
    rows |= {
        "expected_arms": [
            [name for code, name in enumerate(ARMS) if mask >> code & 1]
            for mask in columns.expected_arms.tolist()
        ],
        "definition": [DEFINITIONS[code] for code in columns.definition.tolist()],
        "source": [SOURCES[code] for code in columns.source.tolist()],
        "kind": [KINDS[code] for code in columns.kind.tolist()],
        "eta": columns.eta.tolist(),
        "identity": [IDENTITIES[code] for code in columns.identity.tolist()],
        "ended": _tristate(columns.ended),
        "positions": np.diff(columns.offsets).tolist(),
        "k": columns.k.tolist(),
        "emitted_listed": listed.tolist(),
        "emitted_logprob_sum": [
            total if known else None for total, known in zip(sums.tolist(), judged, strict=True)
        ],
    }
    return Rows(columns.n, rows, columns.n * ROW_BYTES)


def telemetry_rows(decoded: Decoded[TelemetryColumns], offset: int, append_us: int) -> Rows:
    """Rows of `node_telemetry`."""
    columns = decoded.columns
    events = [_node_event.decode(text) for text in columns.events]
    rows = place(offset, append_us, decoded.positions.tolist(), columns.n)
    rows |= {
        "node": [event.node for event in events],
        "ts_us": columns.ts_us.tolist(),
        "memory_used_bytes": [_total(gpu.memory_used_bytes for gpu in event.gpus) for event in events],
        "memory_total_bytes": [_total(gpu.memory_total_bytes for gpu in event.gpus) for event in events],
        "gpus": [
            [tuple(getattr(gpu, name) for name in _GPU_FIELDS) for gpu in event.gpus] for event in events
        ],
        "engine": [event.engine.name if event.engine else None for event in events],
    }
    for name in _ENGINE_FIELDS:
        rows[name] = [getattr(event.engine, name) if event.engine else None for event in events]
    for name in ("internal", "external", "method"):
        rows[name] = [getattr(event.fragmentation, name) if event.fragmentation else None for event in events]
    prints = [event.fingerprint for event in events]
    for name in ("weights", "tokenizer", "driver"):
        rows[name] = [getattr(found, name) if found else None for found in prints]
    rows["libraries"] = [dict(found.libraries or {}) if found else {} for found in prints]
    return Rows(columns.n, rows, columns.n * ROW_BYTES + sum(map(len, columns.events)))


_ENGINE_FIELDS: Final = (
    "kv_usage",
    "kv_blocks_used",
    "kv_blocks_total",
    "kv_block_tokens",
    "kv_tokens_held",
    "kv_largest_free_run",
    "running",
    "waiting",
    "preemptions",
    "stalled",
    "oom_errors",
)


def emitted_logprobs(columns: LogitColumns) -> tuple[I8, np.ndarray[Any, np.dtype[np.float64]]]:
    """Per event: valid positions whose emitted token is on its own list, and the sum of its logprob."""
    lengths = np.diff(columns.offsets)
    event = np.repeat(np.arange(columns.n), lengths)
    within = np.arange(len(event)) - columns.offsets[event]
    k = columns.k.astype(np.int64)
    start = columns.entry_offsets[event] + within * k[event]
    valid = valid_positions(columns)
    listed = np.zeros(columns.n, dtype=np.int64)
    sums = np.zeros(columns.n, dtype=np.float64)
    for width in np.unique(k[k > 0]).tolist():
        chosen = np.flatnonzero((k[event] == width) & valid)
        entries = start[chosen][:, None] + np.arange(width)
        logprobs = columns.top_logprobs[entries].astype(np.float64)
        same = (columns.top_ids[entries] == columns.tokens[chosen][:, None]) & np.isfinite(logprobs)
        found = same.any(axis=1)
        values = np.where(same, logprobs, -np.inf).max(axis=1)[found]
        owner = event[chosen][found]
        listed += np.bincount(owner, minlength=columns.n)
        sums += np.bincount(owner, weights=values, minlength=columns.n)
    return listed, sums


def _label_columns(columns: LabelsColumns, append_us: int, labels: Sequence[str]) -> Columns:
    latest_us = held_time_us(append_us) + EVENT_TIME_CUT_US
    rows: Columns = {name: _texts(columns.labels[name]) for name in labels}
    rows |= {
        "generation": _optional(columns.generation),
        "arm": [ARMS[code] for code in columns.arm.tolist()],
        "pair_id": _hex(columns.pair_id, columns.has_pair_id.tolist()),
        "signature": _hex(columns.signature, [True] * columns.n),
        "ts_us": columns.ts_us.tolist(),
        "duration_us": columns.duration_us.tolist(),
        "event_us": np.minimum(columns.ts_us + columns.duration_us, latest_us).tolist(),
        "input_tokens": columns.input_tokens.tolist(),
        "temperature": _optional(columns.temperature),
        "top_p": _optional(columns.top_p),
        "seed": [
            seed if known else None
            for seed, known in zip(columns.seed.tolist(), columns.has_seed.tolist(), strict=True)
        ],
        "max_tokens": _optional(columns.max_tokens),
        "cached_tokens": _optional(columns.cached_tokens),
    }
    return rows


def _extra_columns(columns: RequestColumns) -> Columns:
    """What of the remaining fields has a column. Of an encrypted text only the key's id is kept (C3)."""
    n = columns.n
    rows: Columns = {name: [None] * n for name in ("response_quality_score", "similarity", "text_key_id")}
    rows |= {
        "scores": [{} for _ in range(n)],
        "steps": [[] for _ in range(n)],
        "embedding": [[] for _ in range(n)],
    }
    for index, text in columns.extras.items():
        extras: Mapping[str, Any] = {name: getattr(_extras.decode(text), name) for name in EXTRA_FIELDS}
        rows["response_quality_score"][index] = extras["response_quality_score"]
        rows["similarity"][index] = extras["similarity"]
        rows["scores"][index] = dict(extras["scores"] or {})
        rows["embedding"][index] = list(extras["embedding"] or ())
        rows["steps"][index] = [
            (step.name, step.duration_us, step.attempts, step.outcome) for step in extras["steps"] or ()
        ]
        if extras["text"] is not None:
            rows["text_key_id"][index] = extras["text"].key_id
    return rows


def _texts(column: LabelColumn) -> Column:
    texts = [*column.values, None]
    last = len(column.values)
    return [texts[min(code, last)] for code in column.codes.tolist()]


def _optional(values: np.ndarray[Any, np.dtype[Any]]) -> Column:
    return [None if value == ABSENT else value for value in values.tolist()]


def _tristate(values: np.ndarray[Any, np.dtype[np.int8]]) -> Column:
    return [None if value == ABSENT else bool(value) for value in values.tolist()]


def _hex(values: np.ndarray[Any, np.dtype[np.uint8]], known: Sequence[bool]) -> Column:
    return [row.tobytes().hex() if there else None for row, there in zip(values, known, strict=True)]


def _total(values: Iterable[int | None]) -> int | None:
    there = [value for value in values if value is not None]
    return min(sum(there), _MAX_U8) if there else None
