"""What a request asks for, and the same request with what Klaxon measures by asked for too. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Raw

from schemas.events import MAX_TOP

EngineKind: TypeAlias = Literal["vllm", "llama.cpp", "llama-cpp-python", "sglang", "tgi"]
Level: TypeAlias = Literal["timing", "full"]
"""`timing`: what token counts need, nearly nothing; `full`: log-probabilities and token ids too."""
RequestType: TypeAlias = Literal["chat", "completion"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TGI_TOP: Final = 5
"""TGI refuses more unless it was started with a greater --max-top-n-tokens."""

_NO_SAMPLING: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "user",
        "metadata",
    }
)
"""Fields that do not change what is asked; every other one stands in the signature."""
_NOT_COPIED: Final = (
    "request_id",
    "rid",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "prompt_logprobs",
)
"""Of one request to one engine: names it there, or a transfer that only the original may fetch. And what vLLM
refuses in a stream, as copies are, and no answer depends on: the prompt's own log-probabilities."""
_COUNT_BY_TIMINGS: Final = ("llama.cpp", "llama-cpp-python")
"""llama.cpp counts tokens on the finish chunk unless usage is asked for; llama-cpp-python never does."""
_MOST_CHOICES: Final = 1024
_SEEDS: Final = range(-(2**63), 2**63)
_TOKENS: Final = range(2**31)
_MOST_NESTED: Final = 256
"""Lists in lists: far under what any reader or writer of JSON here can follow."""
_GREATEST: Final = 2**64
"""Numbers beyond it stand in a signature as they are written."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its user sent it."""

    path: str
    request_type: RequestType
    body: bytes = field(repr=False)
    fields: Mapping[str, Any] = field(repr=False)
    model: str | None
    stream: bool
    choices: int
    """Answers asked for: of each prompt as many as `n`."""
    temperature: float | None
    top_p: float | None
    seed: int | None
    max_tokens: int | None
    logprobs: bool
    """Log-probabilities are asked for."""
    top: int | None
    """With how many candidates a position; None: as many as the engine likes."""
    usage: bool
    """A stream's usage is asked for."""
    comparable: bool
    """One generated answer that can be compared position by position: one prompt, no echo, no beam search, no
    wish for log-probabilities that an engine may read in its own way, as lenient ones read "true", nor for
    those of certain tokens: what such a list leaves out is not bounded by what it holds."""
    texts: tuple[str, ...] = field(repr=False)
    sampling: Mapping[str, float | str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Added:
    """What was asked for beyond the user's wishes, and so must be taken out of the answer again."""

    level: Level = "timing"
    """What can be captured: with `full`, the answer holds log-probabilities, the user's own or ours."""
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False

    def touches_answer(self) -> bool:
        """Whether a whole answer, not streamed, must be mended."""
        return self.logprobs or self.token_ids


NOTHING_ADDED: Final = Added()
USAGE_ADDED: Final = Added(usage=True)
ALL_OURS: Final = Added(level="full")
"""For a mirrored copy: everything is captured, and nobody waits for what would remain."""


def read_asked(path: str, body: bytes) -> Asked | None:
    """The request, or None for what is none that is understood: it passes untouched and is never mirrored."""
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    if not isinstance(fields, dict) or _too_deep(body, fields):
        return None
    chat = path == CHAT
    texts = _chat_texts(fields.get("messages")) if chat else _prompts(fields.get("prompt"))
    if texts is None:
        return None
    logprobs, top = _logprobs(fields, chat)
    options = fields.get("stream_options")
    n = fields.get("n")
    n = n if type(n) is int and 1 <= n <= _MOST_CHOICES else 1
    limit = fields.get("max_completion_tokens") if chat else None
    model = fields.get("model")
    return Asked(
        path=path,
        request_type="chat" if chat else "completion",
        body=body,
        fields=fields,
        model=model if isinstance(model, str) else None,
        stream=fields.get("stream") is True,
        choices=n if chat else n * max(1, len(texts)),
        temperature=_between(fields.get("temperature"), 0, 100),
        top_p=_between(fields.get("top_p"), 0, 1),
        seed=_whole(fields.get("seed"), _SEEDS),
        max_tokens=_whole(fields.get("max_tokens") if limit is None else limit, _TOKENS),
        logprobs=logprobs,
        top=top,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        comparable=(chat or len(texts) == 1)
        and type(fields.get("logprobs")) in ((bool, type(None)) if chat else (int, type(None)))
        and not fields.get("echo")
        and not fields.get("use_beam_search")
        and fields.get("logprob_token_ids") is None
        and fields.get("best_of") in (None, 1),
        texts=texts,
        sampling=_sampling(fields),
    )


def with_capture(
    asked: Asked, kind: EngineKind, *, top: int, level: Level, model: str | None
) -> tuple[bytes, Added]:
    """The body for the engine that answers the user, and what of its answer is not the user's.

    `top`: candidates a position; one more is asked for where the engine may put the emitted token in the
    place of the last. What the user asked for himself stays as it is: log-probabilities with fewer candidates
    are captured as they are. `Added.level` says what of `level` was possible.
    """
    more: dict[str, Any] = {} if model is None or model == asked.model else {"model": model}
    usage = _may_add_usage(asked, kind)
    added = USAGE_ADDED if usage else NOTHING_ADDED
    if level == "full" and can_be_full(asked, kind):
        if not asked.logprobs:
            more |= _asking_logprobs(asked, kind, top)
        token_ids = kind == "vllm" and not asked.fields.get("return_token_ids")
        if token_ids:
            more["return_token_ids"] = True
        added = Added("full", logprobs=not asked.logprobs, token_ids=token_ids, usage=usage)
    if usage:
        more["stream_options"] = _usage_options(asked)
    return _edited(asked, more), added


def can_be_full(asked: Asked, kind: EngineKind) -> bool:
    """Whether this engine's answer to the user can be captured whole, without his noticing.

    Where not, a copy would be compared with nothing: the user asks for log-probabilities without candidates
    himself, which is what no number means except to llama.cpp; or the engine would show that it was asked.
    llama.cpp refuses log-probabilities with tools in a stream. llama-cpp-python writes another answer with
    them: it loses parts of characters; nor do its tokens have ids or bytes. TGI's legacy endpoint has none.
    """
    if not asked.comparable:
        return False
    if asked.logprobs and not (asked.top or (asked.top is None and kind == "llama.cpp")):
        return False
    if asked.logprobs and asked.top == 1 and kind == "vllm" and asked.request_type == "chat":
        return False  # its only candidate is the emitted token, whether that is the best or not
    if not asked.logprobs and asked.request_type == "chat" and asked.fields.get("top_logprobs") is not None:
        return False  # engines refuse it, and still must
    if kind == "llama.cpp":
        return not (asked.stream and _has_tools(asked))
    if kind == "llama-cpp-python":
        return asked.logprobs
    return kind != "tgi" or asked.request_type == "chat"


def shadow_body(asked: Asked, kind: EngineKind, *, top: int, model: str | None) -> bytes:
    """The mirrored copy: streamed, one choice, everything captured; seed and sampling parameters as asked.

    llama.cpp's are not streamed where there are tools: it would refuse log-probabilities.
    """
    more: dict[str, Any] = {} if model is None else {"model": model}
    more["stream"] = not (kind == "llama.cpp" and _has_tools(asked))
    more["n"] = None if asked.fields.get("n") is None else 1
    counts = more["stream"] and kind not in _COUNT_BY_TIMINGS
    more["stream_options"] = {"include_usage": True} if counts else None
    if kind != "llama-cpp-python":
        more |= _asking_logprobs(asked, kind, top)
    if kind == "vllm":
        more["return_token_ids"] = True
        if asked.logprobs:
            # The user's own answer names candidates as he asked: so must its copy.
            more["return_tokens_as_token_ids"] = asked.fields.get("return_tokens_as_token_ids")
    return _edited(asked, more, without=_NOT_COPIED)


def _asking_logprobs(asked: Asked, kind: EngineKind, top: int) -> dict[str, Any]:
    """Fields that ask for `top` candidates a position, by ids where the engine has them."""
    if kind == "tgi":
        top = min(top, TGI_TOP)
    more: dict[str, Any] = {"return_tokens_as_token_ids": True} if kind == "vllm" else {}
    if asked.request_type == "completion":
        return {**more, "logprobs": top}
    # vLLM's chat lists the emitted token in place of the last candidate when it is not among the best.
    return {**more, "logprobs": True, "top_logprobs": min(top + 1, MAX_TOP) if kind == "vllm" else top}


def _may_add_usage(asked: Asked, kind: EngineKind) -> bool:
    if not asked.stream or asked.usage or kind in _COUNT_BY_TIMINGS:
        return False
    options = asked.fields.get("stream_options")
    return options is None or (isinstance(options, dict) and options.get("include_usage") in (None, False))


def _usage_options(asked: Asked) -> dict[str, Any]:
    options: dict[str, Any] = {**(asked.fields.get("stream_options") or {}), "include_usage": True}
    # Without include_usage it was without effect; with it, it would put usage on every chunk.
    options.pop("continuous_usage_stats", None)
    return options


def _edited(asked: Asked, more: Mapping[str, Any], without: tuple[str, ...] = ()) -> bytes:
    """The body with these fields; every other one keeps its bytes. A field of None is left out."""
    if not more and not any(name in asked.fields for name in without):
        return asked.body
    fields: dict[str, Any] = msgspec.json.decode(asked.body, type=dict[str, Raw])
    fields.update(more)
    return msgspec.json.encode(
        {name: value for name, value in fields.items() if value is not None and name not in without}
    )


def _too_deep(body: bytes, fields: dict[str, Any]) -> bool:
    if body.count(b"[") + body.count(b"{") <= _MOST_NESTED:
        return False
    level: list[Any] = [fields]
    for _ in range(_MOST_NESTED):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _has_tools(asked: Asked) -> bool:
    return bool(asked.fields.get("tools"))


def _logprobs(fields: Mapping[str, Any], chat: bool) -> tuple[bool, int | None]:
    asked, top = fields.get("logprobs"), fields.get("top_logprobs")
    if not chat:
        return type(asked) is int, asked if type(asked) is int else 0
    if asked is not True:
        return False, 0
    return True, top if type(top) is int else None


def _chat_texts(messages: object) -> tuple[str, ...] | None:
    """Role and content of every message in turn; None for what is no list of messages."""
    if not isinstance(messages, list) or not messages:
        return None
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        content = message.get("content")
        texts += (message["role"], "" if content is None else _text(content))
    return tuple(texts)


def _prompts(prompt: object) -> tuple[str, ...] | None:
    """One text a prompt; token ids stand for themselves."""
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        return None
    if all(type(token) is int for token in prompt):
        return (_text(prompt),)
    return tuple(_text(one) for one in prompt)


def _sampling(fields: Mapping[str, Any]) -> dict[str, float | str]:
    return {
        name: value if type(value) in (int, float) and -_GREATEST < value < _GREATEST else _text(value)
        for name, value in fields.items()
        if name not in _NO_SAMPLING and value is not None
    }


def _text(value: object) -> str:
    """Text as it is, everything else as its JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _between(value: object, low: float, high: float) -> float | None:
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]
        return None
    return float(value)  # type: ignore[arg-type]


def _whole(value: object, among: range) -> int | None:
    return value if type(value) is int and value in among else None
