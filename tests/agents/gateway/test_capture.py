"""Answers read as they pass: real ones at any cut, hand-written ones with every trap, and garbage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.gateway.asking import ALL_OURS, NOTHING_ADDED, Added
from agents.gateway.capture import Captured
from tests.agents.gateway.captures import Recorded, capture, load, recorded

pytestmark = pytest.mark.shared

EVERY_BYTE = (
    "llama-cpp-python_f16/chat_one_token.sse",
    "llama-server_f16/chat_one_token.sse",
    "llama-server_q4_0/chat_stop.sse",
    "vllm/error_mid_stream.sse",
    "vllm/error_in_stream_from_start.sse",
)


def plain_events(body: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Chunks and the offset of their last byte, by another way: bodies here are framed by two line feeds."""
    found, end = [], 0
    for part in body.split(b"\n\n"):
        end += len(part) + 2
        lines = [line.removeprefix(b"data: ") for line in part.split(b"\n") if line.startswith(b"data: ")]
        if lines and lines[0] != b"[DONE]":
            found.append((end - 1, json.loads(lines[0])))
    return found


def items_of(choice: dict[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Token, log-probability and candidates of a chunk's choice."""
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [
            (item["token"], item["logprob"], [(e["token"], e["logprob"]) for e in item["top_logprobs"]])
            for item in logprobs["content"]
        ]
    return [
        (token, value, list(top.items()))
        for token, value, top in zip(
            logprobs.get("tokens", ()),
            logprobs.get("token_logprobs", ()),
            logprobs.get("top_logprobs", ()),
            strict=True,
        )
    ]


def arrived(of: Recorded, offset: int) -> int:
    """When the byte at this offset came."""
    return max(at_us for at_us, start in of.reads if start <= offset)


@pytest.fixture(scope="module")
def everything(shared_dir: Path) -> list[Recorded]:
    return recorded(shared_dir)


def test_tokens_times_and_logprobs_of_every_real_stream(everything: list[Recorded]) -> None:
    """As a reading by another way has them."""
    streams = [one for one in everything if one.name.endswith(".sse") and "error" not in one.name]
    assert len(streams) > 30
    for one in streams:
        got, said = capture(one.kind, one.asked, ALL_OURS, one.pieces())
        assert got == one.body, one.name
        timed, listed, text, counted = [], [], "", 0
        for last_byte, chunk in plain_events(one.body):
            for choice in chunk["choices"]:
                items = items_of(choice)
                written = choice["text"] if "text" in choice else choice["delta"].get("content")
                if items or written:
                    timed.append(arrived(one, last_byte))
                counted += len(items)
                if choice["index"] == 0:
                    listed += items
                    text += written or ""
        assert (said.first_token_us, said.last_token_us) == (timed[0], timed[-1]), one.name
        assert said.text == text
        usage = next((c["usage"] for _, c in plain_events(one.body) if c.get("usage")), None)
        assert said.output_tokens == (usage["completion_tokens"] if usage else counted), one.name
        assert said.error is None
        if said.answer is not None:
            values = [[value for _, value in position.entries] for position in said.answer.generated]
            assert values == [[value for _, value in top] for _, _, top in listed], one.name


def test_what_cannot_be_compared_is_still_counted_and_timed(everything: list[Recorded]) -> None:
    """llama-cpp-python names tokens by text alone, as vLLM's legacy endpoint does."""
    without = {one.name for one in everything if captured_of(one).answer is None}
    assert without == {
        one.name
        for one in everything
        if one.kind == "llama-cpp-python" or one.name.startswith(("vllm/completion_s", "vllm/error_"))
    }


def captured_of(one: Recorded, *cuts: int) -> Captured:
    got, said = capture(one.kind, one.asked, ALL_OURS, one.pieces(*cuts))
    assert got == one.body
    return said


@pytest.mark.parametrize("name", EVERY_BYTE)
def test_a_cut_at_every_byte_changes_nothing(shared_dir: Path, name: str) -> None:
    one = load(shared_dir / "data" / "sse", name)
    whole = captured_of(one)
    for cut in range(1, len(one.body)):
        assert captured_of(one, cut) == whole, cut


@pytest.mark.slow
def test_every_real_answer_byte_by_byte(everything: list[Recorded]) -> None:
    for one in everything:
        assert captured_of(one, *range(len(one.body))) == captured_of(one), one.name


@settings(max_examples=150)
@given(data=st.data())
def test_any_cuts_of_any_real_answer_change_nothing(everything: list[Recorded], data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(everything))
    cuts = data.draw(st.lists(st.integers(0, len(one.body)), max_size=20))
    assert captured_of(one, *cuts) == captured_of(one)


def broken(body: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """With bytes taken out and others put in at these places."""
    for at, taken, put in changes:
        at %= len(body) + 1
        body = body[:at] + put + body[at + taken :]
    return body


JSON_SCRAPS = (b'"', b"}", b"]}", b"{", b"null", b'"logprobs":{}', b'"id":', b"-9999.0", b"1e999")
scraps = st.binary(max_size=6) | st.sampled_from([b"\n\n", b"\r\n", b"data: ", *JSON_SCRAPS])
changes = st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 40), scraps), min_size=1, max_size=8)


@settings(max_examples=300)
@given(data=st.data(), changed=changes, cuts=st.lists(st.integers(0, 60_000), max_size=6))
def test_broken_real_answers_never_raise(
    everything: list[Recorded],
    data: st.DataObject,
    changed: list[tuple[int, int, bytes]],
    cuts: list[int],
) -> None:
    """Where nothing was added the user gets what came; at any cut the same is learnt."""
    one = data.draw(st.sampled_from(everything))
    body = broken(one.body, changed)
    pieces = Recorded(one.name, one.kind, one.asked, body, ((0, 0),)).pieces(*cuts)
    for added in (ALL_OURS, NOTHING_ADDED, Added("full", logprobs=True, token_ids=True, usage=True)):
        got, said = capture(one.kind, one.asked, added, pieces)
        assert (got, said) == capture(one.kind, one.asked, added, [(0, body)])
        assert added.logprobs or got == body
        assert said.output_tokens >= 0
