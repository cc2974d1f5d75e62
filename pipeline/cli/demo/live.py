"""The same drill with real engines that answer live: fewer requests, one after the other.

Baseline, healthy canary and faulty canary are three llama.cpp processes of one thread each. The faulty one
answers for FAULTY_NODE where the prompt is over the boundary, as in the recorded drill.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from pipeline.cli.demo.engines import VARIANTS, EngineAnswer, EngineClient, engine
from pipeline.cli.demo.fleet import FAULTY_NODE, NODES, EventMaker, Routing, Served, Turn
from pipeline.cli.demo.play import Played, Script, Tally, wall_us
from pipeline.cli.demo.prompts import BOUNDARY_TOKENS, Document, document
from pipeline.cli.demo.recording import About, Answer, VariantName
from pipeline.cli.demo.traffic import Arrival
from schemas.events import Arm

MAX_TOKENS: Final = 16
CANARIES: Final = (FAULTY_NODE, "canary-2")
"""Two nodes are enough for a few requests."""
DOCUMENTS: Final = (("short", "heapq", 420), ("long", "argparse", 2070))
ABOUT: Final = About(
    recording=1,
    model="SmolLM2-135M-Instruct.Q4_1",
    engine="llama.cpp",
    definition="raw",
    precision="f32",
    boundary_tokens=BOUNDARY_TOKENS,
)
SUBJECTS: Final = (
    "arguments", "classes", "defaults", "errors", "examples", "files", "functions", "lists", "methods",
    "names", "numbers", "objects", "options", "order", "results", "speed", "strings", "types", "values",
)  # fmt: skip
"""What live prompts ask about, one question each: distinct prompts on few documents that engines hold."""


@dataclass(frozen=True, slots=True)
class LivePrompt:
    """A prompt as token ids."""

    prompt_id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Engines:
    """Running engines, and prompts whose documents they hold in their caches."""

    clients: dict[VariantName, EngineClient]
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
        tokenize = clients["baseline"].tokenize
        read = [
            await asyncio.to_thread(document, name, length, _questions(), tokenize)
            for _, name, length in DOCUMENTS
        ]
        await asyncio.gather(*(asyncio.to_thread(_warm, client, read) for client in clients.values()))
        prompts = [
            LivePrompt(f"{side}-{name}-{number}", tokens)
            for (side, name, _), one in zip(DOCUMENTS, read, strict=True)
            for number, tokens in enumerate(one.prompts)
        ]
        yield Engines(clients, tuple(prompts))


def _questions() -> list[str]:
    return [f"What does the text say about {subject}?" for subject in SUBJECTS]


def _warm(client: EngineClient, read: list[Document]) -> None:
    for one in read:
        client.complete(one.head, 1)


class LivePlayer:
    """One run of live traffic. Requests follow each other as fast as the engines answer."""

    def __init__(
        self,
        script: Script,
        running: Engines,
        seed: int,
        publish: Callable[[Served], None],
        routing: Callable[[], Routing],
    ) -> None:
        self._script = script
        self._running = running
        self._draw = random.Random(f"live/{seed}")  # noqa: S311 (a repeatable demo, no secret)
        self._events = EventMaker(ABOUT, seed)
        self._publish = publish
        self._routing = routing
        self._tally = Tally()

    @property
    def played(self) -> Played:
        """What has been played so far; changes while it runs."""
        return self._tally.played

    async def run(self, on_progress: Callable[[Played], None]) -> None:
        """Play everything; returns when the last answer is handed to the publisher."""
        while self.played.requests < self._script.requests:
            fault_from = self._script.fault_from
            fault = fault_from is not None and self.played.requests >= fault_from
            prompt = self._draw.choice(self._running.prompts)
            node = self._draw.choice(CANARIES)
            routing = self._routing()
            primary: Arm = "canary" if self._draw.random() * 100 < routing.canary_percent else "baseline"
            turn = Turn(
                Arrival(0, "chat", len(prompt.tokens)),
                wall_us(),
                routing.generation,
                prompt.prompt_id,
                f"{self._draw.getrandbits(128):032x}",
                ("baseline", "canary"),
                primary,
            )
            affected = fault and node == FAULTY_NODE and len(prompt.tokens) > BOUNDARY_TOKENS
            await asyncio.gather(
                self._answer(turn, prompt, "baseline", NODES["baseline"][0], "baseline"),
                self._answer(turn, prompt, "canary", node, "fault" if affected else "healthy"),
            )
            self.played.requests += 1
            on_progress(self.played)

    async def _answer(
        self, turn: Turn, prompt: LivePrompt, arm: Arm, node: str, variant: VariantName
    ) -> None:
        client = self._running.clients[variant]
        found = await asyncio.to_thread(client.complete, prompt.tokens, MAX_TOKENS)
        answer = _as_answer(found, prompt, variant)
        served = self._events.make(turn, arm, node, answer, affected=variant == "fault")
        self._publish(served)
        self._tally.add(served)


def _as_answer(found: EngineAnswer, prompt: LivePrompt, variant: VariantName) -> Answer:
    long = len(prompt.tokens) > BOUNDARY_TOKENS
    return Answer(
        prompt_id=prompt.prompt_id,
        side="long" if long else "short",
        variant=variant,
        input_tokens=len(prompt.tokens),
        cached_tokens=found.cached_tokens,
        ttft_us=found.ttft_us,
        duration_us=found.duration_us,
        ended=found.ended,
        tokens=found.tokens,
        top_ids=found.top_ids,
        top_logprobs=found.top_logprobs,
    )
