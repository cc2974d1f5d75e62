"""Rows against the JSON of the same events: what an analyst reads is what a producer wrote."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store.archive import TABLES, Archive, read_record
from pipeline.store.blocks import BlockLimits
from pipeline.store.client import Store
from pipeline.store.columns import listed
from schemas.codec import (
    BatchHeader,
    encode_logits,
    encode_requests,
    encode_telemetry,
    logit_columns,
    request_columns,
    telemetry_columns,
)
from schemas.events import (
    EngineGauges,
    Fingerprint,
    Fragmentation,
    Gpu,
    LogitEvent,
    NodeEvent,
    RequestEvent,
)
from schemas.examples import invalid_examples, valid_examples
from schemas.records import UnknownVersionError
from schemas.topics import COLUMNS, JSON, Topic
from tests.schemas.events import logit_events, node_events, request_events
from tests.store.records import (
    START_US,
    LogRecord,
    final,
    packed,
    pair_batch,
    refused_decision,
    request,
)

HEADER = BatchHeader("p", 0, {})
NOT_COLUMNS = {
    "v",
    "text",
    "key_ids",
    "tokens",
    "top_ids",
    "top_logprobs",
    "token_bytes",
    "top_bytes",
    "precision",
}
TIMES = {
    "append_us",
    "ts_us",
    "event_us",
    "formed_us",
    "second",
    "closed_from",
    "closed_through",
    "whole_from",
    "lease_until_us",
    "now_us",
    "complete_through",
}
_offsets = iter(range(0, 10**9, 2))

LABEL_DEFAULTS = dict.fromkeys(
    [
        "generation",
        "pair_id",
        "model_name",
        "prompt_version",
        "data_version",
        "system_version",
        "request_type",
        "temperature",
        "top_p",
        "seed",
        "max_tokens",
        "engine",
        "hardware",
        "region",
        "tenant",
        "cached_tokens",
    ]
)
REQUEST_DEFAULTS: dict[str, Any] = {
    **LABEL_DEFAULTS,
    **dict.fromkeys(
        [
            "error",
            "ttft_us",
            "itl_us",
            "finish_reason",
            "stream",
            "session",
            "prompt_id",
            "consent_id",
            "response_quality_score",
            "similarity",
            "parse_depth",
            "snapshot_id",
            "text_key_id",
        ]
    ),
    "scores": {},
    "steps": [],
    "embedding": [],
}


def put(store: Store, topic: Topic, records: list[LogRecord]) -> None:
    """Through the archive itself, into partition 1."""
    archive = Archive(store, BlockLimits(), "boot")
    part = archive.open_partition(topic, 1)
    for record in records:
        assert part.add(record, 0) == ()
    block = part.take(0, force=True)
    assert block is not None
    assert archive.store_block(block, threading.Event())
    part.stored(block)


def rows(store: Store, table: str, offset: int) -> list[dict[str, Any]]:
    """Stored rows of one record, times as µs."""
    columns = [name for name, *_ in store.rows(f"DESCRIBE {table}")]
    times = ", ".join(f"toUnixTimestamp64Micro({n}) AS {n}" for n in columns if n in TIMES)
    text = store.text(
        f"SELECT * REPLACE ({times}) FROM {table} WHERE off = {offset} ORDER BY pos", "JSONEachRow"
    )
    return [json.loads(line) for line in text.splitlines()]


def pair_id_of(text: str) -> str:
    return text if re.fullmatch("[0-9a-f]{32}", text) else hashlib.sha256(text.encode()).digest()[:16].hex()


def plain(event: RequestEvent | LogitEvent) -> dict[str, Any]:
    """The event's JSON fields that have columns, absent ones spelt out."""
    found = {k: v for k, v in json.loads(msgspec.json.encode(event)).items() if k not in NOT_COLUMNS}
    if "pair_id" in found:
        found["pair_id"] = pair_id_of(found["pair_id"])
    return found


def check(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: like(expected[name], row[name]) for name in expected} == expected


def like(expected: Any, found: Any) -> Any:
    """`found`, integers read as floats where floats are expected: ClickHouse prints 1e16 with zeros."""
    if isinstance(expected, float) and isinstance(found, int):
        return float(found)
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return {name: like(expected[name], found[name]) for name in found}
    return found


@pytest.fixture
def many(store: Store) -> Store:
    return store


relaxed = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@relaxed
@given(
    events=st.lists(request_events, min_size=1, max_size=5), append_us=st.integers(-5, 4_200_000_000_000_000)
)
def test_requests_round_trip_in_both_encodings(
    many: Store, events: list[RequestEvent], append_us: int
) -> None:
    first = next(_offsets)
    values = [
        (msgspec.json.encode(events), JSON),
        (encode_requests(request_columns(events), HEADER), COLUMNS),
    ]
    records = [LogRecord(first + i, append_us, value, kind) for i, (value, kind) in enumerate(values)]
    put(many, Topic.REQUESTS, records)
    held_us = min(max(append_us, 0), 4_102_444_800_000_000)
    for record in records:
        found = rows(many, "inference_log", record.offset)
        assert [row["pos"] for row in found] == list(range(len(events)))
        for row, event in zip(found, events, strict=True):
            check(row, {**REQUEST_DEFAULTS, **plain(event)})
            assert row["append_us"] == held_us
            assert row["event_us"] == min(event.ts_us + event.duration_us, held_us + 5_000_000)
            assert (row["topic"], row["part"]) == ("klaxon.requests", 1)


@relaxed
@given(events=st.lists(logit_events(), min_size=1, max_size=4))
def test_logit_summaries_round_trip_in_both_encodings(many: Store, events: list[LogitEvent]) -> None:
    first = next(_offsets)
    whole = read_record(Topic.LOGITS, LogRecord(0, START_US, msgspec.json.encode(events)))[0]
    readable = [events[position] for position in listed(whole.columns["pos"])]
    if not readable:
        return
    values = [
        (msgspec.json.encode(readable), JSON),
        (encode_logits(logit_columns(readable), HEADER), COLUMNS),
    ]
    records = [LogRecord(first + i, START_US, value, kind) for i, (value, kind) in enumerate(values)]
    put(many, Topic.LOGITS, records)
    pairs = [rows(many, "logit_summaries", record.offset) for record in records]
    for row, other, event in zip(*pairs, readable, strict=True):
        expected = {**LABEL_DEFAULTS, "ended": None, "kind": "logprobs", **plain(event)}
        arms = expected.pop("expected_arms")
        check(row, expected)
        assert set(row["expected_arms"]) == set(arms)
        assert row["positions"] == len(event.top_logprobs)
        assert row["identity"] == ("bytes" if event.tokens is None else "ids")
        assert {**row, "off": 0} == {**other, "off": 0}, "both encodings give the same row"


def test_emitted_logprobs_count_listed_tokens_of_readable_positions(store: Store) -> None:
    labels = {k: v for k, v in request().items() if k not in ("shadow", "status", "output_tokens")}
    event = {
        **labels,
        "expected_arms": ["baseline", "canary"],
        "definition": "raw",
        "source": "generated",
        "tokens": [7, 8, 9, 10],
        "top_ids": [[7, 1], [2, 3], [9], [10, 10]],
        "top_logprobs": [[-0.5, -1.0], [-0.1, -3.0], [-0.25], [-1.0, -2.0]],
    }
    logits = {**event, "kind": "logits"}
    put(store, Topic.LOGITS, [LogRecord(0, START_US, json.dumps([event, logits]).encode())])
    first, second = rows(store, "logit_summaries", 0)
    # 7 and 9 are listed; 8 is not; the last position lists an id twice and cannot be read.
    check(first, {"positions": 4, "emitted_listed": 2, "emitted_logprob_sum": -0.75, "k": 2})
    assert second["emitted_logprob_sum"] is None, "logits without a normaliser have no log-probability"


def test_the_remaining_request_fields_have_columns_but_an_encrypted_text_does_not(store: Store) -> None:
    extras = {
        "response_quality_score": 0.25,
        "similarity": -1e300,
        "scores": {"safety": 1.5, "ü": 0},
        "steps": [
            {"name": "tool", "duration_us": 5},
            {"name": "x", "duration_us": 0, "attempts": 3, "outcome": "ok"},
        ],
        "embedding": [0.1, -2e-308],
        "text": {"key_id": "k-7", "nonce": "AAAA", "data": "U0VDUkVU"},
    }
    put(store, Topic.REQUESTS, [LogRecord(0, START_US, json.dumps(request(**extras)).encode())])
    (row,) = rows(store, "inference_log", 0)
    check(
        row, {name: extras[name] for name in ("response_quality_score", "similarity", "scores", "embedding")}
    )
    assert row["steps"] == [
        {"name": "tool", "duration_us": 5, "attempts": 1, "outcome": None},
        {"name": "x", "duration_us": 0, "attempts": 3, "outcome": "ok"},
    ]
    assert row["text_key_id"] == "k-7"
    assert "U0VDUkVU" not in json.dumps(row)


def test_every_field_of_a_request_event_has_a_column(store: Store) -> None:
    columns = {name for name, *_ in store.rows("DESCRIBE inference_log")}
    assert set(RequestEvent.__struct_fields__) - columns == {"v", "text", "key_ids"}
    assert set(LogitEvent.__struct_fields__) - {n for n, *_ in store.rows("DESCRIBE logit_summaries")} == (
        NOT_COLUMNS - {"text"}
    )
    telemetry = {name for name, *_ in store.rows("DESCRIBE node_telemetry")}
    nested = [f for kind in (EngineGauges, Fragmentation, Fingerprint) for f in kind.__struct_fields__]
    assert {name for name in nested if name != "name"} < telemetry


@relaxed
@given(events=st.lists(node_events, min_size=1, max_size=3))
def test_telemetry_round_trips_in_both_encodings(many: Store, events: list[NodeEvent]) -> None:
    full = NodeEvent(
        v=1,
        node="n",
        ts_us=START_US,
        gpus=(
            Gpu(index=0, memory_used_bytes=5, ecc_errors=0),
            Gpu(index=1, memory_used_bytes=2**63 - 1, power_w=0.5),
        ),
        engine=EngineGauges(name="vllm", kv_usage=0.25, kv_blocks_total=10, stalled=False),
        fragmentation=Fragmentation(internal=0.125, method="exact"),
        fingerprint=Fingerprint(weights="w", libraries={"torch": "2"}),
    )
    first = next(_offsets)
    sent = [*events, full]
    values = [
        (msgspec.json.encode(sent), JSON),
        (encode_telemetry(telemetry_columns(sent), HEADER), COLUMNS),
    ]
    records = [LogRecord(first + i, START_US, value, kind) for i, (value, kind) in enumerate(values)]
    put(many, Topic.TELEMETRY, records)
    for record in records:
        *found, last = rows(many, "node_telemetry", record.offset)
        assert [(row["node"], row["ts_us"]) for row in found] == [(e.node, e.ts_us) for e in events]
        check(
            last,
            {
                "memory_used_bytes": 5 + 2**63 - 1,
                "memory_total_bytes": None,
                "engine": "vllm",
                "kv_usage": 0.25,
                "kv_blocks_used": None,
                "kv_blocks_total": 10,
                "stalled": False,
                "internal": 0.125,
                "external": None,
                "method": "exact",
                "weights": "w",
                "libraries": {"torch": "2"},
                "driver": None,
            },
        )
        assert [(g["index"], g["power_w"], g["ecc_errors"]) for g in last["gpus"]] == [
            (0, None, 0),
            (1, 0.5, None),
        ]


def test_pairs_round_trip_exactly(store: Store) -> None:
    batch = pair_batch()
    put(store, Topic.PAIRS, [LogRecord(4, START_US, packed(batch), None)])
    first, second = rows(store, "pair_scores", 4)
    check(
        first,
        {
            "source_part": 3,
            "source_off": 700,
            "estimator": "kl_lower/1",
            "rollout": "r1",
            "arm": "canary",
            "model_version": "m2",
            "baseline_version": "m1",
            "node": "node-1",
            "request_type": "chat",
            "signature": "00" * 16,
            "pair_id": "64" * 16,
            "event_us": START_US,
            "kl_lower": 0.5,
            "kl_lower_max": 1.0,
            "kl_floor": 3.0,
            "js_lower": 2.0**-30,
            "control_kl_lower": 0.25,
            "ended_together": True,
            "first_difference": 11,
        },
    )
    check(second, {"request_type": None, "control_kl_lower": None, "ended_together": None, "pair_id": ""})


def test_a_pair_scored_twice_is_seen_once_in_the_view(store: Store) -> None:
    put(store, Topic.PAIRS, [LogRecord(4, START_US, packed(pair_batch()), None)])
    next_day = LogRecord(9, START_US + 86_400_000_000, packed(pair_batch(offset=701)), None)
    put(store, Topic.PAIRS, [next_day])
    assert store.rows("SELECT count() FROM pair_scores") == [(4,)]
    assert store.rows("SELECT count(), min(source_off) FROM v_pair_scores") == [(2, 701)]
    assert store.rows("SELECT pair_id FROM v_pair_scores ORDER BY signature") == [("64" * 16,), (None,)]


def test_finals_round_trip_and_the_greater_source_offset_wins(store: Store) -> None:
    changed = final(offset=78)
    changed.seconds[0].contents[0].cells[0].counters["pairs"] = 4
    records = [final(), changed, final()]
    put(store, Topic.BUCKETS, [LogRecord(i, START_US, packed(r), None) for i, r in enumerate(records)])
    statement, cell, telemetry = rows(store, "final_buckets", 0)
    check(
        statement,
        {"entry": "statement", "second": 1_790_000_000_000_000, "closed_from": 1_789_999_990_000_000},
    )
    check(
        cell,
        {
            "entry": "cell",
            "source_topic": "klaxon.logits",
            "source_part": 2,
            "gating_part": 1,
            "rollout": "r1",
            "generation": -1,
            "arm": "canary",
            "differs": 1,
            "dimension": "node",
            "value": "node-1",
            "counters": {"pairs": 3, "renormalised": 0},
            "worst": [{"score": 200, "id": "01" * 16}, {"score": 50, "id": "02" * 16}],
            "settings_hash": "abc",
            "source_off": 77,
        },
    )
    assert cell["measures"]["kl_lower"] == {
        "count": 3,
        "sum": 300,
        "min": 50,
        "max": 200,
        "bins": [4, 9],
        "counts": [2, 1],
    }
    check(telemetry, {"rollout": "", "arm": "", "value": "n"})
    seen = store.rows(
        "SELECT source_off, counters['pairs'], generation, measures['kl_lower'].sum "
        "FROM v_final_buckets WHERE rollout = 'r1'"
    )
    assert seen == [(78, 4, None, 300)]
    assert store.rows("SELECT count() FROM v_final_buckets") == [(3,)]


def test_decisions_keep_their_bytes_and_take_the_rollout_from_the_key_without_a_directive(
    store: Store,
) -> None:
    text = msgspec.json.encode(refused_decision())
    put(store, Topic.DECISIONS, [LogRecord(3, START_US, text, JSON, key=b"r9")])
    (row,) = rows(store, "decisions", 3)
    check(
        row,
        {
            "kind": "refused",
            "rollout": "r9",
            "generation": None,
            "command_id": "c-1",
            "command_offset": 4,
            "complete_through": None,
            "offsets": {"klaxon.logits/0": 5},
            "record": text.decode(),
        },
    )


def test_a_decision_with_a_directive(store: Store) -> None:
    located = {"dimension": "node", "value": "n1", "share_of_excess": 0.9, "share_of_traffic": 0.1}
    decision = {
        "kind": "trip",
        "directive": {
            "rollout": "r1",
            "generation": 2,
            "epoch": 7,
            "ts_us": START_US,
            "lease_until_us": START_US + 1,
            "dead_man_us": 60,
            "state": "tripped",
            "weights": {"m1": 100, "m2": 0},
            "last_promoted": {"m1": 100},
            "excluded_segments": [{"dimension": "node", "value": "n1"}],
            "fallback": "m1",
            "cause": {"rule": "G3", "metric": "kl_lower", "value": 0.14, "limit": 0.05, "located": located},
        },
        "inputs": {
            "offsets": {},
            "command_offset": -1,
            "complete_through": 1_790_000_000,
            "now_us": START_US,
        },
        "evaluations": [
            {"rule": "G3", "scope": "rollout", "verdict": "trip", "metric": "kl_lower", "value": 0.14}
        ],
    }
    put(store, Topic.DECISIONS, [LogRecord(3, START_US, json.dumps(decision).encode(), JSON, key=b"r1")])
    (row,) = rows(store, "decisions", 3)
    check(
        row,
        {
            "state": "tripped",
            "epoch": 7,
            "ts_us": START_US,
            "weights": {"m1": 100, "m2": 0},
            "rule": "G3",
            "cause_value": 0.14,
            "limit": 0.05,
            "located_value": "n1",
            "excluded_segments": [{"dimension": "node", "value": "n1"}],
            "level": 0,
            "complete_through": START_US,
        },
    )
    assert [(e["rule"], e["verdict"], e["limit"]) for e in row["evaluations"]] == [("G3", "trip", None)]


HOSTILE = [
    (Topic.PAIRS, packed(pair_batch(rollout=[0])), "rollout"),
    (Topic.PAIRS, packed(pair_batch(node=[3, 6])), "node"),
    (Topic.PAIRS, packed(pair_batch(arm=[1, 3])), "arm"),
    (Topic.PAIRS, packed(pair_batch(signature=[b"x", b"y" * 16])), "signature"),
    (Topic.PAIRS, packed(pair_batch(positions=[2**32, 0])), "positions"),
    (Topic.PAIRS, packed(pair_batch(event_us=[-1, 0])), "event_us"),
    (Topic.PAIRS, packed(pair_batch(partition=-1)), "partition"),
    (Topic.PAIRS, b"\xc1", "record"),
    (Topic.PAIRS, b"", "record"),
    (Topic.BUCKETS, packed(final(offset=2**63)), "offset"),
    (Topic.BUCKETS, packed(final(closed_through=-1)), "closed_through"),
    (Topic.BUCKETS, packed(final(partition=2**40)), "partition"),
    (Topic.BUCKETS, b"\x91\x01", "record"),
    (Topic.DECISIONS, b"{}", "record"),
    (Topic.DECISIONS, b"\xff", "record"),
]


@pytest.mark.parametrize(("topic", "value", "field"), HOSTILE)
def test_what_does_not_fit_is_refused_with_its_field(topic: Topic, value: bytes, field: str) -> None:
    found, rejected = read_record(topic, LogRecord(0, START_US, value, None, b"k"))
    assert found.n == 0
    assert [(r.position, r.field) for r in rejected] == [(None, field)]


def test_a_counter_over_64_bits_is_refused() -> None:
    huge = final()
    huge.seconds[0].contents[0].cells[0].counters["pairs"] = 2**63
    assert read_record(Topic.BUCKETS, LogRecord(0, START_US, packed(huge), None))[1][0].field == "counters"


INPUTS = [Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY]


@pytest.mark.parametrize("topic", INPUTS)
def test_every_example_is_archived_or_counted_and_costs_only_itself(store: Store, topic: Topic) -> None:
    archive = Archive(store, BlockLimits(), "boot")
    part = archive.open_partition(topic, 0)
    expected, refused = 0, 0
    for offset, good in enumerate(valid_examples(topic)):
        assert part.add(LogRecord(offset, START_US, good.value, good.content_type), 0) == ()
        events = orjson.loads(good.value)
        expected += len(events) if isinstance(events, list) else 1
    for offset, bad in enumerate(invalid_examples(topic), start=1000):
        record = LogRecord(offset, START_US, bad.value, bad.content_type)
        if bad.field == "v" and bad.content_type == COLUMNS:
            with pytest.raises(UnknownVersionError):
                part.add(record, 0)  # somebody else's to read: the worker stops at it
            continue
        handed = part.add(record, 0)
        assert handed == (), "the input topics' own readers dead-letter"
        expected += bad.neighbours
        refused += 1
    block = part.take(0, force=True)
    assert block is not None
    assert archive.store_block(block, threading.Event())
    assert store.rows(f"SELECT count() FROM {TABLES[topic]}") == [(expected,)]
    assert refused > 0
    assert part.gauges()["rejected"] >= refused
