"""`mirror.forced` through a whole gateway: who scores, who writes its own, what the pair worker says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from agents.gateway.settings import EngineKind, EngineSettings, MirrorSettings, PoolSettings
from pipeline.core.pairing import PairSource
from pipeline.core.source import ContentSettings, RecordMeta
from schemas import codec
from schemas.events import ARMS
from schemas.pairs import PairBatch
from schemas.topics import Topic
from tests.agents.gateway.fake_asked import MODEL
from tests.agents.gateway.fake_engine import FakeEngine, Fault
from tests.agents.gateway.harness import VERSIONS, Running, running, until

ASKED = 8
TOKENS = 6
"""The fake's answers are longer, so none has an end, whose list it makes up."""
CONTENT = ContentSettings(lateness_us=2_000_000, join_timeout_us=60_000_000)
Check = Callable[[Running, Mapping[str, FakeEngine]], Any]


async def through(
    kinds: Mapping[str, EngineKind],
    check: Check,
    *,
    canary: float = 0.0,
    damage: float = 0.0,
    forced: bool = True,
    **asked: Any,
) -> Any:
    """ASKED users of a gateway that forces, unless it is a control; then what `check` finds."""
    engines = {arm: FakeEngine(kind) for arm, kind in kinds.items()}
    if "canary" in engines:
        engines["canary"].damage = damage
    async with AsyncExitStack() as stack:
        urls = {arm: (await stack.enter_async_context(one.running())).url for arm, one in engines.items()}
        pools = tuple(
            PoolSettings(
                arm=arm,  # type: ignore[arg-type]  # as the callers name them
                kind=kind,
                model_version=VERSIONS[arm],
                engines=(EngineSettings(node=f"{arm}-1", url=urls[arm]),),
            )
            for arm, kind in kinds.items()
        )
        mirror = MirrorSettings(
            rate=1.0, tokens_per_s=10_000_000, per_signature_per_minute=1000, forced=forced
        )
        it = await stack.enter_async_context(running([], lambda: pools, canary=canary, mirror=mirror))
        found = await asyncio.gather(
            *(
                it.ask(f"question {at}", **{"model": MODEL, "max_tokens": TOKENS, **asked})
                for at in range(ASKED)
            )
        )
        assert {status for status, _ in found} == {200}
        await until(lambda: len(it.requests()) == ASKED * len(kinds))
        assert await it.publisher.drain(10)
        assert it.counts("gateway_requests") == {"answered": ASKED}
        return check(it, engines)


def sources(it: Running, _: Mapping[str, FakeEngine]) -> set[tuple[str, str]]:
    assert {event.error for event in it.requests()} == {None}
    assert it.drops_sent() == {}
    halves = [(event.arm, event.source) for event in it.logits()]
    assert len(halves) == len(it.requests())
    return set(halves)


def pairs(it: Running, _: Mapping[str, FakeEngine]) -> list[PairBatch]:
    """What the pair worker's core makes of the published records."""
    source, offset, now_us = PairSource(Topic.LOGITS, 0, CONTENT), 0, 0
    for sent in it.producer.sent:
        if sent.topic == Topic.LOGITS.value:
            decoded = codec.decode_logits(sent.value, sent.headers["content-type"].decode())
            assert decoded.rejected == ()
            now_us = int((decoded.columns.ts_us + decoded.columns.duration_us).max())
            source.read(RecordMeta(offset, now_us, len(sent.value)), decoded)
            offset += 1
    source.read(RecordMeta(offset, now_us + 600_000_000, 100), None)
    return list(source.take_flush().pairs)


FORCED = {("baseline", "generated"), ("canary", "forced"), ("control", "forced")}
FREE = {("baseline", "generated"), ("canary", "generated"), ("control", "generated")}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"baseline": "vllm", "canary": "vllm", "control": "vllm"}, FORCED),
        # Who cannot score writes its own; its arm is not lost.
        ({"baseline": "vllm", "canary": "llama.cpp", "control": "llama.cpp"}, FREE),
        (
            {"baseline": "vllm", "canary": "vllm", "control": "llama.cpp"},
            {("baseline", "generated"), ("canary", "forced"), ("control", "generated")},
        ),
        # A baseline that does not tell its prompt's ids cannot be scored by anybody.
        ({"baseline": "llama.cpp", "canary": "llama.cpp", "control": "llama.cpp"}, FREE),
    ],
)
async def test_the_copy_of_whoever_can_scores_and_that_of_others_writes_its_own(
    kinds: Mapping[str, EngineKind], expected: set[tuple[str, str]]
) -> None:
    assert await through(kinds, sources) == expected


async def test_a_request_that_the_canary_answers_is_copied_without_forcing() -> None:
    kinds: Mapping[str, EngineKind] = {"baseline": "vllm", "canary": "vllm"}
    found = await through(kinds, sources, canary=100.0)
    assert found == {("baseline", "generated"), ("canary", "generated")}


async def test_a_prompt_that_is_more_than_text_is_answered_freely() -> None:
    kinds: Mapping[str, EngineKind] = {"baseline": "vllm", "canary": "vllm"}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}]
    found = await through(kinds, sources, messages=asked)
    assert found == {("baseline", "generated"), ("canary", "generated")}


async def test_what_a_scoring_engine_is_asked() -> None:
    def asked(_: Running, engines: Mapping[str, FakeEngine]) -> list[Any]:
        return [json.loads(one.body) for one in engines["canary"].asked]

    found = await through({"baseline": "vllm", "canary": "vllm"}, asked)
    assert len(found) == ASKED  # once each: it does not write its own besides
    for body in found:
        assert set(body) == {"model", "prompt", "max_tokens", "temperature", "prompt_logprobs"}
        assert all(type(one) is int for one in body["prompt"])


@pytest.mark.parametrize(("damage", "forced"), [(0.0, True), (0.5, True), (0.5, False)])
async def test_the_pair_worker_scores_forced_pairs_at_every_position(damage: float, forced: bool) -> None:
    """At temperature 1, where a damaged engine that writes its own soon writes another (the control)."""

    def check(it: Running, _: Mapping[str, FakeEngine]) -> tuple[list[PairBatch], dict[str, int]]:
        lengths = {event.pair_id: len(event.top_logprobs) for event in it.logits() if event.arm == "baseline"}
        return pairs(it, _), lengths

    batches, lengths = await through(
        {"baseline": "vllm", "canary": "vllm"}, check, damage=damage, forced=forced, temperature=1.0, seed=3
    )
    rows = [
        (ARMS[arm], positions, difference, kl)
        for batch in batches
        for arm, positions, difference, kl in zip(
            batch.arm, batch.positions, batch.first_difference, batch.kl_lower, strict=True
        )
    ]
    assert len(rows) == ASKED
    if not forced:
        assert sum(difference is not None for *_, difference, _ in rows) > ASKED // 2
        assert sum(positions for _, positions, *_ in rows) < sum(lengths.values())
        return
    assert {(arm, difference) for arm, _, difference, _ in rows} == {("canary", None)}
    assert sorted(positions for _, positions, _, _ in rows) == sorted(lengths.values())
    if damage:
        assert all(kl > 0 for *_, kl in rows)
    else:
        assert {kl for *_, kl in rows} == {0}


async def test_without_the_answers_ids_a_copy_writes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that does not give the ids its kind gives (before 0.10.2): known when its answer has come."""
    real = FakeEngine.answer

    async def forgetful(self: FakeEngine, asked: Any, reply: Any) -> None:
        body = msgspec.json.decode(asked.body) if asked.body else {}
        if isinstance(body, dict) and body.pop("return_token_ids", None):
            asked = replace(asked, body=msgspec.json.encode(body))
        await real(self, asked, reply)

    monkeypatch.setattr(FakeEngine, "answer", forgetful)
    found = await through({"baseline": "vllm", "canary": "vllm"}, sources)
    assert found == {("baseline", "generated"), ("canary", "generated")}


@pytest.mark.parametrize(("fault", "scored"), [("refuse", 0), ("silent", 0), ("cut", 3)])
async def test_what_is_scored_of_an_answer_that_fails(fault: Fault, scored: int) -> None:
    """Nothing: the request is dropped and reported once for each pair. A part that came: that part."""
    engines = {arm: FakeEngine("vllm") for arm in ("baseline", "canary", "control")}
    engines["baseline"].fault = fault
    async with AsyncExitStack() as stack:
        urls = {arm: (await stack.enter_async_context(one.running())).url for arm, one in engines.items()}
        pools = tuple(
            PoolSettings(
                arm=arm,  # type: ignore[arg-type]
                kind="vllm",
                model_version="v2" if arm == "canary" else "v1",
                engines=(EngineSettings(node=arm, url=url),),
            )
            for arm, url in urls.items()
        )
        mirror = MirrorSettings(rate=1.0, tokens_per_s=10_000_000, forced=True)
        it = await stack.enter_async_context(
            running([], lambda: pools, mirror=mirror, first_byte_timeout_s=0.3)
        )
        asking = asyncio.create_task(it.ask("question", model=MODEL, max_tokens=TOKENS))
        await asyncio.wait([asking])
        assert (asking.exception() is None) is (scored == 0)
        if scored:
            await until(lambda: len(it.logits()) == 3)
            found = {(one.arm, one.source, len(one.top_logprobs)) for one in it.logits()}
            assert found == {(arm, source, scored) for arm, source in FORCED}
            assert await it.drops() == {}
        else:
            await until(lambda: it.counts("gateway_mirrors").get("unscorable"))
            assert it.counts("gateway_mirrors") == {"mirrored": 1, "unscorable": 1}
            assert await it.drops() == {"r/canary": 1, "r/control": 1}
            assert not it.logits()
            assert not engines["canary"].asked
