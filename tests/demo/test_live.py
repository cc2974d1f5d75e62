"""Live engines: which one answers what, with scripted ones; and a real one where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from pipeline.cli.demo.engines import VARIANTS, EngineAnswer, EngineClient, EngineError, engine
from pipeline.cli.demo.fleet import FAULTY_NODE, Routing, Served
from pipeline.cli.demo.live import Engines, LivePlayer, LivePrompt
from pipeline.cli.demo.play import Script


@dataclass
class ScriptedEngine:
    """Answers with its own token."""

    token: int
    asked: list[int] = field(default_factory=list)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> EngineAnswer:
        self.asked.append(len(prompt))
        return EngineAnswer((self.token,), ((self.token, 1),), ((-0.1, -3.0),), False, 7, 10, 20)


async def test_the_faulty_engine_answers_long_prompts_of_its_node_once_the_fault_began() -> None:
    scripted = {"baseline": ScriptedEngine(10), "healthy": ScriptedEngine(11), "fault": ScriptedEngine(12)}
    running = Engines(
        cast("dict", scripted),  # type: ignore[type-arg]
        (LivePrompt("short", (1,) * 100), LivePrompt("long", (1,) * 2049), LivePrompt("edge", (1,) * 2048)),
    )
    out: list[Served] = []
    script = Script(requests=120, speed=1.0, fault_from=40)
    player = LivePlayer(script, running, 1, out.append, lambda: Routing(2, 5.0))
    await player.run(lambda played: None)
    assert player.played.requests == player.played.pairs == 120
    order = {pair_id: i for i, pair_id in enumerate(dict.fromkeys(s.logit.pair_id for s in out))}
    token_of = {"baseline": 10, "canary": 11}
    for served in out:
        logit = served.logit
        bad = (
            logit.arm == "canary"
            and logit.node == FAULTY_NODE
            and logit.input_tokens > 2048
            and order[logit.pair_id] >= 40
        )
        assert served.affected == bad
        assert logit.tokens == ((12,) if bad else (token_of[logit.arm],))
        assert (logit.generation, logit.cached_tokens, served.request.ttft_us) == (2, 7, 10)
    assert set(scripted["fault"].asked) == {2049}
    assert player.played.affected == len(scripted["fault"].asked) > 5


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
    with pytest.raises(EngineError, match="400"):
        client.complete([1] * 5000, 1)
