"""Live engines: which one answers what, with scripted ones; and a real one where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiokafka.structs import ConsumerRecord

from pipeline.cli.demo.engines import VARIANTS, EngineClient, EngineError, engine
from pipeline.cli.demo.fleet import FAULTY_NODE, ROLLOUT
from pipeline.cli.demo.front import Front
from pipeline.cli.demo.live import Engines, LivePlayer, LivePrompt
from pipeline.cli.demo.play import Script
from pipeline.cli.demo.witness import Witness
from schemas.codec import encode_logits, encode_requests, logit_columns, request_columns
from schemas.columns import BatchHeader
from schemas.events import LogitEvent, RequestEvent
from schemas.topics import COLUMNS, CONTENT_TYPE, Topic
from tests.agents.gateway.fake_engine import FakeEngine
from tests.agents.gateway.wire import Server


@asynccontextmanager
async def _front(boundary_bytes: int) -> AsyncIterator[tuple[Front, FakeEngine, FakeEngine]]:
    healthy, faulty = FakeEngine("llama.cpp"), FakeEngine("llama.cpp", damage=1.0)
    async with (
        healthy.running() as one,
        faulty.running() as other,
        Front(one.url, other.url, boundary_bytes).running() as front,
    ):
        yield front, healthy, faulty


async def test_long_prompts_go_to_the_faulty_engine_once_the_node_is_broken() -> None:
    async with _front(600) as (front, healthy, faulty), aiohttp.ClientSession() as session:

        async def ask(size: int, *, stream: bool = True) -> tuple[int, bytes]:
            messages = [{"role": "user", "content": "x" * size}]
            body = {"messages": messages, "max_tokens": 4, "stream": stream}
            async with session.post(f"{front.url}/v1/chat/completions", json=body) as answer:
                return answer.status, await answer.read()

        assert (await ask(1_000))[0] == (await ask(100))[0] == 200
        assert (len(healthy.asked), len(faulty.asked), front.damaged) == (2, 0, 0)
        front.broken = True
        whole = await ask(1_000)
        assert whole[0] == 200
        assert whole[1].endswith(b"data: [DONE]\n\n")
        assert (await ask(100, stream=False))[0] == 200
        assert (len(healthy.asked), len(faulty.asked), front.damaged) == (3, 1, 1)
        async with session.get(f"{front.url}/v1/models") as answer:
            assert answer.status == 200
        async with session.get(f"{front.url}/slots") as answer:
            assert answer.status == 404


def _record(topic: Topic, value: bytes) -> ConsumerRecord[bytes, bytes]:
    headers = ((CONTENT_TYPE, COLUMNS.encode()),)
    return ConsumerRecord(topic.value, 0, 0, 0, 0, b"k", value, None, 1, len(value), headers)


def _events(number: int, ts_us: int, node: str, tokens: int) -> list[ConsumerRecord[bytes, bytes]]:
    """What the gateway publishes of one mirrored request: two records."""
    requests, logits = [], []
    for arm in ("baseline", "canary"):
        labels = {
            "v": 1,
            "rollout": ROLLOUT,
            "arm": arm,
            "pair_id": f"{number:032x}",
            "signature": f"{number:032x}",
            "ts_us": ts_us,
            "duration_us": 10 if arm == "baseline" else 25,
            "node": node if arm == "canary" else "base-1",
            "input_tokens": tokens,
            "model_version": "m",
        }
        requests.append(RequestEvent(**labels, shadow=arm == "canary", status=200, output_tokens=1))  # type: ignore[arg-type]
        logits.append(
            LogitEvent(
                **labels,  # type: ignore[arg-type]
                expected_arms=("baseline", "canary"),
                definition="raw",
                source="generated",
                tokens=(1,),
                top_ids=((1, 2),),
                top_logprobs=((-0.1, -3.0),),
            )
        )
    header = BatchHeader(producer_id="gateway", sequence=number, dropped={})
    return [
        _record(Topic.REQUESTS, encode_requests(request_columns(requests), header)),
        _record(Topic.LOGITS, encode_logits(logit_columns(logits), header)),
    ]


def test_pairs_are_counted_once_and_those_that_the_fault_damaged_are_known() -> None:
    witness = Witness("demo-gateway")
    witness.fault_since_us = 1_000
    cases = [(999, FAULTY_NODE, 2_049), (1_000, FAULTY_NODE, 2_049), (1_000, FAULTY_NODE, 2_048)]
    cases.append((1_000, "canary-2", 2_049))
    for number, (ts_us, node, tokens) in enumerate(cases, start=1):
        for record in _events(number, ts_us, node, tokens):
            witness._note(record)
    witness._note(_events(2, 1_000, FAULTY_NODE, 2_049)[1])
    played = witness.played
    assert (played.events, played.pairs, played.controls, played.affected) == (8, 4, 0, 1)
    assert played.sent[f"{2:032x}"].affected
    assert {one.later_half for one in played.sent.values()} == {"canary"}
    assert played.sent[f"{1:032x}"].complete_us == 999 + 25


@dataclass
class SeenAtOnce(Witness):
    """Every request that the gateway was asked is a pair at once."""

    gateway: FakeEngine = field(default_factory=FakeEngine)

    async def until(self, **_: object) -> bool:
        self.played.pairs = len(self.gateway.asked)
        return True


def _live(server: Server, gateway: FakeEngine, front: Front, requests: int) -> LivePlayer:
    prompts = (LivePrompt("short", "a" * 100, long=False), LivePrompt("long", "b" * 1_000, long=True))
    witness = SeenAtOnce("demo-gateway", gateway=gateway)
    script = Script(requests=requests, speed=1.0, fault_from=requests // 2)
    return LivePlayer(script, Engines((), front, prompts), 1, server.url, witness)


async def test_the_node_breaks_at_its_request_and_a_user_without_an_answer_ends_the_demo() -> None:
    gateway = FakeEngine("llama.cpp")
    front = Front("", "", 500)
    states: list[tuple[int, bool]] = []
    async with gateway.running() as server:
        player = _live(server, gateway, front, 20)
        await player.run(lambda played: states.append((played.requests, front.broken)))
        assert states == [*((n, n > 10) for n in range(1, 21)), (20, True)]
        assert {one.headers["x-klaxon-prompt-id"] for one in gateway.asked} == {"short", "long"}
        gateway.fault = "refuse"
        with pytest.raises(EngineError, match="answered 503"):
            await _live(server, gateway, Front("", "", 500), 3).run(lambda _: None)


@pytest.mark.slow
def test_a_real_engine_answers_with_ids_and_top_five() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (extra `engines`)")
    try:
        with engine(VARIANTS["baseline"]) as client:
            check_answer(client)
    except EngineError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise


def check_answer(client: EngineClient) -> None:
    prompt = client.tokenize("<|im_start|>user\nCount to three.<|im_end|>\n<|im_start|>assistant\n")
    first, again = (client.complete(prompt, 8) for _ in range(2))
    assert 1 <= len(first.tokens) <= 8
    assert all(len(ids) == len(set(ids)) == 5 for ids in first.top_ids)
    assert all(logprobs == tuple(sorted(logprobs, reverse=True)) for logprobs in first.top_logprobs)
    # Greedy: the emitted token is the most likely one.
    assert [ids[0] for ids in first.top_ids] == list(first.tokens)
    assert first.tokens == again.tokens
    assert 0 < first.ttft_us <= first.duration_us
    assert client.detokenize(client.tokenize("Count to three.")) == "Count to three."
    assert client.chat("Count to three.", 8)
    with pytest.raises(EngineError, match="400"):
        client.complete([1] * 5000, 1)
