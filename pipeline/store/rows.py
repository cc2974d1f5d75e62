"""Columns of events → columns of the archive's tables. Pure.

Integers stay integers: µs are the ticks of `DateTime64(6)`. Absent is None. Column names are the event's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from pipeline.store.columns import (
    Column,
    Columns,
    HexTexts,
    Numbers,
    Optionals,
    Sparse,
    TextLists,
    Texts,
    constant,
    label,
)
from schemas.columns import (
    DEFINITIONS,
    F8,
    I8,
    IDENTITIES,
    KINDS,
    LABELS,
    REQUEST_LABELS,
    SOURCES,
    U1,
    Decoded,
    LabelsColumns,
    LogitColumns,
    RequestColumns,
    TelemetryColumns,
)
from schemas.events import ARMS, Gpu, NodeEvent
from schemas.tabulate import EXTRA_FIELDS, RequestExtras
from schemas.validity import valid_positions

EVENT_TIME_CUT_US: Final = 5_000_000
"""An event's time is at most this much after its record's append time."""
MAX_TIME_US: Final = 4_102_444_800_000_000
"""The year 2100: what a record's own timestamp is held to."""

Positions = Sequence[int] | range | I8

ROW_BYTES: Final = 600
"""What a row is reckoned at, beside its variable parts."""

_GPU_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(Gpu))
_MAX_U8: Final = 2**64 - 1
_extras: Final = msgspec.json.Decoder(RequestExtras)
_node_event: Final = msgspec.json.Decoder(NodeEvent)


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows of one record: all of the table's columns but `topic`, `part` and those of the block.

    Columns of one name are of one kind in all records of a topic.
    """

    n: int
    columns: Columns
    size_bytes: int
    """An estimate that bounds a block's memory."""


def held_time_us(append_us: int) -> int:
    """A record's timestamp held to 1970–2100, so that no producer's clock can break a block."""
    return min(max(append_us, 0), MAX_TIME_US)


def place(offset: int, append_us: int, positions: Positions, n: int) -> dict[str, Column]:
    """The columns that say where rows stand in the log."""
    return {
        "off": constant(offset, n),
        "pos": Numbers(np.asarray(positions, dtype=np.int64)),
        "append_us": constant(held_time_us(append_us), n),
    }


def request_rows(decoded: Decoded[RequestColumns], offset: int, append_us: int) -> Rows:
    """Rows of `inference_log`."""
    columns = decoded.columns
    rows = place(offset, append_us, decoded.positions, columns.n)
    rows |= _label_columns(columns, append_us, REQUEST_LABELS[:-1])  # key_ids is not archived
    rows |= {
        "shadow": Numbers(columns.shadow.view(np.uint8)),
        "status": Numbers(columns.status),
        "ttft_us": Optionals(columns.ttft_us),
        "output_tokens": Numbers(columns.output_tokens),
        "itl_us": Optionals(columns.itl_us),
        "stream": Optionals(columns.stream),
        "parse_depth": Optionals(columns.parse_depth),
    }
    rows |= _extra_columns(columns)
    variable = sum(map(len, columns.extras.values()))
    return Rows(columns.n, rows, columns.n * ROW_BYTES + variable)


def logit_rows(decoded: Decoded[LogitColumns], offset: int, append_us: int) -> Rows:
    """Rows of `logit_summaries`."""
    columns = decoded.columns
    rows = place(offset, append_us, decoded.positions, columns.n)
    rows |= _label_columns(columns, append_us, LABELS)
    found, sums = emitted_logprobs(columns)
    rows |= {
        "expected_arms": _arm_lists(columns.expected_arms),
        "definition": Texts(DEFINITIONS, columns.definition),
        "source": Texts(SOURCES, columns.source),
        "kind": Texts(KINDS, columns.kind),
        "eta": Numbers(columns.eta),
        "identity": Texts(IDENTITIES, columns.identity),
        "ended": Optionals(columns.ended),
        "positions": Numbers(np.diff(columns.offsets)),
        "k": Numbers(columns.k),
        "emitted_listed": Numbers(found),
        "emitted_logprob_sum": Numbers(sums, columns.kind != KINDS.index("logprobs")),
    }
    return Rows(columns.n, rows, columns.n * ROW_BYTES)


_ARM_SETS: Final = [[code for code in range(len(ARMS)) if mask >> code & 1] for mask in range(256)]


def _arm_lists(masks: U1) -> TextLists:
    sets = [_ARM_SETS[mask] for mask in masks.tolist()]
    codes = np.array([code for arms in sets for code in arms], dtype=np.uint8)
    return TextLists(np.array([len(arms) for arms in sets], dtype=np.int64), Texts(ARMS, codes))


def telemetry_rows(decoded: Decoded[TelemetryColumns], offset: int, append_us: int) -> Rows:
    """Rows of `node_telemetry`."""
    columns = decoded.columns
    events = [_node_event.decode(text) for text in columns.events]
    rows = place(offset, append_us, decoded.positions, columns.n)
    rows |= {
        "node": [event.node for event in events],
        "ts_us": Numbers(columns.ts_us),
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


def emitted_logprobs(columns: LogitColumns) -> tuple[I8, F8]:
    """Per event: valid positions whose emitted token is on its own list, and the sum of its logprob."""
    lengths, k = np.diff(columns.offsets), columns.k
    # A number of entries for all positions, where there is one, is several times as fast as one for each.
    width = int(k[0]) if columns.n and bool((k == k[0]).all()) else np.repeat(k, lengths)
    emitted = np.repeat(columns.tokens, width)
    hits = np.flatnonzero((columns.top_ids == emitted) & np.isfinite(columns.top_logprobs))
    if isinstance(width, int):
        position = hits // max(width, 1)
    else:
        position = np.repeat(np.arange(len(columns.tokens)), width)[hits]
    # A token listed twice makes its position one that cannot be read: a hit is a position.
    readable = valid_positions(columns)[position]
    owner = np.repeat(np.arange(columns.n), lengths)[position[readable]]
    values = columns.top_logprobs[hits[readable]].astype(np.float64)
    found = np.bincount(owner, minlength=columns.n).astype(np.int64, copy=False)
    return found, np.bincount(owner, weights=values, minlength=columns.n).astype(np.float64, copy=False)


def _label_columns(columns: LabelsColumns, append_us: int, labels: Sequence[str]) -> dict[str, Column]:
    latest_us = held_time_us(append_us) + EVENT_TIME_CUT_US
    rows: dict[str, Column] = {name: label(columns.labels[name]) for name in labels}
    rows |= {
        "generation": Optionals(columns.generation),
        "arm": Texts(ARMS, columns.arm),
        "pair_id": HexTexts(columns.pair_id, ~columns.has_pair_id),
        "signature": HexTexts(columns.signature),
        "ts_us": Numbers(columns.ts_us),
        "duration_us": Numbers(columns.duration_us),
        "event_us": Numbers(np.minimum(columns.ts_us + columns.duration_us, latest_us)),
        "input_tokens": Numbers(columns.input_tokens),
        "temperature": Optionals(columns.temperature),
        "top_p": Optionals(columns.top_p),
        "seed": Numbers(columns.seed, ~columns.has_seed),
        "max_tokens": Optionals(columns.max_tokens),
        "cached_tokens": Optionals(columns.cached_tokens),
    }
    return rows


_EXTRA_COLUMNS: Final[Mapping[str, Any]] = {
    "response_quality_score": None,
    "similarity": None,
    "text_key_id": None,
    "scores": {},
    "steps": [],
    "embedding": [],
}
"""With what stands in a row whose event says nothing."""


def _extra_columns(columns: RequestColumns) -> dict[str, Column]:
    """What of the remaining fields has a column. Of an encrypted text only the key's id is kept (C3)."""
    given: dict[str, dict[int, Any]] = {name: {} for name in _EXTRA_COLUMNS}
    for index, text in columns.extras.items():
        extras: Mapping[str, Any] = {name: getattr(_extras.decode(text), name) for name in EXTRA_FIELDS}
        if extras["text"] is not None:
            given["text_key_id"][index] = extras["text"].key_id
        steps = [(step.name, step.duration_us, step.attempts, step.outcome) for step in extras["steps"] or ()]
        said = {
            "response_quality_score": extras["response_quality_score"],
            "similarity": extras["similarity"],
            "scores": dict(extras["scores"] or {}),
            "steps": steps,
            "embedding": list(extras["embedding"] or ()),
        }
        for name, value in said.items():
            if value != _EXTRA_COLUMNS[name]:
                given[name][index] = value
    return {name: Sparse(columns.n, _EXTRA_COLUMNS[name], values) for name, values in given.items()}


def _total(values: Iterable[int | None]) -> int | None:
    there = [value for value in values if value is not None]
    return min(sum(there), _MAX_U8) if there else None
