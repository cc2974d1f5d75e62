"""llama.cpp itself, asked twice: without our additions its answer is the one it gives without them."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agents.gateway.asking import CHAT, COMPLETIONS, read_asked, with_capture
from pipeline.cli.demo.engines import VARIANTS, EngineClient, engine
from tests.agents.gateway.captures import capture
from tests.conftest import required_or_skip

pytestmark = pytest.mark.slow

OWN = (re.compile(rb'"id":"\w+-\w+"'), re.compile(rb'"created":\d+'), re.compile(rb'_(ms|second)":[\d.e+-]+'))
"""What differs between any two answers."""


@pytest.fixture(scope="module")
def llama() -> Iterator[EngineClient]:
    if importlib.util.find_spec("xllamacpp") is None:
        required_or_skip("no llama.cpp; `make engines` installs it")
    with engine(VARIANTS["baseline"]) as running:
        yield running


def post(running: EngineClient, path: str, body: bytes) -> bytes:
    connection = http.client.HTTPConnection(*running._address, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()
    finally:
        connection.close()


def neutral(body: bytes) -> bytes:
    for pattern in OWN:
        body = pattern.sub(b"", body)
    return body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Repeat: 你好,世界! 🎉🚀"}]}),
        (COMPLETIONS, {"prompt": "The sky is"}),
    ],
)
def test_what_remains_is_what_it_sends_without(
    llama: EngineClient, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    body = {
        "model": "m",
        "max_tokens": 12,
        "temperature": 0,
        "cache_prompt": False,
        "stream": stream,
        **prompt,
    }
    asked = read_asked(path, json.dumps(body).encode())
    assert asked is not None
    sent, added = with_capture(asked, "llama.cpp", top=5, level="full", model=None)
    ours, plain = post(llama, path, sent), post(llama, path, asked.body)
    pieces = [(at, ours[at : at + 97]) for at in range(0, len(ours), 97)]
    left, said = capture("llama.cpp", asked, added, pieces)
    assert b"top_logprobs" in ours
    assert neutral(left) == neutral(plain)
    assert 0 < said.output_tokens <= 12
    assert said.answer is not None
    assert all(len(position.entries) == 5 for position in said.answer.generated)
