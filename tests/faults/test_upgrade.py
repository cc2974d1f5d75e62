"""Records of another version are neither read nor malformed; on processes see test_upgrade_processes.py."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from agents.router.runner import Router, RouterSettings
from pipeline.core.gate.state import PartitionMemory, RolloutMemory, StateRecord, decode_state, encode_state
from pipeline.store.derived_rows import bucket_rows, decision_rows, pair_rows
from pipeline.workers.dead_letters import VersionError
from pipeline.workers.gate_log import Remembered, _sort_in
from pipeline.workers.gate_watch import directive_of
from pipeline.workers.records import Record
from schemas import codec
from schemas.buckets import FinalBuckets, FreshCells
from schemas.control import Directive
from schemas.records import UnknownVersionError, read_json, read_msgpack
from schemas.topics import COLUMNS, JSON, Topic
from tests.faults.upgrade import of_version_2
from tests.store.records import START_US, final, packed, pair_batch, refused_decision
from tests.workers.fleet import SEAT

pytestmark = pytest.mark.faults


def _json_2(record: object) -> bytes:
    return json.dumps({**json.loads(msgspec.json.encode(record)), "v": 2}).encode()


@pytest.mark.parametrize("shape", ["like ours", "another"])
def test_another_version_of_our_records_is_neither_read_nor_malformed(shape: str) -> None:
    whole = final()
    fresh = FreshCells(1, whole.topic, 2, 1, 77, 0, "abc", whole.seconds)
    cut = 4 if shape == "another" else None
    for value, kind in ((packed(whole), FinalBuckets), (packed(fresh), FreshCells)):
        later = packed([2, *msgspec.msgpack.decode(value)[1:cut]])
        with pytest.raises(UnknownVersionError, match="version 2; this process reads 1"):
            read_msgpack(later, kind)
    for rows, value in ((bucket_rows, packed(whole)), (pair_rows, packed(pair_batch()))):
        with pytest.raises(UnknownVersionError):
            rows(of_version_2(value)[:None], 0, START_US)
    with pytest.raises(UnknownVersionError):
        decision_rows(_json_2(refused_decision()), b"r1", 0, START_US)
    with pytest.raises(UnknownVersionError):
        read_json(b'{"v": 2, "rollout": {"another": "shape"}}', Directive)


@pytest.mark.parametrize(
    "value", [b"\x91\x00", b"\x91\xff", b"\x91\xa12", b"\x92\xc3\x01", b"\x81\xa1v\x02", b"\x02"]
)
def test_no_version_is_malformed(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        read_msgpack(value, FinalBuckets)
    assert not isinstance(raised.value, UnknownVersionError)


def test_an_absent_version_is_the_first() -> None:
    record = PartitionMemory(partition=1, command_offset=4)
    assert b'"v"' not in encode_state(record).replace(b'"v":1', b"")
    assert decode_state(b'{"type":"partition","partition":1,"command_offset":4}') == record


@pytest.mark.parametrize("topic", [Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY])
def test_an_envelope_of_another_version_says_so(topic: Topic) -> None:
    decode = {
        Topic.REQUESTS: codec.decode_requests,
        Topic.LOGITS: codec.decode_logits,
        Topic.TELEMETRY: codec.decode_telemetry,
    }[topic]
    kind = topic.value.removeprefix("klaxon.")
    for later in ([2, kind], [2, kind, "whatever", {}]):
        decoded = decode(packed(later), COLUMNS)
        assert decoded.unknown_version == 2
        assert len(decoded.rejected) == 1
    for hostile in ([2, "other"], [0, kind], [-1, kind], ["2", kind], [2], {"v": 2}, [1, kind]):
        assert decode(packed(hostile), COLUMNS).unknown_version is None
    # An event's own version is its producer's affair: one event among many.
    assert decode(b'{"v": 2}', JSON).unknown_version is None


def later_memory(**changes: Any) -> StateRecord:
    """A roll-out's state, for example of a later version."""
    fields: dict[str, Any] = {
        "rollout": "r1", "generation": 1, "epoch": 3, "decided_epoch": 3, "state": "observing", "step": 0,
        "step_start": 5, "start_us": START_US, "evidence_from": 5, "folded": 9, "weights": {},
        "last_promoted": {},
    }  # fmt: skip
    return RolloutMemory(**{**fields, **changes})


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (Topic.STATE, encode_state(later_memory(v=2))),
        (Topic.STATE, b'{"type":"something later","v":2}'),
        (Topic.ROLLOUTS, b'{"v":2,"rollout":"r1"}'),
    ],
)
def test_a_gate_does_not_pass_over_what_a_later_one_wrote(topic: Topic, value: bytes) -> None:
    record = Record(topic, 3, 41, 0, 1, {}, b"r1", value)
    with pytest.raises(VersionError) as raised:
        _sort_in(Remembered(), record)
    assert f"{topic.value}/3: offset 41 is of record version 2" in str(raised.value)


def test_a_directive_of_another_version_stops_nobody_and_is_obeyed_by_nobody() -> None:
    """Its topic is the one that others reach for; the state beside it is what stops the gate."""
    value = b'{"v":2,"rollout":"r1"}'
    assert directive_of("r1", value) is None
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None)
    router._take(SEAT, b"r1", value, 0)
    assert router.malformed == 1
