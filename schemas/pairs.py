"""Scored pairs as they travel on `klaxon.pairs`: columns, some flushes' in one record (msgpack array)."""

from __future__ import annotations

from msgspec import Struct


class PairBatch(Struct, array_like=True):
    """n scored pairs of one source partition. Lists have length n; text columns are dictionary encoded.

    A pair's key, equal however often it is scored: (source partition, signature, pair_id, arm, first_offset,
    first_position). Scores are integers in 2⁻³⁰ nats (cosine, agreement, shares: 2⁻³⁰).
    """

    v: int
    partition: int
    offset: int
    estimator: str
    """Name and version of the per-position estimator, e.g. "kl_lower/3"."""
    dictionary: list[str]
    rollout: list[int]
    arm: list[int]
    generation: list[int | None]
    model_version: list[int]
    baseline_version: list[int]
    differs: list[int]
    node: list[int]
    """The compared arm's node."""
    baseline_node: list[int]
    request_type: list[int | None]
    input_tokens: list[int]
    signature: list[bytes]
    pair_id: list[bytes | None]
    event_us: list[int]
    """Later of the two completions."""
    formed_us: list[int]
    """Log time at which the pair was scored."""
    first_offset: list[int]
    first_position: list[int]
    positions: list[int]
    agreed: list[int]
    """Length of the common prefix of emitted tokens."""
    first_difference: list[int | None]
    ended_together: list[bool | None]
    late: list[bool]
    kl_lower: list[int]
    kl_lower_max: list[int]
    kl_floor: list[int]
    js_lower: list[int]
    tv_lower: list[int]
    cosine: list[int]
    top1_agree: list[int]
    control_kl_lower: list[int | None]
    """Canary pairs whose control is scored too: the control's score (X3)."""
