"""A small log for the archive's tests: records made from plain dictionaries, and what tables must hold."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.buckets import Cell, Distribution, FinalBuckets, Population, PopulationCells, Second
from schemas.control import Decision, Inputs
from schemas.pairs import PairBatch
from schemas.topics import JSON, TICK, Topic

START_US = 1_790_000_000_000_000
DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A Kafka record as the archive sees it, and how many rows it must leave."""

    offset: int
    append_us: int
    value: bytes
    content_type: str | None = JSON
    key: bytes | None = None
    rows: int = 0


def request(**changes: Any) -> dict[str, Any]:
    event = {
        "v": 1,
        "rollout": "r1",
        "arm": "canary",
        "signature": "0" * 31 + "a",
        "ts_us": START_US,
        "duration_us": 1_000_000,
        "node": "node-1",
        "input_tokens": 100,
        "model_version": "m2",
        "shadow": True,
        "status": 200,
        "output_tokens": 10,
    }
    return {**event, **changes}


def request_log(seed: int, records: int) -> list[LogRecord]:
    """Batches of 1-9 events with ticks, unreadable events, holes in the offsets, and a midnight."""
    rng = random.Random(seed)
    log, offset, append_us = [], rng.randrange(3), START_US // DAY_US * DAY_US + DAY_US - 5_000_000
    for _ in range(records):
        append_us += rng.randrange(1, 400_000)
        kind = rng.random()
        if kind < 0.15:
            log.append(LogRecord(offset, append_us, b"", TICK))
        elif kind < 0.2:
            log.append(LogRecord(offset, append_us, b"[broken"))
        else:
            events = [request(signature=f"{rng.getrandbits(128):032x}") for _ in range(rng.randint(1, 9))]
            bad = {i for i in range(len(events)) if rng.random() < 0.1}
            for index in bad:
                del events[index]["node"]
            value = json.dumps(events).encode()
            log.append(LogRecord(offset, append_us, value, rows=len(events) - len(bad)))
        offset += 1 if rng.random() < 0.9 else rng.randint(2, 4)
    return log


def expected_places(log: list[LogRecord]) -> list[tuple[int, int]]:
    """(off, pos) of every event that can be read, by plain JSON."""
    places = []
    for record in log:
        if record.content_type == TICK or not record.rows:
            continue
        for position, event in enumerate(json.loads(record.value)):
            if "node" in event:
                places.append((record.offset, position))
    return sorted(places)


def pair_batch(n: int = 2, **changes: Any) -> PairBatch:
    fields: dict[str, Any] = {
        "v": 1,
        "partition": 3,
        "offset": 700,
        "estimator": "kl_lower/1",
        "dictionary": ["r1", "m2", "m1", "node-1", "node-0", "chat"],
        "rollout": [0] * n,
        "arm": [1] * n,
        "generation": [1] * n,
        "model_version": [1] * n,
        "baseline_version": [2] * n,
        "differs": [1] * n,
        "node": [3] * n,
        "baseline_node": [4] * n,
        "request_type": [5] + [None] * (n - 1),
        "input_tokens": [2049] * n,
        "signature": [bytes([i]) * 16 for i in range(n)],
        "pair_id": [bytes([i + 100]) * 16 for i in range(n - 1)] + [None],
        "event_us": [START_US + i for i in range(n)],
        "formed_us": [START_US + 10] * n,
        "first_offset": [600 + i for i in range(n)],
        "first_position": list(range(n)),
        "positions": [12] * n,
        "agreed": [11] * n,
        "first_difference": [11] + [None] * (n - 1),
        "ended_together": [True] + [None] * (n - 1),
        "late": [False] * n,
        "kl_lower": [1 << 29] * n,
        "kl_lower_max": [1 << 30] * n,
        "kl_floor": [3 << 30] * n,
        "js_lower": [1] * n,
        "tv_lower": [0] * n,
        "cosine": [1 << 30] * n,
        "top1_agree": [1 << 30] * n,
        "control_kl_lower": [1 << 28] + [None] * (n - 1),
    }
    return PairBatch(**{**fields, **changes})


def final(**changes: Any) -> FinalBuckets:
    population = Population("r1", None, "canary", "m2", 1)
    cell = Cell(
        "node",
        "node-1",
        {"pairs": 3, "renormalised": 0},
        {
            "kl_lower": Distribution(3, 300, 50, 200, [4, 9], [2, 1]),
            "positions": Distribution(3, 36, 12, 12, [], []),
        },
        [(200, b"\x01" * 16), (50, b"\x02" * 16)],
    )
    seconds = [
        Second(
            1_790_000_000,
            [PopulationCells(population, [cell]), PopulationCells(None, [Cell("node", "n", {}, {}, [])])],
        )
    ]
    fields: dict[str, Any] = {
        "v": 1,
        "topic": Topic.LOGITS.value,
        "partition": 2,
        "gating_partition": 1,
        "closed_from": 1_789_999_990,
        "closed_through": 1_790_000_000,
        "whole_from": 0,
        "offset": 77,
        "settings_hash": "abc",
        "part": 0,
        "parts": 1,
        "seconds": seconds,
    }
    return FinalBuckets(**{**fields, **changes})


def refused_decision() -> Decision:
    inputs = Inputs(offsets={"klaxon.logits/0": 5}, command_offset=4, complete_through=-1, now_us=START_US)
    return Decision(
        kind="refused", directive=None, inputs=inputs, command_id="c-1", reason="no such roll-out"
    )


def packed(record: Any) -> bytes:
    return msgspec.msgpack.encode(record)
