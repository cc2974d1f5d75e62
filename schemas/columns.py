"""The columns both encodings decode into. Nothing behind the codec knows which encoding it was.

Shapes: n events of one record, T positions in all, k entries per position. Absence of a number is `ABSENT`
(−1, outside every column's range), of a label code `NO_LABEL`, of a list entry id `NOT_LISTED`.
NaN never travels: a log-probability that is none decodes to −inf ("zero or unknown"), and a position that
breaks the rules of reading is kept in place with no entry listed, so that positions stay aligned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

U1: TypeAlias = NDArray[np.uint8]
U2: TypeAlias = NDArray[np.uint16]
I4: TypeAlias = NDArray[np.int32]
I8: TypeAlias = NDArray[np.int64]
F4: TypeAlias = NDArray[np.float32]
F8: TypeAlias = NDArray[np.float64]
Bool: TypeAlias = NDArray[np.bool_]

ABSENT: Final = -1
NO_LABEL: Final = 0xFFFF
NOT_LISTED: Final = -1
MOST_SAID_CHARS: Final = 512
"""Longest field path or reason of a rejection."""
MISSING: Final = "required field is missing"
RejectKind: TypeAlias = Literal["missing_field", "value", "unreadable", "misplaced", "unsound", "untrusted"]
_QUOTING: Final = re.compile(
    r"(Invalid enum value|Invalid value|Object contains unknown field) .*", re.DOTALL
)
"""What msgspec says of a value, followed by the value."""

BASELINE: Final = 0
CANARY: Final = 1
CONTROL: Final = 2

LABELS: Final = (
    "rollout",
    "node",
    "model_name",
    "model_version",
    "prompt_version",
    "data_version",
    "system_version",
    "request_type",
    "engine",
    "hardware",
    "region",
    "tenant",
)
"""Label columns of requests and logits, in wire order."""

KEY_IDS: Final = "key_ids"
"""The label column that comes after all others: where no event states it, the batch ends before it."""

LOGIT_LABELS: Final = (*LABELS, KEY_IDS)

REQUEST_LABELS: Final = (
    *LABELS,
    "error",
    "finish_reason",
    "session",
    "prompt_id",
    "consent_id",
    "snapshot_id",
    KEY_IDS,
)

DEFINITIONS: Final = ("raw", "temperature", "processed")
SOURCES: Final = ("generated", "forced")
KINDS: Final = ("logprobs", "logits")
IDENTITIES: Final = ("ids", "bytes")

GAUGES: Final = (
    "memory_used_bytes",
    "memory_total_bytes",
    "kv_usage",
    "kv_blocks_used",
    "kv_blocks_total",
    "kv_tokens_held",
    "running",
    "waiting",
    "preemptions",
    "oom_errors",
    "internal",
    "external",
)

NOT_LISTED_LOGPROB: Final = -9999.0
"""This and anything below means "zero or unknown": the token is treated as not listed."""

ETA_BY_PRECISION: Final = ((6, 1e-6), (4, 5e-5), (0, 5e-4))
"""η, the resolution of the wire (decisions §2), by the least number of decimals."""


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """Dictionary-encoded text: `values[codes[i]]`, or absent where `codes[i] == NO_LABEL`."""

    values: tuple[str, ...]
    codes: U2

    def get(self, index: int) -> str | None:
        """The label of one event, or None."""
        code = int(self.codes[index])
        return None if code == NO_LABEL else self.values[code]


@dataclass(frozen=True, slots=True)
class LabelsColumns:
    """The labels requests and logits share. All arrays have length n."""

    n: int
    signature: U1
    """(n, 16) bytes."""
    pair_id: U1
    """(n, 16): 32 lower-case hex digits as they are, any other string as the first 16 bytes of its SHA-256;
    0 if absent."""
    has_pair_id: Bool
    arm: U1
    """0 baseline, 1 canary, 2 control."""
    generation: I4
    ts_us: I8
    duration_us: I8
    input_tokens: I4
    cached_tokens: I4
    temperature: F8
    top_p: F8
    max_tokens: I4
    seed: I8
    """Valid where `has_seed`."""
    has_seed: Bool
    labels: Mapping[str, LabelColumn]
    """Every name of LOGIT_LABELS (requests: of REQUEST_LABELS)."""


@dataclass(frozen=True, slots=True)
class RequestColumns(LabelsColumns):
    """n request events."""

    shadow: Bool
    status: U2
    ttft_us: I8
    itl_us: I8
    output_tokens: I4
    stream: NDArray[np.int8]
    """1 true, 0 false, −1 absent."""
    parse_depth: I4
    extras: Mapping[int, bytes]
    """Event index → JSON object of its remaining fields (response_quality_score, similarity, scores, steps,
    embedding, text), only where there are any."""


@dataclass(frozen=True, slots=True)
class LogitColumns(LabelsColumns):
    """n logit events with T positions in all; event i owns positions `offsets[i]:offsets[i+1]`.

    The top lists are flat and row-major: position t of event i owns the `k[i]` entries that start at
    `entry_offsets[i] + (t − offsets[i]) · k[i]`. Entries beyond a shorter list, and all entries of a position
    whose two lists differ in length or that lists nothing, are (NOT_LISTED, −inf).
    """

    expected_arms: U1
    """Bit mask: 1 baseline, 2 canary, 4 control."""
    definition: U1
    source: U1
    kind: U1
    eta: F8
    """Resolution of the log-probabilities (decisions §2), from `precision`."""
    identity: U1
    """0: token ids; 1: 62-bit hashes of token bytes. Halves of different identity are not comparable."""
    ended: NDArray[np.int8]
    offsets: I8
    """(n + 1,)"""
    k: U1
    entry_offsets: I8
    """(n + 1,)"""
    tokens: I4 | I8
    """(T,) emitted tokens."""
    top_ids: I4 | I8
    """(Σ lengths·k,)"""
    top_logprobs: F4 | F8
    """(Σ lengths·k,) as sent, read as float32 in both encodings; finite, or −inf where not listed. Values
    above 0, sums above 1 and duplicates stay: `schemas.validity.valid_positions` finds such positions."""


@dataclass(frozen=True, slots=True)
class TelemetryColumns:
    """n node events. Telemetry is small: what is not judged stays an event object (JSON) per row."""

    n: int
    node: LabelColumn
    ts_us: I8
    gauges: Mapping[str, F8]
    """Every name of GAUGES → (n,) value or ABSENT. `memory_*_bytes` are sums over the GPUs that say it; of
    `internal` and `external` only values measured or estimated, none of method "n/a"."""
    events: tuple[bytes, ...]
    """(n,) each event as canonical JSON, for the archive."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """One event (or, with `position` None, one whole record) that cannot be read.

    Neither `field` nor `reason` holds a value that was sent: it may be personal, and both go to logs and the
    dead-letter topic. They are cut, so that saying why never takes more than a line.
    """

    position: int | None
    field: str
    reason: str
    kind: RejectKind | None = None
    """None: what position and reason tell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", _QUOTING.sub(r"\1", self.reason))
        if self.kind is None:
            kind = "missing_field" if self.reason == MISSING else "value"
            object.__setattr__(self, "kind", "unreadable" if self.position is None else kind)
        for name in ("field", "reason"):
            text = getattr(self, name)
            if len(text) > MOST_SAID_CHARS:
                object.__setattr__(self, name, f"{text[: MOST_SAID_CHARS - 1]}…")


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What a batching producer says of itself.

    Batches of one producer and partition are numbered 0, 1, 2, …; a re-sent batch keeps its number. Every
    dropped event is reported in exactly one acknowledged batch of its topic, whatever the partition.
    """

    producer_id: str
    sequence: int
    dropped: Mapping[str, int]
    """"rollout/arm" → events dropped since the last acknowledged batch."""


C = TypeVar("C", RequestColumns, LogitColumns, TelemetryColumns, covariant=True)


@dataclass(frozen=True, slots=True)
class Decoded(Generic[C]):
    """One record, read. Whatever is not in `columns` stands in `rejected`; nothing is silently away."""

    columns: C
    positions: I8
    """(n,) index of each row inside the record, ascending."""
    rejected: tuple[Rejected, ...]
    """Ascending by position. A record that cannot be read at all: n = 0 and one entry without position."""
    header: BatchHeader | None
    """Columnar records only."""
    unknown_version: int | None = None
    """An envelope of a version that is not read here; it stands in `rejected`, too. Not the sender's fault:
    a worker stops at it instead of losing its events."""
