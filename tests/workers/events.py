"""JSON events for tests of the workers."""

from __future__ import annotations

import json
from typing import Any

SIGNATURE = "0123456789abcdef0123456789abcdef"


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
