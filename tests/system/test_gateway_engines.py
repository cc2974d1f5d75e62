"""Real engines through the gateway, real Kafka and the real workers, and back: what trips, and what does not.

Baseline and control are the same llama.cpp engine with an f16 KV cache. The canary is in turn the same again,
one with a KV cache of 8 bits, and one with a wrong RoPE base, whose text still reads like English. The mean
`kl_lower` of a pair, measured on these prompts: 0 exactly, 0.004, 0.07. A cache of 4 bits lies between: no
outcome of it is a defect, so it is not asked.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from pipeline.cli.demo.engines import EngineClient, EngineError, Variant, engine, model_path
from schemas.topics import Topic
from tests.conftest import required_or_skip
from tests.kafka.broker import Broker
from tests.system.gateway import Gateway, Pool, gateway, scores, told, until_obeyed
from tests.system.stack import NOBODY_DIES, PATIENCE_S, Stack, stack

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

F16: Final = Variant("f16")
Q8_0: Final = Variant(
    "q8_0",
    {
        "cache_type_k": "GGML_TYPE_Q8_0",
        "cache_type_v": "GGML_TYPE_Q8_0",
        "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
    },
)
WRONG_ROPE: Final = Variant("wrong-rope", {"rope_freq_base": 10_000.0})
"""The model was trained with 100,000."""

MAX_TOKENS: Final = 8
MIN_SAMPLES: Final = 6
LIMIT: Final = 0.02
WINDOW_S: Final = 40
JOIN_TIMEOUT_S: Final = 5
FIRST_STEP: Final = 40
EVERY_S: Final = 2.0
"""Between two users while a step lasts, which is a window and more: engines cost a core."""
POLICY: Final = f"""\
version: 1
rules:
  - id: divergence
    metric: kl_lower
    statistic: mean
    window: {WINDOW_S}s
    limit: {LIMIT}
    min_samples: {MIN_SAMPLES}
    scope: rollout
    action: rollback_l1
    mode: enforce
coverage: {{limit: 0.9, window: {WINDOW_S}s, min_samples: {MIN_SAMPLES}, action: hold}}
progression: {{mode: auto, min_pairs: {MIN_SAMPLES}}}
"""
PROMPTS: Final = (
    "What is the capital of France?", "Name three colours.", "Why is the sky blue?", "What does a baker do?",
    "Tell me about the moon.", "How do I boil an egg?", "Who wrote Hamlet?", "What is a prime number?",
    "Name a river in Africa.", "What do bees make?", "Explain rain to a child.", "What is bread made of?",
    "Describe a cat.", "Where do penguins live?", "What is two plus two?", "Name a musical instrument.",
    "What is a volcano?", "How many days has a week?", "What is the sun?", "Say something kind.",
    "What do plants need?", "What is the largest ocean?", "Write a short greeting.", "What is a library?",
)  # fmt: skip
WORKERS: Final = ("measure", "pair", "gate")


@dataclass
class Fleet:
    """What runs throughout: workers, and the engines of baseline and control."""

    on: Stack
    folder: Path
    baseline: EngineClient
    control: EngineClient

    @asynccontextmanager
    async def rolling_out(self, canary: Variant) -> AsyncIterator[Rollout]:
        """A roll-out of this canary, started, and a gateway that obeys it."""
        rollout = f"canary-{canary.name}"
        async with AsyncExitStack() as exits:
            client = await _started(exits, canary, self.folder)
            pools = [
                Pool("baseline", [self.baseline.url]),
                Pool("canary", [client.url]),
                Pool("control", [self.control.url]),
            ]
            through = await exits.enter_async_context(
                gateway(
                    self.on.broker,
                    self.folder,
                    rollout,
                    pools,
                    more={"mirror": {"timeout_s": JOIN_TIMEOUT_S}},
                    environment=self.on.environment,
                )
            )
            session = await exits.enter_async_context(aiohttp.ClientSession())
            made = Rollout(self.on, rollout, through, session)
            await made.start()
            yield made


@dataclass
class Rollout:
    """One roll-out under way."""

    on: Stack
    name: str
    through: Gateway
    session: aiohttp.ClientSession

    async def start(self) -> None:
        """Start it; returns when the gateway says that it obeys."""
        arms = {
            arm: {"model_version": "m2" if arm == "canary" else "m1", "nodes": [f"{arm}-*"]}
            for arm in ("baseline", "canary", "control")
        }
        spec = {
            "v": 1,
            "rollout": self.name,
            "arms": arms,
            "fallback": "m1",
            "steps": [FIRST_STEP, 100],
            "policy": POLICY,
        }
        await self.on.order(self.name, "start", {"spec": spec})
        await until_obeyed(self.on.broker, self.name)

    async def ask(self, prompt: str) -> None:
        """One user's request. Nothing of an earlier prompt may change an answer's rounding."""
        body: dict[str, Any] = {
            "model": "any",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "cache_prompt": False,
        }
        said = await self.through.ask(self.session, body)
        assert said.rstrip().endswith(b"data: [DONE]"), said
        assert b"logprobs" not in said

    async def ask_until(self, kind: str, every_s: float = 0.0) -> dict[str, Any]:
        """Users ask, at most one in `every_s`, until the gate decides so."""
        for prompt in cycle(PROMPTS):
            await asyncio.gather(self.ask(prompt), asyncio.sleep(every_s))
            if found := self.decided(kind):
                return found
            assert self.through.worker.running, self.through.worker.log
            assert len(self.through.statuses) < 300, self.on.tails()
        raise AssertionError

    def decided(self, kind: str) -> dict[str, Any] | None:
        """The first decision of a kind, if there is one yet."""
        decisions = self.on.follower.decisions.get(self.name, ())
        return next((one for one in decisions if one["kind"] == kind), None)

    def pairs(self) -> dict[str, list[float]]:
        """Arm → scores of the pairs so far."""
        return scores(self.on.follower.of(Topic.PAIRS), self.name)

    def served(self) -> list[str]:
        """The arm that answered each user so far, in no order."""
        return [one.arm for one in told(self.on.follower.of(Topic.REQUESTS), self.name) if not one.shadow]

    async def until_told(self) -> list[str]:
        """`served`, once every user's request was told."""
        count = len(self.through.statuses)
        await self.on.follower.until(lambda: len(self.served()) >= count, f"{count} users' requests")
        return self.served()


async def _started(exits: AsyncExitStack, variant: Variant, folder: Path) -> EngineClient:
    running = engine(variant, log=folder / f"engine-{variant.name}.log")
    client = await asyncio.to_thread(running.__enter__)
    exits.push(running)
    return client


@asynccontextmanager
async def _fleet(broker: Broker, folder: Path) -> AsyncIterator[Fleet]:
    variables = {**NOBODY_DIES, "KLAXON_CONTENT_JOIN_TIMEOUT_S": str(JOIN_TIMEOUT_S)}
    async with stack(broker, folder, variables=variables) as on, AsyncExitStack() as exits:
        workers = [on.worker(kind) for kind in WORKERS]
        for worker in workers:
            await worker.start()
        engines = [await _started(exits, Variant(name), folder) for name in ("baseline", "control")]
        for worker in workers:
            await worker.until_log(f"{worker.kind}: ready", timeout_s=PATIENCE_S)
        yield Fleet(on, folder, *engines)


def _needs_engines() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        required_or_skip("xllamacpp is not installed: make engines")
    try:
        model_path()
    except EngineError as error:
        required_or_skip(str(error))


async def test_a_wrong_rope_base_trips_and_neither_the_same_engine_nor_an_8_bit_cache_does(
    kafka_session: Broker, tmp_path: Path
) -> None:
    _needs_engines()
    async with _fleet(kafka_session, tmp_path) as fleet:
        await _the_same_again_passes(fleet)
        await _an_8_bit_cache_does_not_trip(fleet)
        await _a_wrong_rope_base_trips(fleet)


async def _the_same_again_passes(fleet: Fleet) -> None:
    async with fleet.rolling_out(F16) as rollout:
        step = await rollout.ask_until("step", EVERY_S)
        found = rollout.pairs()
        # Bit for bit: an engine that answers alone repeats itself.
        assert set(found["canary"]) == set(found["control"]) == {0.0}
        assert len(found["canary"]) >= MIN_SAMPLES
        assert rollout.decided("trip") is None
        assert step["directive"]["weights"]["m2"] == 100
        assert set(rollout.through.statuses) == {200}
        assert set(await rollout.until_told()) == {"baseline", "canary"}


async def _an_8_bit_cache_does_not_trip(fleet: Fleet) -> None:
    async with fleet.rolling_out(Q8_0) as rollout:
        for prompt in PROMPTS[: MIN_SAMPLES + 4]:
            await rollout.ask(prompt)
        await rollout.on.follower.until(
            lambda: len(rollout.pairs()["canary"]) >= MIN_SAMPLES, f"{MIN_SAMPLES} pairs"
        )
        newest_us = max(one.ts_us for one in told(rollout.on.follower.of(Topic.REQUESTS), rollout.name))
        # All of them stand in complete seconds, and were judged.
        await rollout.on.until_closed(newest_us + 2_000_000)
        await rollout.on.follower.caught_up()
        found = rollout.pairs()["canary"]
        assert 0 < sum(found) / len(found) < LIMIT
        assert rollout.decided("trip") is None, rollout.decided("trip")
        assert set(rollout.through.statuses) == {200}


async def _a_wrong_rope_base_trips(fleet: Fleet) -> None:
    async with fleet.rolling_out(WRONG_ROPE) as rollout:
        trip = await rollout.ask_until("trip")
        cause = trip["directive"]["cause"]
        assert (cause["rule"], cause["limit"]) == ("divergence", LIMIT)
        assert cause["value"] > LIMIT
        assert cause["samples"] >= MIN_SAMPLES
        # The control is the baseline's own noise: none.
        assert set(rollout.pairs()["control"]) == {0.0}
        before = await rollout.until_told()
        assert "canary" in before
        await until_obeyed(rollout.on.broker, rollout.name, trip["directive"]["epoch"])
        count = len(rollout.through.statuses)
        for prompt in PROMPTS[:10]:
            await rollout.ask(prompt)
        after = await rollout.until_told()
        assert (len(before), len(after)) == (count, count + 10)
        assert after.count("canary") == before.count("canary")
        assert set(rollout.through.statuses) == {200}
