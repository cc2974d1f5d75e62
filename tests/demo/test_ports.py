"""A port that was free stays free until whoever was started listens on it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.cli.demo import ports
from pipeline.cli.demo.ports import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not RANGE.exists(), reason="only Linux says which ports outgoing connections take")
def test_no_outgoing_connection_takes_it() -> None:
    first = int(RANGE.read_text().split()[0])
    if first <= ports.FIRST:
        pytest.skip(f"this machine gives ports from {first} on to outgoing connections")
    found = [free_port() for _ in range(200)]
    assert max(found) < first
    assert len(set(found)) > 150, "who asks at the same time is told of another"


def test_nobody_listens_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, other = free_port(), free_port()
    drawn = iter([taken, taken, other])
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: next(drawn) - ports.FIRST)
    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() == other
