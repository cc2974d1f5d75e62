"""Every reader of foreign bytes, and what must hold of whatever it makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from pipeline.core.gate.gating import GateCore
from pipeline.core.gate.soundness import unsound
from pipeline.core.gate.state import StateError, decode_state
from pipeline.core.measuring import MeasureSource
from pipeline.core.pairing import PairSource
from pipeline.core.source import ContentSettings, RecordMeta
from pipeline.policy_file import parse_policy
from pipeline.store.derived_rows import bucket_rows, decision_rows, pair_rows
from schemas import codec
from schemas.buckets import Cell, FinalBuckets, FreshCells, PopulationCells, Second
from schemas.columns import (
    ABSENT,
    GAUGES,
    LABELS,
    NO_LABEL,
    NOT_LISTED,
    BatchHeader,
    Decoded,
    LogitColumns,
    Rejected,
    RequestColumns,
    TelemetryColumns,
)
from schemas.commands import COMMANDS
from schemas.control import Command, Directive, Rollout
from schemas.examples import invalid_examples, valid_examples
from schemas.json_codec import FEEDBACK
from schemas.records import read_json, read_msgpack
from schemas.topics import COLUMNS, JSON, Topic, gating_partition
from schemas.validity import has_valid_position
from tests.core.gate import build as gates
from tests.store.records import START_US, final, packed, pair_batch, refused_decision

REQUIRED: Final = ("rollout", "node", "model_version")
LATEST_US: Final = 4_102_444_800_000_000
DAY_US: Final = 86_400_000_000


@dataclass(frozen=True)
class Reader:
    """One way in. `read` returns (accepted, rejected) events; raises AssertionError for a broken promise."""

    read: Callable[[bytes], tuple[int, int]]
    examples: tuple[bytes, ...]


def _decoding(topic: Topic, content_type: str) -> Callable[[bytes], tuple[int, int]]:
    decode: Callable[..., Decoded[Any]] = {
        Topic.REQUESTS: codec.decode_requests,
        Topic.LOGITS: codec.decode_logits,
        Topic.TELEMETRY: codec.decode_telemetry,
    }[topic]

    def read(value: bytes) -> tuple[int, int]:
        decoded = decode(value, content_type)
        check(decoded)
        if decoded.columns.n:
            _counted(topic, decoded, len(value))
        return decoded.columns.n, len(decoded.rejected)

    return read


def _counted(topic: Topic, decoded: Decoded[Any], size_bytes: int) -> None:
    """What was accepted must not end the worker that counts it, and every event must be counted once."""
    settings = ContentSettings(cells_per_bucket=16)
    source: Any = (PairSource if topic is Topic.LOGITS else MeasureSource)(topic, 0, settings)
    source.read(RecordMeta(0, START_US, size_bytes), decoded)
    source.read(RecordMeta(1, START_US + 200_000_000, 0), None)
    flush = source.take_flush()
    if topic is Topic.LOGITS:
        return  # what becomes of halves is the oracle's to say
    counted = sum(
        cell.counters.get(name, 0)
        for each in flush.finals
        if topic is Topic.REQUESTS or each.gating_partition == 0
        for second in read_msgpack(each.value, FinalBuckets).seconds
        for held in second.contents
        for cell in held.cells
        for name in ("requests", "events", "late", "duplicate", "uncounted")
        if cell.dimension == "all"
        or (cell.dimension == "other" and held.population and not held.population.rollout)
    )
    if topic is Topic.REQUESTS:
        assert counted == decoded.columns.n, f"{decoded.columns.n} requests came, {counted} are counted"


def _counts(read: Callable[[bytes], tuple[Any, Any, list[Rejected]]]) -> Callable[[bytes], tuple[int, int]]:
    def counted(value: bytes) -> tuple[int, int]:
        events, positions, rejected = read(value)
        assert len(events) == len(positions)
        check_positions(positions.tolist(), rejected)
        return len(events), len(rejected)

    return counted


def _own(read: Callable[[bytes], object], *errors: type[Exception]) -> Callable[[bytes], tuple[int, int]]:
    """A reader that refuses by one of these errors, or by returning a `Rejected`."""

    def counted(value: bytes) -> tuple[int, int]:
        try:
            made = read(value)
        except errors:
            return 0, 1
        if isinstance(made, Rejected):
            check_rejected(made)
            return 0, 1
        return 1, 0

    return counted


def check(decoded: Decoded[Any]) -> None:
    """What every consumer of columns relies on."""
    columns = decoded.columns
    assert len(decoded.positions) == columns.n
    check_positions(decoded.positions.tolist(), list(decoded.rejected))
    if decoded.header is not None:
        _check_header(decoded.header)
    if isinstance(columns, TelemetryColumns):
        _check_telemetry(columns)
    else:
        _check_labels(columns)
        if isinstance(columns, LogitColumns):
            _check_logits(columns)
        else:
            _check_requests(columns)


def check_positions(accepted: list[int], rejected: list[Rejected]) -> None:
    """Every event of the record stands in exactly one of the two, or the record as a whole is refused."""
    for each in rejected:
        check_rejected(each)
    if any(each.position is None for each in rejected):
        assert (len(accepted), len(rejected)) == (0, 1)
        return
    refused = [each.position for each in rejected if each.position is not None]
    assert accepted == sorted(accepted)
    assert sorted([*accepted, *refused]) == list(range(len(accepted) + len(refused)))


def check_rejected(rejected: Rejected) -> None:
    """It can be sent, and takes no more than a line."""
    assert len(rejected.field) <= 512
    assert len(rejected.reason) <= 512
    msgspec.json.encode([rejected.field, rejected.reason])


def _check_header(header: BatchHeader) -> None:
    assert 0 < len(header.producer_id) <= 256
    assert 0 <= header.sequence < 2**63
    assert all(0 <= count < 2**63 for count in header.dropped.values())


def _within(column: Any, n: int, dtype: Any, low: float, high: float, *, optional: bool = False) -> None:
    assert column.shape == (n,)
    assert column.dtype == dtype
    assert bool(((column >= low) & (column <= high) | (optional & (column == ABSENT))).all()), column


def _check_labels(columns: RequestColumns | LogitColumns) -> None:
    n = columns.n
    assert columns.signature.shape == columns.pair_id.shape == (n, 16)
    assert columns.has_pair_id.dtype == columns.has_seed.dtype == np.bool_
    assert len(columns.has_pair_id) == len(columns.has_seed) == n
    _within(columns.arm, n, np.uint8, 0, 2)
    _within(columns.generation, n, np.int32, 0, 2**31 - 1, optional=True)
    _within(columns.ts_us, n, np.int64, 0, LATEST_US)
    _within(columns.duration_us, n, np.int64, 0, DAY_US)
    _within(columns.input_tokens, n, np.int32, 0, 2**31 - 1)
    _within(columns.cached_tokens, n, np.int32, 0, 2**31 - 1, optional=True)
    _within(columns.max_tokens, n, np.int32, 0, 2**31 - 1, optional=True)
    _within(columns.temperature, n, np.float64, 0, 100, optional=True)
    _within(columns.top_p, n, np.float64, 0, 1, optional=True)
    assert set(LABELS) <= set(columns.labels)
    for name, column in columns.labels.items():
        assert column.codes.shape == (n,)
        used = {int(code) for code in column.codes}
        assert name not in REQUIRED or NO_LABEL not in used, name
        for code in used - {NO_LABEL}:
            text = column.values[code]
            assert (1 if name in REQUIRED else 0) <= len(text) <= 256
            text.encode()


def _check_requests(columns: RequestColumns) -> None:
    n = columns.n
    assert columns.shadow.dtype == np.bool_
    assert columns.shadow.shape == (n,)
    _within(columns.status, n, np.uint16, 0, 999)
    _within(columns.ttft_us, n, np.int64, 0, DAY_US, optional=True)
    _within(columns.itl_us, n, np.int64, 0, DAY_US, optional=True)
    _within(columns.output_tokens, n, np.int32, 0, 2**31 - 1)
    _within(columns.stream, n, np.int8, 0, 1, optional=True)
    _within(columns.parse_depth, n, np.int32, 0, 1_000_000, optional=True)
    for row, text in columns.extras.items():
        assert 0 <= row < n
        said = json.loads(text, parse_constant=lambda name: _fail(f"{name} in the extras"))
        assert isinstance(said, dict)


def _fail(reason: str) -> None:
    raise AssertionError(reason)


def _check_logits(columns: LogitColumns) -> None:
    n = columns.n
    _within(columns.expected_arms, n, np.uint8, 1, 7)
    _within(columns.definition, n, np.uint8, 0, 2)
    _within(columns.source, n, np.uint8, 0, 1)
    _within(columns.kind, n, np.uint8, 0, 1)
    _within(columns.identity, n, np.uint8, 0, 1)
    _within(columns.ended, n, np.int8, 0, 1, optional=True)
    _within(columns.k, n, np.uint8, 1, 20)
    assert set(columns.eta.tolist()) <= {1e-6, 5e-5, 5e-4}
    for offsets in (columns.offsets, columns.entry_offsets):
        assert offsets.shape == (n + 1,)
        assert offsets[0] == 0
        assert bool((np.diff(offsets) >= 0).all())
    assert columns.offsets[-1] == len(columns.tokens)
    assert columns.entry_offsets[-1] == len(columns.top_ids) == len(columns.top_logprobs)
    assert bool((np.diff(columns.entry_offsets) == np.diff(columns.offsets) * columns.k).all())
    assert bool((columns.tokens >= 0).all())
    assert bool((columns.top_ids >= NOT_LISTED).all())
    assert columns.top_logprobs.dtype == np.float32
    assert not bool(np.isnan(columns.top_logprobs).any())
    assert not bool((columns.top_logprobs == np.inf).any())
    assert bool(((columns.top_ids == NOT_LISTED) == (columns.top_logprobs == -np.inf)).all())
    assert bool(has_valid_position(columns).all())


def _check_telemetry(columns: TelemetryColumns) -> None:
    n = columns.n
    assert len(columns.events) == n
    assert columns.node.codes.shape == (n,)
    assert all(columns.node.get(at) for at in range(n))
    _within(columns.ts_us, n, np.int64, 0, LATEST_US)
    assert set(columns.gauges) == set(GAUGES)
    for values in columns.gauges.values():
        _within(values, n, np.float64, 0, 1e30, optional=True)
    for event in columns.events:
        json.loads(event)


def _json_examples(topic: Topic) -> tuple[bytes, ...]:
    found = [example.value for example in valid_examples(topic)]
    return (
        *found,
        *(
            each.value
            for each in invalid_examples(topic)
            if each.content_type == JSON and len(each.value) < 20_000
        ),
    )


def _columnar_examples(topic: Topic) -> tuple[bytes, ...]:
    encode: Callable[..., bytes] = {
        Topic.REQUESTS: codec.encode_requests,
        Topic.LOGITS: codec.encode_logits,
        Topic.TELEMETRY: codec.encode_telemetry,
    }[topic]
    decode: Callable[..., Decoded[Any]] = {
        Topic.REQUESTS: codec.decode_requests,
        Topic.LOGITS: codec.decode_logits,
        Topic.TELEMETRY: codec.decode_telemetry,
    }[topic]
    found = []
    alone = [each.value for each in valid_examples(topic) if decode(each.value, JSON).columns.n]
    together = b"[" + b",".join(value.strip().removeprefix(b"[").removesuffix(b"]") for value in alone) + b"]"
    for number, value in enumerate((*alone, together, together, together)):
        columns = decode(value, JSON).columns
        found.append(encode(columns, BatchHeader("gateway-1", number, {"chat/canary": number})))
    return (*found, *(each.value for each in invalid_examples(topic) if each.content_type == COLUMNS))


def _directive() -> Directive:
    return Directive(
        rollout="chat", generation=1, epoch=3, ts_us=START_US, lease_until_us=START_US, dead_man_us=60,
        state="observing", weights={"v1": 99.0, "v2": 1.0}, last_promoted={"v1": 100.0}, fallback="v1",
    )  # fmt: skip


def _fresh() -> bytes:
    whole = final()
    return packed(FreshCells(1, whole.topic, 2, 1, 77, 0, "abc", whole.seconds))


def _rollout() -> bytes:
    command = json.loads(next(e.value for e in valid_examples(Topic.COMMANDS) if b'"spec"' in e.value))
    spec = command["arguments"]["spec"]
    said = {
        "v": 1,
        "rollout": spec["rollout"],
        "spec": spec,
        "policy": "x",
        "policy_hash": "y",
        "command_offset": 3,
    }
    return json.dumps(said).encode()


def _states() -> tuple[bytes, ...]:
    memory = {
        "type": "rollout", "v": 1, "rollout": "chat", "generation": 1, "epoch": 3, "decided_epoch": 3,
        "state": "observing", "step": 0, "step_start": 5, "start_us": START_US, "evidence_from": 5,
        "folded": 9, "weights": {"v1": 100.0}, "last_promoted": {"v1": 100.0},
    }  # fmt: skip
    partition = {"type": "partition", "partition": 1, "command_offset": 4, "command_ids": ["a", "b"]}
    rule = {
        "type": "rule", "v": 1, "rollout": "chat", "rule": "G3-anytime", "generation": 1, "policy_hash": "ab",
        "evidence_from": 5, "folded": 9, "samples": 3, "scopes": [["all", ""]], "stakes": "AAAA" * 16,
        "buckets": [2], "scope_samples": [3], "pass_logs": "AAAAAAAAAAAAAAAAAAAAAA==", "pass_pairs": 3,
        "pass_from": 5,
    }  # fmt: skip
    return json.dumps(memory).encode(), json.dumps(partition).encode(), json.dumps(rule).encode()


_parsed: Final = lru_cache(parse_policy)


def _gating(kind: type[FinalBuckets] | type[FreshCells]) -> Callable[[bytes], tuple[int, int]]:
    """A gate with a running roll-out that is told this, and judges; other sources have closed the second."""

    def read(value: bytes) -> tuple[int, int]:
        now_us = (gates.T0 + 30) * 1_000_000
        try:
            told = read_msgpack(value, kind)
        except msgspec.DecodeError:
            return 0, 1
        if unsound(told, now_us):
            return 0, 1
        core = GateCore(gating_partition(gates.NAME), gates.SOURCES, gates.settings(parse_policy=_parsed))
        start = {"spec": gates.SPEC}
        core.on_command(
            Command(
                v=1, command_id="c", rollout=gates.NAME, ts_us=1, command="start", arguments=start, by="t"
            ),
            0,
            gates.T0 * 1_000_000,
        )
        for topic in (Topic.REQUESTS, Topic.TELEMETRY):
            core.on_final(read_msgpack(_closing(topic), FinalBuckets))
        if isinstance(told, FinalBuckets):
            core.on_final(told)
        else:
            core.on_fresh(told)
        core.judge_fresh(now_us)
        core.judge_complete(now_us)
        core.gauges()
        return 1, 0

    return read


def _closing(topic: Topic) -> bytes:
    """A second with five requests, or five pairs, of the canary."""
    pairs = topic is Topic.LOGITS
    name, values = ("kl_lower", [gates.nats(0.01)] * 5) if pairs else ("ttft_us", [1000] * 5)
    measures = {name: gates.distribution(name, values)}
    counters = {"pairs": 5} if pairs else {"requests": 5}
    cells = [Cell(dimension, at, counters, measures, []) for dimension, at in (("all", ""), ("node", "c-1"))]
    population = gates.canary(differs=1 if pairs else 0)
    held = [] if topic is Topic.TELEMETRY else [PopulationCells(population, cells)]
    at, mine = gates.T0 + 5, gating_partition(gates.NAME)
    seconds = [Second(at, held)]
    return packed(FinalBuckets(1, topic, 0, mine, at, at, 0, 77, gates.HASH, 0, 1, seconds))


def _opening() -> bytes:
    """The same pairs while their second is open."""
    whole = read_msgpack(_closing(Topic.LOGITS), FinalBuckets)
    return packed(FreshCells(1, whole.topic, 0, whole.gating_partition, 77, 0, gates.HASH, whole.seconds))


def readers() -> Mapping[str, Reader]:
    """All of them by name; each with records to begin from."""
    found = {}
    for topic in (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY):
        found[f"{topic.value} json"] = Reader(_decoding(topic, JSON), _json_examples(topic))
        found[f"{topic.value} columns"] = Reader(_decoding(topic, COLUMNS), _columnar_examples(topic))
    decode_errors = (msgspec.DecodeError,)
    decision = msgspec.json.encode(refused_decision())
    own: dict[str, tuple[Callable[[bytes], object], tuple[bytes, ...], tuple[type[Exception], ...]]] = {
        "klaxon.buckets": (lambda v: bucket_rows(v, 1, START_US), (packed(final()),), decode_errors),
        "klaxon.partials": (lambda v: read_msgpack(v, FreshCells), (_fresh(),), decode_errors),
        "klaxon.pairs": (lambda v: pair_rows(v, 1, START_US), (packed(pair_batch()),), decode_errors),
        "klaxon.decisions": (lambda v: decision_rows(v, b"chat", 1, START_US), (decision,), decode_errors),
        "klaxon.control": (
            lambda v: read_json(v, Directive), (msgspec.json.encode(_directive()),), decode_errors,
        ),
        "klaxon.rollouts": (lambda v: read_json(v, Rollout), (_rollout(),), decode_errors),
        "klaxon.state": (decode_state, _states(), (StateError, msgspec.DecodeError)),
    }  # fmt: skip
    for name, (read, examples, errors) in own.items():
        found[name] = Reader(_own(read, *errors), examples)
    found["gate finals"] = Reader(_gating(FinalBuckets), (_closing(Topic.LOGITS), _closing(Topic.REQUESTS)))
    found["gate fresh"] = Reader(_gating(FreshCells), (_opening(),))
    found["klaxon.feedback json"] = Reader(_counts(FEEDBACK.read), _json_examples(Topic.FEEDBACK))
    found["klaxon.commands json"] = Reader(_counts(COMMANDS.read), _json_examples(Topic.COMMANDS))
    return found
