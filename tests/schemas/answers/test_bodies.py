"""Bodies as the engines send them, real ones first, and what is no body at all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.answers.bodies import read_body, read_response
from schemas.answers.positions import Answer, CaptureError, Skipped, has_bytes, has_ids


def real(shared_dir: Path, name: str) -> Any:
    return read_body((shared_dir / "data" / "sse" / name).read_bytes())


def answer_of(reading: object) -> Answer:
    assert isinstance(reading, Answer), reading
    return reading


REAL = [
    # name, positions, ids, bytes, ended
    ("llama-server_f16/chat_short_greedy.sse", 64, True, True, False),
    ("llama-server_f16/chat_no_usage.sse", 64, True, True, False),
    ("llama-server_f16/chat_utf8.sse", 27, True, True, True),
    ("llama-server_f16/completion_greedy.sse", 48, True, True, False),
    ("llama-server_f16/completion_utf8.sse", 30, True, True, False),
    ("vllm/chat_stream.sse", 40, False, True, False),
    ("vllm/chat_nostream.json", 40, False, True, False),
    ("vllm/chat_stream_interval4.sse", 24, False, True, False),
    ("vllm/chat_n2_stream.sse", 24, False, True, False),
    ("vllm/chat_stop_string_stream.sse", 17, False, True, True),
    ("vllm/chat_split_characters_stream.sse", 40, False, True, False),
    ("vllm/chat_minus9999_stream.sse", 16, False, True, False),
]


@pytest.mark.shared
@pytest.mark.parametrize(("name", "positions", "ids", "raw", "ended"), REAL)
def test_real_bodies(shared_dir: Path, name: str, positions: int, ids: bool, raw: bool, ended: bool) -> None:
    answer = answer_of(real(shared_dir, name))
    assert len(answer.generated) == positions
    assert (has_ids(answer.generated), has_bytes(answer.generated)) == (ids, raw)
    assert answer.ended is ended
    assert answer.decimals() == 6


@pytest.mark.shared
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("llama-cpp-python_*/*.sse", "no_token_identity"),
        ("llama-cpp-python_f16/chat_nostream.json", "no_token_identity"),
        ("vllm/completion_s*.sse", "no_token_identity"),
        ("vllm/error_*.*[ne]", "engine_error"),
    ],
)
def test_real_bodies_that_hold_nothing_to_compare(shared_dir: Path, pattern: str, reason: str) -> None:
    files = [f for f in (shared_dir / "data" / "sse").glob(pattern) if ".meta." not in f.name]
    assert files
    for file in files:
        assert read_body(file.read_bytes()) == Skipped(reason), file  # type: ignore[arg-type]


@pytest.mark.shared
def test_streamed_and_whole_vllm_answers_are_the_same(shared_dir: Path) -> None:
    streamed, whole = real(shared_dir, "vllm/chat_stream.sse"), real(shared_dir, "vllm/chat_nostream.json")
    assert streamed.generated == whole.generated


@pytest.mark.shared
def test_choices_of_one_stream_are_kept_apart(shared_dir: Path) -> None:
    """Two interleaved choices: the first is read, the other counted."""
    body = (shared_dir / "data" / "sse" / "vllm" / "chat_n2_stream.sse").read_bytes()
    answer = answer_of(read_body(body))
    assert answer.other_choices == 1
    expected = []
    for event in body.split(b"\n\n")[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            if choice["index"] == 0 and choice.get("logprobs"):
                expected += [item["logprob"] for item in choice["logprobs"]["content"]]
    assert [position.entries[0][1] for position in answer.generated] == expected


@pytest.mark.shared
def test_parts_of_characters_have_ids_only_when_emitted(shared_dir: Path) -> None:
    answer = answer_of(real(shared_dir, "vllm/chat_split_characters_stream.sse"))
    parts = [position for position in answer.generated if position.emitted.raw is None]
    assert parts
    assert all(position.emitted.id is not None for position in parts)
    assert all(position.entries[0][0].raw is None for position in parts)


@pytest.mark.shared
def test_prompt_logprobs_are_scored_positions(shared_dir: Path) -> None:
    """25 prompt tokens, the first without; a token outside the best five stands first, alone out of order."""
    answer = answer_of(real(shared_dir, "vllm/completion_prompt_logprobs.json"))
    assert len(answer.scored) == 24
    assert has_ids(answer.scored)
    first = answer.scored[0]
    assert first.emitted.id == first.entries[0][0].id == 3575
    values = [value for _, value in first.entries]
    assert len(values) == 6
    assert values[0] < min(values[1:])
    for position in answer.scored:
        others = [value for _, value in position.entries[1:]]
        assert others == sorted(others, reverse=True)


def test_a_scored_token_out_of_rank_without_company_cannot_be_compared() -> None:
    """Nothing says what the tokens left out may hold at most."""
    place = {"7": {"logprob": -9.5, "rank": 3000}}
    company = {"7": {"logprob": -9.5, "rank": 3000}, "8": {"logprob": -0.5, "rank": 1}}
    answer = answer_of(read_response({"choices": [{"prompt_logprobs": [None, place, company]}]}))
    assert [len(position.entries) for position in answer.scored] == [0, 2]


def chat_item(token: str, logprob: float, top: list[tuple[str, float]], **extra: Any) -> dict[str, Any]:
    def entry(text: str, value: float) -> dict[str, Any]:
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top], **extra}


def stream(*chunks: object) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


ITEM = chat_item("a", -0.1, [("a", -0.1), ("b", -2.5)])


def test_sglang_named_events_and_separate_finish_chunk() -> None:
    body = (
        stream({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        + stream({"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [ITEM]}}]})
        + b'event: sglext_ids\ndata: {"ids": [7]}\n\n'
        + stream({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": 2}]})
        + b"data: [DONE]\n\n"
    )
    answer = answer_of(read_body(body))
    assert len(answer.generated) == 1
    assert answer.ended is True


def test_tgi_chunks_have_no_bytes_and_so_no_identity() -> None:
    item = {"token": " a", "logprob": -0.1, "top_logprobs": [{"token": " a", "logprob": -0.1}]}
    chunk = {
        "id": "",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": " a"}, "logprobs": {"content": [item]}}
        ],
    }
    body = b"data:" + json.dumps(chunk).encode() + b"\n\n"
    assert read_body(body) == Skipped("no_token_identity")


def test_token_id_strings_are_ids_and_their_bytes_are_not_bytes() -> None:
    answer = answer_of(
        read_response(
            {
                "choices": [
                    {
                        "logprobs": {
                            "content": [
                                chat_item("token_id:5", -0.1, [("token_id:5", -0.1), ("token_id:6", -3.0)])
                            ]
                        }
                    }
                ]
            }
        )
    )
    assert [token.id for token, _ in answer.generated[0].entries] == [5, 6]
    assert not has_bytes(answer.generated)


def test_legacy_arrays_with_token_id_keys() -> None:
    logprobs = {
        "tokens": ["token_id:5", "token_id:9"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"token_id:9": -0.5, "token_id:5": -1.25}],
    }
    answer = answer_of(read_response({"choices": [{"text": "x", "logprobs": logprobs}]}))
    assert answer.generated[0].entries == ()
    assert [(token.id, value) for token, value in answer.generated[1].entries] == [(9, -0.5), (5, -1.25)]


def test_lost_logprobs_are_found_by_count_and_spelling() -> None:
    """Missing in the middle: later positions would be compared with their neighbours."""
    items = [chat_item(letter, -0.1, [(letter, -0.1)]) for letter in "abd"]

    def read(text: str, counted: int, finish: str) -> object:
        choice = {
            "message": {"content": text},
            "logprobs": {"content": items},
            "finish_reason": finish,
        }
        return read_response({"choices": [choice], "usage": {"completion_tokens": counted}})

    assert read("abcd", 4, "length") == Skipped("logprobs_incomplete")
    assert isinstance(read("abd", 4, "stop"), Answer)  # the end-of-text token has no entry
    assert isinstance(read("abd", 5, "length"), Answer)  # parts of a character at the end
    assert isinstance(read("abcd", 3, "length"), Answer)  # everything counted is there


def test_a_cut_stream_keeps_what_came() -> None:
    whole = stream({"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [ITEM]}}]})
    answer = answer_of(read_body(whole + whole[: len(whole) // 2]))
    assert len(answer.generated) == 1
    assert answer.ended is None
    assert len(answer_of(read_body(whole + whole.rstrip())).generated) == 2


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        (b'data: {"choices": []}\n\ndata: {"choices": [}\n\ndata: [DONE]\n\n', 3, "not JSON"),
        (b'{\n"choices": [}\n', 2, "not JSON"),
        (b'data: {"choices": 5}\n\n', 1, "choices"),
        (b'data: {"choices": [5]}\n\n', 1, "choices"),
        (b'{"choices": [{"logprobs": 5}]}', 0, "logprobs"),
        (b'{"choices": [{"logprobs": {"content": [{"top_logprobs": 7}]}}]}', 0, "top_logprobs"),
        (
            b'{"choices": [{"logprobs": {"content": [{"top_logprobs": [{"logprob": "x"}]}]}}]}',
            0,
            "logprob is 'x'",
        ),
        (
            b'{"choices": [{"logprobs": {"content": [{"bytes": [999], "top_logprobs": []}]}}]}',
            0,
            "bytes",
        ),
        (b'{"choices": [{"logprobs": {"tokens": ["a"], "top_logprobs": [{}, {}]}}]}', 0, "tokens"),
        (b'{"choices": [{"prompt_logprobs": [{"a": {}}]}]}', 0, "prompt_logprobs"),
        (b'{"choices": ' + b"9" * 5000 + b"}", 0, "thousands of digits"),
        (b'data: {"choices": ' + b"9" * 5000 + b"}\n\n", 1, "thousands of digits"),
        (b'{"choices": [{"logprobs": {"content": [{"id": 2147483648}]}}]}', 0, "token id 2147483648"),
        (
            b'{"choices": [{"token_ids": [9223372036854775808], "logprobs": {"content": [{}]}}]}',
            0,
            "token id 9223372036854775808",
        ),
        (
            b'{"choices": [{"prompt_logprobs": [{"2147483648": {"logprob": -1, "rank": 1}}]}]}',
            0,
            "prompt_logprobs",
        ),
    ],
)
def test_what_is_no_body_says_where_and_why(body: bytes, line: int, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        read_body(body)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no_logprobs"),
        (b'{"choices": []}', "no_logprobs"),
        (b'{"choices": [{"message": {"content": "hi"}}]}', "no_logprobs"),
        (b'{"choices": [{"logprobs": {"content": [{"token": "a", "logprob": -1}]}}]}', "no_logprobs"),
        (b'{"detail": "Not Found"}', "engine_error"),
        (b'{"error": {"message": "no"}}', "engine_error"),
        (b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n', "engine_error"),
    ],
)
def test_bodies_without_anything_to_compare(body: bytes, reason: str) -> None:
    assert read_body(body) == Skipped(reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "decimals"),
    [([-0.25, -1.0], 2), ([-1.2345], 4), ([-1e-05, -3.0], 5), ([-0.0, -9999.0], 0), ([-0.1234567], 6)],
)
def test_decimals_seen(values: list[float], decimals: int) -> None:
    top = [(chr(97 + i), value) for i, value in enumerate(values)]
    response = {"choices": [{"logprobs": {"content": [chat_item("a", values[0], top)]}}]}
    assert answer_of(read_response(response)).decimals() == decimals


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "logprobs",
                    "content",
                    "tokens",
                    "top_logprobs",
                    "token",
                    "bytes",
                    "logprob",
                    "index",
                    "prompt_logprobs",
                    "id",
                    "token_ids",
                    "usage",
                    "message",
                    "delta",
                    "5",
                    "rank",
                    "finish_reason",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values, json_values, json_values, st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_json_is_read_or_refused(choice: Any, logprobs: Any, usage: Any, streamed: bool) -> None:
    if isinstance(choice, dict):
        choice = {**choice, "logprobs": logprobs}
    response = {"choices": [choice], "usage": usage}
    body = stream(response) if streamed else json.dumps(response).encode()
    try:
        reading = read_body(body)
    except CaptureError:
        return
    assert isinstance(reading, Answer | Skipped)


def test_nan_travels_as_an_unreadable_value_only() -> None:
    body = (
        b'{"choices": [{"logprobs": {"content": [{"token": "a", "bytes": [97], "logprob": NaN, '
        b'"top_logprobs": [{"token": "a", "bytes": [97], "logprob": NaN}]}]}}]}'
    )
    assert math.isnan(answer_of(read_body(body)).generated[0].entries[0][1])
