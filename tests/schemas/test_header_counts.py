"""A batch that holds a record of too many headers is left out, before a reader makes objects of them."""

from __future__ import annotations

import logging
import re
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from aiokafka import codec
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, _DefaultRecordBatchBuilderPy
from aiokafka.record.util import calc_crc32c, decode_varint_py, encode_varint
from hypothesis import example, given
from hypothesis import strategies as st

from schemas import checksums, header_counts, header_names
from schemas.header_counts import MOST_HEADERS, HeadersError, require_few
from tests.conftest import REPOSITORY
from tests.schemas.test_header_names import log, read

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
EMPTY = b"\0\1"
"""A header without a name and without a value."""
RECORDS_AT = 61


def number(value: int, length: int = 1) -> bytes:
    """As records hold it; in so many bytes, if it needs fewer."""
    made = bytearray()
    encode_varint(value, made.append)
    while len(made) < length:
        made[-1] |= 0x80
        made.append(0)
    return bytes(made)


def record(headers: int, at: int = 0, *, said: int | None = None, value: bytes = b"v") -> bytes:
    """A record of so many empty headers, which says to have `said` of them; the `at`-th of its batch."""
    front = bytes(2) + number(at) + number(1) + b"k" + number(len(value)) + value
    inner = front + number(headers if said is None else said) + EMPTY * headers
    return number(len(inner)) + inner


def batch(records: list[bytes], packed: int = 0, offset: int = 0) -> bytes:
    """As a broker returns it."""
    data = b"".join(records)
    kind = next(name for name, each in CODECS.items() if each == packed)
    data = data if not packed else getattr(codec, f"{kind}_encode")(data)
    summed = struct.pack(">hiqqqhii", packed, len(records) - 1, 0, 0, -1, -1, -1, len(records)) + data
    return struct.pack(">qiibI", offset, len(summed) + 9, 0, 2, calc_crc32c(summed)) + summed


@pytest.mark.parametrize("packed", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("name", [b"a", b"\xff"], ids=["as it is", "in Python"])
def test_one_that_has_too_many_is_left_out_and_said(
    packed: int, name: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands before and after it is read, whoever reads it."""
    fine = [record(MOST_HEADERS), record(MOST_HEADERS, 1)]
    bad = [record(0), record(MOST_HEADERS + 1, 1), record(0, 2)]
    tail = bytearray(log([[b"a"]], packed))
    tail[:8] = (7).to_bytes(8)
    data = log([[name, b"a"]], packed) + batch(fine, packed, 2) + batch(bad, packed, 4)
    before = header_names.batches_left_out()
    with caplog.at_level(logging.ERROR, "klaxon.broker"):
        found = read(data + bytes(tail))
    assert [one.offset for one in found] == [0, 1, 2, 3, 7]
    assert [len(one.headers) for one in found] == [1, 1, MOST_HEADERS, MOST_HEADERS, 1]
    assert header_names.batches_left_out() == before + 1
    (said,) = caplog.messages
    assert said == (
        "t/0: a batch at offset 4 to 6 holds a record of more than 512 headers, or one that cannot be read; "
        "it is left out, see who writes there"
    )


@pytest.mark.parametrize("packed", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("name", [b"a", b"\xff"], ids=["as it is", "in Python"])
def test_one_of_too_many_records_is_left_out_unwalked(
    packed: int, name: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million empty ones in 64 MiB would take longer than a session."""
    monkeypatch.setattr(header_counts, "MOST_RECORDS", 3)
    walked: list[int] = []
    next_of = header_counts._next
    monkeypatch.setattr(
        header_counts, "_next", lambda records, at: (walked.append(at), next_of(records, at))[1]
    )
    few, many, after = ([record(512, at) for at in range(size)] for size in (3, 4, 2))
    data = log([[name]], packed) + batch(few, packed, 1) + batch(many, packed, 4) + batch(after, packed, 8)
    before = header_names.batches_left_out()
    with caplog.at_level(logging.ERROR, "klaxon.broker"):
        found = read(data)
    assert [one.offset for one in found] == [0, 1, 2, 3, 8, 9]
    assert len(walked) == len(few) + len(after)
    assert header_names.batches_left_out() == before + 1
    (said,) = caplog.messages
    assert said == (
        "t/0: a batch at offset 4 to 7 holds more than 3 records; it is left out, see who writes there"
    )


def test_no_more_records_are_walked_through_than_may_be_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_counts, "MOST_RECORDS", 3)
    fine = record(512)
    require_few(fine * 3 + record(600))
    with pytest.raises(HeadersError):
        require_few(fine * 2 + record(600))


@pytest.mark.parametrize("is_fast", [True, False])
def test_one_that_was_damaged_on_its_way_is_no_hostile_one(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched again."""
    monkeypatch.setattr(checksums, "IS_FAST", is_fast)
    data = bytearray(batch([record(MOST_HEADERS + 1)]))
    with pytest.raises(HeadersError):
        require_few(bytes(data), RECORDS_AT)
    data[-1] ^= 4
    with pytest.raises(CorruptRecordException):
        read(bytes(data))


def _most_held(read_all: Any, data: bytes) -> int:
    tracemalloc.start()
    try:
        read_all(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [0, 4], ids=["none", "zstd"])
def test_memory_is_bounded_and_aiokafka_alone_is_not(packed: int) -> None:
    """When the second part fails, header_counts.py is no longer needed."""
    many = record(200_000)
    data = batch([many], packed)
    read(log([[b"a"]], 4))  # what each thread keeps
    assert read(data) == []
    assert _most_held(read, data) < 4 * len(many)
    plain = batch([many])
    assert _most_held(lambda data: list(DefaultRecordBatch(data)), plain) > 30 * len(many)


SIZES = st.one_of(st.none(), st.integers(0, 90), st.sampled_from([63, 64, 8191, 8192, 1 << 20]))


@given(
    st.lists(st.tuples(SIZES, SIZES, st.integers(0, MOST_HEADERS), st.integers(0, 1 << 40)), max_size=5),
    st.binary(max_size=3),
)
@example([(None, None, 0, 0)] * 300, b"")
def test_what_producers_write_is_never_left_out(
    written: list[tuple[int | None, int | None, int, int]], name: bytes
) -> None:
    builder: Any = _DefaultRecordBatchBuilderPy(2, 0, False, -1, -1, -1, 1 << 30)
    for at, (key, value, headers, late) in enumerate(written):
        held = [(name.hex(), None if at % 2 else name)] * headers
        sized = [None if size is None else bytes(size) for size in (key, value)]
        assert builder.append(at, 1 << 41 if not at else (1 << 41) - late, *sized, held)
    require_few(bytes(builder.build()), RECORDS_AT)


EDGES = [
    -(1 << 63),
    -(1 << 31),
    -2,
    -1,
    0,
    1,
    6,
    63,
    64,
    511,
    512,
    513,
    1029,
    1 << 20,
    1 << 31,
    1 << 62,
    (1 << 63) - 1,
]
NUMBERS = st.builds(number, st.sampled_from(EDGES), st.integers(1, 11))
PARTS = st.one_of(
    NUMBERS,
    NUMBERS,
    st.binary(max_size=4),
    st.builds(lambda held: EMPTY * held, st.integers(0, 600)),
    st.builds(record, st.sampled_from([0, 1, 511, 512, 513, 600])),
    st.builds(lambda held, said: record(held, said=said), st.integers(0, 600), st.sampled_from(EDGES)),
)
ANYTHING = st.builds(
    lambda parts, cut: b"".join(parts)[cut:], st.lists(PARTS, min_size=1, max_size=12), st.integers(0, 8)
)
TAMPERED = st.builds(
    lambda records, at, byte: (
        records[: at % len(records)] + bytes((byte,)) + records[at % len(records) + 1 :]
    ),
    st.builds(b"".join, st.lists(st.builds(record, st.sampled_from([0, 3, 512])), min_size=1, max_size=4)),
    st.integers(0, 1 << 12),
    st.integers(0, 255),
)


def _numbers_read(records: bytes) -> Iterator[int]:
    """Numbers that aiokafka's reader in Python takes from each record, until it raises."""
    reader: Any = header_names._Batch(batch([b""])[:RECORDS_AT] + records)
    taken = 0

    def counting(buffer: bytearray, at: int) -> tuple[int, int]:
        nonlocal taken
        taken += 1
        found: tuple[int, int] = decode_varint_py(buffer, at)
        return found

    try:
        while reader._pos < len(reader._buffer):
            taken = 0
            reader._read_msg(counting)
            yield taken
    except (ValueError, IndexError, CorruptRecordException):  # as its own `__next__`
        yield taken


@given(st.one_of(ANYTHING, TAMPERED))
@example(number(6) + bytes(6))
@example(b"\x80" * 2000)
@example(record(513))
@example(record(3, said=513))
@example(record(600, said=-1))
@example(number(4) + record(600)[2:])
def test_of_what_passes_no_reader_makes_more_whatever_it_is(records: bytes) -> None:
    """Lengths that lie, numbers that are cut off, negative or too long. A header is two numbers."""
    try:
        require_few(records)
    except HeadersError:
        return
    assert all(taken <= 7 + 2 * MOST_HEADERS for taken in _numbers_read(records))
    header = bytearray(batch([b""])[:RECORDS_AT])
    header[57:61] = (1 << 20).to_bytes(4)
    with suppress(CorruptRecordException, UnicodeDecodeError, OverflowError, MemoryError, SystemError):
        for one in DefaultRecordBatch(bytes(header) + records):
            assert len(one.headers) <= MOST_HEADERS


def test_a_length_that_points_far_away_ends_no_process() -> None:
    """aiokafka's reader in Python looks there, where its numbers are read in C."""
    far = bytes(2) + number(1) + number(-1) + number(-1) + number(1) + number(1 << 40)
    data = log([[b"\xff"]], 0) + batch([number(len(far)) + far], offset=1)
    with pytest.raises(CorruptRecordException):
        read(data)


def test_known_bad_who_trusts_lengths_is_deceived() -> None:
    """A walk from length to length sees records of 1,000 bytes; a reader sees one of 100,000 headers."""
    piece = number(1) + b"x" + number(2) + number(1000) + EMPTY * 498 + bytes(4)
    lying = bytes(3) + number(-1) + number(-1) + number(100_000) + piece * 200
    records = number(8) + lying
    assert max(_numbers_read(records)) > 2 * MOST_HEADERS
    with pytest.raises(HeadersError):
        require_few(records)


def test_readers_take_few_records_at_once() -> None:
    """Of a fetch that unpacks to millions. The demo's read what the demo wrote."""
    files = [file for folder in ("agents", "pipeline") for file in (REPOSITORY / folder).rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if "demo" not in file.parts}
    readers = {file: text for file, text in texts.items() if ".getmany(" in text}
    assert len(readers) >= 5
    assert [file for file, text in readers.items() if not re.search(r"max_(poll_)?records=", text)] == []
