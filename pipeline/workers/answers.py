"""Brokers' answers are read into one buffer each; aiokafka copies every byte of them four times more.

Its connections read through asyncio's streams: what comes from the socket is copied to a buffer that pauses
reading at every 128 KiB, is cut out of that as bytes, and read again field by field. Of a busy pair worker's
fetches, 16 MiB each, that was half the price. Here the socket writes to where an answer stays until its
fields are read. Importing this module replaces three names in aiokafka's connections, for the whole process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from aiokafka import conn

PRIVATE_NAMES: Final = {
    "aiokafka.conn": ("AIOKafkaConnection", "AIOKafkaProtocol", "io"),
    "aiokafka.conn.AIOKafkaConnection": ("_handle_frame", "_read"),
}

SMALL_BYTES: Final = 1 << 16
"""Answers that fit with their length are gathered here and handed on as bytes, all others have a buffer."""
_LENGTH: Final = 4

_Connection: Any = conn.AIOKafkaConnection
_Protocol: Any = conn.AIOKafkaProtocol


class Answers(_Protocol, asyncio.BufferedProtocol):
    """What a broker sends, cut into answers: each is its length, four bytes, and as many bytes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._small = memoryview(bytearray(SMALL_BYTES))
        self._large: memoryview | None = None
        """The answer that is being read, if it has a buffer of its own."""
        self._filled = 0
        """Bytes read into either."""
        self._whole: deque[bytes | memoryview] = deque()
        """As many as were asked for at most: the broker only answers."""
        self._ended: Exception | None = None
        self._changed = asyncio.Event()

    def get_buffer(self, _: int) -> memoryview:
        """Where the next bytes go."""
        return (self._small if self._large is None else self._large)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many are there."""
        self._filled += nbytes
        if self._large is None:
            self._cut()
        elif self._filled == len(self._large):
            self._put(self._large)
            self._large, self._filled = None, 0

    def _cut(self) -> None:
        small, at = self._small, 0
        while (begin := at + _LENGTH) <= self._filled:
            size = int.from_bytes(small[at:begin], "big", signed=True)
            if size < 0:
                raise ValueError(f"an answer of {size} bytes")
            if begin + size <= self._filled:
                self._put(bytes(small[begin : begin + size]))
                at = begin + size
            elif _LENGTH + size <= SMALL_BYTES:
                break
            else:
                # Not a bytearray, which is zeroed first: one more pass over all of it.
                self._large = np.empty(size, np.uint8).data
                there = self._filled - begin
                self._large[:there] = small[begin : self._filled]
                self._filled = there
                return
        left = self._filled - at
        small[:left] = small[at : self._filled]
        self._filled = left

    def _put(self, answer: bytes | memoryview) -> None:
        self._whole.append(answer)
        self._changed.set()

    def eof_received(self) -> bool | None:
        """As a stream: what was not read whole never will be."""
        self._end(None)
        ends: bool | None = super().eof_received()
        return ends

    def connection_lost(self, exc: Exception | None) -> None:
        """As a stream."""
        self._end(exc)
        super().connection_lost(exc)

    def _end(self, error: Exception | None) -> None:
        self._ended = error or self._ended or asyncio.IncompleteReadError(b"", _LENGTH)
        self._changed.set()

    async def next_answer(self) -> bytes | memoryview:
        """The next whole one; raises what ended the connection."""
        while not self._whole:
            if self._ended is not None:
                raise self._ended
            self._changed.clear()
            await self._changed.wait()
        return self._whole.popleft()


class _Reads(_Connection):
    @staticmethod
    async def _read(self_ref: Any) -> None:
        """As aiokafka's: without holding the connection while nothing comes."""
        connection = self_ref()
        if connection is None:
            return
        answers = connection._protocol  # noqa: SLF001 (as the base class does)
        del connection
        while True:
            answer = await answers.next_answer()
            connection = self_ref()
            if connection is None:
                return
            connection._handle_frame(answer)  # noqa: SLF001 (as the base class does)
            del answer, connection


class _Fields:
    """The fields of an answer, each copied once."""

    def __init__(self, answer: memoryview) -> None:
        self._answer = answer
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        """As a file's."""
        begin = self._at
        self._at = len(self._answer) if size < 0 else min(begin + size, len(self._answer))
        return bytes(self._answer[begin : self._at])


def _fields(answer: bytes | memoryview) -> BytesIO | _Fields:
    return BytesIO(answer) if isinstance(answer, bytes) else _Fields(answer)


conn.io = SimpleNamespace(BytesIO=_fields)
conn.AIOKafkaProtocol = Answers
conn.AIOKafkaConnection = _Reads
