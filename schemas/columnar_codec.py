"""Columnar records into columns, and columns into records (`envelope`).

Lengths are checked against n and against the sum of answer lengths before anything is viewed; then all values
are checked against the limits of the event types at once. A blob of the wrong length refuses the record, a
bad value only its event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.columns import (
    F4,
    KEY_IDS,
    NO_LABEL,
    NOT_LISTED,
    NOT_LISTED_LOGPROB,
    BatchHeader,
    Bool,
    Decoded,
    LabelColumn,
    LabelsColumns,
    LogitColumns,
    Rejected,
    RequestColumns,
    TelemetryColumns,
)
from schemas.envelope import VERSION, Envelope, LogitEnvelope, RequestEnvelope, TelemetryEnvelope
from schemas.errors import EncodingError
from schemas.json_codec import MAX_EVENTS, RECORD, explain
from schemas.json_codec import decode_telemetry as decode_json_telemetry
from schemas.layout import ETAS, LOGIT_LAYOUT, REQUEST_LAYOUT, Layout
from schemas.select import drop_unreadable, in_order, take_logits, take_requests
from schemas.tabulate import RequestExtras, blank_infinite, logit_columns, offsets_of, request_columns, settle
from schemas.wire_columns import BlobError, constant_labels, constant_numbers, read_label, read_number

MAX_ID: Final = 2**31 - 1

_requests: Final = msgspec.msgpack.Decoder(RequestEnvelope)
_logits: Final = msgspec.msgpack.Decoder(LogitEnvelope)
_telemetry: Final = msgspec.msgpack.Decoder(TelemetryEnvelope)
_extras: Final = msgspec.json.Decoder(RequestExtras)
NO_KEY_IDS: Final[tuple[list[str], bytes]] = ([], NO_LABEL.to_bytes(2, "little"))
"""What batches without the last label column, `key_ids`, would hold there."""
_ETAS: Final = np.array(ETAS)
_encode: Final = msgspec.msgpack.Encoder().encode


class _RefusedError(Exception):
    """A whole record cannot be read; carries what to say of it."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.reason)
        self.rejected = rejected


def _refuse(field: str, reason: str) -> NoReturn:
    raise _RefusedError(Rejected(None, field, reason))


class _Faults:
    """First fault of every event that has one."""

    def __init__(self) -> None:
        self.by_row: dict[int, Rejected] = {}

    def add(self, row: int, field: str, reason: str) -> None:
        self.by_row.setdefault(row, Rejected(row, field, reason))


def _check_head(envelope: Envelope, kind: str) -> None:
    if envelope.v != VERSION:
        _refuse("v", f"version {envelope.v} of the columnar encoding; this reads {VERSION}")
    if envelope.kind != kind:
        _refuse("kind", f"an envelope of another kind, where {kind!r} is expected")
    if not 0 <= envelope.n <= MAX_EVENTS:
        _refuse("n", f"{envelope.n} events in one record; at most {MAX_EVENTS}")


def _numbers(layout: Layout, blobs: Sequence[bytes], n: int, faults: _Faults) -> dict[str, NDArray[Any]]:
    """All number columns by name; faults get every event that violates a limit."""
    if len(blobs) != len(layout.numbers):
        _refuse("numbers", f"{len(blobs)} number columns; {layout.kind} have {len(layout.numbers)}")
    columns, others = constant_numbers(layout, blobs, n)
    for index in others:
        column = layout.numbers[index]
        try:
            columns[column.name], bad = read_number(column, blobs[index], n)
        except BlobError as error:
            _refuse(column.name, str(error))
        for row, reason in bad:
            faults.add(row, column.name, reason)
    return columns


def _labels(
    layout: Layout, wire: Sequence[tuple[list[str], bytes]], n: int, faults: _Faults
) -> dict[str, LabelColumn]:
    if len(wire) == len(layout.labels) - 1:
        wire = [*wire, NO_KEY_IDS if n else ([], b"")]
    if len(wire) != len(layout.labels):
        _refuse("labels", f"{len(wire)} label columns; {layout.kind} have {len(layout.labels)}")
    columns, others = constant_labels(layout, wire, n)
    for index in others:
        name = layout.labels[index]
        values, codes = wire[index]
        try:
            columns[name], bad = read_label(layout.optional_labels[index], values, codes, n)
        except BlobError as error:
            _refuse(name, str(error))
        for row, reason in bad:
            faults.add(row, name, reason)
    return columns


def _ids16(blob: bytes, n: int, name: str) -> NDArray[np.uint8]:
    if len(blob) != 16 * n:
        _refuse(name, f"blob of {len(blob)} bytes; {n} events need {16 * n}")
    return np.frombuffer(blob, dtype=np.uint8).reshape(n, 16)


def _common(
    layout: Layout, envelope: RequestEnvelope | LogitEnvelope, faults: _Faults
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constructor arguments of the shared label columns, and the remaining number columns."""
    n = envelope.n
    signature = _ids16(envelope.signature, n, "signature")
    pair_id = _ids16(envelope.pair_id or bytes(16 * n), n, "pair_id")
    numbers = _numbers(layout, envelope.numbers, n, faults)
    if not envelope.pair_id:
        for row in np.flatnonzero(numbers["has_pair_id"]).tolist():
            faults.add(row, "pair_id", "said to be there, but the record holds no pair ids")
    labels = _labels(layout, envelope.labels, n, faults)
    shared = {
        name: numbers.pop(name)
        for name in (
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
            "has_seed",
            "has_pair_id",
        )
    }
    return {"n": n, "signature": signature, "pair_id": pair_id, "labels": labels, **shared}, dict(numbers)


def _header(envelope: Envelope) -> BatchHeader:
    return BatchHeader(envelope.producer_id, envelope.sequence, envelope.dropped)


def _kept(faults: _Faults, n: int) -> NDArray[np.int64]:
    kept = np.ones(n, dtype=np.bool_)
    kept[list(faults.by_row)] = False
    return np.flatnonzero(kept)


def decode_requests(value: bytes) -> Decoded[RequestColumns]:
    """Request events of one columnar record. Never raises on content."""
    try:
        envelope = _requests.decode(value)
        _check_head(envelope, REQUEST_LAYOUT.kind)
        faults = _Faults()
        shared, numbers = _common(REQUEST_LAYOUT, envelope, faults)
        extras = _read_extras(envelope.extras, envelope.n, faults)
    except _RefusedError as refused:
        return Decoded(request_columns([]), _EMPTY, (refused.rejected,), None)
    except (msgspec.DecodeError, RecursionError) as error:
        return Decoded(request_columns([]), _EMPTY, (explain(None, error, RECORD),), None)
    columns = RequestColumns(**shared, **numbers, extras=extras)
    if not faults.by_row:
        return Decoded(columns, np.arange(envelope.n), (), _header(envelope))
    rows = _kept(faults, envelope.n)
    return Decoded(take_requests(columns, rows), rows, in_order(faults.by_row.values()), _header(envelope))


_EMPTY: Final = np.empty(0, dtype=np.int64)


def _read_extras(extras: dict[int, bytes], n: int, faults: _Faults) -> dict[int, bytes]:
    canonical: dict[int, bytes] = {}
    for row, text in extras.items():
        if not 0 <= row < n:
            _refuse("extras", f"fields of event {row}; the record has {n}")
        try:
            canonical[row] = msgspec.json.encode(_extras.decode(text))
        except (msgspec.DecodeError, RecursionError) as error:
            fault = explain(row, error)
            faults.add(row, fault.field, fault.reason)
    return canonical


def decode_logits(value: bytes) -> Decoded[LogitColumns]:
    """Logit events of one columnar record. Never raises on content."""
    try:
        envelope = _logits.decode(value)
        _check_head(envelope, LOGIT_LAYOUT.kind)
        faults = _Faults()
        shared, numbers = _common(LOGIT_LAYOUT, envelope, faults)
        columns = _logit_columns(envelope, shared, numbers, faults)
    except _RefusedError as refused:
        return Decoded(logit_columns([]), _EMPTY, (refused.rejected,), None)
    except (msgspec.DecodeError, RecursionError) as error:
        return Decoded(logit_columns([]), _EMPTY, (explain(None, error, RECORD),), None)
    rows = np.arange(envelope.n)
    if faults.by_row:
        rows = _kept(faults, envelope.n)
        columns = take_logits(columns, rows)
    columns, rows, unreadable = drop_unreadable(columns, rows)
    return Decoded(columns, rows, in_order([*faults.by_row.values(), *unreadable]), _header(envelope))


def _logit_columns(
    envelope: LogitEnvelope, shared: dict[str, Any], numbers: dict[str, Any], faults: _Faults
) -> LogitColumns:
    if envelope.id_bytes not in (4, 8):
        _refuse("id_bytes", f"{envelope.id_bytes}; token ids take 4 or 8 bytes")
    lengths = numbers.pop("length").astype(np.int64)
    k = numbers.pop("k")
    offsets = offsets_of(lengths)
    entry_offsets = offsets_of(lengths * k)
    total, entries = int(offsets[-1]), int(entry_offsets[-1])
    needed = {
        "tokens": (envelope.tokens, total * envelope.id_bytes),
        "top_ids": (envelope.top_ids, entries * envelope.id_bytes),
        "top_logprobs": (envelope.top_logprobs, entries * 4),
    }
    for name, (blob, size) in needed.items():
        if len(blob) != size:
            _refuse(name, f"blob of {len(blob)} bytes; {total} positions with {entries} entries need {size}")
    dtype = np.dtype(f"<i{envelope.id_bytes}")
    tokens = np.frombuffer(envelope.tokens, dtype=dtype)
    top_ids = np.frombuffer(envelope.top_ids, dtype=dtype)
    if total and int(tokens.min()) < 0:
        _fault_entries(tokens < 0, offsets, "tokens", tokens, faults)
    least_id = int(top_ids.min()) if entries else 0
    if least_id < NOT_LISTED:
        _fault_entries(top_ids < NOT_LISTED, entry_offsets, "top_ids", top_ids, faults)
    if envelope.id_bytes == 8:
        plain = numbers["identity"] == 0
        _fault_entries((tokens > MAX_ID) & np.repeat(plain, lengths), offsets, "tokens", tokens, faults)
        wide = (top_ids > MAX_ID) & np.repeat(plain, lengths * k)
        _fault_entries(wide, entry_offsets, "top_ids", top_ids, faults)
    logprobs = np.frombuffer(envelope.top_logprobs, dtype="<f4")
    if least_id < 0 or not _all_listed(logprobs):
        top_ids, logprobs = settle(*blank_infinite(top_ids, logprobs, lengths, k))
    # A code out of range is a fault of its event already; the clip only keeps the look-up inside the table.
    eta = _ETAS.take(numbers.pop("eta"), mode="clip")
    return LogitColumns(
        **shared,
        **numbers,
        eta=eta,
        offsets=offsets,
        k=k,
        entry_offsets=entry_offsets,
        tokens=tokens,
        top_ids=top_ids,
        top_logprobs=logprobs,
    )


def _all_listed(logprobs: F4) -> bool:
    """Whether every log-probability is a number that stands for something: true of almost every record."""
    if len(logprobs) == 0:
        return True
    with np.errstate(invalid="ignore"):
        # NaN spreads to both and fails both.
        return bool(logprobs.min() > NOT_LISTED_LOGPROB and logprobs.max() < np.inf)


def _fault_entries(
    bad: Bool, offsets: NDArray[np.int64], name: str, ids: NDArray[Any], faults: _Faults
) -> None:
    indices = np.flatnonzero(bad)
    # An event is refused for its first bad id: the others of a hostile record cost nothing more.
    rows, first = np.unique(np.searchsorted(offsets, indices, side="right") - 1, return_index=True)
    for row, index in zip(rows.tolist(), indices[first].tolist(), strict=True):
        faults.add(row, name, f"token id {int(ids[index])} is not in 0..{MAX_ID}")


def decode_telemetry(value: bytes) -> Decoded[TelemetryColumns]:
    """Node events of one columnar record. Never raises on content."""
    try:
        envelope = _telemetry.decode(value)
        _check_head(envelope, "telemetry")
    except _RefusedError as refused:
        return Decoded(decode_json_telemetry(b"[]").columns, _EMPTY, (refused.rejected,), None)
    except (msgspec.DecodeError, RecursionError) as error:
        return Decoded(decode_json_telemetry(b"[]").columns, _EMPTY, (explain(None, error, RECORD),), None)
    decoded = decode_json_telemetry(envelope.events)
    return Decoded(decoded.columns, decoded.positions, decoded.rejected, _header(envelope))


def _shrunk(column: NDArray[Any]) -> bytes:
    """The blob of a column: one value where all are alike."""
    blob = column.tobytes()
    first = blob[: column.itemsize]
    return first if blob == first * len(column) else blob


def _wire_numbers(layout: Layout, columns: LabelsColumns, derived: dict[str, NDArray[Any]]) -> list[bytes]:
    blobs: list[bytes] = []
    for group in layout.groups:
        for column in group.columns:
            values = derived.get(column.name)
            if values is None:
                values = getattr(columns, column.name)
            blobs.append(_shrunk(values.astype(group.wire, copy=False)))
    return blobs


def _wire_labels(layout: Layout, columns: LabelsColumns) -> list[tuple[list[str], bytes]]:
    wire: list[tuple[list[str], bytes]] = []
    for name in layout.labels:
        column = columns.labels[name]
        wire.append((list(column.values), _shrunk(column.codes.astype("<u2", copy=False))))
    # Readers that know no key_ids read what has none.
    return wire if columns.labels[KEY_IDS].values else wire[:-1]


def _wire_pair_ids(columns: LabelsColumns) -> bytes:
    return columns.pair_id.tobytes() if bool(columns.has_pair_id.any()) else b""


def encode_requests(columns: RequestColumns, header: BatchHeader) -> bytes:
    """One record of these events. They must be valid: the reader refuses those that are not."""
    return _encode(
        RequestEnvelope(
            VERSION,
            REQUEST_LAYOUT.kind,
            columns.n,
            header.producer_id,
            header.sequence,
            dict(header.dropped),
            columns.signature.tobytes(),
            _wire_pair_ids(columns),
            _wire_numbers(REQUEST_LAYOUT, columns, {}),
            _wire_labels(REQUEST_LAYOUT, columns),
            dict(columns.extras),
        )
    )


def encode_logits(columns: LogitColumns, header: BatchHeader) -> bytes:
    """One record of these events. They must be valid: the reader refuses those that are not.

    Raises EncodingError for an η that the encoding has no code for.
    """
    code_of_eta = {eta: code for code, eta in enumerate(ETAS)}
    etas = columns.eta.tolist()
    unknown = set(etas) - code_of_eta.keys()
    if unknown:
        raise EncodingError(f"no code for the resolution {min(unknown)}; known: {', '.join(map(str, ETAS))}")
    derived: dict[str, NDArray[Any]] = {
        "eta": np.array([code_of_eta[eta] for eta in etas], dtype=np.uint8),
        "length": np.diff(columns.offsets),
    }
    id_type = "<i4" if columns.tokens.dtype.itemsize == 4 else "<i8"
    return _encode(
        LogitEnvelope(
            VERSION,
            LOGIT_LAYOUT.kind,
            columns.n,
            header.producer_id,
            header.sequence,
            dict(header.dropped),
            columns.signature.tobytes(),
            _wire_pair_ids(columns),
            _wire_numbers(LOGIT_LAYOUT, columns, derived),
            _wire_labels(LOGIT_LAYOUT, columns),
            int(id_type[2]),
            columns.tokens.astype(id_type, copy=False).tobytes(),
            columns.top_ids.astype(id_type, copy=False).tobytes(),
            columns.top_logprobs.astype("<f4", copy=False).tobytes(),
        )
    )


def encode_telemetry(columns: TelemetryColumns, header: BatchHeader) -> bytes:
    """One record of these events."""
    return _encode(
        TelemetryEnvelope(
            VERSION,
            "telemetry",
            columns.n,
            header.producer_id,
            header.sequence,
            dict(header.dropped),
            b"[" + b",".join(columns.events) + b"]",
        )
    )
