"""What an engine's answer lacks, by the shapes of engines as they are, and engines that cannot be asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.engines.logprobs import (
    MOST_BYTES,
    NO_LOGPROBS,
    NO_MEASUREMENT,
    NO_TOKENS,
    EngineAwayError,
    ask,
    lacks_of,
)
from pipeline.cli.doctor.engines import engine_findings


def entry(logprob: float, **changes: Any) -> dict[str, Any]:
    return {"token": " cat", "logprob": logprob, "bytes": [32, 99, 97, 116], **changes}


def answer(top: int = 5, logprob: float = -0.4, **changes: Any) -> dict[str, Any]:
    """As vLLM answers; `changes` of every entry."""
    listed = [entry(logprob - at, **changes) for at in range(top)]
    position = entry(logprob, **changes) | {"top_logprobs": listed}
    return {"choices": [{"message": {"content": " cat"}, "logprobs": {"content": [position]}}]}


def test_answers_of_engines_that_can_be_compared() -> None:
    assert lacks_of(answer()) == ()
    assert lacks_of(answer(bytes=None, id=5255)) == (), "llama.cpp"
    assert lacks_of(answer(bytes=None, token="token_id:5255")) == (), "vLLM, ids as text"
    assert lacks_of(answer(logprob=0)) == (), "a token that is certain"


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, {"content": None}, {"content": []}, {"tokens": [""]}, [], "x", {"content": [1]}],
)
def test_without_log_probabilities_nothing_is_compared(logprobs: object) -> None:
    assert lacks_of({"choices": [{"logprobs": logprobs}]}) == (NO_LOGPROBS,)


def test_fewer_candidates_bound_less_closely() -> None:
    (few,) = lacks_of(answer(top=4))
    assert (few.fatal, few.what.partition(":")[0]) == (False, "4 of 5 candidates a position")
    assert lacks_of(answer(top=6)) == ()
    assert lacks_of(answer(top=0))[0].fatal


def test_tokens_without_ids_or_bytes_cannot_be_matched() -> None:
    assert lacks_of(answer(bytes=None)) == (NO_TOKENS,), "TGI"
    mixed = answer()
    mixed["choices"][0]["logprobs"]["content"][0]["top_logprobs"][4]["bytes"] = None
    assert lacks_of(mixed) == (NO_TOKENS,)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 1e-9, "x", None, True, -(10**400)])
def test_values_that_are_no_log_probabilities(logprob: Any) -> None:
    spoiled = answer()
    spoiled["choices"][0]["logprobs"]["content"][0]["top_logprobs"][2]["logprob"] = logprob
    assert lacks_of(spoiled) == (NO_MEASUREMENT,)


def test_all_unmeasured_is_no_measurement_and_one_is() -> None:
    spoiled = answer()
    listed = spoiled["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    listed[4]["logprob"] = -9999.0
    assert lacks_of(spoiled) == ()
    for one in listed:
        one["logprob"] = -9999.0
    assert lacks_of(spoiled) == (NO_MEASUREMENT,)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "logprobs", "content", "top_logprobs", "logprob", "id"]), inner
        )
    ),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries({}, optional={"logprob": JSON, "top_logprobs": st.lists(JSON), "bytes": JSON})
POSITIONS = st.builds(lambda one: {"choices": [{"logprobs": {"content": [one]}}]}, ENTRIES)


@given(JSON | POSITIONS)
def test_any_answer_is_judged(said: object) -> None:
    assert isinstance(lacks_of(said), tuple)


class Engine:
    """An engine that says what it is told to."""

    def __init__(self, chat: bytes, status: int = 200, models: bytes = b'{"data":[{"id":"m"}]}') -> None:
        self.chat, self.status, self.models = chat, status, models
        self.asked: list[dict[str, Any]] = []

    @contextmanager
    def running(self) -> Iterator[str]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._say(200, engine.models)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                engine.asked.append({"path": self.path, **json.loads(body)})
                self._say(engine.status, engine.chat)

            def _say(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


def codes(url: str) -> list[tuple[str, str]]:
    return [(one.severity, one.code) for one in engine_findings([url])]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/models/a/v1/"])
def test_one_token_is_asked_for(path: str) -> None:
    engine = Engine(json.dumps(answer()).encode())
    with engine.running() as url:
        assert codes(url + path) == []
    (asked,) = engine.asked
    assert asked["path"] == path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    assert (asked["model"], asked["max_tokens"], asked["logprobs"], asked["top_logprobs"]) == (
        "m",
        1,
        True,
        5,
    )


def test_what_is_lacking_is_a_finding() -> None:
    with Engine(b'{"choices":[{"logprobs":null}]}').running() as url:
        (found,) = engine_findings([url])
    assert (found.severity, found.code) == ("error", "engine_logprobs")
    assert found.what == "m: its answer holds no log-probabilities"
    with Engine(json.dumps(answer(top=2)).encode()).running() as url:
        assert codes(url) == [("warning", "engine_logprobs")]


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (Engine(b"{}", status=400), "/v1/chat/completions: status 400"),
        (Engine(b"<html>sk-secret"), "/v1/chat/completions: the answer is no JSON"),
        (Engine(b"[" * 100_000), "/v1/chat/completions: the answer is no JSON"),
        (Engine(b" " * (MOST_BYTES + 1)), "/v1/chat/completions: an answer of over 1048576 bytes"),
        (Engine(b"{}", models=b"{}"), "/v1/models names no model"),
    ],
)
def test_what_cannot_be_asked_is_away(engine: Engine, told: str) -> None:
    with engine.running() as url:
        (found,) = engine_findings([url])
    assert found.code == "engine_unreachable"
    assert found.what.startswith(told)
    assert "sk-secret" not in str(found)


def test_an_engine_that_is_not_there_or_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (found,) = engine_findings([url])
        assert (found.code, found.what) == ("engine_unreachable", "/v1/models: Connection refused")
        silent.listen()
        with pytest.raises(EngineAwayError, match=r"no answer within 0\.05 s"):
            ask(url, timeout_s=0.05)


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://h", "http://", "http://u:hunter2@h", "http://h:port", "http://[::1"]
)
def test_what_is_no_address(url: str) -> None:
    (found,) = engine_findings([url])
    assert found.what.startswith("no address of an engine")
    assert "hunter2" not in str(found)
