"""What a fake engine is asked for, read as strictly as the real ones read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.agents.gateway import fake_model

MODEL = "fake-1"
MOST_TOP = {"vllm": 20, "tgi": 5}


class RefusedError(Exception):
    """The engine refuses the request; `status` and `message` as it says them."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, understood."""

    chat: bool
    prompt: tuple[int, ...]
    text: str
    """Of the last message, or the prompt."""
    stream: bool
    usage: bool
    choices: int
    most_tokens: int
    ignore_eos: bool
    """All of them, past where the answer would end."""
    temperature: float
    seed: int
    top: int | None
    """Alternatives asked for; None: no log-probabilities."""
    stop: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...]
    token_ids: bool
    ids_as_strings: bool
    prompt_logprobs: int | None


def read(kind: str, path: str, body: bytes) -> Wanted:
    """Raises RefusedError as the engine of this kind would."""
    try:
        asked = json.loads(body)
    except ValueError:
        raise RefusedError(400, "the body is not JSON") from None
    if kind == "vllm" and asked.get("model", MODEL) != MODEL:
        raise RefusedError(404, f"The model `{asked['model']}` does not exist.")
    chat = path.endswith("/chat/completions")
    stream = bool(asked.get("stream"))
    if asked.get("stream_options") is not None and not stream and kind in ("vllm", "sglang"):
        raise RefusedError(400, "Stream options can only be defined when `stream=True`.")
    choices = asked.get("n") or 1
    if choices > 1 and kind not in ("vllm", "sglang"):
        raise RefusedError(400, "Only one completion choice is allowed")
    top = _top(kind, asked, chat=chat)
    tools = tuple(asked.get("tools") or ())
    if kind == "llama.cpp" and tools and stream and top is not None:
        raise RefusedError(400, "logprobs is not supported with tools + stream")
    prompt_logprobs = asked.get("prompt_logprobs")
    if prompt_logprobs is not None and stream:
        raise RefusedError(400, "`prompt_logprobs` are not available when `stream=True`.")
    prompt, text = _prompt(asked, chat=chat)
    stop = asked.get("stop") or ()
    return Wanted(
        chat=chat,
        prompt=prompt,
        text=text,
        stream=stream,
        usage=bool((asked.get("stream_options") or {}).get("include_usage")),
        choices=choices,
        most_tokens=asked.get("max_completion_tokens") or asked.get("max_tokens") or (64 if chat else 16),
        ignore_eos=bool(asked.get("ignore_eos")),
        temperature=float(asked.get("temperature", 0.0)),
        seed=int(asked.get("seed") or 0),
        top=top,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        tools=tools,
        token_ids=kind == "vllm" and bool(asked.get("return_token_ids")),
        ids_as_strings=kind == "vllm" and bool(asked.get("return_tokens_as_token_ids")),
        prompt_logprobs=prompt_logprobs if kind == "vllm" else None,
    )


def _top(kind: str, asked: Mapping[str, Any], *, chat: bool) -> int | None:
    if not chat:
        top = asked.get("logprobs")
        top = None if top is None or kind == "tgi" else int(top)
    elif not asked.get("logprobs"):
        if asked.get("top_logprobs") and kind in ("vllm", "llama.cpp", "tgi"):
            raise RefusedError(400, "when using `top_logprobs`, `logprobs` must be set to true.")
        top = None
    else:
        top = int(asked.get("top_logprobs") or (20 if kind == "llama.cpp" else 0))
    if top is not None and top > MOST_TOP.get(kind, 1000):
        raise RefusedError(400, f"Requested sample logprobs of {top}, which is greater than max allowed")
    return top


def _prompt(asked: Mapping[str, Any], *, chat: bool) -> tuple[tuple[int, ...], str]:
    if not chat:
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            return tuple(prompt), ""
        if not isinstance(prompt, str) or not prompt:
            raise RefusedError(400, "prompt: a string or a list of token ids")
        return fake_model.tokenize(prompt), prompt
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages: at least one")
    ids: list[int] = []
    text = ""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        text = content or ""
        ids += fake_model.tokenize(f"{message.get('role')}: {text}\n")
    return tuple(ids), text
