"""Events of exchanges: valid whatever was said, the same in both encodings, and holding what they should."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.gateway.capture import Captured
from agents.gateway.events import ERRORS, FINISHES, Exchange, NoLogits, Stated, logit_event, request_event
from agents.gateway.facts import EngineFacts
from agents.gateway.lists import decimals_of
from agents.gateway.pseudonyms import IDS, Pseudonyms
from agents.publish.batches import CODECS, cut_to_record, key_of
from schemas.answers.positions import Answer, Position, Token
from schemas.codec import decode_logits, decode_requests
from schemas.columns import BatchHeader
from schemas.events import EncryptedText, LogitEvent, RequestEvent
from schemas.topics import COLUMNS, MAX_RECORD_BYTES, Topic
from schemas.validity import has_valid_position, valid_positions
from tests.agents.gateway.exchanges import (
    ASKED,
    CAPTURED,
    EXCHANGE,
    POOL,
    POSITIONS,
    ROUTE,
    answered,
    by_bytes,
    exchanges,
    position,
)
from tests.schemas.events import assert_equal_columns

HOLDER = Pseudonyms(bytes(range(32)), "p1")
PAIR = HOLDER.of(EXCHANGE.pair_id)
HEADER = BatchHeader("g", 0, {})
SEALED = EncryptedText(key_id="k", nonce="AAAA", data="AAAA")


def logits(exchange: Exchange) -> LogitEvent:
    found = logit_event(exchange, HOLDER)
    assert isinstance(found, LogitEvent), found
    return found


def revealed(exchange: Exchange) -> list[list[tuple[int, float]]]:
    """Lists of its logit event, by their ids."""
    event = logits(exchange)
    assert event.top_ids is not None
    return [
        list(zip(PAIR.reveal(np.array(ids, dtype=np.int64)).tolist(), values, strict=True))
        for ids, values in zip(event.top_ids, event.top_logprobs, strict=True)
    ]


# --- valid, whatever was said -----------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(exchanges(), st.one_of(st.none(), st.lists(st.floats(), max_size=3).map(tuple)))
def test_request_events_are_valid_and_alike_in_both_encodings(
    exchange: Exchange, embedding: tuple[float, ...] | None
) -> None:
    event = request_event(exchange, SEALED, "c-1", embedding)
    as_json = msgspec.json.encode(event)
    assert msgspec.json.decode(as_json, type=RequestEvent) == event
    in_json = decode_requests(as_json, None)
    in_columns = decode_requests(CODECS[Topic.REQUESTS].encode([event], HEADER), COLUMNS)
    assert in_json.rejected == in_columns.rejected == ()
    assert_equal_columns(in_json.columns, in_columns.columns)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=300)
@given(exchanges())
def test_logit_events_are_valid_and_alike_in_both_encodings(exchange: Exchange) -> None:
    event = logit_event(exchange, HOLDER)
    if isinstance(event, NoLogits):
        return
    as_json = msgspec.json.encode(event)
    assert msgspec.json.decode(as_json, type=LogitEvent) == event
    in_json = decode_logits(as_json, None)
    in_columns = decode_logits(CODECS[Topic.LOGITS].encode([event], HEADER), COLUMNS)
    assert in_json.rejected == in_columns.rejected == ()
    assert_equal_columns(in_json.columns, in_columns.columns)
    assert has_valid_position(in_json.columns).all(), "a reader keeps it"
    listed = np.array([len(row) > 0 for row in event.top_logprobs])
    assert (valid_positions(in_json.columns) == listed).all(), "what leaves is what can be read"
    assert max(map(len, event.top_logprobs)) <= exchange.top


@given(exchanges())
def test_whatever_was_said_no_text_is_among_it(exchange: Exchange) -> None:
    """Nothing of an engine's or a client's own words but the labels that headers are configured for."""
    secret = "sk-4711-secret"
    asked = replace(exchange.asked, texts=(secret,), model=secret, body=secret.encode(), fields={"a": secret})
    said = replace(
        exchange.captured or Captured(),
        text=secret, finish_reason=secret, error=secret, model=secret, response_id=secret,
    )  # fmt: skip
    exchange = replace(exchange, asked=asked, captured=said, error=None)
    events = [request_event(exchange), logit_event(exchange, HOLDER)]
    for event in events:
        if isinstance(event, RequestEvent | LogitEvent):
            assert secret.encode() not in msgspec.json.encode(event)
    assert (events[0].error, events[0].finish_reason) == ("other", "other")


# --- what they hold ---------------------------------------------------------------------------------------


def test_a_request_event_of_everything() -> None:
    facts = EngineFacts(kind="vllm", version="0.32.1", model="m-8b", definition="raw")
    stated = Stated("p3", "d1", "s9", "prompt-7", "snap-1")
    exchange = replace(EXCHANGE, facts=facts, stated=stated)
    event = request_event(exchange, SEALED, "c-1", (0.5, -0.5))
    assert msgspec.to_builtins(event) == {
        "v": 1, "rollout": "chat", "generation": 3, "arm": "canary", "pair_id": EXCHANGE.pair_id,
        "signature": EXCHANGE.signature, "ts_us": EXCHANGE.ts_us, "duration_us": 2_000_000, "node": "n1",
        "input_tokens": 12, "model_name": "m-8b", "model_version": "v2", "prompt_version": "p3",
        "data_version": "d1", "system_version": "s9", "key_ids": "s1", "request_type": "chat",
        "temperature": 0.7,
        "top_p": 0.9, "seed": 7, "max_tokens": 64, "engine": "vllm 0.32.1 mode=raw", "hardware": "h200",
        "region": "eu", "tenant": "b" * 32, "cached_tokens": 4, "shadow": True, "status": 200,
        "ttft_us": 180_000, "output_tokens": 2, "itl_us": 30_000, "finish_reason": "stop", "stream": True,
        "session": "a" * 32, "prompt_id": "prompt-7", "snapshot_id": "snap-1", "embedding": (0.5, -0.5),
        "consent_id": "c-1", "text": {"key_id": "k", "nonce": "AAAA", "data": "AAAA"},
    }  # fmt: skip
    assert key_of(event) == EXCHANGE.signature.encode()


def test_the_configuration_wins_over_headers_and_engine() -> None:
    pool = msgspec.structs.replace(
        POOL, prompt_version="pc", data_version="dc", system_version="sc", model_name="named"
    )
    facts = EngineFacts(kind="vllm", model="m-8b")
    exchange = replace(EXCHANGE, route=replace(ROUTE, pool=pool), stated=Stated("p", "d", "s"), facts=facts)
    event = request_event(exchange)
    assert (event.prompt_version, event.data_version, event.system_version) == ("pc", "dc", "sc")
    assert event.model_name == "named"


def test_a_request_that_nobody_answered() -> None:
    event = request_event(
        replace(EXCHANGE, captured=None, status=0, error="connect", ttft_us=None, expected_arms=())
    )
    assert (event.status, event.error, event.ttft_us, event.output_tokens) == (0, "connect", None, 0)
    assert (event.itl_us, event.finish_reason, event.text, event.consent_id) == (None, None, None, None)
    assert event.input_tokens == len("userhello") // 4, "a guess by its length, so that it has its class"


@pytest.mark.parametrize(
    ("said", "tokens", "expected"),
    [((100, 160), 4, 20), ((100, 160), 1, None), ((100, 160), 0, None), ((None, 160), 4, None),
     ((100, None), 4, None), ((160, 100), 4, 0), ((100, 100), 2, 0)],
)  # fmt: skip
def test_time_between_tokens(said: tuple[int | None, int | None], tokens: int, expected: int | None) -> None:
    captured = Captured(first_token_us=said[0], last_token_us=said[1], output_tokens=tokens)
    assert request_event(replace(EXCHANGE, captured=captured)).itl_us == expected


def test_answers_that_share_a_stream_have_no_time_between_tokens() -> None:
    """Counted are the tokens of all; a copy's, which is of one answer, goes without as well."""
    captured = Captured(first_token_us=100, last_token_us=160, output_tokens=8)
    for shadow in (False, True):
        for choices, expected in ((1, 8), (2, None)):
            asked = replace(EXCHANGE.asked, choices=choices)
            event = request_event(replace(EXCHANGE, asked=asked, captured=captured, shadow=shadow))
            assert event.itl_us == expected


def test_input_tokens_as_counted_else_by_ids_else_guessed() -> None:
    for captured, expected in (
        (Captured(input_tokens=9, prompt_token_ids=(1, 2)), 9),
        (Captured(input_tokens=0), 0),
        (Captured(input_tokens=-3, prompt_token_ids=(1, 2)), 2),
        (Captured(), 2),
    ):
        assert request_event(replace(EXCHANGE, captured=captured)).input_tokens == expected


@pytest.mark.parametrize("error", sorted(ERRORS))
def test_errors_have_their_class(error: str) -> None:
    assert request_event(replace(EXCHANGE, error=error)).error == error
    assert request_event(replace(EXCHANGE, captured=replace(CAPTURED, error=error))).error == error
    assert (
        request_event(replace(EXCHANGE, error="timeout", captured=Captured(error=error))).error == "timeout"
    )


@pytest.mark.parametrize("finish", sorted(FINISHES))
def test_finish_reasons_are_known_ones(finish: str) -> None:
    event = request_event(replace(EXCHANGE, captured=replace(CAPTURED, finish_reason=finish)))
    assert event.finish_reason == finish


def test_an_embedding_that_is_none_is_left_out() -> None:
    for vector in ((), (math.nan,), (math.inf, 0.0), (0.0,) * 4097):
        assert request_event(EXCHANGE, embedding=vector).embedding is None
    assert request_event(EXCHANGE, embedding=(0.0,) * 4096).embedding == (0.0,) * 4096


def test_a_logit_event_of_everything() -> None:
    event = logits(EXCHANGE)
    assert event.tokens == tuple(PAIR.ids(np.array([5, 2])).tolist())
    assert revealed(EXCHANGE) == [[(5, -0.25), (9, -1.75), (3, -4.5)], [(2, -0.125), (7, -2.5)]]
    assert event.expected_arms == ("baseline", "canary"), "in the order of their codes"
    assert (event.definition, event.source, event.kind, event.ended) == ("raw", "generated", "logprobs", True)
    assert (event.token_bytes, event.top_bytes, event.key_ids) == (None, None, "s1,p1")
    shared = set(msgspec.to_builtins(event)) & set(msgspec.to_builtins(request_event(EXCHANGE)))
    shared -= {"key_ids"}
    assert all(getattr(event, name) == getattr(request_event(EXCHANGE), name) for name in shared)
    assert len(shared) >= 17, "self-contained"


def test_equal_tokens_of_two_arms_are_equal_there_and_nowhere_else() -> None:
    other = replace(EXCHANGE, route=replace(ROUTE, pool=msgspec.structs.replace(POOL, arm="baseline")))
    assert logits(other).tokens == logits(EXCHANGE).tokens
    assert logits(replace(EXCHANGE, pair_id="f" * 32)).tokens != logits(EXCHANGE).tokens


def test_no_logits_and_why() -> None:
    for exchange, why in (
        (replace(EXCHANGE, expected_arms=()), NoLogits.NOT_MIRRORED),
        (replace(EXCHANGE, captured=None), NoLogits.NO_ANSWER),
        (replace(EXCHANGE, captured=Captured()), NoLogits.NO_ANSWER),
        (answered(), NoLogits.NO_POSITIONS),
        (answered(position(1), position(2)), NoLogits.NO_POSITIONS),
        (answered(position(1, (1, math.nan))), NoLogits.NO_POSITIONS),
        (answered(position(1, (1, -9999.0))), NoLogits.NO_POSITIONS),
        (answered(Position(Token(), ((Token(), -0.5),))), NoLogits.NO_TOKEN_IDENTITY),
    ):
        assert logit_event(exchange, HOLDER) is why
    assert len(NoLogits) == 4


# --- lists ------------------------------------------------------------------------------------------------


def test_lists_leave_falling_and_cut_to_the_best() -> None:
    six = position(9, (9, -1.2), (1, -0.5), (4, -6.0), (2, -3.0), (3, -4.0), (5, -5.0))
    (best,) = revealed(replace(answered(six), top=5))
    assert best == [(1, -0.5), (9, -1.2), (2, -3.0), (3, -4.0), (5, -5.0)]
    (two,) = revealed(replace(answered(six), top=2))
    assert two == [(1, -0.5), (9, -1.2)]


def test_an_emitted_token_out_of_rank_stays_first() -> None:
    """vLLM's chat lists: the sampled token, then only the best four others. Readers know it by its place."""
    sampled = position(77, (77, -8.0), (1, -0.3), (2, -2.0), (3, -3.0), (4, -4.0))
    assert revealed(answered(sampled)) == [[(77, -8.0), (1, -0.3), (2, -2.0), (3, -3.0), (4, -4.0)]]
    # With one more asked for, the five best are all there, and it is none of them.
    more = position(77, (77, -8.0), (1, -0.3), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0))
    assert revealed(answered(more)) == [[(1, -0.3), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0)]]
    # Any other first token, or one in rank, is just an entry.
    assert revealed(answered(position(9, (77, -8.0), (1, -0.2)))) == [[(1, -0.2), (77, -8.0)]]
    assert revealed(answered(position(2, (2, -2.0), (1, -0.3), (3, -3.0)))) == [
        [(1, -0.3), (2, -2.0), (3, -3.0)]
    ]
    assert revealed(answered(position(1, (1, -0.5), (2, -1.2)))) == [[(1, -0.5), (2, -1.2)]]
    assert revealed(answered(position(1, (1, -3.0)))) == [[(1, -3.0)]]


@pytest.mark.parametrize("value", [-9999.0, -9999.5, -math.inf])
def test_not_listed_entries_are_left_out(value: float) -> None:
    assert revealed(answered(position(1, (1, value), (2, -0.5)))) == [[(2, -0.5)]]


@pytest.mark.parametrize(
    "entries",
    [((1, math.nan), (2, -0.5)), ((1, math.inf),), ((1, 0.0011),), ((1, -0.5), (1, -0.9)),
     ((1, -0.1), (2, -0.1)), ((2**31, -0.5),), ((-1, -0.5),), ()],
)  # fmt: skip
def test_a_position_that_breaks_the_rules_lists_nothing(entries: tuple[tuple[int, float], ...]) -> None:
    """It stays in its place: positions of two arms are compared by number."""
    assert revealed(answered(position(1, *entries), POSITIONS[1])) == [[], [(2, -0.125), (7, -2.5)]]


def test_logits_are_no_probabilities() -> None:
    facts = EngineFacts(kind="vllm", logits=True)
    exchange = replace(answered(position(1, (1, 12.5), (2, 11.0))), facts=facts)
    assert logits(exchange).kind == "logits"
    assert revealed(exchange) == [[(1, 12.5), (2, 11.0)]]


def test_bytes_where_there_are_no_ids() -> None:
    exchange = answered(
        by_bytes(b" cat", (b" cat", -0.25), (b" dog", -2.0)), by_bytes(b" cat", (b"x" * 20, -0.5))
    )
    event = logits(exchange)
    assert (event.tokens, event.top_ids) == (None, None)
    assert event.token_bytes is not None
    assert event.top_bytes is not None
    assert [PAIR.reveal_bytes(one) for one in event.token_bytes] == [b" cat", b" cat"]
    assert [PAIR.reveal_bytes(one) for one in event.top_bytes[0]] == [b" cat", b" dog"]
    assert event.top_bytes[0][0] == event.token_bytes[0]
    assert PAIR.reveal_bytes(event.top_bytes[1][0]) is None
    assert all(len(one) == 32 for one in event.token_bytes)


def test_an_emitted_token_that_nothing_identifies_equals_no_other_arms() -> None:
    def tokens(arm: str, *positions: Position) -> tuple[Any, ...]:
        pool = msgspec.structs.replace(POOL, arm=arm)
        event = logits(replace(answered(*positions), route=replace(ROUTE, pool=pool)))
        return event.tokens or event.token_bytes or ()

    unknown = position(None, (5, -0.25))
    assert len({tokens(arm, unknown) for arm in ("baseline", "canary", "control")}) == 3
    nameless = by_bytes(None, (b"x", -0.25))
    assert len({tokens(arm, nameless) for arm in ("baseline", "canary", "control")}) == 3
    known = by_bytes(None, (b"x", -0.25), id=7)
    assert len({tokens(arm, known) for arm in ("baseline", "canary", "control")}) == 1, "by its id at least"
    assert PAIR.reveal(np.array(tokens("canary", unknown))).tolist() == [IDS - 2]


@pytest.mark.parametrize("positions", [65_535, 65_536])
def test_the_longest_answer(positions: int) -> None:
    exchange = answered(*[position(1, (1, -0.5))] * positions, ended=True)
    event = logits(exchange)
    assert event.tokens is not None
    assert len(event.tokens) == 65_535
    assert event.ended is (True if positions == 65_535 else None)
    cut = cut_to_record(event)
    assert len(CODECS[Topic.LOGITS].encode([cut], HEADER)) <= MAX_RECORD_BYTES


@pytest.mark.parametrize(
    ("values", "expected"),
    [([-0.5, -1.0], 3), ([-0.125, -2.0], 3), ([-0.1254, -2.0], 4), ([-0.12543], 4), ([-0.125431], 6),
     ([-0.44810932874679565, -2.0], 6), ([0.0, -1.0], 3), ([-0.1234, -0.12345678], 6)],
)  # fmt: skip
def test_precision_as_sent(values: list[float], expected: int) -> None:
    assert decimals_of([values]) == expected
    exchange = answered(position(1, *enumerate(values))) if len(values) == 1 else None
    if exchange is not None:
        assert logits(exchange).precision == expected


@given(st.lists(st.decimals(-20, 0, places=5).map(float), min_size=1, max_size=9), st.integers(1, 8))
def test_decimals_agree_with_what_compare_reads(values: list[float], places: int) -> None:
    """Within the classes that η knows (under 4, 4 or 5, from 6)."""
    values = [round(value, places) for value in values]
    answer = Answer((position(0, *enumerate(values)),))
    classes = [3, 3, 3, 3, 4, 4, 6]
    assert decimals_of([values]) == classes[answer.decimals()]


def test_stated_precision_wins() -> None:
    pool = msgspec.structs.replace(POOL, precision="f16")
    assert logits(replace(EXCHANGE, route=replace(ROUTE, pool=pool))).precision == "f16"


@pytest.mark.parametrize(
    ("kind", "stated", "said", "temperature", "expected"),
    [("vllm", None, None, 0.7, "raw"), ("vllm", None, "processed", 0.7, "processed"),
     ("vllm", "temperature", "processed", 0.7, "temperature"), ("vllm", "temperature", None, 1.0, "raw"),
     ("vllm", "temperature", None, 0.0, "temperature"), ("sglang", None, None, 0.7, "temperature"),
     ("sglang", None, None, 0.0, "raw"), ("sglang", None, None, None, "temperature"),
     ("tgi", None, None, 0.7, "processed"), ("tgi", None, None, 0.0, "raw"),
     ("tgi", None, None, 1.0, "processed"), ("llama.cpp", None, None, 0.7, "raw"),
     ("llama-cpp-python", None, None, 0.7, "raw")],
)  # fmt: skip
def test_what_log_probabilities_are(
    kind: Any, stated: Any, said: Any, temperature: float | None, expected: str
) -> None:
    pool = msgspec.structs.replace(POOL, kind=kind, definition=stated)
    facts = EngineFacts(kind=kind, definition=said)
    exchange = replace(
        EXCHANGE, route=replace(ROUTE, pool=pool), facts=facts, asked=replace(ASKED, temperature=temperature)
    )
    assert logits(exchange).definition == expected
