"""What the gate spends on one second of evidence, by number of roll-outs in its partition."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pipeline.core.gate.gating import GateCore
from pipeline.core.measuring import MeasureSource
from pipeline.core.pairing import PairSource
from pipeline.core.source import ContentSettings, Flush, RecordMeta
from schemas.buckets import FinalBuckets, FreshCells
from schemas.codec import (
    decode_logits,
    decode_requests,
    encode_logits,
    encode_requests,
    logit_columns,
    request_columns,
)
from schemas.columns import BatchHeader
from schemas.control import ArmSpec, Command, RolloutSpec
from schemas.events import Arm, LogitEvent, RequestEvent
from schemas.records import read_msgpack
from schemas.topics import COLUMNS, SOURCES, Topic
from tests.bench.rows import Row, row
from tests.core.gate.build import settings

ROLLOUTS: Final = (1, 5, 20)
PAIRS_PER_S: Final = 100
"""Of each roll-out."""
NODES: Final = 8
POSITIONS: Final = 4
FILL_S: Final = 320
"""More than the longest window of the shipped policy."""
QUICK_FILL_S: Final = 60
TIMED_S: Final = 20
SECOND_US: Final = 1_000_000
START_S: Final = 1_790_000_000
# One gating partition, so that all roll-outs are in it.
CONTENT: Final = ContentSettings(gating_partitions=1)
VERSIONS: Final[dict[Arm, str]] = {"baseline": "m1", "canary": "m2"}


def gate(quick: bool) -> list[Row]:
    """CPU ms of one complete second, and of one evaluation of a second that is still open; shipped policy."""
    complete: list[Row] = []
    fresh: list[Row] = []
    for rollouts in ROLLOUTS:
        second_ms, fresh_ms = _judged_ms(rollouts, QUICK_FILL_S if quick else FILL_S)
        complete.append(row(f"gate.complete_second_{rollouts}", second_ms, "ms"))
        fresh.append(row(f"gate.fresh_evaluation_{rollouts}", fresh_ms, "ms"))
    return complete + fresh


def _judged_ms(rollouts: int, fill_s: int) -> tuple[float, float]:
    """Median CPU ms per complete second and per fresh evaluation, with full windows."""
    finals, fresh = _one_second(rollouts)
    core = GateCore(
        0, dict.fromkeys((topic.value for topic in SOURCES), 1), settings(settings_hash=CONTENT.hash)
    )
    for number in range(rollouts):
        core.on_command(_start(f"bench-{number}"), number, START_S * SECOND_US)
    second_ms: list[float] = []
    fresh_ms: list[float] = []
    for second in range(fill_s):
        now_us = (START_S + second + 17) * SECOND_US
        started_ns = time.thread_time_ns()
        for final in finals:
            core.on_final(_final_at(final, START_S + second, first=second == 0))
        effects = core.judge_complete(now_us)
        second_ms.append((time.thread_time_ns() - started_ns) / 1e6)
        tripped = [one.name for one in effects if one.decision and one.decision.kind == "trip"]
        assert not tripped, f"healthy roll-outs tripped: {tripped}"
        core.renew(now_us)
        if second >= fill_s - TIMED_S:
            fresh_ms.append(_fresh_ms(core, fresh, START_S + second + 1, second, now_us))
    folded = core.gauges()["rollouts"]
    assert folded == rollouts, folded
    return median(second_ms[-TIMED_S:]), median(fresh_ms)


def _fresh_ms(core: GateCore, fresh: list[FreshCells], second: int, number: int, now_us: int) -> float:
    """One patch of the open second, and its judgement."""
    started_ns = time.thread_time_ns()
    for one in fresh:
        moved = [replace(held, second=second) for held in one.seconds]
        core.on_fresh(replace(one, offset=10_000 + number, seconds=moved))
    core.judge_fresh(now_us)
    return (time.thread_time_ns() - started_ns) / 1e6


def _final_at(final: FinalBuckets, second: int, *, first: bool) -> FinalBuckets:
    """The same content in another second; the first closes all before it."""
    return replace(
        final,
        closed_from=0 if first else second,
        closed_through=second,
        offset=second - START_S,
        seconds=[replace(held, second=second) for held in final.seconds],
    )


def _start(rollout: str) -> Command:
    arms = {arm: ArmSpec(model_version=version, nodes=(f"{arm}-*",)) for arm, version in VERSIONS.items()}
    spec = RolloutSpec(rollout=rollout, arms=arms, fallback="m1")
    return Command(
        v=1,
        command_id=f"{rollout}/start",
        rollout=rollout,
        ts_us=START_S * SECOND_US,
        command="start",
        arguments={"spec": msgspec.to_builtins(spec)},
        by="bench",
    )


def _one_second(rollouts: int) -> tuple[list[FinalBuckets], list[FreshCells]]:
    """What the workers publish of one second of traffic: made by their own sources."""
    requests, logits = _events(rollouts)
    header = BatchHeader("bench", 0, {})
    wire_requests = encode_requests(request_columns(requests), header)
    wire_logits = encode_logits(logit_columns(logits), header)
    measure = MeasureSource(Topic.REQUESTS, 0, CONTENT)
    pair = PairSource(Topic.LOGITS, 0, CONTENT)
    telemetry = MeasureSource(Topic.TELEMETRY, 0, CONTENT)
    at_us = (START_S + 1) * SECOND_US
    measure.read(RecordMeta(0, at_us, len(wire_requests)), decode_requests(wire_requests, COLUMNS))
    pair.read(RecordMeta(0, at_us, len(wire_logits)), decode_logits(wire_logits, COLUMNS))
    telemetry.read(RecordMeta(0, at_us, 0), None)
    fresh: list[FreshCells] = []
    finals: list[FinalBuckets] = []
    for source in (measure, pair, telemetry):
        flush: Flush = source.take_flush()
        fresh += (read_msgpack(each.value, FreshCells) for each in flush.fresh)
        # A tick after lateness closes the second and no other that holds anything.
        source.read(RecordMeta(1, at_us + CONTENT.lateness_us + 1_000, 0), None)
        finals += (read_msgpack(each.value, FinalBuckets) for each in source.take_flush().finals)
    return finals, fresh


def _events(rollouts: int) -> tuple[list[RequestEvent], list[LogitEvent]]:
    draw = random.Random(rollouts)
    requests, logits = [], []
    for labels in _labels(draw, rollouts):
        requests.append(
            RequestEvent(
                **labels,
                shadow=labels["arm"] == "canary",
                status=200,
                ttft_us=draw.randrange(50_000, 200_000),
                output_tokens=draw.randrange(500),
            )
        )
        less = 0.0 if labels["arm"] == "baseline" else abs(draw.gauss(0, 0.02))
        values = (-0.22 - less, -2.3, -3.2, -4.6, -5.3)
        logits.append(
            LogitEvent(
                **labels,
                expected_arms=("baseline", "canary"),
                definition="raw",
                source="generated",
                tokens=(0,) * POSITIONS,
                top_ids=((0, 1, 2, 3, 4),) * POSITIONS,
                top_logprobs=(values,) * POSITIONS,
            )
        )
    return requests, logits


def _labels(draw: random.Random, rollouts: int) -> Iterator[dict[str, Any]]:
    for number in range(rollouts):
        for _ in range(PAIRS_PER_S):
            ident = f"{draw.getrandbits(128):032x}"
            tokens, duration_us = draw.randrange(50, 9_000), draw.randrange(100_000, 900_000)
            for arm, version in VERSIONS.items():
                yield {
                    "v": 1,
                    "rollout": f"bench-{number}",
                    "generation": 1,
                    "arm": arm,
                    "pair_id": ident,
                    "signature": ident,
                    "ts_us": START_S * SECOND_US,
                    "duration_us": duration_us,
                    "node": f"{arm}-{draw.randrange(NODES)}",
                    "input_tokens": tokens,
                    "model_version": version,
                    "request_type": "chat",
                }
