"""`klaxon watch`: which directives are told, and how."""

from __future__ import annotations

import json

import msgspec
from msgspec.structs import replace

from pipeline.cli.watch import Shown, line
from pipeline.workers.records import Record
from schemas.control import Cause, Directive, Located
from schemas.topics import Topic

DIRECTIVE = Directive(
    rollout="chat", generation=1, epoch=1, ts_us=1_700_000_000_000_000, lease_until_us=1, dead_man_us=1,
    state="observing", weights={"v1": 99.0, "v2": 1.0}, last_promoted={"v1": 100.0}, fallback="v1",
)  # fmt: skip
CAUSE = Cause(
    rule="G3-divergence", metric="kl_lower mean", value=0.14, limit=0.05, window_us=300_000_000, samples=120,
    scope="node_context=c-3|>2048", located=Located(
        dimension="node_context", value="c-3|>2048", share_of_excess=0.97, share_of_traffic=0.04
    ), also=("G5-slow-share",),
)  # fmt: skip


def record(value: bytes) -> Record:
    return Record(
        topic=Topic.CONTROL,
        partition=0,
        offset=0,
        append_us=0,
        timestamp_type=1,
        headers={},
        key=b"chat",
        value=value,
    )


def told(shown: Shown, directive: Directive) -> bool:
    return shown.of(record(msgspec.json.encode(directive))) is not None


def test_renewals_are_left_out_unless_asked_for() -> None:
    renewed = replace(DIRECTIVE, epoch=2, ts_us=2, lease_until_us=2)
    paused = replace(DIRECTIVE, epoch=3, state="paused")
    shown = Shown(None, renewals=False)
    assert [told(shown, one) for one in (DIRECTIVE, renewed, paused)] == [True, False, True]
    shown = Shown(None, renewals=True)
    assert [told(shown, one) for one in (DIRECTIVE, renewed)] == [True, True]


def test_other_rollouts_and_foreign_records_are_left_out() -> None:
    shown = Shown("other", renewals=False)
    assert not told(shown, DIRECTIVE)
    assert shown.of(record(b"{}")) is None
    assert shown.of(record(b"\xff")) is None


def test_a_line_says_why() -> None:
    tripped = replace(DIRECTIVE, state="tripped", weights={"v1": 100.0, "v2": 0.0}, cause=CAUSE, level=1)
    text = line(tripped, as_json=False)
    for part in (
        "chat generation 1 epoch 1",
        "tripped",
        "v1 100 % · v2 0 %",
        "G3-divergence",
        "kl_lower mean 0.14 > 0.05 over 300 s",
        "120 samples",
        "located in node_context c-3|>2048 (97% of the excess, 4% of the traffic)",
        "also G5-slow-share",
    ):
        assert part in text
    assert "\n" not in text
    assert json.loads(line(tripped, as_json=True))["cause"]["located"]["value"] == "c-3|>2048"
