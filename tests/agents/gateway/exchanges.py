"""Exchanges for tests: a plain one, and whatever an engine and a client may have said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from agents.gateway.asking import read_asked
from agents.gateway.capture import Captured
from agents.gateway.events import Exchange, Stated
from agents.gateway.facts import EngineFacts
from agents.gateway.routing import Route, Why
from agents.gateway.settings import EngineSettings, PoolSettings
from schemas.answers.positions import Answer, Position, Token

POOL = PoolSettings(
    arm="canary",
    kind="vllm",
    model_version="v2",
    hardware="h200",
    region="eu",
    engines=(EngineSettings(node="n1", url="http://127.0.0.1:1"),),
)
ROUTE = Route(POOL, POOL.engines[0], 3, Why.WEIGHTS)
_read = read_asked(
    "/v1/chat/completions",
    b'{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true,"temperature":0.7,"top_p":0.9,'
    b'"seed":7,"max_tokens":64}',
)
assert _read is not None
ASKED = _read


def position(emitted: int | None, *entries: tuple[int, float], raw: bytes | None = None) -> Position:
    """By ids."""
    return Position(Token(emitted, raw), tuple((Token(one), value) for one, value in entries))


def by_bytes(emitted: bytes | None, *entries: tuple[bytes, float], id: int | None = None) -> Position:
    """By bytes."""
    return Position(Token(id, emitted), tuple((Token(None, one), value) for one, value in entries))


POSITIONS = (
    position(5, (5, -0.25), (9, -1.75), (3, -4.5)),
    position(2, (2, -0.125), (7, -2.5)),
)
CAPTURED = Captured(
    answer=Answer(POSITIONS, ended=True), output_tokens=2, input_tokens=12, cached_tokens=4,
    first_token_us=1_000_000, last_token_us=1_030_000, finish_reason="stop", ended=True, text="hi there",
)  # fmt: skip
EXCHANGE = Exchange(
    rollout="chat", route=ROUTE, asked=ASKED, signature="5f0c8a1b2d3e4f60718293a4b5c6d7e8",
    signature_key_id="s1", pair_id="0123456789abcdef0123456789abcdef", ts_us=1_767_225_600_000_000,
    duration_us=2_000_000, ttft_us=180_000, status=200, error=None, shadow=True, captured=CAPTURED,
    expected_arms=("canary", "baseline"), session="a" * 32, tenant="b" * 32,
)  # fmt: skip


def answered(*positions: Position, **changes: Any) -> Exchange:
    """The plain one with this answer."""
    return replace(EXCHANGE, captured=replace(CAPTURED, answer=Answer(positions), **changes))


# --- whatever may be said ---------------------------------------------------------------------------------

_ints = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 2**31 - 1, 2**31, -1]))
_floats = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 100.0, 100.5, -0.0]))
_texts = st.one_of(st.none(), st.text(max_size=20), st.just("x" * 300), st.just("\ud800"))
_values = st.one_of(
    st.floats(-12, 0),
    st.floats(),
    st.sampled_from([0.0, 1e-3, 1.1e-3, -9999.0, -9998.9999, -9998.0, float("nan"), float("inf"),
                     float("-inf"), -1e39, 1e39, -0.6931, -0.5]),
)  # fmt: skip
_tokens = st.one_of(
    st.builds(Token, st.integers(0, 5), st.none()),
    st.builds(Token, st.none(), st.binary(min_size=1, max_size=3)),
    st.builds(Token, st.one_of(st.none(), st.sampled_from([0, 2**31 - 1, 2**31, -1])),
              st.one_of(st.none(), st.binary(min_size=1, max_size=20))),
)  # fmt: skip
_positions = st.builds(Position, _tokens, st.lists(st.tuples(_tokens, _values), max_size=8).map(tuple))
_by_ids = st.builds(
    position,
    st.one_of(st.none(), st.integers(0, 9)),
    *[st.tuples(st.integers(0, 9), _values)] * 3,
)
_answers = st.one_of(st.lists(_positions, max_size=6), st.lists(_by_ids, max_size=6)).map(
    lambda positions: Answer(tuple(positions))
)


def captures() -> st.SearchStrategy[Captured]:
    """Whatever an engine may have said."""
    return st.builds(
        Captured,
        answer=st.one_of(st.none(), _answers),
        output_tokens=st.integers(-5, 2**40),
        input_tokens=_ints,
        cached_tokens=_ints,
        first_token_us=_ints,
        last_token_us=_ints,
        finish_reason=_texts,
        ended=st.sampled_from([None, True, False]),
        error=_texts,
        missing_logprobs=st.integers(0, 9),
        prompt_token_ids=st.one_of(st.none(), st.just((1, 2, 3))),
        text=st.text(max_size=5),
        response_id=_texts,
        model=_texts,
    )


def exchanges() -> st.SearchStrategy[Exchange]:
    """Whatever may have been asked and answered, by configurations that are accepted."""
    asked = st.builds(
        replace,
        st.just(ASKED),
        temperature=_floats,
        top_p=_floats,
        seed=_ints,
        max_tokens=_ints,
        stream=st.booleans(),
        texts=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    )
    facts = st.builds(
        EngineFacts,
        kind=st.just("vllm"),
        version=st.sampled_from([None, "0.32", "x" * 300]),
        model=_texts,
        definition=st.sampled_from([None, "raw", "temperature", "processed"]),
        logits=st.booleans(),
    )
    stated = st.builds(Stated, _texts, _texts, _texts, _texts, _texts)
    arms = st.sampled_from([(), ("baseline", "canary"), ("control", "canary", "baseline")])
    return st.builds(
        replace,
        st.just(EXCHANGE),
        asked=asked,
        ts_us=st.integers(-5, 2**63),
        duration_us=st.integers(-5, 2**63),
        ttft_us=_ints,
        status=st.integers(-5, 2000),
        error=_texts,
        shadow=st.booleans(),
        captured=st.one_of(st.none(), captures()),
        expected_arms=arms,
        source=st.sampled_from(["generated", "forced"]),
        session=_texts,
        tenant=_texts,
        stated=stated,
        facts=st.one_of(st.none(), facts),
        top=st.integers(1, 20),
    )
