"""The events that producers send, as frozen types. Names and meaning: the JSON contract in docs/events.md.

Every constraint that makes an event invalid stands here, once: the JSON decoder enforces it, the JSON
Schemas are generated from it, the columnar encoder refuses what violates it. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

ARMS: Final = ("baseline", "canary", "control")
"""Arms by their code on the wire: 0, 1, 2."""

MAX_TOP: Final = 20
MAX_POSITIONS: Final = 65_535
"""Positions of one answer: lengths are u2 in the columnar encoding."""

Arm = Literal["baseline", "canary", "control"]
Definition = Literal["raw", "temperature", "processed"]
Source = Literal["generated", "forced"]
Kind = Literal["logprobs", "logits"]

Text = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
TimeUs = Annotated[int, Meta(ge=0, le=4_102_444_800_000_000)]
"""Microseconds since the epoch, up to the year 2100."""
DurationUs = Annotated[int, Meta(ge=0, le=86_400_000_000)]
"""Microseconds, up to a day."""
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Generation = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Version = Annotated[int, Meta(ge=1, le=1)]
"""Version of the event's shape; another one is refused, never guessed at."""
HexBytes = Annotated[str, Meta(pattern="^([0-9a-f]{2})+$(?!\\n)", max_length=512)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Labels(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Labels, the same in request and logit events."""

    rollout: Name
    generation: Generation | None = None
    arm: Arm
    pair_id: Text | None = None
    signature: Hex32
    ts_us: TimeUs
    duration_us: DurationUs
    node: Name
    input_tokens: Tokens
    model_name: Text | None = None
    model_version: Name
    prompt_version: Text | None = None
    data_version: Text | None = None
    system_version: Text | None = None
    request_type: Text | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Tokens | None = None
    engine: Text | None = None
    hardware: Text | None = None
    region: Text | None = None
    tenant: Text | None = None
    cached_tokens: Tokens | None = None
    key_ids: Text | None = None
    """Of the keys that hide what is said: the signature's and session's; a comma; the tokens', if hidden."""


class Step(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a call chain (B5)."""

    name: Name
    duration_us: DurationUs
    attempts: Annotated[int, Meta(ge=1, le=1000)] = 1
    outcome: Text | None = None


class EncryptedText(Struct, frozen=True, kw_only=True):
    """AES-256-GCM text (C1): base64 nonce and ciphertext with tag, and the id of the key."""

    key_id: Name
    nonce: Text
    data: Annotated[str, Meta(max_length=262_144)]


class RequestEvent(Labels, frozen=True, kw_only=True, omit_defaults=True):
    """One per request and arm, on `klaxon.requests`, key = signature."""

    v: Version
    shadow: bool
    status: Annotated[int, Meta(ge=0, le=999)]
    error: Text | None = None
    ttft_us: DurationUs | None = None
    output_tokens: Tokens
    itl_us: DurationUs | None = None
    finish_reason: Text | None = None
    stream: bool | None = None
    session: Text | None = None
    prompt_id: Text | None = None
    response_quality_score: float | None = None
    similarity: float | None = None
    scores: Annotated[dict[Name, float], Meta(max_length=64)] | None = None
    steps: Annotated[tuple[Step, ...], Meta(max_length=64)] | None = None
    embedding: Annotated[tuple[float, ...], Meta(max_length=4096)] | None = None
    consent_id: Text | None = None
    text: EncryptedText | None = None
    parse_depth: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    snapshot_id: Text | None = None


class LogitEvent(Labels, frozen=True, kw_only=True, omit_defaults=True):
    """One per answer of a mirrored request, on `klaxon.logits`, key = signature.

    T = number of emitted tokens. `top_ids` and `top_logprobs` hold T lists of at most 20 entries, in any
    order. An engine without ids sends `token_bytes` and `top_bytes` (hex) in place of `tokens`, `top_ids`.
    Log-probabilities are not constrained here: an impossible one spoils its position, not the event.
    """

    v: Version
    expected_arms: Annotated[tuple[Arm, ...], Meta(min_length=1, max_length=3)]
    definition: Definition
    source: Source
    kind: Kind = "logprobs"
    precision: Annotated[int, Meta(ge=1, le=17)] | Literal["f16", "f32", "f64"] = 4
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_POSITIONS)] | None = None
    top_ids: tuple[Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOP)], ...] | None = None
    token_bytes: Annotated[tuple[HexBytes, ...], Meta(max_length=MAX_POSITIONS)] | None = None
    top_bytes: tuple[Annotated[tuple[HexBytes, ...], Meta(max_length=MAX_TOP)], ...] | None = None
    top_logprobs: tuple[Annotated[tuple[float | None, ...], Meta(max_length=MAX_TOP)], ...]
    ended: bool | None = None


class Gpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU of a node; what the driver did not say is absent."""

    index: Annotated[int, Meta(ge=0, le=1023)]
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    sm_utilisation: Share | None = None
    nvlink_rx_bytes_s: Count | None = None
    nvlink_tx_bytes_s: Count | None = None
    power_w: Annotated[float, Meta(ge=0)] | None = None
    ecc_errors: Count | None = None
    xid: Annotated[int, Meta(ge=0, le=65_535)] | None = None


class EngineGauges(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the inference engine says of its KV cache and queue."""

    name: Text | None = None
    kv_usage: Share | None = None
    kv_blocks_used: Count | None = None
    kv_blocks_total: Count | None = None
    kv_block_tokens: Count | None = None
    kv_tokens_held: Count | None = None
    kv_largest_free_run: Count | None = None
    running: Count | None = None
    waiting: Count | None = None
    preemptions: Count | None = None
    stalled: bool | None = None
    oom_errors: Count | None = None


class Fragmentation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """KV-block fragmentation (G4); values of different methods are never compared."""

    internal: Share | None = None
    external: Share | None = None
    method: Literal["exact", "estimate", "n/a"]


class Fingerprint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What really runs on the node (V4)."""

    weights: Text | None = None
    tokenizer: Text | None = None
    libraries: Annotated[dict[Name, Text], Meta(max_length=256)] | None = None
    driver: Text | None = None


class NodeEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node's gauges, on `klaxon.telemetry`, key = node."""

    v: Version
    node: Name
    ts_us: TimeUs
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=64)] = ()
    engine: EngineGauges | None = None
    fragmentation: Fragmentation | None = None
    fingerprint: Fingerprint | None = None


class FeedbackEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A quality signal, on `klaxon.feedback`, key = signature."""

    v: Version
    signature: Hex32
    pair_id: Text | None = None
    ts_us: TimeUs
    source: Literal["click", "ticket", "rating", "speech", "judge"]
    label: Text
    confidence: Share
    annotator: Text | None = None
    duration_us: DurationUs | None = None
