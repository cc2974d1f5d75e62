"""Records of Klaxon's own topics, read whoever wrote them: JSON and msgpack into frozen types."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def read_json(value: bytes, kind: type[T]) -> T:
    """The record's value. Raises msgspec.DecodeError for whatever is none, however deep it is nested."""
    try:
        return msgspec.json.decode(value, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def read_msgpack(value: bytes, kind: type[T]) -> T:
    """The record's value. Raises msgspec.DecodeError for whatever is none, however deep it is nested."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
