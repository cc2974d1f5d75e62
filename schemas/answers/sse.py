"""Server-sent events out of bytes, however they are cut. The bytes of all events are the bytes that came."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

MOST_EVENT_BYTES: Final = 4 << 20
"""A longer event is none: reading ends there."""

_BLANK: Final = re.compile(rb"(?>\r\n|\n|\r)(?:\n|\r)")
"""The end of an event. The line feed of a last CRLF begins the next event, where it means nothing: so an
event is whole at the same byte wherever its bytes are cut."""
_LINE: Final = re.compile(rb"[^\r\n]+")
_BOM: Final = b"\xef\xbb\xbf"


class Event(Struct, frozen=True, gc=False):
    """One event, comment or stretch of blank lines."""

    raw: bytes
    """As it came, with the blank line that ends it."""
    data: bytes | None
    """None: it has none."""
    name: bytes | None = None
    at: int = -1
    """Where `data` begins in `raw`; -1 where it is of several lines."""

    def with_data(self, data: bytes) -> bytes:
        """Its bytes with other data in place of its own."""
        if self.at >= 0:
            return self.raw[: self.at] + data + self.raw[self.at + len(self.data or b"") :]
        ending = self.raw[_end_of_text(self.raw) :]
        others = [line for line in _LINE.findall(self.raw) if not line.startswith(b"data")]
        newline = b"\r\n" if b"\r\n" in self.raw else b"\n" if b"\n" in self.raw else b"\r"
        return newline.join([*others, *(b"data: " + line for line in data.split(b"\n"))]) + ending


class EventReader:
    """Bytes in, whole events out. Holds one unfinished event of at most `most_bytes`."""

    def __init__(self, most_bytes: int = MOST_EVENT_BYTES) -> None:
        self._most = most_bytes
        self._held = bytearray()
        self._returns = False
        self._begun = False
        self.broken = False
        """An event was longer than any is: what comes is handed on as bytes without data."""

    def line_of(self, data: bytes) -> bytes | None:
        """The data of what is one whole event of one line, as servers send a token; None: it needs `feed`."""
        end = len(data) - 2
        if self._held or self._returns or self.broken or not data.startswith(b"data: ") or end > self._most:
            return None
        if data.find(b"\n") != end or not data.endswith(b"\n") or b"\r" in data:
            return None
        return data[6:end]

    def feed(self, data: bytes) -> list[Event]:
        """The events that are whole now."""
        if self.broken:
            return [Event(data, None)] if data else []
        self._returns = self._returns or b"\r" in data
        held = self._held
        if not held:
            events, start = self._split(data, 0)
            if start < len(data):
                held += data[start:]
        else:
            resume = max(0, len(held) - 2)
            held += data
            events, start = self._split(held, resume)
            if start:
                del held[:start]
        if not self.broken and len(held) > self._most:
            self.broken = True
        if self.broken and held:
            events.append(Event(bytes(held), None))
            held.clear()
        return events

    def end(self) -> Event | None:
        """What is left: an event without its blank line."""
        left, self._held = bytes(self._held), bytearray()
        if not left:
            return None
        return Event(left, None) if self.broken else self._event(left)

    def _split(self, buffer: bytes | bytearray, resume: int) -> tuple[list[Event], int]:
        """Whole events, and where the rest begins."""
        events: list[Event] = []
        start = 0
        while not self.broken:
            if self._returns:
                found = _BLANK.search(buffer, resume)
                end = found.end() if found else -1
            else:
                end = buffer.find(b"\n\n", resume) + 2
                if end == 1:
                    end = -1
            if end < 0:
                break
            if end - start > self._most:
                self.broken = True
                break
            events.append(self._event(bytes(buffer[start:end])))
            start = resume = end
        return events, start

    def _event(self, raw: bytes) -> Event:
        if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and not self._returns:
            self._begun = True
            return Event(raw, raw[6:-2], None, 6)
        return self._by_lines(raw)

    def _by_lines(self, raw: bytes) -> Event:
        name: bytes | None = None
        lines: list[bytes] = []
        at = -1
        for found in _LINE.finditer(raw):
            line, begin = found.group(), found.start()
            if not self._begun:
                self._begun = True
                if begin == 0 and line.startswith(_BOM):
                    line, begin = line[3:], 3
            field, _, value = line.partition(b":")
            if field == b"data":
                at = begin + min(len(line), 5)
                if value.startswith(b" "):
                    value, at = value[1:], at + 1
                lines.append(value)
            elif field == b"event":
                name = value.removeprefix(b" ")
        if not lines:
            return Event(raw, None, name)
        return Event(raw, b"\n".join(lines), name, at if len(lines) == 1 else -1)


def _end_of_text(raw: bytes) -> int:
    end = len(raw)
    while end and raw[end - 1] in b"\r\n":
        end -= 1
    return end
