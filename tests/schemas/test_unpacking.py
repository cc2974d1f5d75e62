"""Batches unpack to what aiokafka unpacks them to, up to the bound; a larger one is left out, and said."""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import suppress
from typing import Any

import pytest
from aiokafka import codec
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from schemas import header_names, unpacking
from schemas.unpacking import MOST_BYTES, NAMES, READERS, USUAL_BYTES, TooLargeError
from tests.schemas.test_header_names import log, read

CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
MOST = 3 << 20


def packed(kind: str, data: bytes) -> bytes:
    made: bytes = getattr(codec, f"{kind}_encode")(data)
    return made


@pytest.mark.parametrize("kind", CODECS)
@given(data=st.binary(min_size=1, max_size=300), repeated=st.integers(1, 500))
def test_the_same_as_without(kind: str, data: bytes, repeated: int) -> None:
    made = packed(kind, data * repeated)
    assert getattr(unpacking, f"{kind}_decode")(made) == data * repeated
    assert getattr(unpacking, f"{kind}_decode")(memoryview(made)) == data * repeated


@given(st.binary(min_size=1, max_size=200))
def test_snappy_without_blocks(data: bytes) -> None:
    assert unpacking.snappy_decode(codec.snappy_encode(data, xerial_compatible=False)) == data


@pytest.mark.parametrize("kind", CODECS)
def test_at_the_bound_and_over_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MOST_BYTES", MOST)
    decode = getattr(unpacking, f"{kind}_decode")
    for data in (bytes, os.urandom):
        for size in (1, USUAL_BYTES - 1, USUAL_BYTES, USUAL_BYTES + 1, MOST - 1, MOST):
            made = data(size)
            assert decode(packed(kind, made)) == made
        with pytest.raises(TooLargeError):
            decode(packed(kind, data(MOST + 1)))


@pytest.mark.parametrize("kind", CODECS)
@given(junk=st.binary(max_size=60))
def test_what_is_not_packed_is_an_error_of_its_own(kind: str, junk: bytes) -> None:
    """No broker takes such a batch; nothing hangs on it."""
    with suppress(Exception):
        getattr(unpacking, f"{kind}_decode")(junk)


@pytest.mark.parametrize("kind", ["gzip", "lz4", "zstd"])
def test_a_batch_that_unpacks_to_too_much_is_left_out_and_said(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unpacking, "MOST_BYTES", MOST)
    small, codec_number = [[b"a"], [b"a", b"\xff"]], CODECS[kind]
    head = log(small, codec_number)
    bomb = bytearray(log([[b"a", b"a"]], codec_number, zeros=MOST))
    bomb[:8] = (3).to_bytes(8)
    tail = bytearray(log([[b"\xff"], [b"a"]], codec_number))
    tail[:8] = (5).to_bytes(8)
    second = 12 + int.from_bytes(tail[8:12])
    tail[second : second + 8] = (6).to_bytes(8)
    before = header_names.batches_left_out()
    with caplog.at_level(logging.ERROR, "klaxon.broker"):
        found = read(bytes(head + bomb + tail))
    assert [one.offset for one in found] == [0, 1, 2, 5, 6]
    assert header_names.batches_left_out() == before + 1
    (said,) = caplog.messages
    assert said.startswith("t/0: a batch at offset 3 to 4 unpacks to more than")
    only = header_names.fetcher.PartitionRecords  # alone in its fetch, it still moves the position
    alone: Any = only(("t", 0), header_names.fetcher.MemoryRecords(bytes(bomb)), [], 3, None, None, True, 1)
    alone._tp = found[0]
    assert list(alone) == []
    assert alone.next_fetch_offset == 5


def test_known_bad_aiokafka_unpacks_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, unpacking.py is no longer needed."""
    module = importlib.import_module(READERS[0])
    monkeypatch.setattr(module, "zstd_decode", codec.zstd_decode)
    bomb = log([[b"a"]], CODECS["zstd"], zeros=MOST_BYTES)
    assert len(bomb) < 10_000
    (record,) = list(DefaultRecordBatch(bomb))
    assert len(record.value) > MOST_BYTES


@pytest.mark.parametrize("path", READERS)
def test_the_private_names_are_replaced(path: str) -> None:
    module = importlib.import_module(path)
    held = [name for name in NAMES if hasattr(module, name)]
    assert len(held) >= 3
    ours = {name: getattr(unpacking, name) for name in held}
    if "legacy" in path:
        assert {name: getattr(module, name) for name in held} == ours
    else:  # they count headers, too
        assert {name: getattr(module, name).__wrapped__ for name in held} == ours
