"""Requests and telemetry, one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core import measuring
from pipeline.core.measuring import MeasureSource, prepare_together
from pipeline.core.source import BYTES_AT_ONCE, ContentSettings, RecordMeta
from pipeline.core.table import CellTable
from schemas.codec import decode_requests, decode_telemetry, encode_requests
from schemas.columns import BatchHeader
from schemas.topics import COLUMNS, JSON, Topic
from tests.core import scenarios

S = 1_000_000
T = 1_700_000_000 * S
SETTINGS = ContentSettings(lateness_us=2 * S)
CANARY = ("chat", 1, "canary", "m2", 0)


def request(**fields: Any) -> dict[str, Any]:
    """A request that completes at T + 0.5 s."""
    return {
        "v": 1, "rollout": "chat", "generation": 1, "arm": "canary", "pair_id": "p", "signature": "0" * 32,
        "ts_us": T, "duration_us": 500_000, "node": "n1", "input_tokens": 3000, "model_version": "m2",
        "shadow": False, "status": 200, "output_tokens": 7, "ttft_us": 500_001, **fields,
    }  # fmt: skip


class Log:
    """Appends records to a source and reads back what it finally says."""

    def __init__(
        self, topic: Topic = Topic.REQUESTS, settings: ContentSettings = SETTINGS, first: int = 0
    ) -> None:
        self.topic = topic
        self.offset = first
        self.source = MeasureSource(topic, 0, settings)

    def append(self, at_us: int, *events: dict[str, Any], dropped: dict[str, int] | None = None) -> None:
        """One record; without events a tick."""
        value = msgspec.json.encode(list(events))
        decode = decode_requests if self.topic is Topic.REQUESTS else decode_telemetry
        decoded = decode(value, JSON) if events or dropped else None
        if dropped is not None:
            assert decoded is not None
            value = encode_requests(decoded.columns, BatchHeader("p", 1, dropped))  # type: ignore[arg-type]
            decoded = decode_requests(value, COLUMNS)
        self.source.read(RecordMeta(self.offset, at_us, len(value)), decoded)
        self.offset += 1

    def finals(self) -> Any:
        """Close everything; second (from T on) → population → cell."""
        self.append(T + 60 * S)
        contents, _ = scenarios.assemble(scenarios.finals_of(self.source.take_flush()))
        return {second - T // S: held for second, held in contents.items()}


def test_a_request_stands_in_all_its_cells() -> None:
    log = Log()
    log.append(T + S, request(request_type="chat", hardware="H100", temperature=0, cached_tokens=1499))
    cells = log.finals()[0][CANARY]
    assert list(cells) == [
        ("all", ""),
        ("node", "n1"),
        ("context", ">512"),
        ("context", ">2048"),
        ("request_type", "chat"),
        ("hardware", "H100"),
        ("sampling", "greedy"),
        ("region", "unknown"),
        ("traffic", "user"),
        ("node_context", "n1|>512"),
        ("node_context", "n1|>2048"),
        ("stratum", "chat|<=4096|greedy|part|H100"),
    ]
    assert all(cell["counters"] == {"requests": 1} for cell in cells.values())
    assert cells["all", ""]["measures"]["ttft_us"] == {
        "count": 1, "sum": 500_001, "min": 500_001, "max": 500_001, "bins": {512: 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cached", "tokens", "hit"),
    [
        (None, 10, "unknown"),
        (0, 10, "none"),
        (4, 10, "part"),
        (5, 10, "most"),
        (0, 0, "none"),
        (3, 0, "most"),
    ],
)
def test_cache_hit_classes(cached: int | None, tokens: int, hit: str) -> None:
    log = Log()
    log.append(T + S, request(cached_tokens=cached, input_tokens=tokens))
    strata = [value for name, value in log.finals()[0][CANARY] if name == "stratum"]
    assert strata == [f"unknown|<=512|unknown|{hit}|unknown"]


def test_errors_and_answers_without_a_token() -> None:
    log = Log()
    log.append(
        T + S,
        request(pair_id="a", status=500, ttft_us=None),
        request(pair_id="b", error="timeout"),
        request(pair_id="c", status=429),
    )
    all_cell = log.finals()[0][CANARY]["all", ""]
    assert all_cell["counters"] == {"requests": 3, "errors": 2, "no_token": 1}
    assert all_cell["measures"]["ttft_us"]["count"] == 2


def test_a_request_is_late_by_log_time_alone() -> None:
    log = Log()
    log.append(T + 3 * S, request(pair_id="in time"))
    log.append(T + 3 * S + 1, request(pair_id="late"))
    log.append(T - 9 * S, request(pair_id="late too: log time does not fall"))
    held = log.finals()
    assert held[0][CANARY]["all", ""]["counters"] == {"requests": 1}
    assert held[3][CANARY]["all", ""]["counters"] == {"late": 2}


def test_an_event_from_the_future_is_cut_and_counted() -> None:
    log = Log()
    log.append(T, request(duration_us=3600 * S))
    assert log.finals()[5][CANARY]["all", ""]["counters"] == {"requests": 1, "cut": 1}


def test_duplicates_count_once() -> None:
    log = Log()
    plain = request()
    anonymous = request(pair_id=None)
    log.append(T + S, plain, plain, request(node="other"), request(rollout="code"), request(arm="control"))
    log.append(T + S, anonymous, anonymous, request(pair_id=None, node="other"))
    counters = log.finals()[0][CANARY]["all", ""]["counters"]
    assert counters == {"requests": 3, "duplicate": 3}


def test_reported_drops_count_once_in_log_time() -> None:
    log = Log()
    for _ in range(2):
        log.append(T + S, request(), dropped={"a/b/canary": 3, "chat/nobody": 9, "canary": 1})
    held = log.finals()
    assert held[1]["a/b", None, "canary", None, 0]["all", ""]["counters"] == {"dropped": 3}
    assert set(held[1]) | set(held[0]) == {("a/b", None, "canary", None, 0), CANARY}


def test_seconds_before_whole_from_are_never_published() -> None:
    log = Log(first=9)
    log.append(T + S, request())
    log.append(T + 6 * S, request(pair_id="b", ts_us=T + 5 * S))
    log.append(T + 7 * S, request(pair_id="c", ts_us=T + 6 * S))
    flush = log.source.take_flush()
    assert {second.second for fresh in scenarios.fresh_of(flush) for second in fresh.seconds} == {T // S + 6}
    log.append(T + 60 * S)
    finals = scenarios.finals_of(log.source.take_flush())
    assert {(final.closed_from, final.whole_from) for final in finals} == {(T // S + 6, T // S + 6)}


def test_events_beyond_what_a_bucket_remembers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "EVENTS_PER_BUCKET", 2)
    log = Log()
    log.append(T + S, *(request(pair_id=name) for name in "aabcd"))
    counters = log.finals()[0][CANARY]["all", ""]["counters"]
    assert counters == {"requests": 2, "duplicate": 1, "uncounted": 2}


def test_what_waits_for_a_flush_is_bounded_by_bytes() -> None:
    for size_bytes, waiting in ((BYTES_AT_ONCE - 1, 1), (BYTES_AT_ONCE, 0)):
        source = MeasureSource(Topic.REQUESTS, 0, SETTINGS)
        decoded = decode_requests(msgspec.json.encode([request()]), JSON)
        source.read(RecordMeta(0, T + S, 0), decoded)  # closes all seconds before it
        source.read(RecordMeta(1, T + S, size_bytes), decoded)
        assert source.gauges()["events_waiting"] == waiting


def test_telemetry_goes_to_every_gating_partition_by_node() -> None:
    log = Log(Topic.TELEMETRY)
    event = {"v": 1, "node": "n1", "ts_us": T, "engine": {"kv_usage": 0.25, "running": 3}}
    log.append(T + S, event, event, {**event, "node": "n2", "ts_us": T + 99 * S})
    held = log.finals()
    assert held[0][None]["node", "n1"]["counters"] == {"events": 1}
    assert held[0][None]["node", "n1"]["measures"]["kv_usage"]["sum"] == 1 << 28
    assert held[0][None]["all", ""]["counters"] == {"duplicate": 1}
    assert held[6][None]["node", "n2"]["counters"] == {"events": 1, "cut": 1}


def test_everything_held_is_let_go() -> None:
    log = Log()
    for n in range(50):
        log.append(T + n * S, request(pair_id=f"{n}", ts_us=T + n * S), dropped={"chat/canary": 1})
    held = log.source.gauges()
    assert held["open_seconds"] <= 4
    assert held["event_keys"] <= 4
    log.append(T + 200 * S)
    log.append(T + 206 * S, dropped={"chat/canary": 1})
    log.source.take_flush()
    gauges = log.source.gauges()
    assert (gauges["open_seconds"], gauges["event_keys"], gauges["reports"]) == (1, 0, 1)
    assert gauges["finals_waiting"] == 0


def flushes(topic: Topic, partitions: list[list[dict[str, Any]]], *, together: bool) -> list[Any]:
    """What sources say that read a record in turn and are flushed now and then."""
    capped, table = replace(SETTINGS, cells_per_bucket=20), CellTable() if together else None
    sources = [MeasureSource(topic, number, capped, table) for number in range(len(partitions))]
    said: list[Any] = []
    for turn, records in enumerate(zip_longest(*partitions)):
        for source, record in zip(sources, records, strict=True):
            if record is not None:
                scenarios.feed(source, topic, record)
        if turn % 3 == 0:
            if together:
                prepare_together(sources)
            said += [source.take_flush() for source in sources]
    return said


@pytest.mark.parametrize("topic", [Topic.REQUESTS, Topic.TELEMETRY])
@pytest.mark.parametrize("at_once", [4, measuring.EVENTS_AT_ONCE])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5, deadline=None)
def test_sources_that_are_prepared_together_say_what_they_say_alone(
    topic: Topic, at_once: int, seed: int
) -> None:
    partitions = scenarios.make_log(seed, topic, scenarios.Shape(seconds=20), SETTINGS, partitions=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "EVENTS_AT_ONCE", at_once)
        alone = flushes(topic, partitions, together=False)
        assert any(flush.finals for flush in alone)
        assert flushes(topic, partitions, together=True) == alone


def test_a_source_that_is_dropped_gives_back_its_cells() -> None:
    table = CellTable()
    source = MeasureSource(Topic.REQUESTS, 0, SETTINGS, table)
    source.read(RecordMeta(0, T + S, 100), decode_requests(msgspec.json.encode([request()]), JSON))
    source.take_flush()
    assert table.taken == source.gauges()["cells"] > 0
    source.give_back()
    assert table.taken == 0


def test_a_record_without_an_event_is_not_kept() -> None:
    """Malformed, say: a partition that gets nothing else would keep them all."""
    source = MeasureSource(Topic.REQUESTS, 0, SETTINGS)
    for offset in range(3):
        source.read(RecordMeta(offset, T, 100), decode_requests(b"{", JSON))
    source.take_flush()
    assert source.hand_over() == []
