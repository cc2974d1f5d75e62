"""Events into columns. Pure; the JSON decoder and the columnar encoder both go through here.

The events must satisfy their types (decoded by msgspec, or checked by it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.columns import (
    ABSENT,
    DEFINITIONS,
    ETA_BY_PRECISION,
    F4,
    GAUGES,
    I8,
    KEY_IDS,
    KINDS,
    LABELS,
    LOGIT_LABELS,
    NO_LABEL,
    NOT_LISTED,
    NOT_LISTED_LOGPROB,
    REQUEST_LABELS,
    SOURCES,
    LabelColumn,
    LogitColumns,
    Rejected,
    RequestColumns,
    TelemetryColumns,
)
from schemas.events import ARMS, LogitEvent, NodeEvent, RequestEvent
from schemas.identity import pair_id_bytes, token_hash

EXTRA_FIELDS: Final = ("response_quality_score", "similarity", "scores", "steps", "embedding", "text")
"""Fields of a request event that have no column and travel as one JSON object."""

_REQUEST_FIELDS: Final = {f.name: f for f in msgspec.structs.fields(RequestEvent)}
RequestExtras: Final = msgspec.defstruct(
    "RequestExtras",
    [(name, _REQUEST_FIELDS[name].type, None) for name in EXTRA_FIELDS],
    frozen=True,
    kw_only=True,
    omit_defaults=True,
)
"""The fields of EXTRA_FIELDS, typed as in RequestEvent."""

_ARM_CODE: Final = {name: code for code, name in enumerate(ARMS)}
_DEFINITION_CODE: Final = {name: code for code, name in enumerate(DEFINITIONS)}
_SOURCE_CODE: Final = {name: code for code, name in enumerate(SOURCES)}
_KIND_CODE: Final = {name: code for code, name in enumerate(KINDS)}
_ETA_OF_FLOAT: Final = {"f16": 5e-4, "f32": 1e-6, "f64": 1e-6}
_TRISTATE: Final = {None: ABSENT, False: 0, True: 1}

_COMMON_FIELDS: Final = (
    "signature",
    "pair_id",
    "arm",
    "generation",
    "ts_us",
    "duration_us",
    "input_tokens",
    "cached_tokens",
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    *LABELS,
)
_REQUEST_ONLY: Final = ("shadow", "status", "ttft_us", "itl_us", "output_tokens", "stream", "parse_depth")
_REQUEST_NAMES: Final = (*_COMMON_FIELDS, *_REQUEST_ONLY, *REQUEST_LABELS[len(LABELS) :], *EXTRA_FIELDS)
_LOGIT_ONLY: Final = ("expected_arms", "definition", "source", "kind", "precision", "ended")
_LOGIT_NAMES: Final = (*_COMMON_FIELDS, KEY_IDS, *_LOGIT_ONLY)
_request_values: Final = attrgetter(*_REQUEST_NAMES)
_logit_values: Final = attrgetter(*_LOGIT_NAMES)

_NO_LABELS: Final = np.full(1024, NO_LABEL, dtype=np.uint16)
_FIRST_LABELS: Final = np.zeros(1024, dtype=np.uint16)
_NO_LABELS.flags.writeable = _FIRST_LABELS.flags.writeable = False

Table = dict[str, Sequence[Any]]


def _table(events: Sequence[object], names: tuple[str, ...], values: attrgetter[Any]) -> Table:
    if not events:
        return dict.fromkeys(names, ())
    return dict(zip(names, zip(*map(values, events), strict=True), strict=True))


def _optional(values: Sequence[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return np.array([ABSENT if v is None else v for v in values], dtype=dtype)


def _alike(kept: NDArray[np.uint16], n: int, code: int) -> NDArray[np.uint16]:
    """n times the same code; of a small batch a view of what is kept, which nobody may write to."""
    return kept[:n] if n <= len(kept) else np.full(n, code, dtype=np.uint16)


def label_column(texts: Sequence[str | None]) -> LabelColumn:
    """Dictionary-encode; the dictionary stands in order of first appearance."""
    n = len(texts)
    if n and texts.count(texts[0]) == n:
        first = texts[0]
        if first is None:
            return LabelColumn((), _alike(_NO_LABELS, n, NO_LABEL))
        return LabelColumn((first,), _alike(_FIRST_LABELS, n, 0))
    codes: dict[str, int] = {}
    coded = [NO_LABEL if t is None else codes.setdefault(t, len(codes)) for t in texts]
    return LabelColumn(tuple(codes), np.array(coded, dtype=np.uint16))


def _common(table: Table, labels: tuple[str, ...]) -> dict[str, Any]:
    n = len(table["arm"])
    pair_ids = table["pair_id"]
    seeds = table["seed"]
    pairs = b"".join([bytes(16) if p is None else pair_id_bytes(p) for p in pair_ids])
    return {
        "n": n,
        "signature": np.frombuffer(bytes.fromhex("".join(table["signature"])), dtype=np.uint8).reshape(n, 16),
        "pair_id": np.frombuffer(pairs, dtype=np.uint8).reshape(n, 16),
        "has_pair_id": np.array([p is not None for p in pair_ids], dtype=np.bool_),
        "arm": np.array([_ARM_CODE[a] for a in table["arm"]], dtype=np.uint8),
        "generation": _optional(table["generation"], np.int32),
        "ts_us": np.array(table["ts_us"], dtype=np.int64),
        "duration_us": np.array(table["duration_us"], dtype=np.int64),
        "input_tokens": np.array(table["input_tokens"], dtype=np.int32),
        "cached_tokens": _optional(table["cached_tokens"], np.int32),
        "temperature": _optional(table["temperature"], np.float64),
        "top_p": _optional(table["top_p"], np.float64),
        "max_tokens": _optional(table["max_tokens"], np.int32),
        "seed": np.array([0 if s is None else s for s in seeds], dtype=np.int64),
        "has_seed": np.array([s is not None for s in seeds], dtype=np.bool_),
        "labels": {name: label_column(table[name]) for name in labels},
    }


def _extras(table: Table) -> dict[int, bytes]:
    rows: set[int] = set()
    for name in EXTRA_FIELDS:
        values = table[name]
        if values.count(None) != len(values):
            rows.update(i for i, v in enumerate(values) if v is not None)
    return {
        i: msgspec.json.encode(RequestExtras(**{name: table[name][i] for name in EXTRA_FIELDS}))
        for i in sorted(rows)
    }


def request_columns(events: Sequence[RequestEvent]) -> RequestColumns:
    """Columns of these events, row i = event i."""
    table = _table(events, _REQUEST_NAMES, _request_values)
    return RequestColumns(
        **_common(table, REQUEST_LABELS),
        shadow=np.array(table["shadow"], dtype=np.bool_),
        status=np.array(table["status"], dtype=np.uint16),
        ttft_us=_optional(table["ttft_us"], np.int64),
        itl_us=_optional(table["itl_us"], np.int64),
        output_tokens=np.array(table["output_tokens"], dtype=np.int32),
        stream=np.array([_TRISTATE[s] for s in table["stream"]], dtype=np.int8),
        parse_depth=_optional(table["parse_depth"], np.int32),
        extras=_extras(table),
    )


def eta_of(precision: int | str) -> float:
    """Resolution of log-probabilities stated as decimals or as a float type (decisions §2)."""
    if isinstance(precision, str):
        return _ETA_OF_FLOAT[precision]
    return next(eta for decimals, eta in ETA_BY_PRECISION if precision >= decimals)


def logit_shape_error(event: LogitEvent) -> Rejected | None:
    """Why this event's lists do not form positions (position 0 in the answer), or None.

    T of `tokens`, `top_ids` (or `token_bytes`, `top_bytes`) and `top_logprobs` must agree.
    """
    name: str
    tokens: Sequence[object]
    tops: Sequence[object] | None
    if event.tokens is not None:
        name, tokens, tops = "top_ids", event.tokens, event.top_ids
    elif event.token_bytes is not None:
        name, tokens, tops = "top_bytes", event.token_bytes, event.top_bytes
    else:
        return Rejected(0, "tokens", "required field is missing (or token_bytes with top_bytes)")
    if tops is None:
        return Rejected(0, name, "required field is missing")
    if len(tops) != len(tokens):
        return Rejected(0, name, f"{len(tops)} lists for {len(tokens)} tokens")
    if len(event.top_logprobs) != len(tokens):
        return Rejected(0, "top_logprobs", f"{len(event.top_logprobs)} lists for {len(tokens)} tokens")
    return None


# One prompt's candidates repeat from position to position and between arms.
_token_hash = lru_cache(maxsize=65_536)(token_hash)


def _ids(event: LogitEvent) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    if event.tokens is not None:
        assert event.top_ids is not None
        return event.tokens, event.top_ids
    assert event.token_bytes is not None
    assert event.top_bytes is not None
    tops = [[_token_hash(token) for token in row] for row in event.top_bytes]
    return [_token_hash(token) for token in event.token_bytes], tops


def _flat(rows: Iterable[Sequence[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.array(list(chain.from_iterable(rows)), dtype=dtype)


def _rectangle(
    ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]], dtype: type[np.generic]
) -> tuple[int, NDArray[Any], NDArray[np.float64]]:
    """k, ids and log-probabilities (T·k,) of one answer. A null becomes NaN, settled by `settle`."""
    widths = {*map(len, ids), *map(len, logprobs)}
    if len(widths) == 1:
        return widths.pop(), _flat(ids, dtype), _flat(logprobs, np.float64)
    id_widths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    lp_widths = np.fromiter(map(len, logprobs), dtype=np.int64, count=len(ids))
    good = id_widths == lp_widths
    k = int(id_widths[good].max(initial=0))
    inside = good[:, None] & (np.arange(k) < id_widths[:, None])
    kept = [t for t, ok in enumerate(good.tolist()) if ok]
    top_ids = np.full((len(ids), k), NOT_LISTED, dtype=dtype)
    top_logprobs = np.full((len(ids), k), -np.inf)
    top_ids[inside] = _flat([ids[t] for t in kept], dtype)
    top_logprobs[inside] = _flat([logprobs[t] for t in kept], np.float64)
    return k, top_ids.reshape(-1), top_logprobs.reshape(-1)


def settle(top_ids: NDArray[Any], top_logprobs: NDArray[Any]) -> tuple[NDArray[Any], F4]:
    """Canonical entries: float32; what is not listed is exactly (NOT_LISTED, −inf). No NaN, no +inf left out.

    A NaN counts as "none" here; whoever must treat it as a fault of its position does so before.
    """
    with np.errstate(over="ignore"):
        logprobs = top_logprobs.astype(np.float32, copy=False)
    listed = (logprobs > NOT_LISTED_LOGPROB) & (top_ids != NOT_LISTED)
    if listed.all():
        return top_ids, logprobs
    return np.where(listed, top_ids, top_ids.dtype.type(NOT_LISTED)), np.where(
        listed, logprobs, np.float32(-np.inf)
    )


def offsets_of(lengths: NDArray[Any]) -> I8:
    """(n + 1,) running offsets of consecutive runs."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def logit_columns(events: Sequence[LogitEvent]) -> LogitColumns:
    """Columns of these events, row i = event i; each must pass `logit_shape_error`."""
    table = _table(events, _LOGIT_NAMES, _logit_values)
    hashed = [event.tokens is None for event in events]
    dtype = np.int64 if any(hashed) else np.int32
    tokens: list[NDArray[Any]] = []
    ids: list[NDArray[Any]] = []
    logprobs: list[NDArray[np.float64]] = []
    ks: list[int] = []
    for event in events:
        emitted, tops = _ids(event)
        k, flat_ids, flat_logprobs = _rectangle(tops, event.top_logprobs, dtype)
        tokens.append(np.array(emitted, dtype=dtype))
        ids.append(flat_ids)
        logprobs.append(flat_logprobs)
        ks.append(k)
    empty = np.empty(0, dtype=dtype)
    lengths = np.array([len(t) for t in tokens], dtype=np.int64)
    k_column = np.array(ks, dtype=np.uint8)
    top_ids, top_logprobs = settle(
        np.concatenate([empty, *ids]), np.concatenate([np.empty(0, dtype=np.float64), *logprobs])
    )
    top_ids, top_logprobs = blank_infinite(top_ids, top_logprobs, lengths, k_column)
    return LogitColumns(
        **_common(table, LOGIT_LABELS),
        expected_arms=np.array([_arm_mask(arms) for arms in table["expected_arms"]], dtype=np.uint8),
        definition=np.array([_DEFINITION_CODE[d] for d in table["definition"]], dtype=np.uint8),
        source=np.array([_SOURCE_CODE[s] for s in table["source"]], dtype=np.uint8),
        kind=np.array([_KIND_CODE[k] for k in table["kind"]], dtype=np.uint8),
        eta=np.array([eta_of(p) for p in table["precision"]], dtype=np.float64),
        identity=np.array(hashed, dtype=np.uint8),
        ended=np.array([_TRISTATE[e] for e in table["ended"]], dtype=np.int8),
        offsets=offsets_of(lengths),
        k=k_column,
        entry_offsets=offsets_of(lengths * k_column),
        tokens=np.concatenate([empty, *tokens]),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _arm_mask(arms: Sequence[str]) -> int:
    mask = 0
    for arm in arms:
        mask |= 1 << _ARM_CODE[arm]
    return mask


def blank_infinite(
    top_ids: NDArray[Any], top_logprobs: F4, lengths: NDArray[Any], k: NDArray[Any]
) -> tuple[NDArray[Any], F4]:
    """List nothing in any position that holds NaN or +inf: such a position breaks the rules of reading."""
    bad = ~(top_logprobs < np.inf)
    if not bad.any():
        return top_ids, top_logprobs
    widths = np.repeat(k.astype(np.int64), lengths)
    position_of_entry = np.repeat(np.arange(len(widths)), widths)
    bad_positions = np.zeros(len(widths), dtype=np.bool_)
    bad_positions[position_of_entry[bad]] = True
    blank = bad_positions[position_of_entry]
    return np.where(blank, top_ids.dtype.type(NOT_LISTED), top_ids), np.where(
        blank, np.float32(-np.inf), top_logprobs
    )


def _gauge_values(event: NodeEvent) -> dict[str, float | None]:
    engine = event.engine
    fragmentation = event.fragmentation
    used = [g.memory_used_bytes for g in event.gpus if g.memory_used_bytes is not None]
    total = [g.memory_total_bytes for g in event.gpus if g.memory_total_bytes is not None]
    values: dict[str, float | None] = {
        "memory_used_bytes": sum(used) if used else None,
        "memory_total_bytes": sum(total) if total else None,
    }
    if engine is not None:
        for name in GAUGES[2:-2]:
            values[name] = getattr(engine, name)
    if fragmentation is not None and fragmentation.method != "n/a":
        values["internal"] = fragmentation.internal
        values["external"] = fragmentation.external
    return values


def telemetry_columns(events: Sequence[NodeEvent]) -> TelemetryColumns:
    """Columns of these events, row i = event i."""
    gauges = [_gauge_values(event) for event in events]
    return TelemetryColumns(
        n=len(events),
        node=label_column([event.node for event in events]),
        ts_us=np.array([event.ts_us for event in events], dtype=np.int64),
        gauges={name: _optional([g.get(name) for g in gauges], np.float64) for name in GAUGES},
        events=tuple(msgspec.json.encode(event) for event in events),
    )
