"""The offline oracle: plain, slow Python over a topic's records, written from the design's texts.

It shares no code with the pipeline: own bins, own divergences, own joining, own caps. A record is a dict:
`offset`, `append_us`, `size_bytes`, `events` (list of JSON objects; None for a tick) and `producer`
(`producer_id`, `sequence`, `dropped` or None). `record()` makes one from what a consumer hands out.
"""

from __future__ import annotations

from tests.oracle.log import Settings, record
from tests.oracle.pairs import logit_seconds
from tests.oracle.requests import request_seconds, telemetry_seconds

__all__ = ["Settings", "logit_seconds", "record", "request_seconds", "telemetry_seconds"]
