"""Recordings are read strictly; the fleet passes them on unchanged; the shipped one shows its fault."""

from __future__ import annotations

import gzip
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.demo.fleet import FAULTY_NODE, HEALTHY, NODES, VERSIONS, Fleet, Routing, rollout_spec
from pipeline.cli.demo.recording import RecordingError, read_recording
from pipeline.cli.demo.traffic import Arrival

ABOUT = {
    "recording": 1,
    "model": "m",
    "engine": "e",
    "definition": "raw",
    "precision": 6,
    "boundary_tokens": 2048,
}


def answer(prompt_id: str, side: str, variant: str, **changes: Any) -> dict[str, Any]:
    made = {
        "prompt_id": prompt_id,
        "side": side,
        "variant": variant,
        "input_tokens": 120 if side == "short" else 2100,
        "cached_tokens": 100,
        "ttft_us": 400,
        "duration_us": 900,
        "ended": False,
        "tokens": [7, 8],
        "top_ids": [[7, 1], [8, 2]],
        "top_logprobs": [[-0.1, -3.0], [-0.2, -2.5]],
    }
    return made | changes


def lines(duration_us: int = 900) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [ABOUT]
    for side in ("short", "long"):
        for variant in ("baseline", "healthy", "control", "fault"):
            token = 9 if variant == "fault" else 7
            rows.append(
                answer(f"{side}-a", side, variant, duration_us=duration_us)
                | {"tokens": [token, 8], "top_ids": [[token, 1], [8, 2]]}
            )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in rows)))
    return path


def write_recording(folder: Path, duration_us: int = 900) -> Path:
    return write(folder / "answers.jsonl.gz", lines(duration_us))


def test_a_recording_has_both_sides_and_every_variant(tmp_path: Path) -> None:
    recording = read_recording(write_recording(tmp_path))
    assert [len(recording.prompts[side]) for side in ("short", "long")] == [1, 1]
    assert set(recording.prompts["long"][0].answers) == {"baseline", "healthy", "control", "fault"}
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(json.dumps(row) for row in lines()))
    assert read_recording(plain) == recording


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"empty"),
        ([{"recording": 2}], r":1: .*recording|:1: .*missing"),
        ([ABOUT, {"prompt_id": "x"}], r":2: "),
        ([ABOUT, answer("a", "short", "baseline", tokens=[1])], r":2: tokens, top_ids and top_logprobs"),
        ([ABOUT, answer("a", "short", "baseline", top_ids=[[7], [8]])], r":2: a position's ids"),
        ([ABOUT, answer("a", "short", "baseline", input_tokens=2049)], r":2: side 'short' with 2049"),
        ([ABOUT, answer("a", "long", "baseline", input_tokens=2048)], r":2: side 'long' with 2048"),
        ([ABOUT, answer("a", "short", "baseline", ttft_us=901)], r":2: ttft_us"),
        ([ABOUT, *[answer("a", "short", "baseline")] * 2], r":3: a has two answers of variant baseline"),
        ([ABOUT, answer("a", "short", "baseline")], r"prompt 'a' has no answer of healthy, control"),
        ([row for row in lines() if row.get("side") != "long"], r"no long prompts"),
        (
            [row for row in lines() if (row.get("side"), row.get("variant")) != ("long", "fault")],
            r"prompt 'long-a' has no answer of fault",
        ),
    ],
)
def test_what_is_wrong_with_a_recording_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(RecordingError, match=message):
        read_recording(write(tmp_path / "bad.jsonl.gz", rows))


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08broken", b"no gzip at all"])
def test_a_broken_archive_is_an_error_of_the_recording(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"cannot be read.*--recording"):
        read_recording(path)


def test_answers_travel_unchanged_and_only_the_faulty_node_damages_long_prompts(tmp_path: Path) -> None:
    recording = read_recording(write_recording(tmp_path))
    fleet = Fleet(recording, seed=1)
    affected = 0
    for i in range(400):
        long = i % 2 == 1
        arrival = Arrival(i, "chat", 2049 if long else 2048)
        served = fleet.serve(arrival, 5_000_000, Routing(1, 0.0), fault=True)
        prompt = recording.prompts["long" if long else "short"][0]
        assert {one.request.pair_id for one in served} == {served[0].request.pair_id}
        assert {one.request.signature for one in served} == {served[0].request.signature}
        for one in served:
            faulty = one.logit.arm == "canary" and one.logit.node == FAULTY_NODE and long
            assert one.affected == faulty
            variant = HEALTHY[one.logit.arm]
            replayed = prompt.answers["fault" if faulty else variant]
            assert (one.logit.tokens, one.logit.top_ids, one.logit.top_logprobs) == (
                replayed.tokens,
                replayed.top_ids,
                replayed.top_logprobs,
            )
            assert one.logit.expected_arms == tuple(each.logit.arm for each in served)
            assert one.logit.input_tokens == arrival.input_tokens
            affected += faulty
    assert affected > 20


def test_the_same_seed_gives_the_same_events(tmp_path: Path) -> None:
    recording = read_recording(write_recording(tmp_path))
    arrivals = [Arrival(i, "chat", 100 + i) for i in range(50)]

    def events(seed: int) -> list[Any]:
        fleet = Fleet(recording, seed)
        return [fleet.serve(arrival, 1, Routing(1, 10.0), fault=False) for arrival in arrivals]

    assert events(1) == events(1)
    assert events(1) != events(2)


def test_the_spec_covers_every_node_and_only_its_arm() -> None:
    spec = rollout_spec("version: 1\n")
    for arm in NODES:
        assert spec.arms[arm].model_version == VERSIONS[arm]
        for other, nodes in NODES.items():
            for node in nodes:
                assert any(fnmatchcase(node, pattern) for pattern in spec.arms[arm].nodes) == (arm == other)
