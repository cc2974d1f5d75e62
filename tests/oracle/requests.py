"""Final buckets of requests and telemetry by one pass over the whole log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.oracle.cells import Contents, Population, Seconds, marginals, node_contexts, sampling_class
from tests.oracle.log import AHEAD_US, Record, Settings, closed_only, drops, is_open, with_log_time

SHARES = ("kv_usage", "internal", "external")


def request_seconds(records: Sequence[Record], settings: Settings, closed: bool = True) -> Contents:
    """Closed seconds → population → cell, of one partition of the requests."""
    seconds = Seconds(settings.cells_per_bucket)
    seen: set[Any] = set()
    reported = drops(records)
    for log_us, each in with_log_time(records):
        now = log_us // 1_000_000
        for rollout, arm, count in reported.get(each["offset"], ()):
            seconds.row(now, (rollout, None, arm, None, 0), [("all", "")], totals={"dropped": count})
        for event in each["events"] or ():
            population = _population(event)
            event_us = event["ts_us"] + event["duration_us"]
            limit_us = each["append_us"] + AHEAD_US
            second = min(event_us, limit_us) // 1_000_000
            if not is_open(second, log_us, settings):
                seconds.row(now, population, [("all", "")], totals={"late": 1})
                continue
            if event.get("pair_id") is not None:
                key = (second, event["rollout"], event["arm"], event["pair_id"])
            else:
                key = (second, event["rollout"], event["arm"], event["signature"], event["node"])
                key = (*key, event["ts_us"])
            if key in seen:
                seconds.row(second, population, [("all", "")], totals={"duplicate": 1})
                continue
            seen.add(key)
            _count(seconds, second, population, event, cut=event_us > limit_us)
    return closed_only(seconds.contents, records, settings) if closed else seconds.contents


def _population(event: dict[str, Any]) -> Population:
    return (event["rollout"], event.get("generation"), event["arm"], event["model_version"], 0)


def _count(seconds: Seconds, second: int, population: Population, event: dict[str, Any], cut: bool) -> None:
    failed = event["status"] >= 500 or event.get("error") is not None
    ttft = event.get("ttft_us")
    measures = {
        "duration_us": event["duration_us"],
        "input_tokens": event["input_tokens"],
        "output_tokens": event["output_tokens"],
    }
    if ttft is not None:
        measures["ttft_us"] = ttft
    if event.get("itl_us") is not None:
        measures["itl_us"] = event["itl_us"]
    cells = [
        *marginals(event),
        ("traffic", "shadow" if event["shadow"] else "user"),
        *node_contexts(event),
        ("stratum", _stratum(event)),
    ]
    seconds.row(
        second,
        population,
        cells,
        counters={"requests": 1, "errors": int(failed), "no_token": int(ttft is None)},
        totals={"cut": int(cut)},
        measures=measures,
    )


def _stratum(event: dict[str, Any]) -> str:
    tokens = event["input_tokens"]
    length = next((f"<={limit}" for limit in (512, 2048, 4096, 8192) if tokens <= limit), ">8192")
    cached = event.get("cached_tokens")
    if cached is None:
        cache = "unknown"
    elif cached == 0:
        cache = "none"
    elif tokens > 0 and cached / tokens < 0.5:
        cache = "part"
    else:
        cache = "most"
    return "|".join(
        (
            event.get("request_type") or "unknown",
            length,
            sampling_class(event),
            cache,
            event.get("hardware") or "unknown",
        )
    )


def telemetry_seconds(records: Sequence[Record], settings: Settings, closed: bool = True) -> Contents:
    """Closed seconds → None → node, of one partition of the telemetry."""
    seconds = Seconds(settings.cells_per_bucket)
    seen: set[Any] = set()
    for log_us, each in with_log_time(records):
        for event in each["events"] or ():
            limit_us = each["append_us"] + AHEAD_US
            second = min(event["ts_us"], limit_us) // 1_000_000
            if not is_open(second, log_us, settings):
                seconds.row(log_us // 1_000_000, None, [("all", "")], totals={"late": 1})
                continue
            key = (second, event["node"], event["ts_us"])
            if key in seen:
                seconds.row(second, None, [("all", "")], totals={"duplicate": 1})
                continue
            seen.add(key)
            seconds.row(
                second,
                None,
                [("node", event["node"])],
                counters={"events": 1, "cut": int(event["ts_us"] > limit_us)},
                measures={name: _scaled(name, value) for name, value in _gauges(event).items()},
            )
    return closed_only(seconds.contents, records, settings) if closed else seconds.contents


def _gauges(event: dict[str, Any]) -> dict[str, float]:
    engine = event.get("engine") or {}
    fragmentation = event.get("fragmentation") or {}
    gauges: dict[str, float] = {}
    for name in ("memory_used_bytes", "memory_total_bytes"):
        said = [gpu[name] for gpu in event.get("gpus", ()) if gpu.get(name) is not None]
        if said:
            gauges[name] = sum(said)
    for name in (
        "kv_usage", "kv_blocks_used", "kv_blocks_total", "kv_tokens_held",
        "running", "waiting", "preemptions", "oom_errors",
    ):  # fmt: skip
        if engine.get(name) is not None:
            gauges[name] = engine[name]
    if fragmentation.get("method") != "n/a":
        for name in ("internal", "external"):
            if fragmentation.get(name) is not None:
                gauges[name] = fragmentation[name]
    return gauges


def _scaled(name: str, value: float) -> int:
    return round(value * 2**30) if name in SHARES else min(round(value), 2**48)
