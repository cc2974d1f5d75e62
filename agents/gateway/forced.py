"""Teacher-forced scoring: what another engine gives the tokens of the baseline's answer. Pure.

One prefill of prompt and answer as token ids, so nothing diverges after a first different token. Only engines
that score a prompt can: vLLM and SGLang, not llama.cpp or TGI. Prompts are scored before any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agents.gateway.asking import COMPLETIONS, Asked, EngineKind
from agents.gateway.capture import Captured
from agents.gateway.failures import failure_class
from schemas.answers.building import MOST_TOKEN_ID, scored_positions
from schemas.answers.positions import Answer, CaptureError, Position, Token
from schemas.answers.shapes import read_chunk
from schemas.events import MAX_TOP, Definition

GENERATE: Final = "/generate"
FORCED_DEFINITION: Final[Definition] = "raw"


SCORING: Final[frozenset[EngineKind]] = frozenset({"vllm", "sglang"})
TELLING_PROMPTS: Final[frozenset[EngineKind]] = frozenset({"vllm"})
"""Engines whose answers give the ids of prompt and answer."""


def may_be_forced(asked: Asked, baseline: EngineKind, kind: EngineKind) -> bool:
    """Whether an engine of `kind` can be expected to score what one of `baseline` answers to this.

    Not where the prompt is more than text: an image has no tokens that another request could name.
    """
    return kind in SCORING and baseline in TELLING_PROMPTS and _only_text(asked)


def forced_request(
    asked: Asked, baseline: Captured, kind: EngineKind, *, top: int, model: str | None
) -> tuple[str, bytes] | None:
    """Path and body that score the baseline's tokens; None: this engine cannot, or the tokens are unknown.

    Never None where `may_be_forced`, but for a baseline that does not give the ids that its kind gives.
    """
    answer_ids = None if baseline.answer is None else _ids(baseline.answer.generated)
    prompt_ids = baseline.prompt_token_ids
    if kind not in SCORING or not answer_ids or not prompt_ids or not _only_text(asked):
        return None
    ids = [*prompt_ids, *answer_ids]
    top = min(top, MAX_TOP)
    body: dict[str, Any]
    if kind == "vllm":
        path = COMPLETIONS
        body = {"model": model or asked.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body["prompt_logprobs"] = top
    else:
        path = GENERATE
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        # The token at which it starts has no value: the last of the prompt.
        body |= {"return_logprob": True, "logprob_start_len": len(prompt_ids) - 1, "top_logprobs_num": top}
    return path, msgspec.json.encode(body)


def read_forced(kind: EngineKind, body: bytes, baseline: Captured) -> Captured:
    """The baseline's tokens with the lists of the engine that scored them.

    `error`: what the engine said went wrong; `garbled` where it answered something else, or other tokens.
    """
    ours = () if baseline.answer is None else baseline.answer.generated
    try:
        if kind == "vllm":
            response = read_chunk(body)
            failure = response.failure()
            choices = response.choices or ()
            prompt = choices[0].prompt_logprobs if choices else None
            scored = scored_positions(prompt or response.prompt_logprobs) if failure is None else ()
        else:
            failure, scored = _read_generate(body)
    except CaptureError:
        return Captured(error="garbled")
    if failure is not None:
        return Captured(error=failure_class(failure))
    theirs = scored[len(scored) - len(ours) :] if ours else ()
    if not theirs or _ids(theirs) != _ids(ours):
        return Captured(error="garbled")
    return Captured(
        answer=Answer(theirs, ended=baseline.ended),
        output_tokens=len(theirs),
        input_tokens=None if baseline.prompt_token_ids is None else len(baseline.prompt_token_ids),
        finish_reason=baseline.finish_reason,
        ended=baseline.ended,
    )


def _ids(positions: Sequence[Position]) -> list[int] | None:
    """Ids of the emitted tokens, None where one has none."""
    ids = [position.emitted.id for position in positions]
    return None if None in ids else [one for one in ids if one is not None]


def _only_text(asked: Asked) -> bool:
    """Whether every message is text, whole or in parts of text."""
    messages = asked.fields.get("messages") or ()
    return all(
        part.get("type") == "text" if isinstance(part, dict) else isinstance(part, str)
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


class _MetaInfo(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]
    input_top_logprobs: list[list[tuple[float | None, int, Any]] | None]


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo | None = None
    error: Any = None


_generated: Final = msgspec.json.Decoder(_Generated)


def _read_generate(body: bytes) -> tuple[Any, tuple[Position, ...]]:
    """SGLang's native answer: its failure, else positions of the prompt. Raises CaptureError."""
    try:
        answer = _generated.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"/generate: {error}") from None
    meta = answer.meta_info
    if answer.error is not None or meta is None:
        return answer.error or "no meta_info", ()
    if len(meta.input_token_logprobs) != len(meta.input_top_logprobs):
        raise CaptureError("/generate: lists of different lengths")
    return None, tuple(
        _position(value, token_id, top or [])
        for (value, token_id, _), top in zip(meta.input_token_logprobs, meta.input_top_logprobs, strict=True)
        if value is not None
    )


def _position(value: float, token_id: int, top: list[tuple[float | None, int, Any]]) -> Position:
    """The actual token stands first where it is not among the best, as in `scored_positions`."""
    if not all(0 <= one <= MOST_TOKEN_ID for one in (token_id, *(entry[1] for entry in top))):
        raise CaptureError(f"/generate: a token id that is not in 0..{MOST_TOKEN_ID}")
    entries = sorted(
        ((Token(one), float("-inf") if logprob is None else logprob) for logprob, one, _ in top),
        key=lambda entry: -entry[1],
    )
    if entries and all(token.id != token_id for token, _ in entries):
        entries.insert(0, (Token(token_id), value))
    return Position(Token(token_id), tuple(entries))
