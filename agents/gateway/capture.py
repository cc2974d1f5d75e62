"""One exchange as it passes: what the user gets of it, and what Klaxon learns from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from agents.gateway.asking import Added, Asked, EngineKind
from agents.gateway.failures import failure_class
from agents.gateway.restoring import Restoring
from schemas.answers.bodies import holds_chunk
from schemas.answers.building import AnswerBuilder
from schemas.answers.positions import Answer, CaptureError, Skipped, SkipReason
from schemas.answers.shapes import Choice, Logprobs, RawChunk, ReadChunk, raw_chunk, read_chunk, read_logprobs
from schemas.answers.sse import MOST_EVENT_BYTES, Event, EventReader
from schemas.events import MAX_POSITIONS

MOST_BYTES: Final = 8 << 20
_MOST_COUNT: Final = 2**31 - 1
_MOST_BLANK: Final = 64
"""Blank bytes before an answer that says what it is."""
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_MOST_PROMPT: Final = 1 << 20
"""Longer prompts are not scored again."""
_DONE: Final = b"[DONE]"
_MOST_UNREAD: Final = 64
_MOST_UNREAD_BYTES: Final = 1 << 16
"""Chunks that pass as they came are read later, so many at a time: that takes less CPU than in between."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What an answer said. Times are the ones given to `Capture`."""

    answer: Answer | None = field(default=None, repr=False)
    """Positions of choice 0; None where nothing of it can be compared."""
    skipped: SkipReason | None = None
    """Why there is none, where the answer came whole."""
    output_tokens: int = 0
    """Of all choices; 0 where the engine did not say."""
    input_tokens: int | None = None
    cached_tokens: int | None = None
    first_token_us: int | None = None
    """None: no token came, or the answer was not streamed."""
    last_token_us: int | None = None
    finish_reason: str | None = None
    ended: bool | None = None
    error: str | None = None
    """`overload`, `oom`, `timeout`, `refused`, `engine`: said in the answer; `cut`; `garbled`: not read."""
    missing_logprobs: int = 0
    """Tokens of choice 0 that came without, as far as the engine counts them."""
    prompt_token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    text: str = field(default="", repr=False)
    """Choice 0's, without halves of characters."""
    response_id: str | None = None
    model: str | None = None
    overflowed: bool = False
    """More came than is kept: no positions, perhaps not all of the text; counts and times are right."""


class Capture:
    """Reads one answer while it passes. Never raises, whatever comes.

    Holds no more than what `most_bytes` of an answer decode to, and one event of at most `most_event_bytes`.
    """

    def __init__(
        self,
        kind: EngineKind,
        asked: Asked,
        added: Added,
        *,
        most_bytes: int = MOST_BYTES,
        most_event_bytes: int = MOST_EVENT_BYTES,
    ) -> None:
        self._full = added.level == "full"
        self._most = most_bytes
        self._most_event = most_event_bytes
        self._restoring = Restoring(kind, asked.request_type, added)
        self._holds_whole = added.touches_answer()
        self.takes_out = added.touches_answer() or added.usage
        """Whether the user may get fewer bytes than came."""
        self._drops_usage = added.usage
        self._unread: list[tuple[bytes, int]] = []
        self._unread_bytes = 0
        self._builder = AnswerBuilder()
        self._events: EventReader | None = None
        self._body: bytearray | None = None
        self._blank = b""
        self._came = 0
        self._last_us = 0
        self._first_token_us: int | None = None
        self._last_token_us: int | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._prompt_token_ids: list[Any] | None = None
        self._id: Any = None
        self._model: Any = None
        self._error: str | None = None
        self._done = False
        self._begun = False
        """A stream of answers it is: a chunk came, or a comment."""
        self._overflowed = False

    def feed(self, data: bytes, at_us: int) -> bytes:
        """What the user gets now: whole events, without what was added; b"" while one is incomplete."""
        self._last_us = at_us
        if self._events is not None:
            line = None if self._holds_whole else self._events.line_of(data)
            if line is not None and self._read_later(line, at_us):
                return data
            return self._feed_events(self._events, data, at_us)
        if self._body is not None:
            return self._feed_body(self._body, data)
        start = (self._blank + data).lstrip(_BLANK)
        if not start and len(self._blank) + len(data) <= _MOST_BLANK:
            self._blank += data
            return b""
        data, self._blank = self._blank + data, b""
        if start.startswith((b"{", b"[")):
            self._body = bytearray()
            return self._feed_body(self._body, data)
        self._events = EventReader(self._most_event)
        return self._feed_events(self._events, data, at_us)

    def end(self, at_us: int, *, cut: bool = False) -> bytes:  # noqa: ARG002  # when its bytes came counts
        """The rest. `cut`: the connection broke before the answer was whole."""
        rest = self._blank
        if self._events is not None:
            rest = self._end_events(self._events, cut)
        elif self._body is not None:
            rest = self._end_body(self._body, cut)
        else:
            self._fail("cut" if cut else "garbled")
        self._blank = b""
        return rest

    @property
    def given_up(self) -> bool:
        """Whether nothing of what comes yet can be compared."""
        return self._overflowed or self._error == "garbled"

    def captured(self) -> Captured:
        """What the answer said; after `end`."""
        builder = self._builder
        output = _count(self._usage, "completion_tokens")
        if output is None:
            output = _count(self._timings, "predicted_n")
        answer, skipped = None, None
        if self._full and not self._overflowed and self._error in (None, "cut"):
            reading = builder.reading(self._usage)
            answer = reading if isinstance(reading, Answer) else None
            skipped = reading.reason if isinstance(reading, Skipped) else None
        return Captured(
            answer=answer,
            skipped=skipped,
            output_tokens=min(builder.tokens + builder.other_tokens, _MOST_COUNT)
            if output is None
            else output,
            input_tokens=self._input_tokens(),
            cached_tokens=self._cached_tokens(),
            first_token_us=self._first_token_us,
            last_token_us=self._last_token_us,
            finish_reason=_name(builder.finish_reason),
            ended=builder.ended,
            error=self._error,
            missing_logprobs=self._missing(output) if self._full else 0,
            prompt_token_ids=self._prompt_ids(),
            text=_whole_characters(builder.text),
            response_id=_name(self._id),
            model=_name(self._model),
            overflowed=self._overflowed,
        )

    # Streams.

    def _read_later(self, data: bytes, at_us: int) -> bool:
        """Keep a chunk that its user gets as it is, to be read with others; False: it may be no such."""
        if not data.startswith(b"{") or (self._drops_usage and b'"usage"' in data):
            return False
        self._unread.append((data, at_us))
        self._unread_bytes += len(data)
        if len(self._unread) >= _MOST_UNREAD or self._unread_bytes >= _MOST_UNREAD_BYTES:
            self._read_unread()
        return True

    def _read_unread(self) -> None:
        unread, self._unread, self._unread_bytes = self._unread, [], 0
        for data, at_us in unread:
            chunk = raw_chunk(data)
            try:
                self._read(read_chunk(data) if chunk is None else chunk, len(data), at_us)
            except CaptureError:
                self._garbled()

    def _feed_events(self, reader: EventReader, data: bytes, at_us: int) -> bytes:
        self._read_unread()
        events = reader.feed(data)
        if len(events) == 1:
            out = self._event(events[0], at_us)
        else:
            out = b"".join([self._event(event, at_us) for event in events])
        if reader.broken:
            self._garbled()
        return out

    def _end_events(self, reader: EventReader, cut: bool) -> bytes:
        self._read_unread()
        last = reader.end()
        rest = b""
        if last is not None:
            rest = self._event(last, self._last_us, whole=False)
        if cut:
            self._fail("cut")
        elif not (self._done or self._builder.finish_reason is not None or self._error):
            self._fail("cut" if self._begun else "garbled")
        return rest

    def _event(self, event: Event, at_us: int, *, whole: bool = True) -> bytes:
        data = event.data
        if data is None or not holds_chunk(event):
            self._done = self._done or (data is not None and event.name is None and data.strip() == _DONE)
            self._begun = self._begun or event.raw.startswith(b":")  # a sign of life
            return event.raw
        chunk = raw_chunk(data)
        self._begun = True
        try:
            self._read(read_chunk(data) if chunk is None else chunk, len(data), at_us)
        except CaptureError:
            if not whole:
                return event.raw  # the connection ended inside it
            self._garbled()
        left = self._restoring.event(data, chunk)
        if left is data:
            return event.raw
        return b"" if left is None else event.with_data(left)

    # Whole bodies.

    def _feed_body(self, body: bytearray, data: bytes) -> bytes:
        self._came += len(data)
        if self._overflowed:
            return data
        if self._came > self._most:
            self._overflow()
            held = bytes(body) if self._holds_whole else b""
            body.clear()
            return held + data
        body += data
        return b"" if self._holds_whole else data

    def _end_body(self, held: bytearray, cut: bool) -> bytes:
        body = bytes(held)
        held.clear()
        if cut:
            self._fail("cut")
        if self._overflowed:
            return b""
        chunk = raw_chunk(body)
        try:
            self._read(read_chunk(body) if chunk is None else chunk, 0, None)
        except CaptureError:
            self._fail("garbled")
        if not self._holds_whole:
            return b""
        return self._restoring.whole(body, chunk)

    # What both hold.

    def _read(self, chunk: RawChunk | ReadChunk, size: int, at_us: int | None) -> None:
        failure = chunk.failure()
        if failure is not None:
            self._fail(failure_class(failure))
            return
        if chunk.usage and isinstance(chunk.usage, dict):
            self._usage = chunk.usage
        if isinstance(chunk.timings, dict):
            self._timings = chunk.timings
        if self._id is None:
            self._id, self._model = chunk.id, chunk.model
        ids = chunk.prompt_token_ids
        for choice in chunk.choices or ():
            says = choice.says_anything()
            logprobs = self._logprobs(choice, says)
            ids = ids or choice.prompt_token_ids
            if at_us is not None and (says or choice.token_ids or logprobs):
                self._last_token_us = at_us
                if self._first_token_us is None:
                    self._first_token_us = at_us
            self._builder.add(choice, logprobs)
        if ids and self._prompt_token_ids is None and len(ids) <= _MOST_PROMPT:
            self._prompt_token_ids = ids
        self._keep(size)

    def _logprobs(self, choice: Choice[Any], says: bool) -> Logprobs | None:
        held = choice.logprobs
        if held is None or isinstance(held, Logprobs):
            return held
        if not self._full and says:
            return None  # nobody compares it, and the token is seen
        return read_logprobs(held)

    def _keep(self, size: int) -> None:
        self._came += size
        if not self._overflowed and (self._came > self._most or len(self._builder.positions) > MAX_POSITIONS):
            self._overflow()

    def _overflow(self) -> None:
        self._overflowed = True
        self._builder.keep_no_more()

    def _garbled(self) -> None:
        self._fail("garbled")
        self._builder.keep_no_more()

    def _fail(self, error: str) -> None:
        """The first thing that went wrong is what went wrong."""
        self._error = self._error or error

    # Counts.

    def _input_tokens(self) -> int | None:
        stated = _count(self._usage, "prompt_tokens")
        if stated is not None:
            return stated
        cached, fresh = _count(self._timings, "cache_n"), _count(self._timings, "prompt_n")
        if fresh is not None:
            return min(fresh + (cached or 0), _MOST_COUNT)
        return None if self._prompt_token_ids is None else len(self._prompt_token_ids)

    def _cached_tokens(self) -> int | None:
        details = self._usage.get("prompt_tokens_details")
        stated = _count(details, "cached_tokens") if isinstance(details, dict) else None
        return _count(self._timings, "cache_n") if stated is None else stated

    def _missing(self, output: int | None) -> int:
        builder = self._builder
        missing = builder.without_logprobs
        if output is not None and not builder.others:
            behind = output - builder.tokens
            # The end-of-text token may have no entry.
            missing += 0 if behind == 1 and builder.ended else max(0, behind)
        return missing

    def _prompt_ids(self) -> tuple[int, ...] | None:
        ids = self._prompt_token_ids
        if ids is None or not all(type(one) is int and 0 <= one <= _MOST_COUNT for one in ids):
            return None
        return tuple(ids)


def _count(counts: dict[str, Any], name: str) -> int | None:
    value = counts.get(name)
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else None


def _name(value: object) -> str | None:
    """A text that is one and not empty."""
    return _whole_characters(value) if isinstance(value, str) and value else None


def _whole_characters(text: str) -> str:
    """With a replacement for halves that stayed alone: UTF-8 has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
