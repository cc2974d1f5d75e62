"""A header name of any bytes stops no reader: what stands beside it is read once, and in order."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from schemas import header_names

Names = list[list[bytes]]
"""A header name per record, by batch."""


class Name(str):
    """A header name that is written as these bytes."""

    __slots__ = ("data",)

    def __new__(cls, data: bytes) -> Name:
        made = super().__new__(cls, "x" * len(data))
        made.data = data
        return made

    def encode(self, *_: str) -> bytes:
        return self.data


def log(batches: Names, codec: int, *, zeros: int = 0) -> bytes:
    """Batches as a broker returns them. `zeros`: how many follow each value."""
    data, offset = b"", 0
    for names in batches:
        builder: Any = _DefaultRecordBatchBuilderPy(2, codec, False, -1, -1, -1, 1 << 30)
        for at, name in enumerate(names):
            assert builder.append(at, 1, b"k", b"%d" % (offset + at) + bytes(zeros), [(Name(name), b"h")])
        built = bytearray(builder.build())
        built[:8] = offset.to_bytes(8)  # outside the checksum, as brokers write it
        data, offset = data + built, offset + len(names)
    return data


def read(data: bytes, first: int = 0) -> list[Any]:
    kinds: Any = fetcher
    return list(
        kinds.PartitionRecords(
            TopicPartition("t", 0),
            kinds.MemoryRecords(data),
            [],
            first,
            None,
            None,
            True,
            fetcher.READ_COMMITTED,
        )
    )


NAMES = st.sampled_from([b"content-type", b"", "é".encode(), b"\xff", b"a\xc3(", b"\xed\xa0\x80"])


@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from([0, 1, 2]),
    st.data(),
)
def test_every_record_is_read_once_whatever_its_headers_are_called(
    batches: Names, codec: int, data: st.DataObject
) -> None:
    names = [name for batch in batches for name in batch]
    first = data.draw(st.integers(0, len(batches[0]) - 1))  # brokers begin with the batch that holds it
    found = read(log(batches, codec), first)
    assert [(one.offset, one.key, one.value) for one in found] == [
        (offset, b"k", b"%d" % offset) for offset in range(first, len(names))
    ]
    told = [one.headers for one in found]
    assert told == [((name.decode("utf-8", "replace"), b"h"),) for name in names[first:]]


def test_known_bad_aiokafka_stops_there_for_good() -> None:
    """When this fails, header_names.py is no longer needed."""
    plain: Any = header_names._PartitionRecords(
        TopicPartition("t", 0),
        header_names._MemoryRecords(log([[b"a", b"\xff", b"a"]], 0)),
        [],
        0,
        None,
        None,
        True,
        1,
    )
    assert next(plain).offset == 0
    with pytest.raises(UnicodeDecodeError):
        next(plain)


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in header_names.PRIVATE_NAMES.items() for name in names]
)
def test_the_private_names_are_there(path: str, name: str) -> None:
    assert hasattr(pkgutil.resolve_name(path), name)


@pytest.mark.parametrize(
    "module", ["pipeline.workers.broker", "agents.router.runner", "pipeline.workers.transport"]
)
def test_every_reader_has_it(module: str) -> None:
    assert "header_names" in vars(importlib.import_module(module))
