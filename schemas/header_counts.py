"""A record has at most MOST_HEADERS headers: aiokafka's reader would make gigabytes of a megabyte of them.
A batch has at most MOST_RECORDS records.

Kafka knows no bound. An empty header is two bytes, next to none compressed, and 80 once it is read: whoever
may write a topic could take the memory of all who read it. So the records of a batch are walked through
before they are read, from one's count of headers to the next record; headers themselves are not looked at.
That is done at once, and in it nobody sends a heartbeat: a megabyte packs a million empty records and more,
64 MiB hold ten million.
"""

from __future__ import annotations

from typing import Final

MOST_HEADERS: Final = 512
"""Ours have three; what traces and routes add to records of others are dozens."""

MOST_RECORDS: Final = 500_000
"""A second to walk through. A batch of 64 MiB, the most that is unpacked, would be of 134 bytes each."""

_LEAST_BYTES: Final = 2 * (MOST_HEADERS + 1)
"""What is shorter cannot hold more."""
_VARINT_BYTES: Final = 9
"""More than any length or count takes, and few enough for 64 bits: aiokafka cuts longer numbers there."""


class HeadersError(Exception):
    """A batch holds a record of more than MOST_HEADERS headers, or one that cannot be told to have fewer."""

    def __init__(self) -> None:
        super().__init__(f"holds a record of more than {MOST_HEADERS} headers, or one that cannot be read")


class RecordsError(Exception):
    """A batch holds more than MOST_RECORDS records."""

    def __init__(self) -> None:
        super().__init__(f"holds more than {MOST_RECORDS} records")


def require_few_records(count: int) -> None:
    """Raise RecordsError if these are more than MOST_RECORDS. `count`: what the batch states, which is what
    readers go by."""
    if count > MOST_RECORDS:
        raise RecordsError


def require_few(records: bytes, at: int = 0, end: int | None = None) -> None:
    """Raise HeadersError if a record of those that stand there, unpacked, has more than MOST_HEADERS.

    Of one whose beginning is malformed, too. Of what passes, aiokafka's readers make no more of any record,
    malformed or not, before they raise an error of their own. What comes after MOST_RECORDS nobody reads.
    """
    end = len(records) if end is None else end
    try:
        for _ in range(MOST_RECORDS):
            if end - at < _LEAST_BYTES:
                break
            at = _next(records, at)
    except IndexError:
        raise HeadersError from None
    if at > end:
        raise HeadersError


def _next(records: bytes, at: int) -> int:
    """Where the record after the one that begins here begins. Raises IndexError where the data ends before.

    A microsecond or two, because most numbers are one byte or two.
    """
    low, high = records[at], records[at + 1]
    if low > 0x7F and high < 0x80 and not low & 1:
        length, at = (low & 0x7F | high << 7) >> 1, at + 2
    else:
        length, at = _number(records, at)
    after = at + length
    while records[at] > 0x7F:  # attributes
        at += 1
    at += 1
    while records[at] > 0x7F:  # time
        at += 1
    at += 1
    while records[at] > 0x7F:  # offset
        at += 1
    at += 1
    for _ in ("key", "value"):
        low = records[at]
        if low < 0x80:
            at += 1 if low & 1 else 1 + (low >> 1)
        else:
            size, at = _number(records, at)
            at += max(size, 0)
    low = records[at]
    count = low >> 1 if low < 0x80 and not low & 1 else _number(records, at)[0]
    if not 0 <= count <= MOST_HEADERS or after <= at:
        raise HeadersError
    return after


def _number(records: bytes, at: int) -> tuple[int, int]:
    """The number that stands there, zigzag and seven bits a byte, and where the next begins."""
    number = shift = 0
    for following in range(at, at + _VARINT_BYTES):
        byte = records[following]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), following + 1
        shift += 7
    raise HeadersError
