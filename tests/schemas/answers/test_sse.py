"""Server-sent events: every framing, any cut, and events that never end."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.answers.sse import Event, EventReader

Read = list[tuple[bytes, bytes | None, bytes | None]]
"""Raw bytes, data and name of every event."""


def read(body: bytes, *cuts: int, most: int = 1 << 21) -> tuple[Read, bool]:
    """The events, and whether one was too long."""
    reader = EventReader(most)
    edges = sorted({0, len(body), *(cut for cut in cuts if 0 < cut < len(body))})
    events: list[Event] = []
    for start, end in itertools.pairwise(edges):
        events += reader.feed(body[start:end])
    last = reader.end()
    events += [] if last is None else [last]
    assert b"".join(event.raw for event in events) == body
    return [(event.raw, event.data, event.name) for event in events], reader.broken


def data_of(body: bytes, *cuts: int) -> list[tuple[bytes | None, bytes]]:
    return [(name, data) for _, data, name in read(body, *cuts)[0] if data is not None]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_framing(newline: bytes) -> None:
    lines = (
        b": ping||data: {|data: }|id: 3||event: x|data:y||"
        b"|: a|data:  z|retry: 5||data||event: none||data: a:b||datax: no||"
    )
    body = lines.replace(b"|", newline)
    expected = [(None, b"{\n}"), (b"x", b"y"), (None, b" z"), (None, b""), (None, b"a:b")]
    assert data_of(body) == expected
    assert data_of(body, *range(len(body))) == expected
    for cut in range(len(body)):
        assert data_of(body, cut) == expected, cut


def test_mixed_line_ends_and_a_byte_order_mark() -> None:
    body = b"\xef\xbb\xbfdata: a\r\n\ndata: b\n\r\ndata: c\r\rdata: d\r\n\r\ndata: \xef\xbb\xbfe\n\n"
    expected = [(None, data) for data in (b"a", b"b", b"c", b"d", b"\xef\xbb\xbfe")]
    for cuts in ((), range(len(body))):
        assert data_of(body, *cuts) == expected


def test_what_ends_without_a_blank_line_is_the_last_event() -> None:
    assert read(b"data: a\n\ndata: b\n")[0] == [(b"data: a\n\n", b"a", None), (b"data: b\n", b"b", None)]
    assert read(b"")[0] == []


def test_an_event_is_whole_with_its_last_byte() -> None:
    """As early as that, and at the same byte wherever it is cut."""
    for body in (b"data: a\n\n", b"data: a\r\n\r", b"data: a\r\r", b"data: a\r\n\n"):
        reader = EventReader()
        assert not reader.feed(body[:-1])
        assert [event.data for event in reader.feed(body[-1:])] == [b"a"]


@pytest.mark.parametrize("size", [99, 100, 101])
def test_an_event_has_a_greatest_length(size: int) -> None:
    """At and just under it is one; over it reading ends, and what comes is handed on."""
    event = b"data: " + b"x" * (size - 8) + b"\n\n"
    body = b"data: a\n\n" + event + b"data: b\n\n"
    events, broken = read(body, most=100)
    assert broken is (size > 100)
    assert [data for _, data, _ in events if data is not None] == (
        [b"a"] if broken else [b"a", event[6:-2], b"b"]
    )
    assert read(body, *range(len(body)), most=100)[1] is broken


def test_an_endless_event_is_not_held() -> None:
    reader = EventReader(1000)
    passed = 0
    for _ in range(100):
        passed += sum(len(event.raw) for event in reader.feed(b"y" * 100))
        assert len(reader._held) <= 1000
    assert passed == 10_000


def test_a_megabyte_in_pieces_is_one_event() -> None:
    body = b"data: " + b"x" * (1 << 20) + b"\n\n"
    assert [len(data) for _, data in data_of(body, *range(0, len(body), 1000))] == [1 << 20]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: old\n\n", b"data: new\n\n"),
        (b"data:old\r\n\r", b"data:new\r\n\r"),
        (b"\n: c\nevent: e\ndata: old\nid: 1\n\n", b"\n: c\nevent: e\ndata: new\nid: 1\n\n"),
        (b"event: e\ndata: o\ndata: ld\n\n", b"event: e\ndata: new\n\n"),
        (b"data: o\r\ndata: ld\r\n\r", b"data: new\r\n\r"),
    ],
)
def test_data_is_replaced_in_place(raw: bytes, expected: bytes) -> None:
    reader = EventReader()
    [event] = reader.feed(raw)
    assert event.with_data(b"new") == expected


def by_lines(body: bytes) -> list[tuple[bytes | None, bytes]]:
    """The standard's algorithm, line by line over the whole text."""
    found, data, name = [], [], None
    body = body.removeprefix(b"\xef\xbb\xbf")
    lines = re.split(rb"\r\n|\n|\r", body)
    for number, line in enumerate(lines):
        if not line:
            if data:
                found.append((name, b"\n".join(data)))
            data, name = [], None
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        if number == len(lines) - 1 and data:
            found.append((name, b"\n".join(data)))
    return found


LINE_ENDS = (b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n")
STARTS = (b"data: ", b"data:", b"data", b"event: e", b": c", b"x", b"id: 1", b"\xef\xbb\xbf")
pieces = st.sampled_from(LINE_ENDS) | st.sampled_from(STARTS)


@given(st.lists(pieces, max_size=30).map(b"".join), st.lists(st.integers(0, 100), max_size=12))
def test_any_text_at_any_cut_is_read_as_the_standard_says(body: bytes, cuts: list[int]) -> None:
    assert data_of(body, *cuts) == by_lines(body)


def test_known_bad_a_reader_that_takes_a_returned_line_for_two() -> None:
    """The property above fails such a reader."""
    naive = re.split(rb"[\r\n]{2}", b"data: a\r\ndata: b\n\n")
    assert [part for part in naive if part] == [b"data: a", b"data: b"]
    assert by_lines(b"data: a\r\ndata: b\n\n") == data_of(b"data: a\r\ndata: b\n\n") == [(None, b"a\nb")]
