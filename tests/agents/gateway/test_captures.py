"""Real engines' answers, replayed byte for byte with their recorded timing, through the gateway.

What must come of them is read from the captured bodies by the few lines of this file, not by our own reader:
tokens (by id where the engine gives ids, else by bytes, else there is text alone and no logit event),
log-probabilities, token counts, the finish reason. A time to first token lies between two instants that the
test itself measures: when the replay server sent the last byte of the first event with a token, and when the
user had it. The user's bytes are the captured ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.gateway.pseudonyms import Pseudonyms
from agents.gateway.settings import EngineSettings, PoolSettings
from schemas.events import LogitEvent
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.harness import Running, running, until
from tests.agents.gateway.replay_server import Capture, Replays, captures, replaying

pytestmark = pytest.mark.shared

PSEUDONYMS = Pseudonyms(b"p" * 32, "p1")
"""Those of the harness."""
MOST_MS = 300.0
"""A capture that took longer is replayed faster, all of its times alike."""
NOT_LISTED = -9999.0
FOLDERS = (
    "llama-server_f16", "llama-server_q8_0", "llama-server_q4_0",
    "llama-cpp-python_f16", "llama-cpp-python_q4_0", "vllm",
)  # fmt: skip
TEXT_ONLY = ("llama-cpp-python", "vllm/completion_")
"""No ids and no bytes: llama-cpp-python, and every engine's legacy lists."""


@dataclass
class Expected:
    """What a body says, of choice 0 but for the counts."""

    emitted: list[Any] = field(default_factory=list)
    """Ids, or bytes; None for what has neither."""
    lists: list[dict[Any, float]] = field(default_factory=list)
    """{} where a list cannot be read: two of its tokens, or one and nothing, have the same identity."""
    counted: int = 0
    finish: str | None = None
    error: bool = False
    first_token_end: int | None = None
    """Offset behind the first event with a token."""


def events_of(body: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset behind it, what it says) of every event that is a JSON object."""
    at = 0
    for block in body.split(b"\n\n")[:-1]:
        at += len(block) + 2
        data = b"".join(line[6:] for line in block.split(b"\n") if line.startswith(b"data: "))
        if data.startswith(b"{"):
            yield at, json.loads(data)


def expected_of(capture: Capture) -> Expected:
    """Read by hand."""
    found = Expected()
    streamed = capture.body.startswith((b"data:", b":"))
    said = events_of(capture.body) if streamed else iter([(len(capture.body), json.loads(capture.body))])
    entries_of_all = usage = 0
    for end, chunk in said:
        found.error |= "error" in chunk
        usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
        for choice in chunk.get("choices", ()):
            entries = entries_in(choice)
            entries_of_all += len(entries)
            if found.first_token_end is None and streamed and entries:
                found.first_token_end = end
            if choice["index"] != 0:
                continue
            found.finish = choice["finish_reason"] or found.finish
            ids = choice.get("token_ids") or [None] * len(entries)
            for entry, token_id in zip(entries, ids, strict=True):
                # vLLM tells ids of emitted tokens alone: their lists go by bytes, and so do they if they can.
                known = identity(entry)
                found.emitted.append(token_id if known is None else known)
                found.lists.append(readable(entry.get("top_logprobs") or []))
    found.counted = usage or entries_of_all
    return found


def entries_in(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """One a token, in the chat shape; legacy lists have texts alone."""
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("content") or [{"token": token} for token in logprobs.get("tokens") or ()]


def identity(entry: dict[str, Any]) -> int | bytes | None:
    return entry["id"] if "id" in entry else bytes(entry.get("bytes") or ()) or None


def readable(top: list[dict[str, Any]]) -> dict[Any, float]:
    pairs = [(identity(one), one["logprob"]) for one in top if one["logprob"] > NOT_LISTED + 0.01]
    found = dict(pairs)
    return found if len(found) == len(pairs) and None not in found else {}


def revealed(event: LogitEvent) -> tuple[list[Any], list[dict[Any, float]]]:
    """The event's tokens and lists, by the key that tests have."""
    pair = PSEUDONYMS.of(str(event.pair_id))
    if event.tokens is not None:
        assert event.top_ids is not None
        tokens = pair.reveal(np.array(event.tokens)).tolist()
        tops = [pair.reveal(np.array(row, dtype=np.int64)).tolist() for row in event.top_ids]
    else:
        assert event.token_bytes is not None
        assert event.top_bytes is not None
        tokens = [pair.reveal_bytes(token) for token in event.token_bytes]
        tops = [[pair.reveal_bytes(token) for token in row] for row in event.top_bytes]
    lists = [dict(zip(ids, row, strict=True)) for ids, row in zip(tops, event.top_logprobs, strict=True)]
    return tokens, lists


@dataclass
class User:
    """What one user saw, and when: milliseconds since the request was sent."""

    status: int
    body: bytes
    seen: list[tuple[float, int]]
    """(when, bytes that were there by then)."""

    def had_ms(self, offset: int) -> float:
        """When the first `offset` bytes were there."""
        return next(at for at, size in self.seen if size >= offset)


async def ask(through: Running, capture: Capture) -> User:
    clock = asyncio.get_running_loop().time
    started_s = clock()
    user = User(0, b"", [])
    async with through.client.post(through.url + capture.path, json=dict(capture.request)) as answer:
        user.status = answer.status
        async for part in answer.content.iter_any():
            user.body += part
            user.seen.append(((clock() - started_s) * 1000, len(user.body)))
    return user


async def replayed(capture: Capture) -> None:
    """One capture through a gateway of its own, and everything that must come of it."""
    speed = max(1.0, capture.reads[-1][0] / MOST_MS) if capture.reads else 1.0
    async with AsyncExitStack() as exits:
        server, replays = await exits.enter_async_context(replaying([capture], speed=speed))
        canary = await exits.enter_async_context(FakeEngine(capture.kind).running())
        pools = tuple(
            PoolSettings(
                arm=arm,
                kind=capture.kind,
                model_version=version,
                engines=(EngineSettings(node=f"{arm}-1", url=url),),
            )
            for arm, version, url in (("baseline", "v1", server.url), ("canary", "v2", canary.url))
        )
        through = await exits.enter_async_context(running((), lambda: pools))
        user = await ask(through, capture)
        assert (user.status, user.body) == (capture.status, capture.body)
        await until(lambda: len(through.requests()) == 2)
        expected = expected_of(capture)
        check_request(capture, expected, through, user, replays)
        check_logits(capture, expected, through)


def check_request(
    capture: Capture, expected: Expected, through: Running, user: User, replays: Replays
) -> None:
    (event,) = [one for one in through.requests() if one.arm == "baseline"]
    assert event.status == capture.status
    assert not event.shadow
    assert (event.error is not None) == expected.error
    assert event.finish_reason == expected.finish
    assert event.output_tokens == expected.counted
    assert event.stream == bool(capture.request.get("stream"))
    if expected.first_token_end is None:
        assert event.ttft_us is None
        return
    assert event.ttft_us is not None
    part = max(i for i, (_, offset) in enumerate(capture.reads) if offset < expected.first_token_end)
    assert replays.sent_ms[capture.name][part] * 1000 - 1 <= event.ttft_us
    assert event.ttft_us <= user.had_ms(expected.first_token_end) * 1000 + 1
    assert event.ttft_us <= event.duration_us


def check_logits(capture: Capture, expected: Expected, through: Running) -> None:
    events = [one for one in through.logits() if one.arm == "baseline"]
    if capture.name.startswith(TEXT_ONLY) or expected.error:
        assert not events
        return
    (event,) = events
    tokens, lists = revealed(event)
    # A token with neither id nor bytes is told by a stand-in: it is none of the others, and no bytes.
    assert [token for token, want in zip(tokens, expected.emitted, strict=True) if want is not None] == [
        want for want in expected.emitted if want is not None
    ]
    assert all(
        isinstance(token, int) for token, want in zip(tokens, expected.emitted, strict=True) if want is None
    )
    assert lists == expected.lists
    assert event.expected_arms == ("baseline", "canary")


@pytest.mark.parametrize("folder", FOLDERS)
async def test_every_capture_comes_through_as_it_was_recorded(shared_dir: Path, folder: str) -> None:
    found = [one for one in captures(shared_dir) if one.name.startswith(f"{folder}/")]
    assert found, "no captures in this folder"
    outcomes = await asyncio.gather(*map(replayed, found), return_exceptions=True)
    for capture, outcome in zip(found, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            outcome.add_note(capture.name)
            raise outcome


def test_no_folder_of_captures_is_left_out(shared_dir: Path) -> None:
    assert {one.name.partition("/")[0] for one in captures(shared_dir)} <= set(FOLDERS)
