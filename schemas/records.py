"""Records of Klaxon's own topics, read whoever wrote them: JSON and msgpack into frozen types.

Each kind states its version as `v`: the first element of a msgpack array, a member of a JSON object, where
an absent one means 1. Who meets a version it does not read must stop there: passed over, the record would
be missing from every number after it.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from schemas.errors import SchemaError

READ_VERSIONS: Final = frozenset({1})
"""Versions of Klaxon's own records that this process reads."""


class UnknownVersionError(SchemaError, msgspec.DecodeError):
    """A record of a version that this process does not read: not malformed, but somebody else's to read.

    Whoever only looks on may treat it like any record it cannot read.
    """

    def __init__(self, version: int, known: frozenset[int] = READ_VERSIONS) -> None:
        """`known`: the versions that would have been read."""
        super().__init__(f"version {version}; this process reads {', '.join(map(str, sorted(known)))}")
        self.version = version


class Versioned(Protocol):
    """Anything that states its version."""

    @property
    def v(self) -> int:
        """From 1."""


T = TypeVar("T", bound=Versioned)


class _Array(Struct, array_like=True):
    v: int


class _Object(Struct):
    v: int = 1


def read_json(value: bytes, kind: type[T]) -> T:
    """The record's value.

    Raises msgspec.DecodeError for whatever is none, however deep it is nested; of it UnknownVersionError for
    a version that is not read here.
    """
    try:
        record = msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        check_json_version(value)
        raise _malformed(error) from None
    _check(record.v)
    return record


def read_msgpack(value: bytes, kind: type[T]) -> T:
    """The record's value. Raises as `read_json` does."""
    try:
        record = msgspec.msgpack.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        # Another version may have another shape: its number is looked at before anything is called malformed.
        _check_head(value)
        raise _malformed(error) from None
    _check(record.v)
    return record


def check_json_version(value: bytes) -> None:
    """Raise UnknownVersionError if this is a JSON object of a version that is not read here."""
    try:
        version = msgspec.json.decode(value, type=_Object).v
    except (msgspec.DecodeError, RecursionError):
        return
    _check(version)


def _check_head(value: bytes) -> None:
    try:
        version = msgspec.msgpack.decode(value, type=_Array).v
    except (msgspec.DecodeError, RecursionError):
        return
    _check(version)


def _check(version: int) -> None:
    if version < 1:
        raise msgspec.ValidationError(f"version {version}; they count from 1")
    if version not in READ_VERSIONS:
        raise UnknownVersionError(version)


def _malformed(error: Exception) -> msgspec.DecodeError:
    return error if isinstance(error, msgspec.DecodeError) else msgspec.DecodeError("nested too deeply")
