"""JSON events for tests of the workers."""

from __future__ import annotations

import json
import time
from typing import Any

SIGNATURE = "0123456789abcdef0123456789abcdef"
AHEAD_S = 4
"""Less than the 5 s by which an event may be ahead of its record. Its second is open that much longer: a
machine that stands still between an event's making and its record's writing makes no event late."""


def soon_us() -> int:
    """The time of events that must not be late, in µs: AHEAD_S from now."""
    return time.time_ns() // 1000 + AHEAD_S * 1_000_000


def request(ts_us: int, **changes: Any) -> dict[str, Any]:
    """A valid request event."""
    event: dict[str, Any] = {
        "v": 1,
        "rollout": "r1",
        "generation": 1,
        "arm": "canary",
        "pair_id": f"p{ts_us}",
        "signature": SIGNATURE,
        "ts_us": ts_us,
        "duration_us": 1000,
        "node": "n1",
        "input_tokens": 100,
        "model_version": "m2",
        "shadow": False,
        "status": 200,
        "ttft_us": 50_000,
        "output_tokens": 10,
    }
    return {key: value for key, value in {**event, **changes}.items() if value is not None}


def encoded(event: dict[str, Any] | list[dict[str, Any]]) -> bytes:
    """As a record's value."""
    return json.dumps(event).encode()


def answer(ts_us: int, arm: str, pair_id: str, *, bad: bool = False, **changes: Any) -> dict[str, Any]:
    """A valid logit event of four positions; the canary's `bad` answers diverge by about 2 nats each."""
    likely, unlikely = (-2.3026, -0.1054) if bad else (-0.1054, -2.3026)
    event: dict[str, Any] = {
        "v": 1,
        "rollout": "r1",
        "generation": 1,
        "arm": arm,
        "pair_id": pair_id,
        "signature": SIGNATURE,
        "ts_us": ts_us,
        "duration_us": 1000,
        "node": f"{arm}-1",
        "input_tokens": 3000,
        "model_version": "m1" if arm != "canary" else "m2",
        "expected_arms": ["baseline", "canary"],
        "definition": "raw",
        "source": "generated",
        "tokens": [1, 1, 1, 1],
        "top_ids": [[1, 2]] * 4,
        "top_logprobs": [[likely, unlikely]] * 4,
    }
    return {key: value for key, value in {**event, **changes}.items() if value is not None}


POLICY = """
version: 1
rules:
  - id: G3-divergence
    capability: G3
    metric: kl_lower
    statistic: mean
    window: 10s
    limit: 0.05
    min_samples: 10
    scope: [rollout, node]
    action: rollback_l1
    mode: enforce
"""


def start_command(command_id: str = "c1", policy: str = POLICY) -> dict[str, Any]:
    """A `start` command of roll-out r1."""
    return {
        "v": 1,
        "command_id": command_id,
        "rollout": "r1",
        "ts_us": time.time_ns() // 1000,
        "command": "start",
        "by": "test",
        "arguments": {
            "spec": {
                "rollout": "r1",
                "arms": {
                    "baseline": {"model_version": "m1", "nodes": ["baseline-*"]},
                    "canary": {"model_version": "m2", "nodes": ["canary-*"]},
                },
                "fallback": "m1",
                "policy": policy,
            }
        },
    }
