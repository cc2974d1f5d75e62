"""Ask an engine for one token with log-probabilities, and say what its answer lacks.

Over the OpenAI-compatible chat endpoint that vLLM, SGLang, llama.cpp and TGI share. One greedy token of a
fixed question: it costs the engine next to nothing, and no user's text leaves this machine.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

TOP: Final = 5
"""Candidates a position that Klaxon compares."""
MOST_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 10.0
UNMEASURED: Final = -9999.0
"""What OpenAI's contract says for −∞ and for unknown."""
QUESTION: Final = "Answer with one word: is water wet?"


class EngineAwayError(Exception):
    """The engine cannot be asked; the text says why, for people, and quotes no answer."""


@dataclass(frozen=True, slots=True)
class Lack:
    """What an answer lacks: `fatal` where nothing could be compared, else it compares worse."""

    fatal: bool
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What one engine said."""

    model: str
    lacks: tuple[Lack, ...]


NO_LOGPROBS: Final = Lack(
    fatal=True,
    what="its answer holds no log-probabilities",
    remedy="turn them on (vLLM: --max-logprobs; SGLang and llama.cpp answer them when asked)",
)
NO_TOKENS: Final = Lack(
    fatal=True,
    what="tokens come with neither ids nor bytes: candidates of two engines cannot be matched",
    remedy="vLLM: return_token_ids; TGI has neither on this endpoint: use another engine",
)
NO_MEASUREMENT: Final = Lack(
    fatal=True,
    what="its log-probabilities are none: not finite, above 0, or -9999",
    remedy="look at the engine's log: a model that computes NaN answers so",
)


def ask(url: str, model: str | None = None, timeout_s: float = TIMEOUT_S) -> Asked:
    """Blocks for at most about `timeout_s` for each of two requests. `model` None: the first it serves.

    `url`: `http://host:port`, or https, perhaps with a path before `/v1`. Raises EngineAwayError.
    """
    if model is None:
        model = _model(_request(url, "GET", "/v1/models", None, timeout_s))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP,
        "return_token_ids": True,
    }
    return Asked(model, lacks_of(_request(url, "POST", "/v1/chat/completions", body, timeout_s)))


def lacks_of(answer: object) -> tuple[Lack, ...]:
    """What a non-streamed chat answer lacks; () when it can be compared."""
    choice = _first(answer, "choices")
    logprobs = choice.get("logprobs")
    position = _first(logprobs, "content") if isinstance(logprobs, dict) else {}
    if not position:
        return (NO_LOGPROBS,)
    listed = position.get("top_logprobs")
    top = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    found = []
    if len(top) < TOP:
        found.append(
            Lack(
                fatal=not top,
                what=f"{len(top)} of {TOP} candidates a position: divergence is bounded less closely",
                remedy=f"allow {TOP} (vLLM: --max-logprobs, TGI: --max-top-n-tokens)",
            )
        )
    entries = [position, *top]
    if not all(map(_identified, entries)):
        found.append(NO_TOKENS)
    if not all(map(_measured, entries[: 1 + len(top)])) or all(_value(one) == UNMEASURED for one in top):
        found.append(NO_MEASUREMENT)
    return tuple(found)


def _identified(entry: dict[str, Any]) -> bool:
    """By id, by an id in place of its text, or by its bytes."""
    token = entry.get("token")
    return (
        isinstance(entry.get("id"), int)
        or (isinstance(token, str) and token.startswith("token_id:"))
        or isinstance(entry.get("bytes"), list)
    )


def _value(entry: dict[str, Any]) -> float | None:
    value = entry.get("logprob")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer that no double holds
        return None


def _measured(entry: dict[str, Any]) -> bool:
    value = _value(entry)
    return value is not None and math.isfinite(value) and value <= 0


def _first(of: object, name: str) -> dict[str, Any]:
    """The first object of a list under this name; {} where there is none."""
    listed = of.get(name) if isinstance(of, dict) else None
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}


def _model(answer: object) -> str:
    name = _first(answer, "data").get("id")
    if not isinstance(name, str):
        raise EngineAwayError("/v1/models names no model: no OpenAI-compatible endpoint")
    return name


def _request(url: str, method: str, path: str, body: object, timeout_s: float) -> object:
    connection, before = _connection(url, timeout_s)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, before + path, sent, {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read(MOST_BYTES + 1)
    except TimeoutError:
        raise EngineAwayError(f"{path}: no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise EngineAwayError(f"{path}: {why}") from None
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise EngineAwayError(f"{path}: status {response.status}")
    if len(data) > MOST_BYTES:
        raise EngineAwayError(f"{path}: an answer of over {MOST_BYTES} bytes to a question for one token")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise EngineAwayError(f"{path}: the answer is no JSON") from None


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.username is not None:
        raise EngineAwayError("no address of an engine: http://host:port or https://host:port is expected")
    before = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s), before
    context = ssl.create_default_context()
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context), before
