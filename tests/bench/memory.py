"""What a source holds in memory: per half that waits, per cell of a bucket; and that the bounds bind."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from pipeline.core.measuring import SECONDS_AT_ONCE, MeasureSource
from pipeline.core.pairing import PairSource
from pipeline.core.source import WAITING_BYTES, ContentSettings, RecordMeta
from schemas.codec import (
    decode_logits,
    decode_requests,
    encode_logits,
    encode_requests,
    logit_columns,
    request_columns,
)
from schemas.columns import U1, BatchHeader
from schemas.events import LogitEvent, RequestEvent
from schemas.topics import COLUMNS, Topic
from tests.bench.rows import Row, row

SETTINGS: Final = ContentSettings()
HALVES: Final = 100_000
HALVES_PER_RECORD: Final = 64
POSITIONS, TOP = 64, 5
SECONDS: Final = 8
EVENTS: Final = 6_000
"""Requests of one second."""
NODES: Final = 300
MANY_NODES: Final = 3_000
"""More than a bucket has room for."""
START_US: Final = 1_790_000_000_000_000
HEADER: Final = BatchHeader("bench", 0, {})
CATCH_ALLS: Final = 3
"""Cells beside the bounded ones: one an arm, for populations without room."""
OPEN_SECONDS: Final = SETTINGS.lateness_us // 1_000_000 + 5 + 2 + SECONDS_AT_ONCE
"""Lateness, what an event's time may lie ahead, the seconds begun at both ends, and what closes at once."""
MIB: Final = 1 << 20


def memory(quick: bool) -> list[Row]:
    """Bytes by tracemalloc, which sees numpy's too: everything held once the traffic has been read."""
    part = 5 if quick else 1
    halves = _Halves(HALVES // part, WAITING_BYTES // part)
    cell_bytes = _cell_bytes()
    return [
        row("memory.waiting_half", halves.per_half, "bytes"),
        row("memory.waiting_half_in_its_record", halves.record_bytes, "bytes"),
        row("memory.log_waited_through", halves.waited_bytes / MIB, "MiB", ceiling=halves.limit / MIB),
        row(
            "memory.waiting_halves_at_most",
            halves.per_half * WAITING_BYTES / halves.record_bytes / MIB,
            "MiB/partition",
        ),
        row("memory.cell", cell_bytes, "bytes"),
        row(
            "memory.cells_of_a_second",
            _fullest_second(),
            "cells",
            ceiling=SETTINGS.cells_per_bucket + CATCH_ALLS,
        ),
        row(
            "memory.cells_at_most",
            cell_bytes * SETTINGS.cells_per_bucket * OPEN_SECONDS / MIB,
            "MiB/partition",
        ),
    ]


class _Halves:
    """Baseline halves that no canary ever answers, in records of 64."""

    def __init__(self, count: int, limit: int) -> None:
        records = list(_records_of_halves(count // HALVES_PER_RECORD))
        source = PairSource(Topic.LOGITS, 0, SETTINGS, waiting_bytes=limit)

        def read() -> None:
            for number, value in enumerate(records):
                # A copy, as a consumer's: a record's bytes live as long as its columns.
                decoded = decode_logits(bytes(bytearray(value)), COLUMNS)
                source.read(RecordMeta(number, START_US + number * 1_000, len(value)), decoded)
                source.take_flush()

        held = _held(read)
        gauges = source.gauges()
        self.limit = limit
        self.waited_bytes = gauges["waiting_bytes"]
        self.per_half = held / gauges["open_groups"]
        self.record_bytes = len(records[0]) / HALVES_PER_RECORD


def _cell_bytes() -> float:
    """The same requests of many nodes and of one: what they differ in are the cells."""
    many, one = _read_requests(NODES), _read_requests(1)
    return (many[0] - one[0]) / (many[1] - one[1])


def _fullest_second() -> int:
    """Cells of a second in which far more than may be held were claimed."""
    source = MeasureSource(Topic.REQUESTS, 0, SETTINGS)
    (value,) = _records_of_requests(MANY_NODES, 1)
    source.read(RecordMeta(0, START_US + 900_000, len(value)), decode_requests(value, COLUMNS))
    return source.gauges()["cells"]


def _read_requests(nodes: int) -> tuple[int, int]:
    """Bytes held, and cells."""
    records = list(_records_of_requests(nodes, SECONDS))
    source = MeasureSource(Topic.REQUESTS, 0, SETTINGS)

    def read() -> None:
        for second, value in enumerate(records):
            meta = RecordMeta(second, START_US + second * 1_000_000 + 900_000, len(value))
            source.read(meta, decode_requests(value, COLUMNS))
            source.take_flush()

    held = _held(read)
    return held, source.gauges()["cells"]


def _held(action: Callable[[], None]) -> int:
    """Bytes allocated by the action and not freed."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        action()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def _records_of_halves(count: int) -> Iterator[bytes]:
    """The same answers again and again, each time of other prompts."""
    lists = tuple(tuple(range(first, first + TOP)) for first in range(0, POSITIONS * TOP, TOP))
    event = LogitEvent(
        v=1,
        rollout="bench",
        arm="baseline",
        signature="0" * 32,
        pair_id="0" * 32,
        ts_us=START_US,
        duration_us=0,
        node="baseline-0",
        input_tokens=100,
        model_version="m1",
        expected_arms=("baseline", "canary"),
        definition="raw",
        source="generated",
        tokens=tuple(each[0] for each in lists),
        top_ids=lists,
        top_logprobs=((-0.25, -2.0, -3.0, -4.0, -5.0),) * POSITIONS,
    )
    columns = logit_columns([event] * HALVES_PER_RECORD)
    for number in range(count):
        ids = _ids(number * HALVES_PER_RECORD, HALVES_PER_RECORD)
        yield encode_logits(dataclasses.replace(columns, signature=ids, pair_id=ids), HEADER)


def _records_of_requests(nodes: int, seconds: int) -> Iterator[bytes]:
    """The same requests every second, each time of other prompts."""
    events: Sequence[RequestEvent] = [
        RequestEvent(
            v=1,
            rollout="bench",
            arm="canary",
            signature="0" * 32,
            pair_id="0" * 32,
            ts_us=START_US,
            duration_us=400_000 + at * 17 % 500_000,
            node=f"canary-{at % nodes}",
            input_tokens=100 + at * 13 % 9_000,
            model_version="m2",
            shadow=False,
            status=200,
            ttft_us=50_000 + at * 29 % 400_000,
            output_tokens=at % 300,
        )
        for at in range(EVENTS)
    ]
    columns = request_columns(events)
    for second in range(seconds):
        ids = _ids(second * EVENTS, EVENTS)
        ts_us = columns.ts_us + second * 1_000_000
        yield encode_requests(dataclasses.replace(columns, signature=ids, pair_id=ids, ts_us=ts_us), HEADER)


def _ids(first: int, count: int) -> U1:
    """So many different ids of 16 bytes."""
    numbers = np.zeros((count, 2), dtype=">u8")
    numbers[:, 1] = np.arange(first, first + count)
    return numbers.view(np.uint8)
