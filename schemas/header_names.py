"""Records whose header names are not UTF-8 are read like all others; aiokafka's reader would never pass one.

Kafka keeps names as bytes, and producers in other languages write any. aiokafka raises UnicodeDecodeError out
of every poll from there on: whoever may write a topic could stop all who read it, for as long as the record
is kept. Importing this module replaces two names in aiokafka's fetcher, for every consumer of the process.
What is left of the fetch at fault is taken apart in Python, with U+FFFD in such names. A batch that unpacks
to too much (`unpacking.py`) or holds too many headers or records (`header_counts.py`) is left out. Checksums
are verified here, too (`checksums.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, Final

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record import default_records
from aiokafka.record.util import decode_varint

from schemas import checksums
from schemas.header_counts import HeadersError, RecordsError, require_few, require_few_records
from schemas.plain import Log, Plain
from schemas.unpacking import TooLargeError

log: Log = logging.getLogger("klaxon.broker")

PRIVATE_NAMES: Final = {
    "aiokafka.consumer.fetcher": ("MemoryRecords", "PartitionRecords"),
    "aiokafka.consumer.fetcher.PartitionRecords": ("_unpack_records",),
    "aiokafka.record.default_records": ("_DefaultRecordBatchPy",),
    "aiokafka.record.default_records._DefaultRecordBatchPy": ("_maybe_uncompress", "_read_msg"),
}

_LENGTH_AT: Final = 8
_HEAD: Final = 12
"""Offset and length stand before what the length counts."""
_MAGIC_AT: Final = 16
_CODEC_AT: Final = 22
_CODEC_MASK: Final = 0x07
_LAST_DELTA_AT: Final = 23
_COUNT_AT: Final = 57
_RECORDS_AT: Final = 61

_Batch: Any = vars(default_records)["_DefaultRecordBatchPy"]
_MemoryRecords: Any = fetcher.MemoryRecords
_PartitionRecords: Any = fetcher.PartitionRecords


_counting: Final = threading.Lock()
_left_out = 0


def batches_left_out() -> int:
    """Batches that this process left out so far, because they unpack to too much or hold too many headers or
    records; each time it met them."""
    return _left_out


def _count_left_out() -> None:
    """From whichever thread reads."""
    global _left_out
    with _counting:
        _left_out += 1


class _Bytes(bytearray):
    """Whose slices decode, whatever they hold."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return found if isinstance(found, int) else _Bytes(found)

    def decode(self, encoding: str = "utf-8", _: str = "") -> str:
        return super().decode(encoding, "replace")


def _number(buffer: bytearray, at: int) -> tuple[int, int]:
    """As aiokafka's, which looks wherever a length before it points: past the end, the process would die."""
    if at >= len(buffer):
        raise IndexError("the record ends before")
    found: tuple[int, int] = decode_varint(buffer, at)
    return found


class _ForgivingBatch(_Batch):  # type: ignore[misc]  # its type is known at run time only
    _buffer: bytearray

    def _read_msg(self, _: object = None) -> Any:
        return super()._read_msg(_number)

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _Bytes(self._buffer)


class _Records(_MemoryRecords):  # type: ignore[misc]  # as above
    """A fetched run of batches, which still knows its bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data
        self.verifies = False
        """Whether a batch that is not what was written raises CorruptRecordException."""
        self._at = 0

    def next_batch(self) -> Any:
        """It."""
        batch = super().next_batch()
        begin = self._at
        self._at += _HEAD + int.from_bytes(self.data[begin + _LENGTH_AT : begin + _HEAD], "big", signed=True)
        if self.verifies:
            _verify(batch, self.data, begin, self._at)
        _require_few(self.data, begin, self._at)
        return batch


def _require_few(data: bytes, begin: int, end: int) -> None:
    """Raise RecordsError if the batch that stands there has too many records, HeadersError if one of them has
    too many headers.

    Of one that is compressed the latter is seen when it is unpacked.
    """
    if not checksums.is_current(data, begin):
        return
    require_few_records(int.from_bytes(data[begin + _COUNT_AT : begin + _RECORDS_AT], "big", signed=True))
    if not data[begin + _CODEC_AT] & _CODEC_MASK:
        require_few(data, begin + _RECORDS_AT, end)


def _verify(batch: Any, data: bytes, begin: int, end: int) -> None:
    """Raise CorruptRecordException, as aiokafka does, if the batch that stands there was damaged."""
    if checksums.IS_FAST and checksums.is_current(data, begin):
        intact = checksums.is_intact(data, begin, end)
    else:
        intact = batch.validate_crc()
    if not intact:
        offset = int.from_bytes(data[begin : begin + _LENGTH_AT], "big")
        raise CorruptRecordException(f"invalid CRC of the batch at offset {offset}")


class _ForgivingRecords:
    """What is left of such a run from the batch that holds this offset on."""

    def __init__(self, data: bytes, offset: int, *, verifies: bool) -> None:
        self.data = data
        self.verifies = verifies
        self._at = 0
        while self.has_next() and self._int(0, 8) + self._int(_LAST_DELTA_AT, 4) < offset:
            self._at = self._end

    @property
    def _end(self) -> int:
        return self._at + _HEAD + self._int(_LENGTH_AT, 4)

    def has_next(self) -> bool:
        """Whether another whole batch follows."""
        return self._at + _LAST_DELTA_AT < len(self.data) and self._end <= len(self.data)

    def next_batch(self) -> Any:
        """It."""
        data = self.data[self._at : self._end]
        self._at = self._end
        batch = _ForgivingBatch(data) if data[_MAGIC_AT] >= 2 else _MemoryRecords(data).next_batch()
        if self.verifies:
            _verify(batch, data, 0, len(data))
        _require_few(data, 0, len(data))
        return batch

    def skip(self) -> int:
        """Leave the next batch out; the offset after it."""
        after = self._int(0, 8) + self._int(_LAST_DELTA_AT, 4) + 1
        self._at = self._end
        return after

    def _int(self, at: int, size: int) -> int:
        return int.from_bytes(self.data[self._at + at : self._at + at + size], "big", signed=True)


class _Tolerant(_PartitionRecords):  # type: ignore[misc]  # as above
    _records: Any
    _check_crcs: bool
    next_fetch_offset: int

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Before headers are counted: a batch that was damaged on its way is fetched again.
        self._records.verifies, self._check_crcs = self._check_crcs, False

    def _unpack_records(self) -> Iterator[Any]:
        while True:
            try:
                yield from super()._unpack_records()
            except UnicodeDecodeError:
                self._records = self._rest()
            except (HeadersError, RecordsError, TooLargeError) as why:
                rest = self._rest()
                before, self.next_fetch_offset = self.next_fetch_offset, rest.skip()
                self._records = rest
                _count_left_out()
                log.error(
                    "%s/%d: a batch at offset %d to %d %s; it is left out, see who writes there",
                    Plain(self._tp.topic), self._tp.partition, before, self.next_fetch_offset - 1,
                    Plain(str(why)),
                )  # fmt: skip
            else:
                return

    def _rest(self) -> _ForgivingRecords:
        """What was not read yet."""
        records = self._records
        return _ForgivingRecords(records.data, self.next_fetch_offset, verifies=records.verifies)


fetcher.MemoryRecords = _Records
fetcher.PartitionRecords = _Tolerant
