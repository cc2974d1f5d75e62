"""Both encodings give equal columns for the same events; hostile records cost only what is hostile."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import codec, columnar_codec, json_codec
from schemas.columns import ABSENT, NO_LABEL, NOT_LISTED, BatchHeader
from schemas.envelope import LogitEnvelope, RequestEnvelope
from schemas.examples import valid_examples
from schemas.identity import pair_id_bytes
from schemas.json_codec import split_array
from schemas.tabulate import eta_of, logit_columns, request_columns
from schemas.topics import COLUMNS, JSON, TICK, Topic
from schemas.validity import has_valid_position, valid_positions
from tests.schemas.events import assert_equal_columns, logit_events, node_events, request_events

# The machine may be busy: only what is read counts here, not how fast.
CODEC = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

HEADER = BatchHeader("gateway-1", 7, {"r/canary": 3, "r/baseline": 0})


def request_events_of(*names: str) -> list[Any]:
    values = {e.name: e.value for e in valid_examples(Topic.REQUESTS)}
    return [event for name in names for event in json_codec.REQUESTS.read(values[name])[0]]


def logit_events_of(*names: str) -> list[Any]:
    values = {e.name: e.value for e in valid_examples(Topic.LOGITS)}
    return [event for name in names for event in json_codec.LOGITS.read(values[name])[0]]


# --- both encodings alike -------------------------------------------------------------------------------


@CODEC
@given(st.lists(request_events, max_size=5))
def test_requests_are_the_same_in_both_encodings(events: list[Any]) -> None:
    from_json = codec.decode_requests(msgspec.json.encode(events), JSON)
    from_columns = codec.decode_requests(codec.encode_requests(from_json.columns, HEADER), COLUMNS)
    assert from_json.rejected == from_columns.rejected == ()
    assert from_json.columns.n == len(events)
    assert_equal_columns(from_json.columns, from_columns.columns)
    assert from_json.positions.tolist() == from_columns.positions.tolist() == list(range(len(events)))
    assert (from_json.header, from_columns.header) == (None, HEADER)


@CODEC
@given(st.lists(logit_events(), max_size=5))
def test_logits_are_the_same_in_both_encodings(events: list[Any]) -> None:
    from_json = codec.decode_logits(msgspec.json.encode(events), JSON)
    from_columns = codec.decode_logits(codec.encode_logits(logit_columns(events), HEADER), COLUMNS)
    assert from_json.rejected == from_columns.rejected
    assert from_json.positions.tolist() == from_columns.positions.tolist()
    assert from_json.columns.n + len(from_json.rejected) == len(events)
    assert_equal_columns(from_json.columns, from_columns.columns)


@CODEC
@given(st.lists(node_events, max_size=4))
def test_telemetry_is_the_same_in_both_encodings(events: list[Any]) -> None:
    from_json = codec.decode_telemetry(msgspec.json.encode(events), None)
    from_columns = codec.decode_telemetry(codec.encode_telemetry(from_json.columns, HEADER), COLUMNS)
    assert_equal_columns(from_json.columns, from_columns.columns)
    assert from_columns.header == HEADER


@CODEC
@given(st.lists(logit_events(), min_size=1, max_size=4), st.integers(0, 3))
def test_batching_does_not_matter(events: list[Any], cut: int) -> None:
    whole = codec.decode_logits(msgspec.json.encode(events), None)
    parts = [codec.decode_logits(msgspec.json.encode(part), None) for part in (events[:cut], events[cut:])]
    assert whole.columns.n == sum(part.columns.n for part in parts)
    pairs = [
        (part.columns.signature[i].tobytes(), np.diff(part.columns.offsets)[i])
        for part in parts
        for i in range(part.columns.n)
    ]
    assert pairs == [
        (whole.columns.signature[i].tobytes(), np.diff(whole.columns.offsets)[i])
        for i in range(whole.columns.n)
    ]


# --- what the columns hold ------------------------------------------------------------------------------


def test_required_only_request_has_absent_everywhere_else() -> None:
    columns = request_columns(request_events_of("required-only"))
    assert columns.generation[0] == columns.ttft_us[0] == columns.itl_us[0] == columns.stream[0] == ABSENT
    assert columns.temperature[0] == columns.top_p[0] == ABSENT
    assert not columns.has_pair_id[0]
    assert not columns.has_seed[0]
    assert columns.labels["region"].codes[0] == NO_LABEL
    assert columns.labels["error"].get(0) == "overload"
    assert columns.extras == {}


def test_extras_hold_exactly_what_has_no_column() -> None:
    columns = request_columns(request_events_of("one", "every-field"))
    assert list(columns.extras) == [1]
    assert set(json.loads(columns.extras[1])) == {
        "response_quality_score",
        "similarity",
        "scores",
        "steps",
        "embedding",
        "text",
    }


def test_pair_ids_of_any_form_have_16_bytes() -> None:
    assert pair_id_bytes("0" * 31 + "a") == bytes(15) + b"\x0a"
    for other in ("", "0" * 31 + "A", "0" * 31 + "a\n", "req-1"):
        assert len(pair_id_bytes(other)) == 16
        assert pair_id_bytes(other) != pair_id_bytes("0" * 31 + "a")


def test_uneven_lists_keep_positions_in_place() -> None:
    columns = logit_columns(logit_events_of("uneven-lists"))
    assert columns.k.tolist() == [3]
    assert columns.top_ids.reshape(3, 3).tolist() == [
        [339, NOT_LISTED, NOT_LISTED],
        [NOT_LISTED, 504, 60],
        [29, NOT_LISTED, NOT_LISTED],
    ]
    listed = np.isfinite(columns.top_logprobs.reshape(3, 3))
    assert listed.tolist() == [[True, False, False], [False, True, True], [True, False, False]]
    assert valid_positions(columns).tolist() == [True, True, True]
    assert columns.eta.tolist() == [5e-4]


def test_position_with_differing_inner_lengths_lists_nothing() -> None:
    columns = logit_columns(logit_events_of("spoiled-positions"))
    assert valid_positions(columns).tolist() == [False, False, True]
    assert columns.k.tolist() == [3]


def test_token_bytes_become_hashes_and_share_a_record_with_ids() -> None:
    columns = logit_columns(logit_events_of("one", "token-bytes"))
    assert columns.identity.tolist() == [0, 1]
    assert columns.tokens.dtype == columns.top_ids.dtype == np.int64
    assert columns.tokens[3] == columns.top_ids[columns.entry_offsets[1]]
    assert 0 <= columns.tokens.min() <= columns.tokens.max() < 2**62


@pytest.mark.parametrize(
    ("precision", "eta"),
    [
        (1, 5e-4),
        (3, 5e-4),
        (4, 5e-5),
        (5, 5e-5),
        (6, 1e-6),
        (17, 1e-6),
        ("f16", 5e-4),
        ("f32", 1e-6),
        ("f64", 1e-6),
    ],
)
def test_eta_follows_precision(precision: int | str, eta: float) -> None:
    assert eta_of(precision) == eta


def test_telemetry_gauges_sum_over_gpus_and_leave_out_methods_that_say_nothing() -> None:
    node = {
        "v": 1,
        "node": "n",
        "ts_us": 1,
        "gpus": [{"index": 0, "memory_used_bytes": 5}, {"index": 1, "memory_used_bytes": 7}, {"index": 2}],
        "fragmentation": {"internal": 0.5, "method": "n/a"},
    }
    columns = codec.decode_telemetry(json.dumps(node).encode(), None).columns
    assert columns.gauges["memory_used_bytes"].tolist() == [12.0]
    assert columns.gauges["memory_total_bytes"].tolist() == [ABSENT]
    assert columns.gauges["internal"].tolist() == [ABSENT]


# --- hostile JSON ---------------------------------------------------------------------------------------


def _fields(event: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(event))
    return fields


BREAK: list[Callable[[dict[str, Any]], str]] = [
    lambda e: json.dumps({**e, "ts_us": -1}),
    lambda e: json.dumps({**e, "temperature": "NaN"}).replace('"NaN"', "NaN"),
    lambda e: json.dumps({**e, "temperature": "@"}).replace('"@"', "1e400"),
    lambda e: json.dumps({**e, "x": "@"}).replace('"@"', "[" * 2000 + "]" * 2000),
    lambda e: json.dumps({**e, "region": "@"}).replace("@", "\\ud800x"),
    lambda e: json.dumps({**e, "region": "@"}).replace("@", '\\", [{'),
    lambda e: json.dumps({k: v for k, v in e.items() if k != "arm"}),
    lambda e: "17",
    lambda e: json.dumps(e)[:-1] + ",}",
]


@CODEC
@given(st.lists(st.none() | st.sampled_from(range(len(BREAK))), min_size=1, max_size=8))
def test_a_bad_event_costs_only_itself(plan: list[int | None]) -> None:
    good = _fields(request_events_of("one")[0])
    texts = [
        json.dumps({**good, "input_tokens": i}) if how is None else BREAK[how](good)
        for i, how in enumerate(plan)
    ]
    decoded = codec.decode_requests(("[" + ",".join(texts) + "]").encode(), None)
    # Index 5 breaks nothing: brackets and quotes inside a string are only text.
    kept = [i for i, how in enumerate(plan) if how is None or how == 5]
    assert decoded.positions.tolist() == kept
    assert [r.position for r in decoded.rejected] == [i for i in range(len(plan)) if i not in kept]
    assert all(r.field and r.reason for r in decoded.rejected)


@given(st.binary(max_size=200))
@settings(CODEC, max_examples=300)
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    for content_type in (None, COLUMNS):
        for decode in (codec.decode_requests, codec.decode_logits, codec.decode_telemetry):
            decoded = decode(value, content_type)
            assert decoded.columns.n == len(decoded.positions)


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(CODEC, max_examples=300)
def test_one_changed_byte_never_raises(at: int, byte: int) -> None:
    requests = msgspec.json.encode(request_events_of("array"))
    logits = msgspec.json.encode(logit_events_of("array"))
    columnar_requests = codec.encode_requests(request_columns(request_events_of("array")), HEADER)
    columnar_logits = codec.encode_logits(logit_columns(logit_events_of("array")), HEADER)
    for value, kind, decode in (
        (requests, JSON, codec.decode_requests),
        (logits, JSON, codec.decode_logits),
        (columnar_requests, COLUMNS, codec.decode_requests),
        (columnar_logits, COLUMNS, codec.decode_logits),
    ):
        changed = bytearray(value)
        changed[at % len(value)] = byte
        decoded = decode(bytes(changed), kind)
        assert decoded.columns.n == len(decoded.positions)
        if isinstance(decoded.columns, type(logit_columns([]))):
            assert not np.isnan(decoded.columns.top_logprobs).any()
            assert not (decoded.columns.top_logprobs == np.inf).any()


def test_a_million_positions_are_refused_by_name() -> None:
    event = _fields(logit_events_of("required-only")[0])
    event["tokens"] = [1] * 1_000_000
    decoded = codec.decode_logits(json.dumps([event, _fields(logit_events_of("one")[0])]).encode(), None)
    assert decoded.columns.n == 1
    assert [(r.position, r.field) for r in decoded.rejected] == [(0, "tokens")]


def test_duplicate_keys_the_last_one_counts() -> None:
    text = json.dumps(_fields(request_events_of("one")[0]))[:-1] + ',"node":"second"}'
    columns = codec.decode_requests(text.encode(), None).columns
    assert columns.labels["node"].get(0) == "second"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"[]", []),
        (b" [ ] ", []),
        (b"[1,2]", [b"1", b"2"]),
        (b'[{"a":"],[\\""},[1,[2]]]', [b'{"a":"],[\\""}', b"[1,[2]]"]),
        (b"[NaN, {}]", [b"NaN", b"{}"]),
        (b"[1,]", [b"1", b""]),
        (b"[1", None),
        (b"[1]]", None),
        (b"[(1}]", None),
        (b'["a]', None),
        (b'[{"a":"x}, {"b":1}]', None),
        (b"[1] 2", None),
        (b"{}", None),
        (b"[" * 5000 + b"]" * 5000, [b"[" * 4999 + b"]" * 4999]),
    ],
)
def test_split_array(text: bytes, parts: list[bytes] | None) -> None:
    assert split_array(text) == parts


# --- hostile envelopes ----------------------------------------------------------------------------------


def _logit_envelope() -> LogitEnvelope:
    events = logit_events_of("one", "required-only", "array")
    value = codec.encode_logits(logit_columns(events[:3]), HEADER)
    return msgspec.msgpack.decode(value, type=LogitEnvelope)


def _request_envelope() -> RequestEnvelope:
    value = codec.encode_requests(request_columns(request_events_of("array")), HEADER)
    return msgspec.msgpack.decode(value, type=RequestEnvelope)


def _refused(envelope: Any, **changes: Any) -> tuple[str, int]:
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, **changes))
    decode = codec.decode_logits if isinstance(envelope, LogitEnvelope) else codec.decode_requests
    decoded = decode(value, COLUMNS)
    assert [r.position for r in decoded.rejected] == [None]
    assert decoded.header is None
    return decoded.rejected[0].field, decoded.columns.n


@pytest.mark.parametrize("name", ["signature", "pair_id", "tokens", "top_ids", "top_logprobs"])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0" * 4, lambda b: b * 2])
def test_a_blob_of_the_wrong_length_refuses_the_record(name: str, change: Callable[[bytes], bytes]) -> None:
    envelope = _logit_envelope()
    assert _refused(envelope, **{name: change(getattr(envelope, name))}) == (name, 0)


def test_pair_ids_that_are_not_there_refuse_their_events() -> None:
    """Without the blob they would all be the same id: the halves of different requests would meet."""
    envelope = _request_envelope()
    has = [bool(event.pair_id) for event in request_events_of("array")]
    assert any(has)
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, pair_id=b""))
    decoded = codec.decode_requests(value, COLUMNS)
    assert [(r.position, r.field) for r in decoded.rejected] == [
        (i, "pair_id") for i, there in enumerate(has) if there
    ]
    assert decoded.positions.tolist() == [i for i, there in enumerate(has) if not there]


def test_an_event_is_refused_once_for_all_its_bad_ids() -> None:
    envelope = _logit_envelope()
    ids = np.frombuffer(envelope.tokens, dtype="<i4").copy()
    ids[1:] = -7
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, tokens=ids.tobytes()))
    decoded = codec.decode_logits(value, COLUMNS)
    assert [(r.position, r.field) for r in decoded.rejected] == [(i, "tokens") for i in range(envelope.n)]
    assert {r.reason for r in decoded.rejected} == {"token id -7 is not in 0..2147483647"}


def test_every_number_column_has_its_length_checked() -> None:
    for envelope, layout in (
        (_logit_envelope(), columnar_codec.LOGIT_LAYOUT),
        (_request_envelope(), columnar_codec.REQUEST_LAYOUT),
    ):
        names = [column.name for group in layout.groups for column in group.columns]
        assert len(names) == len(envelope.numbers)
        for i, name in enumerate(names):
            numbers = list(envelope.numbers)
            numbers[i] += b"\0" * 100
            assert _refused(envelope, numbers=numbers) == (name, 0)
        assert _refused(envelope, numbers=envelope.numbers[:-1])[0] == "numbers"


def test_every_label_column_has_its_length_checked() -> None:
    envelope = _request_envelope()
    every = [*envelope.labels, columnar_codec.NO_KEY_IDS]
    for i, name in enumerate(columnar_codec.REQUEST_LAYOUT.labels):
        labels = list(every)
        labels[i] = (labels[i][0], b"\0" * 5)
        assert _refused(envelope, labels=labels) == (name, 0)
    assert _refused(envelope, labels=every[:-2])[0] == "labels"
    assert _refused(envelope, labels=[*every, every[-1]])[0] == "labels"


@pytest.mark.parametrize("stated", [(), (1,), (0, 1, 2)])
def test_a_batch_in_which_no_event_states_key_ids_ends_before_them(stated: tuple[int, ...]) -> None:
    """So that readers from before they were there read it; and their batches are read here."""
    events = [
        msgspec.structs.replace(event, key_ids="a,b" if number in stated else None)
        for number, event in enumerate(request_events_of("array")[:1] * 3)
    ]
    value = codec.encode_requests(request_columns(events), HEADER)
    envelope = msgspec.msgpack.decode(value, type=RequestEnvelope)
    assert len(envelope.labels) == len(columnar_codec.REQUEST_LAYOUT.labels) - (not stated)
    column = codec.decode_requests(value, COLUMNS).columns.labels["key_ids"]
    assert [column.get(at) for at in range(3)] == ["a,b" if at in stated else None for at in range(3)]
    assert codec.decode_requests(codec.encode_requests(request_columns([]), HEADER), COLUMNS).rejected == ()


@pytest.mark.parametrize("n", [-1, 2, 4, 70_000, 2**62])
def test_a_wrong_n_refuses_the_record(n: int) -> None:
    assert _refused(_request_envelope(), n=n)[1] == 0
    assert _refused(_logit_envelope(), n=n)[1] == 0


def test_other_versions_and_kinds_are_refused() -> None:
    assert _refused(_request_envelope(), v=2)[0] == "v"
    assert _refused(_request_envelope(), kind="logits")[0] == "kind"
    assert _refused(_logit_envelope(), id_bytes=2)[0] == "id_bytes"


def test_a_label_code_without_entry_refuses_its_event_only() -> None:
    envelope = _request_envelope()
    labels = list(envelope.labels)
    labels[1] = (labels[1][0], struct.pack("<3H", 0, 9, 0))
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, labels=labels))
    decoded = codec.decode_requests(value, COLUMNS)
    assert decoded.positions.tolist() == [0, 2]
    assert [(r.position, r.field) for r in decoded.rejected] == [(1, "node")]
    assert decoded.columns.n == 2
    assert decoded.header == HEADER


def test_a_missing_required_label_refuses_its_event_only() -> None:
    envelope = _request_envelope()
    labels = list(envelope.labels)
    labels[0] = (labels[0][0], struct.pack("<3H", 0, 0, NO_LABEL))
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, labels=labels))
    rejected = codec.decode_requests(value, COLUMNS).rejected
    assert [(r.position, r.field, r.reason) for r in rejected] == [
        (2, "rollout", "required field is missing")
    ]


def test_labels_of_impossible_length_refuse_their_events_only() -> None:
    envelope = _request_envelope()
    labels = list(envelope.labels)
    labels[1] = (["n", "", "x" * 257], struct.pack("<3H", 1, 0, 2))
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, labels=labels))
    decoded = codec.decode_requests(value, COLUMNS)
    assert decoded.positions.tolist() == [1]
    assert [(r.position, r.field) for r in decoded.rejected] == [(0, "node"), (2, "node")]


@pytest.mark.parametrize("seed", range(5))
def test_a_value_outside_its_limits_refuses_its_event_only(seed: int) -> None:
    rng = random.Random(seed)
    envelope = _request_envelope()
    at = 0
    for group in columnar_codec.REQUEST_LAYOUT.groups:
        for column in group.columns:
            bad_row = rng.randrange(3)
            original = np.frombuffer(envelope.numbers[at], dtype=group.wire)
            values = np.broadcast_to(original, (3,)).copy() if len(original) == 1 else original.copy()
            outside = (
                [np.nan, -2.0, column.high + 1] if group.wire == "<f8" else [column.low - 2, column.high + 1]
            )
            info = None if group.wire == "<f8" else np.iinfo(group.wire)
            fitting = [x for x in outside if info is None or info.min <= x <= info.max]
            at += 1
            if not fitting:
                continue
            values[bad_row] = rng.choice(fitting)
            numbers = list(envelope.numbers)
            numbers[at - 1] = values.tobytes()
            value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, numbers=numbers))
            decoded = codec.decode_requests(value, COLUMNS)
            assert [(r.position, r.field) for r in decoded.rejected] == [(bad_row, column.name)]
            assert decoded.positions.tolist() == [i for i in range(3) if i != bad_row]


def test_ids_outside_their_range_refuse_their_event_only() -> None:
    for names, wrong in ((("one", "required-only"), -2), (("one", "token-bytes"), 2**40)):
        columns = logit_columns(logit_events_of(*names))
        top_ids = columns.top_ids.copy()
        top_ids[1] = wrong
        envelope = msgspec.msgpack.decode(codec.encode_logits(columns, HEADER), type=LogitEnvelope)
        value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, top_ids=top_ids.tobytes()))
        decoded = codec.decode_logits(value, COLUMNS)
        assert [(r.position, r.field) for r in decoded.rejected] == [(0, "top_ids")]
        assert decoded.positions.tolist() == [1]


def test_nan_on_the_wire_spoils_its_position_only() -> None:
    columns = logit_columns(logit_events_of("one"))
    logprobs = columns.top_logprobs.copy()
    logprobs[7] = np.nan
    envelope = msgspec.msgpack.decode(codec.encode_logits(columns, HEADER), type=LogitEnvelope)
    value = msgspec.msgpack.encode(msgspec.structs.replace(envelope, top_logprobs=logprobs.tobytes()))
    decoded = codec.decode_logits(value, COLUMNS)
    assert decoded.rejected == ()
    assert valid_positions(decoded.columns).tolist() == [True, False, True]
    assert (decoded.columns.top_ids.reshape(3, 5)[1] == NOT_LISTED).all()


def test_hostile_extras_refuse_their_event_or_the_record() -> None:
    envelope = _request_envelope()
    bad = msgspec.structs.replace(envelope, extras={1: b'{"similarity":"high"}'})
    decoded = codec.decode_requests(msgspec.msgpack.encode(bad), COLUMNS)
    assert [(r.position, r.field) for r in decoded.rejected] == [(1, "similarity")]
    assert _refused(envelope, extras={3: b"{}"}) == ("extras", 0)


def test_an_empty_batch_still_carries_its_header() -> None:
    for encode, columns, decode in (
        (codec.encode_requests, request_columns([]), codec.decode_requests),
        (codec.encode_logits, logit_columns([]), codec.decode_logits),
    ):
        decoded = decode(encode(columns, HEADER), COLUMNS)
        assert (decoded.columns.n, decoded.rejected, decoded.header) == (0, (), HEADER)


# --- content types --------------------------------------------------------------------------------------


def test_content_types() -> None:
    value = msgspec.json.encode(request_events_of("one"))
    for content_type in (None, JSON, "application/json; charset=utf-8", "Application/JSON"):
        assert codec.decode_requests(value, content_type).columns.n == 1
    assert codec.decode_requests(b"", TICK).rejected == ()
    unknown = codec.decode_requests(value, "text/csv")
    assert [(r.position, r.field) for r in unknown.rejected] == [(None, "content-type")]
    absent = codec.decode_requests(None, None)
    assert [(r.position, r.field) for r in absent.rejected] == [(None, "record")]


# --- validity -------------------------------------------------------------------------------------------


def _slow_valid(columns: Any, event: int, position: int) -> bool:
    """The rules of reading, one entry at a time."""
    k = int(columns.k[event])
    at = int(columns.entry_offsets[event]) + position * k
    entries = [
        (int(i), float(lp))
        for i, lp in zip(columns.top_ids[at : at + k], columns.top_logprobs[at : at + k], strict=True)
        if i != NOT_LISTED and lp != -np.inf
    ]
    if not entries or len({i for i, _ in entries}) != len(entries):
        return False
    if columns.kind[event] == 1:
        return True
    return all(lp <= 1e-3 for _, lp in entries) and sum(np.exp(lp) for _, lp in entries) <= 1 + 1e-3


@CODEC
@given(st.lists(logit_events(), min_size=1, max_size=6))
def test_validity_follows_the_rules_entry_by_entry(events: list[Any]) -> None:
    columns = logit_columns(events)
    expected = [
        _slow_valid(columns, event, position)
        for event in range(columns.n)
        for position in range(int(np.diff(columns.offsets)[event]))
    ]
    assert valid_positions(columns).tolist() == expected
    per_event = [any(expected[columns.offsets[i] : columns.offsets[i + 1]]) for i in range(columns.n)]
    assert has_valid_position(columns).tolist() == per_event
