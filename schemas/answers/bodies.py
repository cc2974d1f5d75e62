"""Captured bodies, streamed or whole, read at once."""

from __future__ import annotations

import re
from typing import Final

from schemas.answers.building import AnswerBuilder, scored_positions
from schemas.answers.positions import CaptureError, Reading, Skipped
from schemas.answers.shapes import ReadChunk, chunk_of, read_chunk
from schemas.answers.sse import Event, EventReader

_NEWLINE: Final = re.compile(rb"\r\n|\n|\r")
_ANY_BYTES: Final = 1 << 40
"""A body at hand may hold any event."""


def read_body(body: bytes) -> Reading:
    """A captured body, streamed or not. Raises CaptureError for what is neither."""
    start = body.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith((b"{", b"[")):
        return _read_whole(read_chunk(body))
    return read_stream(body)


def read_response(response: object) -> Reading:
    """The answer of a whole response object. Raises CaptureError."""
    return _read_whole(chunk_of(response))


def _read_whole(response: ReadChunk) -> Reading:
    if response.failure() is not None:
        return Skipped("engine_error")
    builder = AnswerBuilder()
    for choice in response.choices or ():
        builder.add(choice, choice.logprobs)
    if builder.index is not None and not builder.scored:
        builder.scored = scored_positions(response.prompt_logprobs)
    return builder.reading(response.usage)


def read_stream(body: bytes) -> Reading:
    """The answer that a stream's chunks add up to. Raises CaptureError with the line in the body."""
    reader = EventReader(most_bytes=_ANY_BYTES)
    builder = AnswerBuilder()
    usage: object = None
    passed = 0
    events: list[tuple[Event, bool]] = [(event, True) for event in reader.feed(body)]
    last = reader.end()
    if last is not None:
        events.append((last, False))
    for event, whole in events:
        passed += len(event.raw)
        if not holds_chunk(event):
            continue
        try:
            chunk = read_chunk(event.data or b"")
        except CaptureError as error:
            if not whole:
                break  # the connection was cut inside this event
            raise _placed(error, body, passed - len(event.raw), event) from None
        if chunk.failure() is not None:
            return Skipped("engine_error")
        usage = chunk.usage or usage
        try:
            for choice in chunk.choices or ():
                builder.add(choice, choice.logprobs)
        except CaptureError as error:
            raise _placed(error, body, passed - len(event.raw), event) from None
    return builder.reading(usage)


def holds_chunk(event: Event) -> bool:
    """Whether an event's data is a chunk: neither another kind of event nor the end of the stream."""
    return event.data is not None and event.name in (None, b"message") and event.data.strip() != b"[DONE]"


def _placed(error: CaptureError, body: bytes, offset: int, event: Event) -> CaptureError:
    """The same with its line in the body."""
    before = len(_NEWLINE.findall(body, 0, offset + max(0, event.raw.find(b"data"))))
    return CaptureError(str(error), before + max(1, error.line))
