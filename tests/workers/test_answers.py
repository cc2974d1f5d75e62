"""What a broker sends is cut into the same answers and fields as aiokafka's own reader cuts it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from io import BytesIO
from itertools import cycle
from typing import Any

import pytest
from aiokafka import conn
from aiokafka.protocol.fetch import FetchResponse_v4
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.workers.answers import _LENGTH, SMALL_BYTES, Answers, _fields, _Reads

ROOM = SMALL_BYTES - _LENGTH
"""The longest answer that needs no buffer of its own."""
SIZES = st.one_of(st.integers(0, 200), st.integers(ROOM - 3, ROOM + 5), st.integers(ROOM, 4 * SMALL_BYTES))
READS = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, SMALL_BYTES), st.just(1 << 20)), min_size=1, max_size=8
)


def _answer(number: int, size: int) -> bytes:
    return bytes((number + at) % 251 for at in range(min(size, 257))) * (size // 257 + 1)


def _framed(*answers: bytes) -> bytes:
    return b"".join(len(answer).to_bytes(_LENGTH, "big") + answer for answer in answers)


def _receive(answers: Answers, data: bytes, reads: Iterator[int]) -> None:
    """As an event loop: into the buffer that is offered, as much as is there and fits."""
    at = 0
    while at < len(data):
        into = answers.get_buffer(-1)
        count = min(len(into), next(reads), len(data) - at)
        into[:count] = data[at : at + count]
        answers.buffer_updated(count)
        at += count


def _made() -> Answers:
    loop = asyncio.get_running_loop()
    return Answers(loop.create_future(), asyncio.StreamReader(loop=loop), loop=loop)


@settings(deadline=None, max_examples=60)
@given(st.lists(SIZES, min_size=1, max_size=6), READS)
def test_answers_come_whole_and_in_order_however_they_are_read(sizes: list[int], reads: list[int]) -> None:
    sent = [_answer(number, size)[:size] for number, size in enumerate(sizes)]

    async def read() -> list[bytes | memoryview]:
        answers = _made()
        _receive(answers, _framed(*sent), cycle([*reads, 1 << 20]))
        return [await answers.next_answer() for _ in sent]

    found = asyncio.run(read())
    assert [bytes(each) for each in found] == sent
    # What is not read as fields of an answer (SASL) are bytes, and small.
    assert [isinstance(each, bytes) for each in found] == [size <= ROOM for size in sizes]


@pytest.mark.parametrize("size", [3, ROOM + 1])
async def test_what_came_whole_is_handed_over_before_the_end_is_said(size: int) -> None:
    answers = _made()
    _receive(answers, _framed(b"whole", _answer(0, size)[:size])[:-1], cycle([1 << 20]))
    answers.eof_received()
    assert await answers.next_answer() == b"whole"
    with pytest.raises(asyncio.IncompleteReadError):
        await answers.next_answer()


@pytest.mark.parametrize("error", [None, ConnectionResetError("gone")])
async def test_whoever_waits_for_an_answer_learns_why_none_comes(error: Exception | None) -> None:
    answers = _made()
    waiting = asyncio.create_task(answers.next_answer())
    await asyncio.sleep(0)
    answers.connection_lost(error)
    with pytest.raises(asyncio.IncompleteReadError if error is None else ConnectionResetError):
        await waiting


async def test_a_length_below_nothing_is_an_error() -> None:
    answers = _made()
    with pytest.raises(ValueError, match="-2 bytes"):
        _receive(answers, (-2).to_bytes(_LENGTH, "big", signed=True), cycle([1 << 20]))


@given(st.binary(max_size=60), st.lists(st.integers(-1, 40), max_size=8))
def test_fields_are_read_as_from_a_file(answer: bytes, sizes: list[int]) -> None:
    file, fields = BytesIO(answer), _fields(memoryview(answer))
    for size in sizes:
        assert fields.read(size) == file.read(size)


def test_a_fetch_is_decoded_from_a_buffer_as_from_bytes() -> None:
    batches = _answer(7, 5_000)
    sent = FetchResponse_v4(0, [("klaxon.logits", [(3, 0, 9, 8, [(5, 6)], batches), (4, 0, 1, 1, [], None)])])
    data = sent.encode()
    for made in (data, memoryview(bytearray(data))):
        assert FetchResponse_v4.decode(_fields(made)) == sent  # type: ignore[arg-type]  # it is only read
    found = FetchResponse_v4.decode(_fields(memoryview(bytearray(data))))  # type: ignore[arg-type]
    assert type(found.topics[0][1][0][-1]) is bytes  # aiokafka's machine code takes nothing else


async def test_a_connection_reads_answers_of_any_size_and_says_when_it_is_cut() -> None:
    """Over a socket, from a broker that knows one request, and cuts the connection within its last answer."""
    versions = [(18, 0, 0)]
    sent: list[int] = [1, 5_000, 20_000]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for count in [1, *sent, None]:
            request = await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH), "big"))
            entries = b"".join(
                api.to_bytes(2, "big") + low.to_bytes(2, "big") + high.to_bytes(2, "big")
                for api, low, high in versions * (count or 9)
            )
            body = request[4:8] + b"\0\0" + (count or 9).to_bytes(4, "big") + entries
            writer.write(_framed(body) if count is not None else _framed(body)[:-1])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connection = await conn.create_conn("127.0.0.1", port)
        assert type(connection) is _Reads
        for count in sent:
            response = await connection.send(conn.ApiVersionRequest())
            assert response.api_versions == versions * count
        with pytest.raises(conn.Errors.KafkaConnectionError):
            await connection.send(conn.ApiVersionRequest())
        assert not connection.connected()
        connection.close()


def test_aiokafka_still_takes_the_three_names_where_we_replace_them() -> None:
    def source(owner: Any) -> str:
        return inspect.getsource(owner)

    assert "AIOKafkaConnection(" in source(conn.create_conn)
    assert "AIOKafkaProtocol(" in source(conn.AIOKafkaConnection.connect)
    assert "self._reader, self._writer, self._protocol = " in source(conn.AIOKafkaConnection.connect)
    assert "io.BytesIO(" in source(conn.AIOKafkaConnection._handle_frame)
    # When this fails, aiokafka reads in another way: measure it before ours is kept.
    assert "readexactly(size)" in source(_Reads.__mro__[1]._read)
