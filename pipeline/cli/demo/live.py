"""The same drill with real engines that answer live, through a gateway, one request after the other.

Baseline, healthy canary and faulty canary are three llama.cpp processes of one thread each. FAULTY_NODE is a
front before two of them: the faulty one answers there where the prompt is over the boundary, as in the
recorded drill. The gateway mirrors every request, and measures and publishes what it sees.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from pipeline.cli.demo.engines import VARIANTS, EngineClient, EngineError, engine
from pipeline.cli.demo.fleet import BASELINE_VERSION, CANARY_VERSION, FAULTY_NODE, NODES
from pipeline.cli.demo.front import Front
from pipeline.cli.demo.play import Played, Script, wall_us
from pipeline.cli.demo.prompts import module_text
from pipeline.cli.demo.recording import VariantName
from pipeline.cli.demo.witness import Witness

MAX_TOKENS: Final = 16
OTHER_CANARY: Final = "canary-2"
"""Two nodes of the canary are enough for a few requests."""
DOCUMENTS: Final = (("short", "heapq", 420), ("long", "argparse", 2070))
"""Side, module whose documentation is asked about, and its length in tokens."""
SUBJECTS: Final = (
    "arguments", "classes", "defaults", "errors", "examples", "files", "functions", "lists", "methods",
    "names", "numbers", "objects", "options", "order", "results", "speed", "strings", "types", "values",
)  # fmt: skip
"""What live prompts ask about, one question each: distinct prompts on few documents that engines hold."""
UNSEEN_PAIRS: Final = 2
"""How many pairs may be on their way while the next request is sent."""
PAIR_TIMEOUT_S: Final = 60.0
ANSWER_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """A question about a document."""

    prompt_id: str
    text: str
    long: bool


@dataclass(frozen=True, slots=True)
class Engines:
    """Running engines, and prompts whose documents they hold in their caches."""

    pools: tuple[dict[str, Any], ...]
    """As section `gateway` of the configuration wants them."""
    front: Front | None
    """Before the engines of FAULTY_NODE; None: nothing goes wrong."""
    prompts: tuple[LivePrompt, ...]


@asynccontextmanager
async def engines(*, fault: bool, say: Callable[[str], None]) -> AsyncIterator[Engines]:
    """Start the engines and let each read the documents once. Raises EngineError."""
    names: list[VariantName] = ["baseline", "healthy", "fault"] if fault else ["baseline", "healthy"]
    async with AsyncExitStack() as stack:
        running = stack.enter_context(ExitStack())
        clients = {
            name: await asyncio.to_thread(running.enter_context, engine(VARIANTS[name])) for name in names
        }
        say(f"{len(clients)} engines run ({', '.join(clients)}); each reads the documents once")
        texts = {
            side: await asyncio.to_thread(_document, clients["baseline"], name, tokens)
            for side, name, tokens in DOCUMENTS
        }
        await asyncio.gather(
            *(asyncio.to_thread(_warm, client, list(texts.values())) for client in clients.values())
        )
        front = None
        if fault:
            boundary_bytes = (len(texts["short"]) + len(texts["long"])) // 2
            front = Front(clients["healthy"].url, clients["fault"].url, boundary_bytes)
            await stack.enter_async_context(front.running())
        prompts = [
            LivePrompt(f"{side}-{name}-{number}", f"{texts[side]}\n\n{question}", side == "long")
            for side, name, _ in DOCUMENTS
            for number, question in enumerate(_questions())
        ]
        yield Engines(_pools(clients, front), front, tuple(prompts))


def _pools(clients: dict[VariantName, EngineClient], front: Front | None) -> tuple[dict[str, Any], ...]:
    """Baseline: one node. Canary: one healthy node, and where there is a fault the node that will have it."""
    healthy = {"node": OTHER_CANARY, "url": clients["healthy"].url}
    canaries = [healthy] if front is None else [healthy, {"node": FAULTY_NODE, "url": front.url}]
    common = {"kind": "llama.cpp", "hardware": "cpu", "precision": "f32"}
    return (
        {
            "arm": "baseline",
            "model_version": BASELINE_VERSION,
            **common,
            "engines": [{"node": NODES["baseline"][0], "url": clients["baseline"].url}],
        },
        {"arm": "canary", "model_version": CANARY_VERSION, **common, "engines": canaries},
    )


def _questions() -> list[str]:
    return [f"What does the text say about {subject}?" for subject in SUBJECTS]


def _document(client: EngineClient, name: str, tokens: int) -> str:
    """The first `tokens` tokens of a module's documentation."""
    return client.detokenize(client.tokenize(module_text(name))[:tokens])


def _warm(client: EngineClient, texts: list[str]) -> None:
    for text in texts:
        client.chat(text, 1)


class LivePlayer:
    """One run of live traffic. Requests follow each other as fast as the engines answer."""

    def __init__(self, script: Script, running: Engines, seed: int, gateway: str, witness: Witness) -> None:
        """`gateway`: its address."""
        self._script = script
        self._running = running
        self._draw = random.Random(f"live/{seed}")  # noqa: S311 (a repeatable demo, no secret)
        self._gateway = gateway
        self._witness = witness

    @property
    def played(self) -> Played:
        """What has been played so far; changes while it runs."""
        return self._witness.played

    async def run(self, on_progress: Callable[[Played], None]) -> None:
        """Play everything; returns when every pair was seen, or late ones were waited for in vain.

        Raises EngineError when a user got no answer."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while self.played.requests < self._script.requests:
                if self.played.requests == self._script.fault_from:
                    await self._break()
                await self._ask(session, self._draw.choice(self._running.prompts))
                self.played.requests += 1
                await self._seen(self.played.requests - UNSEEN_PAIRS)
                on_progress(self.played)
        await self._seen(self.played.requests)
        await self._witness.until(events=2 * self.played.pairs, timeout_s=PAIR_TIMEOUT_S)
        on_progress(self.played)

    async def _break(self) -> None:
        """The node goes wrong, at a moment when nothing is on its way to it."""
        await self._seen(self.played.requests)
        assert self._running.front is not None
        self._witness.fault_since_us = wall_us()
        self._running.front.broken = True

    async def _seen(self, pairs: int) -> None:
        await self._witness.until(pairs=pairs, timeout_s=PAIR_TIMEOUT_S)

    async def _ask(self, session: aiohttp.ClientSession, prompt: LivePrompt) -> None:
        body = {
            "model": "any",
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        headers = {"x-klaxon-prompt-id": prompt.prompt_id}
        url = f"{self._gateway}/v1/chat/completions"
        try:
            async with session.post(url, json=body, headers=headers) as answer:
                said = await answer.read()
        except (OSError, aiohttp.ClientError) as error:
            raise EngineError(f"gateway at {self._gateway}: {error!r}") from error
        if answer.status != 200 or not said.rstrip().endswith(b"[DONE]"):
            raise EngineError(f"gateway at {self._gateway} answered {answer.status}: {said[-300:]!r}")
