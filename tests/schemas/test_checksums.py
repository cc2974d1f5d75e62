"""A damaged batch is never read, whoever verifies it; what stands before it is."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from schemas import checksums, header_names
from tests.schemas.test_header_names import log, read

SUM_AT = 17
"""What stands before it, offset and length among it, brokers write themselves: no checksum is of it."""


def damaged(data: bytes, at: int, bit: int = 0) -> bytes:
    """One bit changed."""
    return data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :]


def read_until_damage(data: bytes) -> list[int]:
    """Offsets read before CorruptRecordException, which must come."""
    kinds: Any = fetcher
    records = kinds.PartitionRecords(
        TopicPartition("t", 0),
        kinds.MemoryRecords(data),
        [],
        0,
        None,
        None,
        True,
        fetcher.READ_COMMITTED,
    )
    found: list[int] = []
    with pytest.raises(CorruptRecordException):
        found.extend(one.offset for one in records)
    return found


def test_the_processor_is_asked() -> None:
    assert checksums.IS_FAST


@given(
    st.sampled_from([0, 1, 2]), st.lists(st.sampled_from([b"h", b"\xff"]), min_size=1, max_size=3), st.data()
)
def test_any_bit_of_a_batch_that_changed_is_noticed(
    codec: int, names: list[bytes], data: st.DataObject
) -> None:
    batch = log([names], codec)
    assert checksums.is_current(batch)
    assert checksums.is_intact(batch)
    at, bit = data.draw(st.integers(SUM_AT, len(batch) - 1)), data.draw(st.integers(0, 7))
    changed = damaged(batch, at, bit)
    assert not checksums.is_intact(changed)
    assert not DefaultRecordBatch(changed).validate_crc()


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_batch_of_many_pieces(over: int) -> None:
    two = 2 << 16
    around = len(log([[b"h"]], 0, zeros=two)) - two
    batch = log([[b"h"]], 0, zeros=two + 21 - around + over)
    assert (len(batch) - 21) % (1 << 16) == over % (1 << 16)
    assert checksums.is_intact(b"?" + batch + b"?", 1, len(batch) + 1)
    for at in (21, 21 + (1 << 16) - 1, 21 + (1 << 16), len(batch) - 1):
        assert not checksums.is_intact(damaged(batch, at))


@pytest.mark.parametrize("name", [b"h", b"\xff"], ids=["as it is", "in Python"])
@pytest.mark.parametrize("is_fast", [True, False])
def test_what_stands_before_a_damaged_batch_is_read(
    name: bytes, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "IS_FAST", is_fast)
    first, second = log([[name, b"h"]], 0), log([[b"h", b"h"], [name]], 0)[len(log([[b"h", b"h"]], 0)) :]
    assert [one.offset for one in read(first + second)] == [0, 1, 2]
    assert read_until_damage(first + damaged(second, len(second) - 1)) == [0, 1]
    assert read_until_damage(damaged(first, len(first) - 1) + second) == []


def test_who_asks_for_no_check_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known-bad: without verifying, a checksum that is wrong is nobody's business."""
    data = damaged(log([[b"h"]], 0), SUM_AT)
    monkeypatch.setattr(header_names, "_verify", lambda *_: None)
    assert [one.offset for one in read(data)] == [0]
    monkeypatch.undo()
    assert read_until_damage(data) == []


@pytest.mark.parametrize("magic", [0, 1])
def test_batches_of_old_formats_are_verified_by_aiokafka(magic: int) -> None:
    builder = LegacyRecordBatchBuilder(magic, 0, 1 << 20)
    assert builder.append(0, timestamp=1, key=b"k", value=b"0")
    data = bytes(builder.build())
    assert not checksums.is_current(data)
    assert [one.value for one in read(data)] == [b"0"]
    assert read_until_damage(damaged(data, len(data) - 1)) == []
