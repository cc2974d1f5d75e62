"""A gateway in the test's own process, between small engines that do as they are told and a fake producer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web

from agents.gateway import relaying
from agents.gateway.consent import Consents
from agents.gateway.embedding import Embedder, NoEmbedder
from agents.gateway.pseudonyms import Pseudonyms
from agents.gateway.running import Keys, RunningGateway
from agents.gateway.settings import EngineSettings, GatewaySettings, MirrorSettings, PoolSettings
from agents.gateway.signature import PromptSigner
from agents.gateway.spans import NoSpans, Spans
from agents.publish import Publisher, PublisherSettings
from agents.router.core import Effective
from agents.router.runner import Change
from schemas import codec
from schemas.control import Directive
from schemas.events import LogitEvent, RequestEvent
from schemas.signing import Trust
from schemas.topics import Topic
from tests.agents.fakes import FakeProducer
from tests.patience import patient

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
CHAT = "/v1/chat/completions"
VERSIONS = {"baseline": "v1", "canary": "v2", "control": "v1"}


@dataclass
class Engine:
    """An engine of one node. `answer` may be changed while it runs."""

    node: str
    answer: Answer
    seen: list[web.Request] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """Bodies as they came; `bodies`: {} for what is no object."""
    cancelled: int = 0
    """Requests whose client hung up before they were answered."""
    under_way: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.method == "GET":  # what it is asked for by the gateway itself, and models
            return await self.answer(request, {})
        self.seen.append(request)
        self.raw.append(raw)
        self.bodies.append(_object(raw))
        self.under_way += 1
        try:
            return await self.answer(request, self.bodies[-1])
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        application = web.Application(client_max_size=1 << 28)
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self
        finally:
            await runner.cleanup()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


WORDS = ("The", " cat", " sat", " on", " the", " mat", ".")


def chunk(text: str | None, **more: Any) -> bytes:
    """One event of a chat stream as vLLM writes it."""
    at = WORDS.index(text) if text in WORDS else -1
    choice: dict[str, Any] = {"index": 0, "delta": {} if text is None else {"content": text}, **more}
    if text is not None:
        entry = {"token": text, "logprob": -0.25, "bytes": list(text.encode())}
        other = {"token": "x", "logprob": -2.5, "bytes": [120]}
        choice["logprobs"] = {"content": [{**entry, "top_logprobs": [entry, other]}]}
        choice["token_ids"] = [100 + at]
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    body = {**told, "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


ROLE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":7,"total_tokens":10}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def chunks() -> list[bytes]:
    """A whole stream of seven tokens."""
    last = chunk(None, finish_reason="stop")
    return [ROLE, *(chunk(word) for word in WORDS), last, USAGE, DONE]


def streaming(parts: Sequence[bytes] | None = None, every_s: float = 0.0) -> Answer:
    """Answers with these parts, one at a time."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Engine": "e"})
        await response.prepare(request)
        for part in chunks() if parts is None else parts:
            await response.write(part)
            await asyncio.sleep(every_s)
        await response.write_eof()
        return response

    return answer


def saying(status: int, body: bytes, content_type: str = "application/json") -> Answer:
    """Answers with this."""

    async def answer(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type)

    return answer


class Watched(Publisher):
    """Keeps what was published."""

    def __init__(self, producer: FakeProducer, settings: PublisherSettings) -> None:
        super().__init__(producer, settings)
        self.events: list[Any] = []

    def publish(self, event: Any) -> bool:
        self.events.append(event)
        return super().publish(event)


@dataclass
class Running:
    """What a test looks at."""

    gateway: RunningGateway
    producer: FakeProducer
    publisher: Watched
    client: aiohttp.ClientSession
    url: str
    opened: AsyncExitStack
    engines: Sequence[Engine]

    async def stop(self) -> None:
        """As a first signal does."""
        await self.opened.aclose()

    async def ask(self, prompt: str = "hello", path: str = CHAT, **more: Any) -> tuple[int, bytes]:
        """Status and the whole body."""
        headers = more.pop("headers", {})
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, **more}
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.read()

    def requests(self) -> list[RequestEvent]:
        """Request events, as they were published."""
        return [event for event in self.publisher.events if isinstance(event, RequestEvent)]

    def logits(self) -> list[LogitEvent]:
        """Logit events."""
        return [event for event in self.publisher.events if isinstance(event, LogitEvent)]

    async def drops(self) -> dict[str, int]:
        """What was reported as dropped on the logits topic, after all of it was."""
        await until(lambda: self.drops_told() == self.publisher.stats().reported)
        return self.drops_sent()

    def drops_told(self) -> int:
        """How many were."""
        return sum(self.drops_sent().values())

    def drops_sent(self) -> dict[str, int]:
        """What the records so far say of the logits topic."""
        total: dict[str, int] = {}
        for sent in self.producer.sent:
            if sent.topic == Topic.LOGITS.value:
                header = codec.decode_logits(sent.value, sent.headers["content-type"].decode()).header
                for key, count in header.dropped.items():
                    total[key] = total.get(key, 0) + count
        return total

    def counts(self, thing: str) -> dict[str, int]:
        """Gauges that are not 0."""
        return {name: value for name, value in self.gateway.gauges()[thing].items() if value}


def pool(engine: Engine | Sequence[Engine], arm: str | None = None, **more: Any) -> PoolSettings:
    """An arm of these engines."""
    engines = (engine,) if isinstance(engine, Engine) else tuple(engine)
    arm = arm or engines[0].node.rstrip("0123456789-")
    return PoolSettings(
        arm=arm,
        kind="vllm",
        model_version=VERSIONS[arm],
        engines=tuple(EngineSettings(node=one.node, url=one.url) for one in engines),
        **more,
    )


def weighing(canary: float, *, generation: int = 1, **more: Any) -> Change:
    """What the router says of a directive with this share for the canary."""
    weights = {"v1": 100.0 - canary, "v2": canary}
    effective = Effective(weights, more.pop("ejected", ()), lease_valid=True, dead_man=False, **more)
    directive = Directive(
        v=1, rollout="r", generation=generation, epoch=1, ts_us=1, lease_until_us=1, dead_man_us=1,
        state="observing", weights=weights, last_promoted={"v1": 100.0}, fallback="v1", level=0,
        policy_hash="0",
    )  # fmt: skip
    return Change("r", generation, 1, "applied", effective, directive, 1)


def keys(credentials: dict[Any, str | None] | None = None) -> Keys:
    """Of nobody."""
    return Keys(
        PromptSigner(b"k" * 32, "s1"),
        Pseudonyms(b"p" * 32, "p1"),
        None,
        Consents(lambda: Trust({})),
        credentials or {},
    )


_BY_ITS_CLOCK: list[asyncio.AbstractEventLoop] = []
"""One a gateway that runs."""


@contextmanager
def _one_clock() -> Iterator[None]:
    """Durations are measured by the loop's own, patient clock: its timers and they agree."""
    loop = patient()
    _BY_ITS_CLOCK.append(loop)
    relaying.time = SimpleNamespace(monotonic_ns=lambda: round(loop.time() * 1e9))  # type: ignore[assignment]
    try:
        yield
    finally:
        _BY_ITS_CLOCK.pop()
        if not _BY_ITS_CLOCK:
            relaying.time = time


@asynccontextmanager
async def running(
    engines: Sequence[Engine],
    pools: Callable[[], tuple[PoolSettings, ...]] | None = None,
    *,
    canary: float = 0.0,
    producer: FakeProducer | None = None,
    publishing: dict[str, Any] | None = None,
    mirror: MirrorSettings | None = None,
    credentials: dict[Any, str | None] | None = None,
    spans: Spans | None = None,
    embedder: Embedder | None = None,
    with_keys: Keys | None = None,
    **more: Any,
) -> AsyncIterator[Running]:
    """A gateway before these engines, and a client; everything is mirrored unless `mirror` says so.

    Everybody is on this loop, and its clock is patient.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(_one_clock())
        for engine in engines:
            await stack.enter_async_context(engine.running())
        settings = GatewaySettings(
            port=more.pop("port", 0),
            rollout="r",
            pools=pools() if pools is not None else tuple(pool(engine) for engine in engines),
            mirror=mirror or MirrorSettings(rate=1.0, tokens_per_s=10_000_000, per_signature_per_minute=1000),
            **more,
        )
        producer = producer or FakeProducer()
        publisher = Watched(
            producer, PublisherSettings(**{"producer_id": "g-1", "flush_age_us": 1000, **(publishing or {})})
        )
        gateway = RunningGateway(
            settings,
            with_keys or keys(credentials),
            publisher,
            spans or NoSpans(),
            embedder or NoEmbedder(),
        )
        gateway.obey(weighing(canary))
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        opened = await stack.enter_async_context(AsyncExitStack())
        await opened.enter_async_context(gateway.open())
        assert gateway.address is not None
        url = "http://{}:{}".format(*gateway.address)
        yield Running(gateway, producer, publisher, client, url, opened, engines)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for what the loop brings about."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  (many things are waited for)
            await asyncio.sleep(0.002)
