"""What engines send: a streamed chunk or a whole response, as far as it is read. Unknown keys are ignored.

Handled as seen on the wire: vLLM (several tokens per chunk, `token_ids`, `token_id:N` strings, −9999, prompt
log-probabilities, errors inside a stream), llama-server (`id` on every entry, chat-style completions,
`timings`), llama-cpp-python (`bytes` null, no ids), SGLang (named events, separate finish chunk), TGI (no
`bytes`).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from schemas.answers.positions import CaptureError

L = TypeVar("L")
"""How log-probabilities are held: read (`Logprobs | None`), or as their bytes (`Raw`, empty where absent)."""


class Entry(Struct, gc=False):
    """A candidate. `id`: llama.cpp; `bytes` null or absent: llama-cpp-python, TGI."""

    token: Any = None
    logprob: Any = None
    bytes: Any = None
    id: Any = None


class Item(Entry, gc=False):
    """An emitted token with its candidates."""

    top_logprobs: list[Entry] | None = None


class Logprobs(Struct, gc=False):
    """Chat style (`content`), or the legacy parallel arrays, whose candidates are keyed by text."""

    content: list[Item] | None = None
    tokens: list[Any] | None = None
    top_logprobs: list[dict[str, Any] | None] | None = None

    def __len__(self) -> int:
        """Tokens in it."""
        return len(self.content or self.tokens or ())


class Message(Struct, gc=False):
    """A chunk's delta, or a whole message."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None

    def says_anything(self) -> bool:
        """Whether anything of it was generated; a role is not."""
        return bool(
            self.content
            or self.tool_calls
            or self.reasoning_content
            or self.reasoning
            or self.function_call
            or self.refusal
        )


class Choice(Struct, Generic[L]):
    """One of the answers to one question."""

    index: int = 0
    delta: Message | None = None
    message: Message | None = None
    text: Any = None
    logprobs: L = None  # type: ignore[assignment]  # what is absent is None for either way to hold them
    token_ids: list[Any] | None = None
    prompt_token_ids: list[Any] | None = None
    prompt_logprobs: Any = None
    finish_reason: Any = None

    def written(self) -> str:
        """The text in it."""
        said = self.delta or self.message
        text = said.content if said is not None else self.text
        return text if isinstance(text, str) else ""

    def says_anything(self) -> bool:
        """Whether it holds text, a call or reasoning; ids and log-probabilities may come without."""
        said = self.delta or self.message
        return bool(self.text or (said is not None and said.says_anything()))


class Chunk(Struct, Generic[L]):
    """A streamed chunk, or a whole response."""

    choices: list[Choice[L]] | None = None
    usage: Any = None
    timings: Any = None
    """llama.cpp's own: on the last chunk."""
    error: Any = None
    detail: Any = None
    object: Any = None
    id: Any = None
    model: Any = None
    prompt_token_ids: list[Any] | None = None
    prompt_logprobs: Any = None

    def failure(self) -> Any:
        """What the engine says went wrong; None: nothing did."""
        if self.error is not None:
            return self.error
        if self.object == "error":
            return {"object": "error"}
        return self.detail if self.choices is None else None


ReadChunk = Chunk[Logprobs | None]
RawChunk = Chunk[Raw]

_AT: Final = re.compile(r"^(.*) - at `\$\.?(.*)`$")
"""How msgspec says where a value is wrong; we say that first."""

_read_chunk: Final = msgspec.json.Decoder(ReadChunk)
_raw_chunk: Final = msgspec.json.Decoder(RawChunk)
_logprobs: Final = msgspec.json.Decoder(Logprobs | None)


def read_chunk(data: bytes | str) -> ReadChunk:
    """A chunk or response. Raises CaptureError: `line` inside the text, 0 where the place is unknown."""
    try:
        return _read_chunk.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # What JSON of Python writes, and no standard allows: NaN, lone surrogates. Or it is garbage.
        text = data.decode("utf-8", errors="replace") if isinstance(data, bytes) else data
        return chunk_of(read_json(text))


def raw_chunk(data: bytes) -> RawChunk | None:
    """A chunk or response, its log-probabilities still bytes; None for what standard JSON does not allow."""
    try:
        return _raw_chunk.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_logprobs(raw: Raw | None) -> Logprobs | None:
    """What a raw chunk's bytes hold. Raises CaptureError."""
    if raw is None:
        return None
    try:
        return _logprobs.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"logprobs: {error}") from None


def chunk_of(value: object) -> ReadChunk:
    """A chunk or response from its decoded JSON. Raises CaptureError."""
    if not isinstance(value, dict):
        raise CaptureError(f"the body: {str(value)[:60]!r} is no object")
    try:
        return msgspec.convert(value, ReadChunk)
    except UnicodeEncodeError:
        raise CaptureError("a key with half of a character in it") from None
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise CaptureError(_AT.sub(r"\2: \1", str(error))) from None


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
