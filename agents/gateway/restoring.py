"""Takes out of an answer what only Klaxon asked for: the rest is, byte for byte, the engine's own. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from agents.gateway.asking import Added, EngineKind, RequestType
from schemas.answers.shapes import RawChunk

_STRING_OR_MARK: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}\[\]:,]|[^\s"{}\[\]:,]+', re.DOTALL)
"""A string without its end is one, too: garbage is read in linear time."""
_MOST_READ: Final = 1 << 18
"""Longer texts that plain search is not certain of stay as they are: reading them would hold up everyone."""
_IDS: Final = re.compile(rb"\[[\d,\s]*\]")
_NULL: Final = b"null"
_OURS_IN_CHOICE: Final = (b"logprobs", b"token_ids", b"prompt_token_ids")


class Member(NamedTuple):
    """A key of a JSON object and where it and its value stand."""

    name: bytes
    key: int
    value: int
    end: int


_key_of: Final = attrgetter("key")


class Restoring:
    """Of one exchange: what was added to it, and how its engine answers without."""

    def __init__(self, kind: EngineKind, request_type: RequestType, added: Added) -> None:
        self._added = added
        # llama.cpp's chat leaves the key out, every other answer says null.
        self._absent = kind == "llama.cpp" and request_type == "chat"
        self._mends = added.touches_answer()
        self._empty_deltas = kind == "vllm" and added.token_ids
        self._names = frozenset(
            name for name in _OURS_IN_CHOICE if (added.logprobs if name == b"logprobs" else added.token_ids)
        )

    def event(self, data: bytes, chunk: RawChunk | None) -> bytes | None:
        """A streamed chunk's data as the user gets it; None: it would not have been sent.

        `chunk`: the same, read; None where it is not standard JSON.
        """
        if chunk is not None and not chunk.choices:
            if self._added.usage and chunk.usage is not None and chunk.failure() is None:
                return None
            return data if not self._mends else self._mended(data, chunk)
        if not self._mends:
            return data
        if self._empty_deltas and b'"delta":{}' in data and _says_nothing(chunk):
            return None  # vLLM streams these for their token ids only
        return self._mended(data, chunk)

    def whole(self, body: bytes, chunk: RawChunk | None) -> bytes:
        """A whole response as the user gets it."""
        return self._mended(body, chunk) if self._mends else body

    def _mended(self, data: bytes, chunk: RawChunk | None) -> bytes:
        members = None if chunk is None else self._found(data, chunk)
        if members is None:
            members = self._searched(data)
        if not members:
            return data
        if len(members) == 1:
            start, end, instead = self._edit(data, members[0])
            return data[:start] + instead + data[end:]
        kept: list[bytes] = []
        at = 0
        for start, end, instead in (self._edit(data, member) for member in members):
            kept += (data[at:start], instead)
            at = end
        return b"".join((*kept, data[at:]))

    def _found(self, data: bytes, chunk: RawChunk) -> list[Member] | None:
        """What is ours, by plain search, in order. None where that is not certain."""
        choices = chunk.choices or ()
        ours: list[Member] = []
        if self._added.logprobs:
            values = [bytes(choice.logprobs) for choice in choices if choice.logprobs is not None]
            found = _by_search(data, b'"logprobs":', [value for value in values if value != _NULL])
            if found is None:
                return None
            ours += found
        if self._added.token_ids:
            prompts: list[bytes | None] = [None for choice in choices if choice.prompt_token_ids is not None]
            prompts += [None] if chunk.prompt_token_ids is not None else []
            ids: list[bytes | None] = [None for choice in choices if choice.token_ids is not None]
            for key, expected in ((b'"token_ids":', ids), (b'"prompt_token_ids":', prompts)):
                found = _by_search(data, key, expected) if expected else []
                if found is None:
                    return None
                ours += found
        if len(ours) > 1:
            ours.sort(key=_key_of)
        return ours

    def _searched(self, data: bytes) -> list[Member]:
        """What is ours, by reading the text mark by mark."""
        members = _ours(data, self._names)
        return [member for member in members if data[member.value : member.end] != _NULL]

    def _edit(self, data: bytes, member: Member) -> tuple[int, int, bytes]:
        """From where to where what stands instead."""
        if not self._absent or member.name != b"logprobs":
            return member.value, member.end, _NULL
        start, end = member.key, member.end
        while data[start - 1 : start].isspace():
            start -= 1
        if data[start - 1 : start] == b",":
            return start - 1, end, b""
        while data[end : end + 1].isspace():
            end += 1
        return start, end + 1 if data[end : end + 1] == b"," else end, b""


def _says_nothing(chunk: RawChunk | None) -> bool:
    return chunk is not None and all(
        choice.finish_reason is None and not choice.says_anything() for choice in chunk.choices or ()
    )


def _by_search(data: bytes, key: bytes, expected: Sequence[bytes | None]) -> list[Member] | None:
    """Where a key is not null: with these values in turn, None for ids. None where it has any other."""
    found: list[Member] = []
    at = data.find(key) if expected else -1
    while at >= 0:
        value = at + len(key)
        while data[value : value + 1].isspace():
            value += 1
        end = value
        if not data.startswith(_NULL, value):
            if len(found) == len(expected):
                return None
            wanted = expected[len(found)]
            if wanted is None:
                ids = _IDS.match(data, value)
                end = -1 if ids is None else ids.end()
            else:
                end = value + len(wanted) if data.startswith(wanted, value) else -1
            if end < 0:
                return None
            found.append(Member(key[1:-2], at, value, end))
        at = data.find(key, end)
    return found if len(found) == len(expected) else None


class _Frame:
    """An object or list that is open, and its member at hand."""

    __slots__ = ("key_at", "mark", "name", "value_at")

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.name = b""
        self.key_at = self.value_at = -1


def _ours(data: bytes, names: frozenset[bytes]) -> list[Member]:
    """Members of these names in the choices, and `prompt_token_ids` beside them; not where else they stand.

    Reads what is not quite JSON as well: NaN, or garbage, of which it makes nothing.
    """
    found: list[Member] = []
    stack: list[_Frame] = []
    end = 0
    written = any(name in data for name in names) or b"\\u" in data
    if not written or len(data) > _MOST_READ or not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return found
    for match in _STRING_OR_MARK.finditer(data):
        mark, start = match.group(), match.start()
        frame = stack[-1] if stack else None
        if mark in b"{[":
            if frame is not None and frame.mark == b"{" and frame.value_at == -2:
                frame.value_at = start
            stack.append(_Frame(mark))
        elif mark in b"}],":
            if frame is None:
                break
            if frame.value_at >= 0 and frame.name in names and _is_ours(stack, frame.name):
                found.append(Member(frame.name, frame.key_at, frame.value_at, end))
            frame.value_at = -1
            if mark != b",":
                stack.pop()
                if not stack:
                    break
        elif frame is not None and frame.mark == b"{":
            if mark == b":":
                frame.value_at = -2
            elif frame.value_at == -2:
                frame.value_at = start
            else:
                frame.name, frame.key_at = _plain(mark), start
        end = match.end()
    return found


def _is_ours(stack: list[_Frame], name: bytes) -> bool:
    if len(stack) == 1:
        return name == b"prompt_token_ids"
    return len(stack) == 3 and stack[0].name == b"choices" and stack[1].mark == b"["


def _plain(string: bytes) -> bytes:
    """A key without its quotes and escapes."""
    if b"\\" not in string:
        return string[1:-1]
    try:
        return str(msgspec.json.decode(string)).encode()
    except (msgspec.DecodeError, UnicodeEncodeError):
        return string
