"""A scripted engine: OpenAI-compatible, fast, deterministic, and as broken as a test wants it.

Refusals can be asked for by the prompt's text, so that the same request fails in the same way with a gateway
and without: `please fail 429`. Everything else that can go wrong is the engine's `fault`.

As a process of its own: `python -m tests.agents.gateway.fake_engine vllm`, which prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from tests.agents.gateway import fake_model
from tests.agents.gateway.fake_asked import MODEL, RefusedError, Wanted, read
from tests.agents.gateway.fake_shapes import DONE, Said, Shape
from tests.agents.gateway.wire import Asked, Reply, Server, serving

Fault = Literal[
    "none",
    "refuse",  # 503 and a JSON error
    "garbage",  # 200 and bytes that are nothing
    "not_http",  # no HTTP at all
    "silent",  # never answers
    "hang",  # never ends after the first token
    "pause",  # goes on after the first token once it is released
    "slow",  # `slow_s` before the first byte
    "cut",  # breaks off after the third token
    "error_event",  # an error inside the stream after the third token
    "huge",  # pads every event to 1 MB
]
PLEASE_FAIL = re.compile(r"please fail (\d{3}|mid-stream)")
JSON = ("content-type", "application/json")
SSE = ("content-type", "text/event-stream; charset=utf-8")
MOST_KEPT = 10_000
HUGE_BYTES = 1 << 20


@dataclass(slots=True)
class FakeEngine:
    """One engine. Attributes may be changed while it runs."""

    kind: str = "vllm"
    damage: float = 0.0
    """0: as the baseline answers. Above: other log-probabilities, and in the end other tokens."""
    first_token_s: float = 0.0
    token_s: float = 0.0
    fault: Fault = "none"
    slow_s: float = 1.0
    faulty: Callable[[Asked], bool] = lambda _: True
    """Which requests meet the fault."""
    asked: deque[Asked] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    """Requests for answers, as they came; the last many."""
    count: int = 0
    """Of all requests for answers. `GET /asked` tells it."""
    open: int = 0
    """Answers under way."""
    gone: int = 0
    """Answers whose client went away before their end."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: what hangs is let go."""
    _answers: dict[bytes, list[bytes]] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[Server]:
        """Serve until the end of the block."""
        async with serving(self.answer, port) as server:
            try:
                yield server
            finally:
                self.released.set()

    async def answer(self, asked: Asked, reply: Reply) -> None:
        """One request."""
        path = asked.path.partition("?")[0]
        if path in ("/v1/chat/completions", "/v1/completions"):
            self.asked.append(asked)
            self.count += 1
            self.open += 1
            try:
                await self._generate(asked, path, reply)
            except (ConnectionError, asyncio.CancelledError):
                self.gone += 1
                raise
            finally:
                self.open -= 1
        elif path == "/generate" and self.kind == "sglang":
            self.asked.append(asked)
            _json(reply, 200, _generate(asked.body, self.damage))
        elif path == "/v1/models":
            listed = {"id": MODEL, "object": "model", "created": 1_790_000_000, "owned_by": self.kind}
            _json(reply, 200, {"object": "list", "data": [listed]})
        elif path == "/asked":
            _json(reply, 200, {"asked": self.count})
        elif path in ("/health", "/version"):
            _json(reply, 200, {"status": "ok", "version": "0.0-fake"})
        else:
            _json(reply, 404, {"detail": "Not Found"})

    async def _generate(self, asked: Asked, path: str, reply: Reply) -> None:
        fault = self.fault if self.fault != "none" and self.faulty(asked) else "none"
        if await self._fails_at_once(fault, reply):
            return
        try:
            wanted = read(self.kind, path, asked.body)
        except RefusedError as error:
            _refuse(reply, error.status, error.message)
            return
        told = PLEASE_FAIL.search(wanted.text)
        if told and (told[1] != "mid-stream" or not wanted.stream):
            status = 500 if told[1] == "mid-stream" else int(told[1])
            _refuse(reply, status, f"as asked: {told[1]}", {"retry-after": "1"} if status == 429 else {})
            return
        if told:
            fault = "error_event"
        parts = self._parts(asked.body, path, wanted)
        if self.first_token_s:
            await asyncio.sleep(self.first_token_s)
        if not wanted.stream:
            await self._whole(fault, parts[0], reply)
            return
        reply.head(200, [SSE, ("server", f"fake-{self.kind}")])
        await self._stream(fault, parts, reply)

    async def _fails_at_once(self, fault: Fault, reply: Reply) -> bool:
        if fault == "refuse":
            _refuse(reply, 503, "overloaded")
        elif fault == "garbage":
            body = bytes(range(256)) * 16
            reply.head(200, [SSE], length=len(body))
            reply.write(body)
        elif fault == "not_http":
            reply.raw(b"\x16\x03\x01 what is this\r\n\r\n")
            reply.cut()
        elif fault == "silent":
            await self.released.wait()
            reply.cut()
        elif fault == "slow":
            await asyncio.sleep(self.slow_s)
            return False
        else:
            return False
        return True

    async def _whole(self, fault: Fault, body: bytes, reply: Reply) -> None:
        reply.head(200, [JSON, ("server", f"fake-{self.kind}")], length=len(body))
        if fault in ("cut", "error_event"):
            await reply.send(body[: len(body) // 2])
            reply.cut()
        if fault == "hang":
            await reply.send(body[: len(body) // 2])
            await self.released.wait()
            reply.cut()
        reply.write(body)

    async def _stream(self, fault: Fault, parts: list[bytes], reply: Reply) -> None:
        if fault == "none" and not self.token_s:
            for part in parts:
                reply.write(part)
            reply.end()
            return
        for number, part in enumerate(parts):
            if self.token_s and number:
                await asyncio.sleep(self.token_s)
            if fault == "huge":
                part = b": %b\n\n%b" % (b"x" * HUGE_BYTES, part)
            await reply.send(part)
            if fault in ("hang", "pause") and number == 2:
                await self.released.wait()
                if fault == "hang":
                    reply.cut()
            if fault == "cut" and number == 3:
                reply.cut()
            if fault == "error_event" and number == 3:
                error = {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}
                await reply.send(f"data: {json.dumps({'error': error})}\n\n".encode() + DONE)
                break
        reply.end()

    def _parts(self, body: bytes, path: str, wanted: Wanted) -> list[bytes]:
        """The whole answer, or the events of a stream; the last many are kept."""
        key = path.encode() + body
        if self.damage:
            key += repr(self.damage).encode()
        parts = self._answers.get(key)
        if parts is None:
            if len(self._answers) >= MOST_KEPT:
                self._answers.clear()
            parts = self._answers[key] = _answer(self.kind, wanted, self.damage)
        return parts


def _answer(kind: str, wanted: Wanted, damage: float) -> list[bytes]:
    said = [_said(kind, wanted, index, damage) for index in range(wanted.choices)]
    digest = hashlib.sha256(repr((wanted.prompt, wanted.seed)).encode()).hexdigest()[:16]
    shape = Shape(kind, wanted, f"{'chatcmpl' if wanted.chat else 'cmpl'}-{digest}", MODEL, damage)
    tool = wanted.tools[0]["function"]["name"] if wanted.tools and wanted.chat else None
    if not wanted.stream:
        return [shape.whole(said, tool)]
    if tool:
        opening = [shape.opening(0)[0]] if shape.opening(0) else []
        return [*opening, *shape.tool_chunks(tool), *shape.ending(said), DONE]
    events = [part for one in said for part in shape.opening(one.index)]
    places = max(len(one.steps) for one in said)
    offsets = [0] * len(said)
    for place in range(places):
        for one in said:
            if place < len(one.steps):
                events += shape.token(one, place, offsets[one.index])
                offsets[one.index] += len(fake_model.text_of(one.steps[place].id))
    events += [part for one in said for part in shape.closing(one)]
    return [*events, *shape.ending(said), DONE]


def _said(kind: str, wanted: Wanted, index: int, damage: float) -> Said:
    steps = fake_model.generated(
        wanted.prompt,
        wanted.most_tokens,
        wanted.temperature,
        wanted.seed + index,
        damage,
        ignore_eos=wanted.ignore_eos,
    )
    ended = bool(steps) and steps[-1].id == fake_model.END
    if ended and kind.startswith("llama"):
        steps = steps[:-1]  # the end-of-text token is not told
    texts = ["" if step.id == fake_model.END else fake_model.text_of(step.id) for step in steps]
    if wanted.tools and wanted.chat:
        return Said(index, steps, texts, "tool_calls", None)
    whole = "".join(texts)
    at, matched = min(((whole.find(stop), stop) for stop in wanted.stop if stop in whole), default=(-1, None))
    if matched is None:
        return Said(index, steps, texts, "stop" if ended else "length", None)
    shown, kept = [], 0
    for place, text in enumerate(texts):
        shown.append(text[: max(0, at - kept)])
        kept += len(text)
        if kept >= at + len(matched):
            return Said(index, steps[: place + 1], shown, "stop", matched)
    raise AssertionError("a stop string that was found ends somewhere")


def _generate(body: bytes, damage: float) -> object:
    """SGLang's own endpoint, as far as it scores a given text."""
    asked = json.loads(body)
    ids = asked["input_ids"]
    steps = fake_model.scored(ids, damage)
    k = asked.get("top_logprobs_num", 0)
    top = [[[v, t, fake_model.text_of(t)] for t, v in step.top[:k]] for step in steps]
    values = [[step.logprob, step.id, fake_model.text_of(step.id)] for step in steps]
    meta = {
        "id": "fake",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "input_token_logprobs": [[None, ids[0], fake_model.text_of(ids[0])], *values],
        "input_top_logprobs": [None, *top],
        "output_token_logprobs": [],
        "output_top_logprobs": [],
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


def _json(reply: Reply, status: int, value: object, headers: dict[str, str] | None = None) -> None:
    body = json.dumps(value, separators=(",", ":")).encode()
    reply.head(status, [JSON, *(headers or {}).items()], length=len(body))
    reply.write(body)


def _refuse(reply: Reply, status: int, message: str, headers: dict[str, str] | None = None) -> None:
    error = {"message": message, "type": "FakeError", "param": None, "code": status}
    _json(reply, status, {"error": error}, headers)


async def _serve(options: argparse.Namespace) -> None:
    engine = FakeEngine(
        options.kind,
        damage=options.damage,
        first_token_s=options.first_token_s,
        token_s=options.token_s,
        fault=options.fault,
    )
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with engine.running(options.port) as server:
        print(server.port, flush=True)
        await ended.wait()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("vllm", "llama.cpp", "llama-cpp-python", "sglang", "tgi"))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fault", choices=get_args(Fault), default="none")
    parser.add_argument("--damage", type=float, default=0.0)
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
