"""Bodies of OpenAI-compatible servers: chat and legacy completions, whole or streamed.

Handled as seen on the wire: vLLM (several tokens per chunk, `token_ids`, `token_id:N` strings, −9999, prompt
log-probabilities, errors inside a stream), llama-server (`id` on every entry, chat-style completions),
llama-cpp-python (`bytes` null, no ids), SGLang (named events, separate finish chunk), TGI (no `bytes`).
Unknown keys are ignored everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipeline.core.captures.answers import (
    Answer,
    CaptureError,
    Position,
    Reading,
    Skipped,
    Token,
    has_bytes,
    has_ids,
)

MOST_TOKEN_ID: Final = 2**31 - 1
"""As on the wire: no vocabulary is larger."""
_TOKEN_ID: Final = re.compile(r"token_id:(\d{1,18})")
_ENDED: Final = {"stop": True, "eos_token": True, "stop_sequence": True, "tool_calls": True, "length": False}
"""finish_reason → ended by itself; any other reason does not say."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One server-sent event: the line it starts on (from 1), its name if it has one, its data."""

    line: int
    name: str | None
    data: str
    complete: bool
    """False for the last event of a body that ends before the blank line that closes it."""


def sse_events(body: bytes) -> Iterator[SseEvent]:
    """Events of a stream; comments are passed over."""
    text = body.decode("utf-8", errors="replace").removeprefix("\ufeff")
    name: str | None = None
    data: list[str] = []
    start = 0
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if not line:
            if data:
                yield SseEvent(start, name, "\n".join(data), complete=True)
            name, data = None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            start = number if not data else start
            data.append(value)
        elif field == "event":
            name = value
    if data:
        yield SseEvent(start, name, "\n".join(data), complete=False)


def read_body(body: bytes) -> Reading:
    """A captured body, streamed or not. Raises CaptureError for what is neither."""
    start = body.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith((b"{", b"[")):
        return read_response(_json_object(body.decode("utf-8", errors="replace"), 0))
    return read_stream(body)


def read_stream(body: bytes) -> Reading:
    """The answer that a stream's chunks add up to."""
    merged: dict[int, dict[str, Any]] = {}
    usage: object = None
    for event in sse_events(body):
        if event.name not in (None, "message") or event.data.strip() == "[DONE]":
            continue
        try:
            chunk = _json_object(event.data, event.line)
        except CaptureError:
            if event.complete:
                raise
            break  # the connection was cut inside this event
        if chunk.get("error") is not None:
            return Skipped("engine_error")
        usage = chunk.get("usage") or usage
        for choice in _list(chunk, "choices", event.line):
            _merge(merged, _object(choice, "choices", event.line), event.line)
    if not merged:
        return Skipped("no_logprobs")
    return _read_choices(list(merged.values()), None, usage)


def read_response(response: Mapping[str, Any]) -> Reading:
    """The answer of a whole response object."""
    if response.get("error") is not None or ("detail" in response and "choices" not in response):
        return Skipped("engine_error")
    choices = [_object(choice, "choices", 0) for choice in _list(response, "choices", 0)]
    if not choices:
        return Skipped("no_logprobs")
    return _read_choices(choices, response.get("prompt_logprobs"), response.get("usage"))


def _merge(merged: dict[int, dict[str, Any]], choice: Mapping[str, Any], line: int) -> None:
    index = choice.get("index", 0)
    if not isinstance(index, int):
        raise CaptureError(f"choices[].index is {index!r}, not a number", line)
    whole = merged.setdefault(index, {"index": index, "text": "", "logprobs": None, "token_ids": []})
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, Mapping) else choice.get("text")
    whole["text"] += text if isinstance(text, str) else ""
    whole["token_ids"] += _list(choice, "token_ids", line)
    whole["finish_reason"] = choice.get("finish_reason") or whole.get("finish_reason")
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return
    held = whole["logprobs"] = whole["logprobs"] or {}
    for key, values in _object(logprobs, "logprobs", line).items():
        if key in ("content", "tokens", "token_logprobs", "top_logprobs") and values is not None:
            held.setdefault(key, []).extend(_list(logprobs, key, line))


def _read_choices(choices: Sequence[Mapping[str, Any]], prompt_logprobs: object, usage: object) -> Reading:
    """Choice 0 (or the first there is); the others answer the same prompt and are only counted."""
    choice = min(choices, key=lambda c: c["index"] if isinstance(c.get("index"), int) else 0)
    scored = _scored(choice.get("prompt_logprobs") or prompt_logprobs)
    logprobs = choice.get("logprobs")
    generated: tuple[Position, ...] = ()
    if logprobs is not None:
        generated = _generated(_object(logprobs, "logprobs", 0), _list(choice, "token_ids", 0))
    if not any(position.entries for position in (*generated, *scored)):
        return Skipped("no_logprobs")
    answer = Answer(generated, scored, _ENDED.get(str(choice.get("finish_reason"))), len(choices) - 1)
    if len(choices) == 1 and _lost_some(answer, choice, usage):
        return Skipped("logprobs_incomplete")
    if not any(has_ids(part) or has_bytes(part) for part in (generated, scored)):
        return Skipped("no_token_identity")
    return answer


def _lost_some(answer: Answer, choice: Mapping[str, Any], usage: object) -> bool:
    """Whether log-probabilities are missing from the middle, so that later positions are not what they seem.

    Servers may leave out the end-of-text token and what never became text at the end. The bytes tell: then
    the tokens spell the text as far as either goes.
    """
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if not answer.generated or not isinstance(counted, int) or counted <= len(answer.generated):
        return False
    if answer.ended and counted == len(answer.generated) + 1:
        return False
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    spelled = b"".join(position.emitted.raw or b"" for position in answer.generated)
    # A character cut in half comes as a lone surrogate, which plain UTF-8 cannot hold.
    written = text.encode(errors="surrogatepass") if isinstance(text, str) else b""
    return not spelled or not (spelled.startswith(written) or written.startswith(spelled))


def _generated(logprobs: Mapping[str, Any], token_ids: Sequence[object]) -> tuple[Position, ...]:
    if isinstance(logprobs.get("content"), list):
        content = [_object(item, "logprobs.content", 0) for item in logprobs["content"]]
        ids = token_ids if len(token_ids) == len(content) else [None] * len(content)
        return tuple(_chat_position(item, token_id) for item, token_id in zip(content, ids, strict=True))
    if isinstance(logprobs.get("tokens"), list):
        return _legacy_positions(logprobs, token_ids)
    return ()


def _chat_position(item: Mapping[str, Any], token_id: object) -> Position:
    top = _list(item, "top_logprobs", 0)
    entries = tuple(
        (_token(_object(entry, "top_logprobs", 0)), _number(entry.get("logprob"), "logprob")) for entry in top
    )
    return Position(_token(item, token_id), entries)


def _legacy_positions(logprobs: Mapping[str, Any], token_ids: Sequence[object]) -> tuple[Position, ...]:
    """Parallel arrays. Alternatives are keyed by text, which identifies nothing, or by `token_id:N`."""
    texts = _list(logprobs, "tokens", 0)
    tops = _list(logprobs, "top_logprobs", 0) or [None] * len(texts)
    if len(texts) != len(tops):
        raise CaptureError(f"logprobs.tokens has {len(texts)} items, logprobs.top_logprobs {len(tops)}")
    ids = token_ids if len(token_ids) == len(texts) else [None] * len(texts)
    return tuple(
        Position(
            _token({"token": text}, token_id),
            tuple(
                (_token({"token": key}), _number(value, "top_logprobs"))
                for key, value in _object(top or {}, "top_logprobs", 0).items()
            ),
        )
        for text, top, token_id in zip(texts, tops, ids, strict=True)
    )


def _scored(prompt_logprobs: object) -> tuple[Position, ...]:
    """Scored prompt tokens: objects keyed by token id, the actual token first and in addition to the best k.

    The first token has none. An actual token outside the best k stays first, so that it is known to set no
    cap; every other list is put into rank order.
    """
    if not isinstance(prompt_logprobs, list):
        return ()
    positions = []
    for place in prompt_logprobs:
        if place is None:
            continue
        try:
            entries = [
                (_identified(int(key)), _number(value["logprob"], "logprob")) for key, value in place.items()
            ]
            rank = next(iter(place.values()))["rank"]
        except (AttributeError, KeyError, TypeError, ValueError, StopIteration):
            raise CaptureError("prompt_logprobs: no object of token id → {logprob, rank}") from None
        first, others = entries[0], sorted(entries[1:], key=lambda entry: -entry[1])
        if isinstance(rank, int) and rank > len(entries):
            ordered = [first, *others] if others else []
        else:
            ordered = sorted(entries, key=lambda entry: -entry[1])
        positions.append(Position(first[0], tuple(ordered)))
    return tuple(positions)


def _token(entry: Mapping[str, Any], token_id: object = None) -> Token:
    text, given, raw = entry.get("token"), entry.get("id"), entry.get("bytes")
    for candidate in (given, token_id):
        if isinstance(candidate, int) and not isinstance(candidate, bool) and candidate >= 0:
            return _identified(candidate, _bytes(raw))
    spelled = _TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    # Where the token string is an id, `bytes` spell that string.
    return _identified(int(spelled.group(1))) if spelled else Token(None, _bytes(raw))


def _identified(token_id: int, raw: bytes | None = None) -> Token:
    if not 0 <= token_id <= MOST_TOKEN_ID:
        raise CaptureError(f"token id {str(token_id)[:20]}: not in 0..{MOST_TOKEN_ID}")
    return Token(token_id, raw)


def _bytes(raw: object) -> bytes | None:
    if not isinstance(raw, list) or not raw:
        return None
    try:
        return bytes(raw)
    except (TypeError, ValueError):
        raise CaptureError(f"bytes: {str(raw)[:60]} are none") from None


def _number(value: object, field: str) -> float:
    if value is None:
        return float("-inf")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CaptureError(f"{field} is {str(value)[:60]!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise CaptureError(f"{field} is beyond every number") from None


def _json_object(text: str, line: int) -> Mapping[str, Any]:
    try:
        value = read_json(text)
    except CaptureError as error:
        raise CaptureError(str(error), line + error.line - 1 if line and error.line else error.line) from None
    return _object(value, "the body", line)


def read_json(text: str) -> object:
    """The value of a JSON text. Raises CaptureError: `line` inside the text, 0 where the place is unknown."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise CaptureError(f"not JSON: {error.msg} (column {error.colno})", error.lineno) from None
    except ValueError:
        raise CaptureError("a number of thousands of digits; no field has one") from None
    except RecursionError:
        raise CaptureError("not JSON: nested too deep") from None


def _object(value: object, field: str, line: int) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CaptureError(f"{field}: {str(value)[:60]!r} is no object", line)
    return value


def _list(holder: Mapping[str, Any], key: str, line: int) -> list[Any]:
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CaptureError(f"{key}: {str(value)[:60]!r} is no list", line)
    return value
