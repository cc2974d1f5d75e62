"""Compressed batches unpack to no more than MOST_BYTES; aiokafka's reader would unpack 1 MB to 30 GB.

A broker bounds a batch as it comes, compressed (`message.max.bytes`), and zstd packs 32,000 zeros into one,
gzip 1,000, lz4 250: whoever may write a topic could take all memory of all who read it, again after each
restart. Importing this module replaces the functions that aiokafka's batches unpack with, for every consumer
of the process. What is larger raises TooLargeError, and records of too many headers (`header_counts.py`) a
HeadersError; `header_names` makes its reader go on after such a batch.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from mmap import mmap
from typing import Any, Final

import cramjam
from aiokafka import codec

from schemas.header_counts import require_few

MOST_BYTES: Final = 64 << 20
"""64 times what a broker takes by default; real events pack 25-fold at most."""

AT_ONCE: Final = 500
"""Records that readers take at most of what was fetched, which may unpack to millions of empty ones: a record
takes 300 bytes and more, however small it is."""

USUAL_BYTES: Final = 1 << 20
"""Room that each thread keeps: what it unpacks nearly always, ours and what clients send by default."""
_usual: Final = threading.local()

READERS: Final = (
    "aiokafka.record._crecords.default_records",
    "aiokafka.record._crecords.legacy_records",
    "aiokafka.record.default_records",
    "aiokafka.record.legacy_records",
)
"""Modules that hold the functions by name."""
NAMES: Final = ("gzip_decode", "lz4_decode", "snappy_decode", "zstd_decode")

_snappy: Any = codec.snappy_decode
_XERIAL_HEAD: Final = 16
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"


class TooLargeError(Exception):
    """A batch holds more than MOST_BYTES once it is unpacked."""

    def __init__(self) -> None:
        super().__init__(f"unpacks to more than {MOST_BYTES >> 20} MiB")


def _within(decompress_into: Any, payload: Any) -> bytes:
    room: bytearray | None = getattr(_usual, "room", None)
    if room is None:
        room = _usual.room = bytearray(min(USUAL_BYTES, MOST_BYTES))
    try:
        return bytes(memoryview(room)[: decompress_into(payload, room)])
    except cramjam.DecompressionError as error:
        if not _is_full(error):
            raise
    # Pages of a map are taken as they are written, and given back: most batches of this kind are far smaller.
    with mmap(-1, MOST_BYTES) as large:
        try:
            return large[: decompress_into(payload, large)]
        except cramjam.DecompressionError as error:
            if _is_full(error):
                raise TooLargeError from None
            raise


def _is_full(error: cramjam.DecompressionError) -> bool:
    return "whole buffer" in str(error)


def gzip_decode(payload: Any) -> bytes:
    """As aiokafka's."""
    return _within(cramjam.gzip.decompress_into, payload)


def lz4_decode(payload: Any) -> bytes:
    """As aiokafka's."""
    return _within(cramjam.lz4.decompress_into, payload)


def zstd_decode(payload: Any) -> bytes:
    """As aiokafka's."""
    return _within(cramjam.zstd.decompress_into, payload)


def snappy_decode(payload: Any) -> bytes:
    """As aiokafka's. A block says how much it unpacks to, before it is."""
    data, at, total = memoryview(payload), 0, 0
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        total = cramjam.snappy.decompress_raw_len(data)
    else:
        at = _XERIAL_HEAD
        while at + 4 <= len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big", signed=True)
            if end <= at + 4:
                break  # none of xerial's blocks; aiokafka says so
            total += cramjam.snappy.decompress_raw_len(data[at + 4 : end])
            at = end
    if total > MOST_BYTES:
        raise TooLargeError
    return bytes(_snappy(payload))


def _of_records(decode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """The same, of records that may have headers: those of older formats have none."""

    @functools.wraps(decode)
    def decoded(payload: Any) -> bytes:
        records = decode(payload)
        require_few(records)
        return records

    return decoded


for _module in map(importlib.import_module, READERS):
    for _name in NAMES:
        if hasattr(_module, _name):
            _decode = globals()[_name]
            _old = _module.__name__.endswith("legacy_records")
            setattr(_module, _name, _decode if _old else _of_records(_decode))
