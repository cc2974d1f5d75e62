"""What breaks a plain reader of streams: one hand-written answer for each trap, by engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agents.gateway.asking import ALL_OURS, NOTHING_ADDED, Added, EngineKind, read_asked
from agents.gateway.capture import MOST_BYTES, Capture, Captured
from schemas.answers.sse import MOST_EVENT_BYTES
from schemas.events import MAX_POSITIONS
from tests.agents.gateway.captures import capture

CHAT = read_asked(
    "/v1/chat/completions", b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
)
assert CHAT is not None
DONE = "[DONE]"
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]}


def entry(token: str, logprob: float | None = -0.5, **more: Any) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), **more}


def item(token: str, *others: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**entry(token, **more), "top_logprobs": [entry(token, **more), *others]}


def chunk(text: str | None, *items: dict[str, Any], index: int = 0, **more: Any) -> dict[str, Any]:
    logprobs = {"content": list(items)} if items else None
    return {"choices": [{"index": index, "delta": {"content": text}, "logprobs": logprobs, **more}]}


def finish(reason: str = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason}], **more}


def usage(output: int, prompt: int = 3, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}}


def bytes_of(event: object) -> bytes:
    if isinstance(event, bytes):
        return event
    return b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"


def said(
    kind: EngineKind, *events: object, added: Added = ALL_OURS, cut: bool = False, most: int = MOST_BYTES
) -> Captured:
    """One event a microsecond; what was learnt."""
    reading = Capture(kind, CHAT, added, most_bytes=most)  # type: ignore[arg-type]
    for at_us, event in enumerate(events):
        reading.feed(bytes_of(event), at_us)
    reading.end(len(events), cut=cut)
    return reading.captured()


def emitted(captured: Captured) -> list[bytes | int | None]:
    assert captured.answer is not None
    return [
        position.emitted.raw if position.emitted.id is None else position.emitted.id
        for position in captured.answer.generated
    ]


def test_vllm_chat_with_several_tokens_a_chunk() -> None:
    one = said(
        "vllm",
        {**ROLE, "prompt_token_ids": [1, 733, 16289]},
        chunk(" cat", item(" cat"), token_ids=[5]),
        chunk(" sat on", item(" sat"), item(" o"), item("n"), token_ids=[6, 7, 8]),
        chunk("", item("x"), token_ids=[9]),  # held back, or part of a character
        chunk("", item("y"), token_ids=[2], finish_reason="stop", stop_reason=None),
        usage(6, prompt_tokens_details={"cached_tokens": 2}),
        DONE,
    )
    assert (one.first_token_us, one.last_token_us) == (1, 4)
    assert (one.output_tokens, one.input_tokens, one.cached_tokens) == (6, 3, 2)
    assert (one.finish_reason, one.ended, one.error, one.missing_logprobs) == ("stop", True, None, 0)
    assert one.prompt_token_ids == (1, 733, 16289)
    assert one.text == " cat sat on"
    assert emitted(one) == [5, 6, 7, 8, 9, 2]


def test_known_bad_a_reader_that_counts_chunks_or_times_the_role() -> None:
    """Both are wrong on the stream above: what is asserted there can fail."""
    three = item(" sat"), item(" o"), item("n")
    stream = [ROLE, chunk(" sat on", *three), chunk(" sat on", *three), finish(), DONE]
    one = said("vllm", *stream)
    chunks = sum(isinstance(event, dict) for event in stream)
    assert one.output_tokens == 6 != chunks
    assert one.first_token_us == 1 != 0


def test_vllm_ids_as_strings_and_a_sampled_token_outside_the_best() -> None:
    best = [entry("token_id:6", -1.0), entry("token_id:7", -2.0)]
    one = said("vllm", ROLE, chunk("x", item("token_id:5", *best, logprob=-9.0)), finish(), DONE)
    assert one.answer is not None
    [position] = one.answer.generated
    assert position.emitted.id == 5
    assert [(token.id, value) for token, value in position.entries] == [(5, -9.0), (6, -1.0), (7, -2.0)]


def test_sglang_with_a_lost_step_and_named_events() -> None:
    """Its log-probabilities are missing from the middle: counted, and nothing is compared."""
    one = said(
        "sglang",
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "", "reasoning_content": None}}]},
        chunk("a", item("a")),
        chunk("bc", item("c")),  # b came without text, and lost its entry
        b'event: sglext_ids\ndata: {"choices":[{"index":0,"delta":{"content":"no"}}],"ids":[7]}\n\n',
        finish(matched_stop=2),
        usage(3),
        DONE,
    )
    assert (one.first_token_us, one.last_token_us, one.text) == (1, 2, "abc")
    assert (one.output_tokens, one.missing_logprobs, one.ended) == (3, 0, True)
    assert one.answer is None
    lost = said("sglang", chunk("a", item("a")), chunk("bcd", item("d")), finish(), usage(4))
    assert (lost.missing_logprobs, lost.answer) == (2, None)


def test_an_entry_lost_among_a_tools_call_is_counted() -> None:
    """No text tells that what was spelled has a hole: what comes after it stands in another place."""
    told = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}

    def calling(text: str, *entries: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": text, **told}, "logprobs": {"content": list(entries)}}
        return {"choices": [choice]}

    for before in ((), (chunk("a", item("a")),)):
        chunks = (*before, calling("", item("{")), calling("", item("}")))
        tokens = len(chunks)
        for counted, whole in ((tokens, True), (tokens + 1, True), (tokens + 2, False)):
            one = said("sglang", ROLE, *chunks, finish("tool_calls"), usage(counted), DONE)
            assert (one.answer is not None) is whole, "the end of text may have no entry"
        cut = said("sglang", ROLE, *chunks, finish("length"), usage(tokens + 1), DONE)
        assert cut.answer is None


def test_llama_cpp_without_the_key_with_timings_and_comments() -> None:
    timings = {"cache_n": 36, "prompt_n": 1, "predicted_n": 3}
    one = said(
        "llama.cpp",
        b": ping\n\n",
        {"choices": [{"finish_reason": None, "index": 0, "delta": {"role": "assistant", "content": None}}]},
        b": ping\n\n",
        chunk("L", item("L", id=60)),
        chunk("", item("", id=61)),
        {**finish("length"), "timings": timings},
        DONE,
    )
    assert (one.first_token_us, one.last_token_us) == (3, 4)
    assert (one.output_tokens, one.input_tokens, one.cached_tokens) == (3, 37, 36)
    assert one.missing_logprobs == 1
    assert one.ended is False
    plain = said("llama.cpp", ROLE, chunk("L"), {**finish(), "timings": timings}, DONE, added=NOTHING_ADDED)
    assert (plain.output_tokens, plain.answer, plain.missing_logprobs) == (3, None, 0)


def test_llama_cpp_completions_are_chat_style() -> None:
    choice = {"text": "x", "index": 0, "logprobs": {"content": [item("x", id=4)]}}
    one = said("llama.cpp", {"choices": [choice]})
    assert emitted(one) == [4]
    assert one.text == "x"


def test_tgi_without_bytes_and_with_a_role_on_every_chunk() -> None:
    bare = {"token": " a", "logprob": -0.1, "top_logprobs": [{"token": " a", "logprob": -0.1}]}
    delta = {"role": "assistant", "content": " a"}
    body = {"id": "", "choices": [{"index": 0, "delta": delta, "logprobs": {"content": [bare]}}]}
    last = {"id": "", "choices": [{"index": 0, "delta": delta, "finish_reason": "eos_token"}], "usage": None}
    one = said("tgi", b"data:" + json.dumps(body).encode() + b"\n\n", last, usage(2))
    assert (one.first_token_us, one.last_token_us, one.output_tokens) == (0, 1, 2)
    assert (one.response_id, one.answer, one.ended) == (None, None, True)


def test_legacy_arrays_with_a_null_first() -> None:
    logprobs = {
        "tokens": ["token_id:5", "token_id:9"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"token_id:9": -0.5, "token_id:5": -1.25}],
        "text_offset": [-1, -1],
    }
    one = said("sglang", {"choices": [{"index": 0, "text": "ab", "logprobs": logprobs}]})
    assert one.answer is not None
    assert [len(position.entries) for position in one.answer.generated] == [0, 2]
    assert emitted(one) == [5, 9]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            {"message": "EngineCore encountered an issue.", "code": 500},
            "engine",
        ),
        ({"message": "CUDA out of memory. Tried to allocate", "code": 500}, "oom"),
        ({"message": "OOM", "code": 400}, "oom"),
        ({"message": "the boom of it", "code": 500}, "engine"),
        ({"message": "Requested sample logprobs of 21", "code": 400}, "refused"),
        ({"message": "slow down", "code": 429}, "overload"),
        ({"message": "no available slot", "code": 500}, "overload"),
        ({"message": "unavailable", "code": 503}, "overload"),
        ({"message": "the request timed out", "code": 500}, "timeout"),
        ("Model is overloaded", "overload"),
        (["x"], "refused"),
        (5, "engine"),
        ({}, "engine"),
    ],
)
def test_errors_after_the_headers(error: object, expected: str) -> None:
    one = said("vllm", ROLE, chunk("a", item("a")), {"error": error}, DONE)
    assert (one.error, one.answer, one.finish_reason) == (expected, None, None)
    assert (one.output_tokens, one.text) == (1, "a")
    whole = capture("vllm", CHAT, ALL_OURS, [(0, json.dumps({"error": error}).encode())])[1]  # type: ignore[arg-type]
    assert whole.error == expected


def test_a_detail_is_a_refusal() -> None:
    for detail in ("Not Found", [{"loc": ["body"], "msg": "Field required"}]):
        body = json.dumps({"detail": detail}).encode()
        assert capture("vllm", CHAT, ALL_OURS, [(0, body)])[1].error == "refused"  # type: ignore[arg-type]


def test_cut_streams() -> None:
    """Told by the connection, or by what is missing; what came is compared."""
    start = [ROLE, chunk("a", item("a"))]
    for one in (said("vllm", *start), said("vllm", *start, cut=True), said("vllm", *start, b'data: {"choi')):
        assert (one.error, one.ended, one.output_tokens, emitted(one)) == ("cut", None, 1, [b"a"])
    assert said("vllm", *start, finish(), cut=True).error == "cut"
    assert said("vllm", *start, finish()).error is None  # without [DONE]
    assert said("vllm", *start, DONE).error is None
    assert said("vllm", cut=True).error == "cut"
    assert said("vllm", b"\n", cut=True).error == "cut"
    whole = Capture("vllm", CHAT, ALL_OURS)  # type: ignore[arg-type]
    assert whole.feed(b'{"choices":[{"mess', 0) == b'{"choices":[{"mess'
    assert whole.end(1, cut=True) == b""
    assert whole.captured().error == "cut"


def test_a_character_over_two_chunks() -> None:
    """Its first part has no text, but is the first token."""
    first, second = {**item("x"), "bytes": [228, 184]}, {**item("x"), "bytes": [150]}
    one = said("llama.cpp", ROLE, chunk("", first), chunk("世", second), finish(), DONE)
    assert (one.first_token_us, one.output_tokens, one.text) == (1, 2, "世")
    halves = [
        b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % half for half in (b"\\ud83d", b"\\ude00x")
    ]
    assert said("llama-cpp-python", *halves, finish()).text == "😀x"
    assert said("llama-cpp-python", halves[1], halves[0], finish()).text == "\ufffdx\ufffd"
    assert said("llama-cpp-python", halves[0]).first_token_us == 0
    key = b'data: {"choices":[{"delta":{"content":"a"},"\\ud83d":1}]}\n\n'
    assert said("llama-cpp-python", key, finish()).error == "garbled"


def test_values_that_are_no_measurement() -> None:
    """They stay what they are: a position is judged where it is compared."""
    others = [entry("b", -9999.0), entry("c", None), entry("d", 0)]
    none = {**entry("e"), "top_logprobs": []}
    one = said("vllm", chunk("a", item("a", *others)), chunk("e", none), finish())
    assert one.answer is not None
    values = [[value for _, value in position.entries] for position in one.answer.generated]
    assert values == [[-0.5, -9999.0, float("-inf"), 0.0], []]
    nan = said("vllm", b'data: {"choices":[{"logprobs":{"content":[{"token":"a","bytes":[97],"logprob":NaN,'
               b'"top_logprobs":[{"token":"a","bytes":[97],"logprob":NaN}]}]}}]}\n\n', finish())  # fmt: skip
    assert nan.answer is not None
    assert nan.answer.generated[0].entries[0][1] != nan.answer.generated[0].entries[0][1]


def test_choice_0_is_captured_and_all_are_counted() -> None:
    two = [
        chunk("x", item("x"), index=1),
        chunk("a", item("a")),
        chunk("y", item("y"), item("z"), index=1),
        chunk("b", item("b")),
        finish("length"),
    ]
    one = said("vllm", *two)
    assert (one.text, emitted(one), one.output_tokens, one.first_token_us) == ("ab", [b"a", b"b"], 5, 0)
    assert one.answer is not None
    assert one.answer.other_choices == 1
    assert said("vllm", *two, usage(7)).output_tokens == 7
    assert said("vllm", *two, usage(7)).missing_logprobs == 0  # nothing says whose they are


def test_tools_and_reasoning_are_tokens() -> None:
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}
    for delta in (call, {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
                  {"choices": [{"index": 0, "delta": {"reasoning": "hm", "content": None}}]},
                  {"choices": [{"index": 0, "delta": {"refusal": "no"}}]},
                  {"choices": [{"index": 0, "delta": {"function_call": {"name": "f"}}}]}):  # fmt: skip
        one = said("vllm", ROLE, delta, finish("tool_calls"), usage(4), DONE)
        assert (one.first_token_us, one.output_tokens, one.ended, one.text) == (1, 4, True, "")


def test_ids_without_logprobs_hold_their_places() -> None:
    first, last = chunk("a", item("a"), token_ids=[5]), chunk("c", item("c"), token_ids=[7])
    one = said("vllm", first, chunk("b", token_ids=[6]), last)
    assert (emitted(one), one.missing_logprobs, one.output_tokens) == ([5, 6, 7], 1, 3)
    assert one.answer is not None
    assert [len(position.entries) for position in one.answer.generated] == [1, 0, 1]


def test_garbage_ends_the_reading_and_not_the_answer() -> None:
    for garbage in (
        b"data: {\n\n",
        b'data: {"choices":5}\n\n',
        b'data: {"choices":[{"logprobs":{"content":[{"bytes":[999]}]}}]}\n\n',
        b"data: " + b"9" * 5000 + b"\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
    ):
        one = said("vllm", chunk("a", item("a")), garbage, chunk("b", item("b")), finish(), usage(2))
        assert (one.error, one.answer, one.output_tokens) == ("garbled", None, 2)
    assert capture("vllm", CHAT, ALL_OURS, [(0, b"{")])[1].error == "garbled"  # type: ignore[arg-type]
    for no_answer in (b"<html>nginx</html>", b"<html>\n\n</html>\n\n", b"", b"\n", b"null"):
        assert said("vllm", no_answer).error == "garbled"  # no event, no end
    for begun in (b": ping\n\n", b'data: {"choices":[]}\n\n'):
        assert said("vllm", begun).error == "cut"


def test_counts_no_event_may_hold_are_none() -> None:
    for wrong in (-1, 2**31, 1.5, "4", True, None):
        counts = {"completion_tokens": wrong, "prompt_tokens": wrong, "prompt_tokens_details": wrong}
        one = said("vllm", chunk("a", item("a")), finish(), {"choices": [], "usage": counts})
        assert (one.output_tokens, one.input_tokens, one.cached_tokens) == (1, None, None)


def test_an_endless_event_passes_untouched() -> None:
    reading = Capture("vllm", CHAT, Added("full", logprobs=True))  # type: ignore[arg-type]
    reading.feed(bytes_of(chunk("a", item("a"))), 0)
    sent, got = 0, 0
    for _ in range(MOST_EVENT_BYTES // (1 << 18) + 8):
        sent += 1 << 18
        got += len(reading.feed(b"x" * (1 << 18), 1))
    assert got == sent
    assert reading.feed(bytes_of(chunk("b", item("b"))), 2) == bytes_of(chunk("b", item("b")))
    assert reading.end(3) == b""
    one = reading.captured()
    assert (one.error, one.answer, one.text) == ("garbled", None, "a")


@pytest.mark.parametrize("short", [0, 1])
def test_more_than_is_kept_passes_and_is_counted(short: int) -> None:
    """Just at the bound all is kept; over it positions are let go of, additions are still taken out."""
    events = [chunk("a", item("a")), chunk("b", item("b")), finish()]
    most = sum(len(bytes_of(event)) - 8 for event in events) - short
    one = said("vllm", *events, usage(2), DONE, most=most + len(json.dumps(usage(2))))
    assert (one.overflowed, one.answer is None) == (bool(short), bool(short))
    assert (one.output_tokens, one.finish_reason, one.error) == (2, "stop", None)
    added = Added("full", logprobs=True)
    reading = Capture("vllm", CHAT, added, most_bytes=10)  # type: ignore[arg-type]
    assert b"top_logprobs" not in b"".join(reading.feed(bytes_of(event), 0) for event in events)


@pytest.mark.parametrize("size", [199, 200, 201])
@pytest.mark.parametrize("ours", [False, True])
def test_a_whole_body_over_the_bound_passes(size: int, ours: bool) -> None:
    body = b'{"choices":[{"index":0,"message":{"content":"' + b"a" * (size - 64) + b'"},"logprobs":{}}]}  '
    body = body[:size].ljust(size)
    reading = Capture("vllm", CHAT, Added("full", logprobs=ours), most_bytes=200)  # type: ignore[arg-type]
    out = b"".join(reading.feed(body[at : at + 50], 0) for at in range(0, size, 50)) + reading.end(0)
    one = reading.captured()
    assert one.overflowed is (size > 200)
    assert out == (body.replace(b"{}", b"null") if ours and size <= 200 else body)


@pytest.mark.slow
def test_no_more_positions_than_an_event_holds() -> None:
    for positions in (MAX_POSITIONS, MAX_POSITIONS + 1):
        bare = {"token": "a", "bytes": [97], "logprob": -1, "top_logprobs": [{"bytes": [97], "logprob": -1}]}
        whole, rest = chunk("a", *[bare] * 5000), chunk("a", *[bare] * (positions % 5000))
        one = said("vllm", *[whole] * (positions // 5000), rest, finish(), most=1 << 30)
        assert one.output_tokens == positions
        assert one.overflowed is (positions > MAX_POSITIONS)
        assert (one.answer is None) is one.overflowed


def test_answers_that_are_not_streamed_have_no_first_token() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
    logprobs = {"content": [item("a"), item("b")]}
    body = {
        "id": "x", "model": "m", "choices": [{**choice, "logprobs": logprobs, "token_ids": [5, 6]}],
        "prompt_token_ids": [1], "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }  # fmt: skip
    got, one = capture("vllm", CHAT, ALL_OURS, [(0, b" \n"), (1, json.dumps(body).encode())])  # type: ignore[arg-type]
    assert got == b" \n" + json.dumps(body).encode()
    assert (one.first_token_us, one.last_token_us, one.error) == (None, None, None)
    assert (one.text, emitted(one), one.output_tokens, one.prompt_token_ids) == ("ab", [5, 6], 2, (1,))
    assert (one.response_id, one.model) == ("x", "m")


@pytest.mark.parametrize("tokens", [62, 63, 64, 65, 200])
def test_tokens_pass_at_once_though_they_are_read_later(tokens: int) -> None:
    events = [ROLE, *(chunk(f" w{number}") for number in range(tokens)), finish(), usage(tokens), DONE]
    reading = Capture("vllm", CHAT, Added(usage=True))  # type: ignore[arg-type]
    for at_us, event in enumerate(events):
        ours = event == usage(tokens)
        assert reading.feed(bytes_of(event), at_us) == (b"" if ours else bytes_of(event))
    assert reading.end(len(events)) == b""
    captured = reading.captured()
    assert captured.text == "".join(f" w{number}" for number in range(tokens))
    assert (captured.first_token_us, captured.last_token_us) == (1, tokens)
    assert (captured.output_tokens, captured.finish_reason, captured.error) == (tokens, "stop", None)


def test_an_error_among_tokens_that_are_read_later_is_told() -> None:
    error = {"error": {"message": "died", "type": "InternalServerError", "code": 500}}
    assert said("vllm", ROLE, chunk("a"), error, added=NOTHING_ADDED, cut=True).error == "engine"
    garbled = said("vllm", ROLE, chunk("a"), b"data: {nothing\n\n", added=NOTHING_ADDED, cut=True)
    assert (garbled.error, garbled.text) == ("garbled", "a")
