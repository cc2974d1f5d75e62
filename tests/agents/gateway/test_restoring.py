"""What the gateway added is taken out again: what remains is what the engine would have sent without it."""
# ruff: noqa: E501  # chunks are lines

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.gateway.asking import Added, EngineKind, read_asked
from agents.gateway.capture import Capture
from agents.gateway.restoring import Restoring
from schemas.answers.shapes import raw_chunk
from schemas.answers.sse import EventReader
from tests.agents.gateway.captures import Recorded, capture, recorded

ALL = Added("full", logprobs=True, token_ids=True, usage=True)
LOGPROBS = Added("full", logprobs=True)
DONE = b"data: [DONE]\n\n"

CHAT = read_asked(
    "/v1/chat/completions", b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
)
COMPLETION = read_asked("/v1/completions", b'{"model":"m","stream":true,"prompt":"hi"}')

ITEM = '{"token":" cat","logprob":-0.41,"bytes":[32,99,97,116],"top_logprobs":[{"token":" cat","logprob":-0.41,"bytes":[32,99,97,116]},{"token":"\\"logprobs\\":","logprob":-1.5,"bytes":null}]}'
SPACED = '{"content": [{"token": " cat", "bytes": null, "logprob": -0.41, "top_logprobs": [{"token": " cat", "logprob": -0.41, "bytes": null}]}], "refusal": null}'
LEGACY = '{"text_offset":[0],"token_logprobs":[-0.1],"tokens":[" a"],"top_logprobs":[{" a":-0.1,"logprobs":-2.5,"token_ids":-3.5}]}'
HEAD = '"id":"chatcmpl-9b","object":"chat.completion.chunk","created":1790000000,"model":"m"'


def stream(*chunks: str, prefix: str = "data: ", end: str = "\n\n") -> bytes:
    return "".join(prefix + chunk + end for chunk in chunks).encode()


def vllm_chat(ours: bool) -> bytes:
    logprobs = f'{{"content":[{ITEM}]}}' if ours else "null"
    three = f'{{"content":[{ITEM},{ITEM},{ITEM}]}}' if ours else "null"
    chunks = [
        f'{{{HEAD},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,'
        f'"finish_reason":null}}],"prompt_token_ids":{"[1,733,16289]" if ours else "null"},"prompt_text":null}}',
        f'{{{HEAD},"choices":[{{"index":0,"delta":{{"content":" cat"}},"logprobs":{logprobs},'
        f'"finish_reason":null,"token_ids":{"[5255]" if ours else "null"}}}]}}',
        f'{{{HEAD},"choices":[{{"index":0,"delta":{{"content":" \\"logprobs\\":{{}} [] cat 世"}},'
        f'"logprobs":{three},"finish_reason":null,"token_ids":{"[5255, 5255,7]" if ours else "null"}}}]}}',
        f'{{{HEAD},"choices":[{{"index":0,"delta":{{"content":""}},"logprobs":{logprobs},'
        f'"finish_reason":null,"token_ids":{"[9]" if ours else "null"}}}]}}',
    ]
    if ours:  # a parser holds text back: sent for its token ids alone
        chunks.append(
            f'{{{HEAD},"choices":[{{"index":0,"delta":{{}},"logprobs":{logprobs},"finish_reason":null,'
            '"token_ids":[9]}]}'
        )
    chunks.append(
        f'{{{HEAD},"choices":[{{"index":0,"delta":{{}},"logprobs":{logprobs},"finish_reason":"stop",'
        f'"stop_reason":null,"token_ids":{"[2]" if ours else "null"}}}]}}'
    )
    if ours:
        chunks.append(
            f'{{{HEAD},"choices":[],"usage":{{"prompt_tokens":3,"total_tokens":11,"completion_tokens":8}},'
            '"system_fingerprint":"vllm-0.32.0-2e681648"}'
        )
    return stream(*chunks) + DONE


def vllm_completion(ours: bool) -> bytes:
    end = f'"prompt_token_ids":{"[1,2]" if ours else "null"},"token_ids":{"[5]" if ours else "null"}}}]}}'
    later = f'"prompt_token_ids":null,"token_ids":{"[5]" if ours else "null"}}}]}}'
    choice = f'"index":0,"text":" a","logprobs":{LEGACY if ours else "null"},"finish_reason":null,"stop_reason":null,'
    usage = f'{{{HEAD},"choices":[],"usage":{{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2}}}}'
    chunks = [f'{{{HEAD},"choices":[{{{choice}{end}', f'{{{HEAD},"choices":[{{{choice}{later}']
    return stream(*chunks, *([usage] if ours else [])) + DONE


def vllm_whole(ours: bool) -> bytes:
    def choice(index: int) -> str:
        return (
            f'{{"index":{index},"message":{{"role":"assistant","content":"a cat"}},'
            f'"logprobs":{f"""{{"content":[{ITEM}]}}""" if ours else "null"},"finish_reason":"stop",'
            f'"stop_reason":null,"token_ids":{"[5255]" if ours else "null"},"routed_experts":null}}'
        )

    return (
        f'{{{HEAD},"choices":[{choice(0)},{choice(1)}],"usage":{{"prompt_tokens":53,"completion_tokens":40}},'
        f'"prompt_logprobs":null,"prompt_token_ids":{"[1,2]" if ours else "null"},"metrics":null}}'
    ).encode()


def llama_chat(ours: bool) -> bytes:
    logprobs = f',"logprobs":{{"content":[{ITEM}]}}' if ours else ""
    return (
        stream(
            f'{{"choices":[{{"finish_reason":null,"index":0,"delta":{{"role":"assistant","content":null}}}}],{HEAD}}}',
            f'{{"choices":[{{"finish_reason":null,"index":0,"delta":{{"content":" cat"}}{logprobs}}}],{HEAD}}}',
        )
        + b": ping\n\n"
        + stream(
            f'{{"choices":[{{"finish_reason":"length","index":0,"delta":{{}}}}],{HEAD},'
            '"timings":{"cache_n":0,"prompt_n":5,"predicted_n":1}}'
        )
        + DONE
    )


def llama_completion(ours: bool) -> bytes:
    logprobs = f'{{"content":[{ITEM}]}}' if ours else "null"
    return (
        stream(
            f'{{"choices":[{{"text":" cat","index":0,"logprobs":{logprobs},"finish_reason":null}}],{HEAD}}}',
            f'{{"choices":[{{"text":"","index":0,"logprobs":null,"finish_reason":"length"}}],{HEAD}}}',
        )
        + DONE
    )


def llama_whole(ours: bool) -> bytes:
    logprobs = f',"logprobs":{{"content":[{ITEM}]}}' if ours else ""
    return (
        '{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":" cat"}'
        f'{logprobs}}}],"created":1795970363,{HEAD},"usage":{{"completion_tokens":1,"prompt_tokens":5}}}}'
    ).encode()


def llama_cpp_python(ours: bool) -> bytes:
    return (
        b": ping - 2026-11-29 15:42:11.045137+00:00\n\n"
        + stream(
            '{"id": "chatcmpl-b8", "choices": [{"index": 0, "delta": {"role": "assistant"}, "logprobs": null, '
            '"finish_reason": null}]}',
            '{"id": "chatcmpl-b8", "choices": [{"index": 0, "delta": {"content": " cat"}, "logprobs": '
            f'{SPACED if ours else "null"}, "finish_reason": null}}]}}',
        )
        + DONE
    )


def sglang_chat(ours: bool) -> bytes:
    logprobs = f'{{"content":[{ITEM}]}}' if ours else "null"
    delta = '"role":null,"content":" cat","reasoning_content":null,"tool_calls":null'
    usage = f'{{{HEAD},"choices":[],"usage":{{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}}}'
    return (
        stream(
            f'{{{HEAD},"choices":[{{"index":0,"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":null,'
            '"matched_stop":null}],"usage":null}'
        )
        + b'event: sglext_ids\ndata: {"choices":[{"index":0,"logprobs":{"a":1}}]}\n\n'
        + stream(
            f'{{{HEAD},"choices":[{{"index":0,"delta":{{"content":null}},"logprobs":null,"finish_reason":"stop",'
            '"matched_stop":2}],"usage":null}',
            *([usage] if ours else []),
        )
        + DONE
    )


def tgi_chat(ours: bool) -> bytes:
    item = '{"token":" cat","logprob":-0.41,"top_logprobs":[{"token":" cat","logprob":-0.41}]}'
    logprobs = f'{{"content":[{item}]}}' if ours else "null"
    usage = '{"object":"chat.completion.chunk","id":"","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
    return stream(
        '{"object":"chat.completion.chunk","id":"","created":1,"model":"m","choices":[{"index":0,"delta":'
        f'{{"role":"assistant","content":" cat"}},"logprobs":{logprobs},"finish_reason":"length"}}],"usage":null}}',
        *([usage] if ours else []),
        "[DONE]",
        prefix="data:",
    )


ENGINES: list[tuple[str, EngineKind, Any, Added, Any]] = [
    ("vllm chat", "vllm", CHAT, ALL, vllm_chat),
    ("vllm completion", "vllm", COMPLETION, ALL, vllm_completion),
    ("vllm whole", "vllm", CHAT, ALL, vllm_whole),
    ("llama.cpp chat", "llama.cpp", CHAT, LOGPROBS, llama_chat),
    ("llama.cpp completion", "llama.cpp", COMPLETION, LOGPROBS, llama_completion),
    ("llama.cpp whole", "llama.cpp", CHAT, LOGPROBS, llama_whole),
    ("llama-cpp-python", "llama-cpp-python", CHAT, LOGPROBS, llama_cpp_python),
    ("sglang chat", "sglang", CHAT, Added("full", logprobs=True, usage=True), sglang_chat),
    ("tgi chat", "tgi", CHAT, Added("full", logprobs=True, usage=True), tgi_chat),
]
IDS = [name for name, *_ in ENGINES]


def got(kind: EngineKind, asked: Any, added: Added, body: bytes, *cuts: int) -> bytes:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(body)}), len(body)]
    return capture(kind, asked, added, [(0, body[a:b]) for a, b in itertools.pairwise(edges)])[0]


@pytest.mark.parametrize(("name", "kind", "asked", "added", "body"), ENGINES, ids=IDS)
def test_what_remains_is_what_the_engine_sends_without(
    name: str, kind: EngineKind, asked: Any, added: Added, body: Any
) -> None:
    ours, plain = body(True), body(False)
    assert ours != plain
    assert got(kind, asked, added, ours) == plain
    for cut in range(0, len(ours), 1 if len(ours) < 2000 else 7):
        assert got(kind, asked, added, ours, cut) == plain, cut
    assert got(kind, asked, added, ours, *range(len(ours))) == plain


@pytest.mark.parametrize(("name", "kind", "asked", "added", "body"), ENGINES, ids=IDS)
def test_where_nothing_was_added_nothing_is_touched(
    name: str, kind: EngineKind, asked: Any, added: Added, body: Any
) -> None:
    """Nor where the engine answered as if nothing had been."""
    assert got(kind, asked, Added("full"), body(True)) == body(True)
    assert got(kind, asked, added, body(False)) == body(False)


@pytest.mark.parametrize(("name", "kind", "asked", "added", "body"), ENGINES, ids=IDS)
@pytest.mark.parametrize("newline", [b"\r\n", b"\r"])
def test_other_line_ends(
    name: str, kind: EngineKind, asked: Any, added: Added, body: Any, newline: bytes
) -> None:
    ours, plain = body(True).replace(b"\n", newline), body(False).replace(b"\n", newline)
    assert got(kind, asked, added, ours) == plain
    assert got(kind, asked, added, ours, *range(len(ours))) == plain


@pytest.mark.parametrize("name", ["logprobs", "token_ids", "usage"])
def test_each_thing_is_taken_out_for_itself(name: str) -> None:
    """What the user asked for himself stays, beside what is ours."""
    added = Added("full", **{name: True})
    left = got("vllm", CHAT, added, vllm_chat(True))
    assert (b'"logprobs":{' in left) is (name != "logprobs")
    assert (b'"token_ids":[' in left) is (name != "token_ids")
    assert (b'"usage":{' in left) is (name != "usage")


def test_a_key_of_the_same_name_elsewhere_stays() -> None:
    """Where plain search is not certain, the text is read."""
    for body, plain in (
        ('{"choices":[{"logprobs":{"content":[]},"index":0}],"x":{"logprobs":{"content":[]}}}',
         '{"choices":[{"logprobs":null,"index":0}],"x":{"logprobs":{"content":[]}}}'),
        ('{"x":{"choices":[{"logprobs":{}}]},"choices":[{"index":0}]}',
         '{"x":{"choices":[{"logprobs":{}}]},"choices":[{"index":0}]}'),
        ('{"choices":[{"index":0,"logprobs":{"a":1}},{"index":1,"logprobs":{"a":2}}]}',
         '{"choices":[{"index":0,"logprobs":null},{"index":1,"logprobs":null}]}'),
        ('{"choices":[{"log\\u0070robs":{"a":[1,{}]}}]}', '{"choices":[{"log\\u0070robs":null}]}'),
        ('{"choices":[{"logprobs":{"a":1},"logprobs":{"b":2}}]}',
         '{"choices":[{"logprobs":null,"logprobs":null}]}'),
        ('{"choices" : [ {"index" : 0 , "logprobs" : {"a" : [1]} } ] }',
         '{"choices" : [ {"index" : 0 , "logprobs" : null } ] }'),
        ('{"choices":[{"logprobs":{"content":[{"logprob":NaN,"token":"\\ud83d"}]}}]}',
         '{"choices":[{"logprobs":null}]}'),
    ):  # fmt: skip
        assert got("vllm", CHAT, LOGPROBS, stream(body)) == stream(plain), body
        assert got("vllm", CHAT, LOGPROBS, body.encode()) == plain.encode(), body


@pytest.mark.parametrize(
    ("choice", "plain"),
    [
        ('{"logprobs":{"a":1},"index":0}', '{"index":0}'),
        ('{"index":0,"logprobs":{"a":1}}', '{"index":0}'),
        ('{"index":0, "logprobs": {"a":1}, "x":1}', '{"index":0, "x":1}'),
        ('{"logprobs":{"a":1}}', "{}"),
    ],
)
def test_a_key_is_left_out_with_its_comma(choice: str, plain: str) -> None:
    body, expected = f'{{"choices":[{choice}]}}', f'{{"choices":[{plain}]}}'
    assert got("llama.cpp", CHAT, LOGPROBS, body.encode()) == expected.encode()
    assert got("llama.cpp", CHAT, LOGPROBS, stream(body)) == stream(expected)


def test_garbage_of_quotes_and_marks_stays() -> None:
    """Read in linear time, and no longer text than is read at all: else this would take hours."""
    for garbage in (
        b'{"logprobs":"' + b'\\"' * 100_000,
        b'{"logprobs"' + b'"a' * 2_000_000,
        b'{"logprobs":' + b"[1," * 500_000,
    ):
        assert got("vllm", CHAT, LOGPROBS, b"data: " + garbage + b"\n\n") == b"data: " + garbage + b"\n\n"


def test_data_of_several_lines() -> None:
    body = b'event: message\ndata: {"choices":[{"index":0,\ndata: "logprobs":{"a":1}}]}\n\n'
    assert got("vllm", CHAT, LOGPROBS, body) == (
        b'event: message\ndata: {"choices":[{"index":0,\ndata: "logprobs":null}]}\n\n'
    )


def expected_of(one: Recorded) -> bytes:
    """The same by another way: Python's own JSON scanner says where a value ends."""
    text, at = one.body.decode(), 0
    scanner = json.JSONDecoder()
    absent = one.kind == "llama.cpp" and one.asked.request_type == "chat"
    while (at := text.find('"logprobs":', at)) >= 0:
        value = at + len('"logprobs":')
        value += text[value] == " "
        _, end = scanner.raw_decode(text, value)
        if text[value:end] == "null":
            at = end
        elif absent:
            assert text[at - 1] == ","
            text = text[: at - 1] + text[end:]
        else:
            text = text[:value] + "null" + text[end:]
    return text.encode()


@pytest.mark.shared
def test_real_answers_without_their_logprobs(shared_dir: Path) -> None:
    mended = 0
    for one in recorded(shared_dir):
        left = capture(one.kind, one.asked, LOGPROBS, one.pieces())[0]
        assert left == expected_of(one), one.name
        mended += left != one.body
    assert mended > 35


values = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8) | st.just("logprobs"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["logprobs", "token_ids", "choices", "a", '"logprobs":']), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(
    choices=st.lists(
        st.fixed_dictionaries(
            {"index": st.integers(0, 3)},
            optional={
                "logprobs": values,
                "token_ids": st.lists(st.integers()),
                "x": values,
                "text": st.text(),
            },
        ),
        max_size=3,
    ),
    rest=st.dictionaries(st.sampled_from(["usage", "logprobs", "prompt_token_ids", "x"]), values),
    ascii_only=st.booleans(),
    spaces=st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
)
def test_anything_else_is_kept(
    choices: list[Any], rest: dict[str, Any], ascii_only: bool, spaces: tuple[str, str]
) -> None:
    """Whatever stands around it: only our own values change, by their value and in the bytes."""
    body = {"choices": choices, **rest}

    def text(value: Any) -> bytes:
        return json.dumps(value, ensure_ascii=ascii_only, separators=spaces).encode(errors="replace")

    plain = {
        **body,
        "choices": [
            {name: None if name in ("logprobs", "token_ids") else value for name, value in choice.items()}
            for choice in choices
        ],
    }
    if "prompt_token_ids" in plain:
        plain["prompt_token_ids"] = None
    assert got("sglang", CHAT, Added("full", logprobs=True, token_ids=True), text(body)) == text(plain)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\n\n", b"data: ", b"{", b'"choices":[', b"}"])))
def test_garbage_passes_as_it_came(pieces: list[bytes]) -> None:
    """Where nothing of ours is in it."""
    reading = Capture("vllm", CHAT, ALL)  # type: ignore[arg-type]
    out = b"".join([reading.feed(piece, 0) for piece in pieces]) + reading.end(0)
    assert out == b"".join(pieces)
    reading.captured()


@pytest.mark.shared
def test_plain_search_finds_what_reading_every_mark_finds(shared_dir: Path) -> None:
    compared = 0
    for one in recorded(shared_dir):
        restoring = Restoring(one.kind, one.asked.request_type, Added("full", logprobs=True, token_ids=True))
        for event in EventReader().feed(one.body):
            chunk = None if event.data is None else raw_chunk(event.data)
            if event.data is not None and chunk is not None:
                assert restoring.event(event.data, chunk) == restoring.event(event.data, None), one.name
                compared += 1
    assert compared > 1000
