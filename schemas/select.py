"""Rows of columns: keep some events of a record, in both encodings alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.columns import I8, LabelColumn, LabelsColumns, LogitColumns, Rejected, RequestColumns
from schemas.tabulate import offsets_of
from schemas.validity import has_valid_position

Rows = NDArray[np.int64]


def _common(columns: LabelsColumns, rows: Rows) -> dict[str, Any]:
    return {
        "n": len(rows),
        "signature": columns.signature[rows],
        "pair_id": columns.pair_id[rows],
        "has_pair_id": columns.has_pair_id[rows],
        "arm": columns.arm[rows],
        "generation": columns.generation[rows],
        "ts_us": columns.ts_us[rows],
        "duration_us": columns.duration_us[rows],
        "input_tokens": columns.input_tokens[rows],
        "cached_tokens": columns.cached_tokens[rows],
        "temperature": columns.temperature[rows],
        "top_p": columns.top_p[rows],
        "max_tokens": columns.max_tokens[rows],
        "seed": columns.seed[rows],
        "has_seed": columns.has_seed[rows],
        "labels": {
            name: LabelColumn(column.values, column.codes[rows]) for name, column in columns.labels.items()
        },
    }


def take_requests(columns: RequestColumns, rows: Rows) -> RequestColumns:
    """The events `rows`, in that order."""
    return RequestColumns(
        **_common(columns, rows),
        shadow=columns.shadow[rows],
        status=columns.status[rows],
        ttft_us=columns.ttft_us[rows],
        itl_us=columns.itl_us[rows],
        output_tokens=columns.output_tokens[rows],
        stream=columns.stream[rows],
        parse_depth=columns.parse_depth[rows],
        extras={i: columns.extras[row] for i, row in enumerate(rows.tolist()) if row in columns.extras},
    )


def _spans(offsets: Rows, rows: Rows) -> Rows:
    """Indices of everything the events `rows` own in a flat array with these offsets."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    spans: NDArray[np.int64] = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return spans


def take_logits(columns: LogitColumns, rows: Rows) -> LogitColumns:
    """The events `rows` with all their positions, in that order."""
    entries = _spans(columns.entry_offsets, rows)
    return LogitColumns(
        **_common(columns, rows),
        expected_arms=columns.expected_arms[rows],
        definition=columns.definition[rows],
        source=columns.source[rows],
        kind=columns.kind[rows],
        eta=columns.eta[rows],
        identity=columns.identity[rows],
        ended=columns.ended[rows],
        offsets=offsets_of(np.diff(columns.offsets)[rows]),
        k=columns.k[rows],
        entry_offsets=offsets_of(np.diff(columns.entry_offsets)[rows]),
        tokens=columns.tokens[_spans(columns.offsets, rows)],
        top_ids=columns.top_ids[entries],
        top_logprobs=columns.top_logprobs[entries],
    )


def drop_unreadable(columns: LogitColumns, positions: I8) -> tuple[LogitColumns, I8, list[Rejected]]:
    """Without the events that have no valid position; those as rejected. `positions`: index in the record."""
    has = has_valid_position(columns)
    if has.all():
        return columns, positions, []
    reason = "no valid position (see the rules of reading top-k lists)"
    rejected = [Rejected(position, "top_logprobs", reason) for position in positions[~has].tolist()]
    kept = np.flatnonzero(has)
    return take_logits(columns, kept), positions[kept], rejected


def in_order(rejected: Iterable[Rejected]) -> tuple[Rejected, ...]:
    """Ascending by position."""
    return tuple(sorted(rejected, key=lambda r: -1 if r.position is None else r.position))
