"""Records of Klaxon's own topics that somebody else wrote."""

from __future__ import annotations

import msgspec
import pytest

from agents.router.runner import Router, RouterSettings
from pipeline.core.gate.state import StateError, decode_state
from pipeline.store.derived_rows import decision_rows, pair_rows
from schemas.buckets import FinalBuckets
from schemas.columns import Rejected
from schemas.control import Directive
from schemas.records import read_json, read_msgpack

DEEP_JSON = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DEEP_MSGPACK = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize("value", [DEEP_JSON, b"", b"\xff", b"{}", b'{"rollout":"\xff"}'])
def test_json_that_is_none_of_ours(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_json(value, Directive)


@pytest.mark.parametrize("value", [b"\xd9" + DEEP_MSGPACK, DEEP_MSGPACK, b"", b"\xff", b"\x80"])
def test_msgpack_that_is_none_of_ours(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_msgpack(value, FinalBuckets)


def test_deep_nesting_ends_no_reader() -> None:
    """Each of these would be read again after a restart: one record must not take a process down for good."""
    router = Router(RouterSettings("nowhere:1", "r"), lambda _: None)
    router._take(0, b"chat", DEEP_JSON, 0)
    assert router.malformed == 1
    with pytest.raises(StateError):
        decode_state(DEEP_JSON)
    assert isinstance(decision_rows(DEEP_JSON, b"chat", 0, 0), Rejected)
    assert isinstance(pair_rows(DEEP_MSGPACK, 0, 0), Rejected)
