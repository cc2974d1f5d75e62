"""Records whose header names are not UTF-8 are read like all others; aiokafka's reader would never pass one.

Kafka keeps names as bytes, and producers in other languages write any. aiokafka raises UnicodeDecodeError out
of every poll from there on: whoever may write a topic could stop all who read it, for as long as the record
is kept. Importing this module replaces two names in aiokafka's fetcher, for every consumer of the process.
What is left of the fetch at fault is taken apart in Python, with U+FFFD in such names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from aiokafka.consumer import fetcher
from aiokafka.record import default_records

PRIVATE_NAMES: Final = {
    "aiokafka.consumer.fetcher": ("MemoryRecords", "PartitionRecords"),
    "aiokafka.consumer.fetcher.PartitionRecords": ("_unpack_records",),
    "aiokafka.record.default_records": ("_DefaultRecordBatchPy",),
    "aiokafka.record.default_records._DefaultRecordBatchPy": ("_maybe_uncompress",),
}

_LENGTH_AT: Final = 8
_HEAD: Final = 12
"""Offset and length stand before what the length counts."""
_MAGIC_AT: Final = 16
_LAST_DELTA_AT: Final = 23

_Batch: Any = vars(default_records)["_DefaultRecordBatchPy"]
_MemoryRecords: Any = fetcher.MemoryRecords
_PartitionRecords: Any = fetcher.PartitionRecords


class _Bytes(bytearray):
    """Whose slices decode, whatever they hold."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return found if isinstance(found, int) else _Bytes(found)

    def decode(self, encoding: str = "utf-8", _: str = "") -> str:
        return super().decode(encoding, "replace")


class _ForgivingBatch(_Batch):  # type: ignore[misc]  # its type is known at run time only
    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _Bytes(self._buffer)


class _Records(_MemoryRecords):  # type: ignore[misc]  # as above
    """A fetched run of batches, which still knows its bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data


class _ForgivingRecords:
    """What is left of such a run from the batch that holds this offset on."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.data = data
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
        batch = self.data[self._at : self._end]
        self._at = self._end
        return _ForgivingBatch(batch) if batch[_MAGIC_AT] >= 2 else _MemoryRecords(batch).next_batch()

    def _int(self, at: int, size: int) -> int:
        return int.from_bytes(self.data[self._at + at : self._at + at + size], "big", signed=True)


class _Tolerant(_PartitionRecords):  # type: ignore[misc]  # as above
    _records: Any

    def _unpack_records(self) -> Iterator[Any]:
        try:
            yield from super()._unpack_records()
        except UnicodeDecodeError:
            self._records = _ForgivingRecords(self._records.data, self.next_fetch_offset)
            yield from super()._unpack_records()


fetcher.MemoryRecords = _Records
fetcher.PartitionRecords = _Tolerant
