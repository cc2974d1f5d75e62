"""Captured answers of real engines, replayed byte for byte with the timing they were captured with.

Captures are those of `shared/data/sse`: a body, the times and offsets of the reads it came in, its status
and headers, and the request it answered. The server knows a capture by the request's path and body, as far
as the capture's own body goes: what a gateway adds does not hide it.
"""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agents.gateway.wire import Asked, Reply, Server, serving

FRAMING = frozenset({"transfer-encoding", "content-length", "connection", "keep-alive", "date"})
KINDS = {"vllm": "vllm", "llama-server": "llama.cpp", "llama-cpp-python": "llama-cpp-python"}
PROMPT_KEYS = ("messages", "prompt")


@dataclass(frozen=True)
class Capture:
    """One captured exchange."""

    name: str
    """`folder/NAME`."""
    kind: str
    """As the gateway's settings name the engine."""
    path: str
    request: Mapping[str, Any]
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    reads: tuple[tuple[float, int], ...]
    """(milliseconds since the request was sent, offset in the body), ascending."""

    def parts(self) -> Iterator[tuple[float, bytes]]:
        """What came at which millisecond."""
        ends = [offset for _, offset in self.reads[1:]] + [len(self.body)]
        for (at_ms, start), end in zip(self.reads, ends, strict=True):
            yield at_ms, self.body[start:end]

    def at_ms(self, offset: int) -> float:
        """When the byte at this offset came."""
        return max(at for at, start in self.reads if start <= offset)


def captures(shared: Path) -> list[Capture]:
    """Every capture of a POST that the folder has, of all engines."""
    prompts = {}
    for line in (shared / "data" / "logits" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        prompts[prompt["id"]] = prompt["messages"]
    folder = shared / "data" / "sse"
    found = [_plain(path, prompts) for path in sorted(folder.glob("*/*.request.json"))]
    for path in sorted(folder.glob("*/*.meta.json")):
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["request"]["method"] == "POST":
            found.append(_with_meta(path, meta))
    return found


def _plain(path: Path, prompts: Mapping[str, Any]) -> Capture:
    """`NAME.request.json`, `.head.txt`, `.timing.csv` and the body."""
    base = path.with_name(path.name.removesuffix(".request.json"))
    asked = json.loads(path.read_text(encoding="utf-8"))
    request = dict(asked["body"])
    if "messages_of_prompt" in asked:
        request["messages"] = prompts[asked["messages_of_prompt"]]
    first, *lines = base.with_name(f"{base.name}.head.txt").read_text(encoding="utf-8").strip().splitlines()
    with base.with_name(f"{base.name}.timing.csv").open(encoding="utf-8") as rows:
        reads = tuple((float(row["ms"]), int(row["offset"])) for row in csv.DictReader(rows))
    headers = (line.partition(":") for line in lines)
    kind = KINDS[path.parent.name.partition("_")[0]]
    return Capture(
        f"{path.parent.name}/{base.name}",
        kind,
        asked["path"],
        request,
        int(first.split()[1]),
        tuple((name, value.strip()) for name, _, value in headers if name.lower() not in FRAMING),
        _body(base),
        reads,
    )


def _with_meta(path: Path, meta: Mapping[str, Any]) -> Capture:
    base = path.with_name(path.name.removesuffix(".meta.json"))
    body, response = _body(base), meta["response"]
    # The last read of some is the end of the body, which has no bytes.
    reads = tuple((at, offset) for at, offset in meta["reads"] if offset < len(body))
    return Capture(
        f"{path.parent.name}/{base.name}",
        KINDS[path.parent.name],
        meta["request"]["path"],
        meta["request"]["body"],
        response["status"],
        tuple((name, value) for name, value in response["headers"] if name.lower() not in FRAMING),
        body,
        reads,
    )


def _body(base: Path) -> bytes:
    for ending in (".sse", ".json"):
        path = base.with_name(base.name + ending)
        if path.exists():
            return path.read_bytes()
    raise FileNotFoundError(f"{base}: neither .sse nor .json")


@dataclass
class Replays:
    """Answers what was captured. What it was asked is kept for the test to look at."""

    captures: Sequence[Capture]
    speed: float
    """Times are divided by this."""
    asked: list[Asked] = field(default_factory=list)
    sent_ms: dict[str, list[float]] = field(default_factory=dict)
    """Capture's name → when each of its parts left, in milliseconds since the request had come."""

    async def answer(self, asked: Asked, reply: Reply) -> None:
        """One request."""
        self.asked.append(asked)
        capture = self._chosen(asked)
        if capture is None:
            body = b'{"error":{"message":"no such capture","type":"NotFoundError","code":404}}'
            reply.head(404, [("content-type", "application/json")], length=len(body))
            reply.write(body)
            return
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        sent = self.sent_ms[capture.name] = []
        streamed = capture.body.startswith((b"data:", b":"))
        reply.head(capture.status, capture.headers, length=None if streamed else len(capture.body))
        for at_ms, part in capture.parts():
            await asyncio.sleep(started_s + at_ms / 1000 / self.speed - loop.time())
            sent.append((loop.time() - started_s) * 1000)
            await reply.send(part)
        reply.end()

    def _chosen(self, asked: Asked) -> Capture | None:
        try:
            body = json.loads(asked.body)
        except ValueError:
            return None
        return next((one for one in self.captures if one.path == asked.path and _same(one, body)), None)


def _same(capture: Capture, body: Mapping[str, Any]) -> bool:
    keys = (*PROMPT_KEYS, "max_tokens", "temperature", "seed", "stop", "n", "stream", "top_k")
    return all(capture.request.get(key) == body.get(key) for key in keys) and (
        ("stream_options" in capture.request) <= ("stream_options" in body)
    )


@asynccontextmanager
async def replaying(captures: Sequence[Capture], *, speed: float) -> AsyncIterator[tuple[Server, Replays]]:
    """A server of these captures, of one engine."""
    replays = Replays(captures, speed)
    async with serving(replays.answer) as server:
        yield server, replays
