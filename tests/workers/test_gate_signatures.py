"""What a gate that takes a seat makes of a control topic on which others wrote, or another key signed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.core.gate.outbid import Topmost
from pipeline.key_file import WatchedKey, create_key_file
from pipeline.trust_file import Entry, WatchedTrust, read_trust_file, trust_text
from pipeline.workers.gate_log import remembered
from pipeline.workers.gate_signatures import GateSignatures
from pipeline.workers.records import Partition, Record
from schemas.control import Directive
from schemas.signing import Signer, TrustedKey, Use
from schemas.topics import Topic
from tests.kafka import keys
from tests.kafka.records import now_us


def signatures(folder: Path, *also: Signer) -> GateSignatures:
    """A gate with a key of its own, which trusts these, too."""
    signer = create_key_file(folder / "gate.key")
    entries = {
        one.key_id: Entry(TrustedKey(one.public_key, frozenset({Use.DIRECTIVES}))) for one in (signer, *also)
    }
    (folder / "trust.yaml").write_text(trust_text(entries))
    return GateSignatures(WatchedKey(folder / "gate.key"), WatchedTrust(folder / "trust.yaml"), 1)


def record(offset: int, epoch: int, signer: Signer | None, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "rollout": "r", "generation": 1, "epoch": epoch, "ts_us": 0, "lease_until_us": 0, "dead_man_us": 0,
        "state": "observing", "weights": {"v1": 100.0}, "last_promoted": {"v1": 100.0}, "fallback": "v1",
    }  # fmt: skip
    value = msgspec.json.encode(Directive(**{**fields, **changes}))
    headers = {} if signer is None else dict([signer.header(Topic.CONTROL, b"r", value)])
    return Record(Topic.CONTROL, 0, offset, 0, 0, headers, b"r", value)


class Log:
    """A reader of these records of the control topic."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    async def begin_offsets(self, places: Any) -> dict[Partition, int]:
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: Any) -> dict[Partition, int]:
        return dict.fromkeys(places, len(self._records))

    async def read(self, ranges: Mapping[Partition, tuple[int, int]]) -> AsyncIterator[Record]:
        for one in self._records:
            yield one


async def topmost(gate: GateSignatures, *records: Record) -> tuple[int | None, int | None]:
    """Epochs of the newest and of the greatest directive that it goes by."""
    found: Any = Log(*records)
    said = Topmost()
    for _, directive in (await remembered(found, 0, gate)).control:
        said.read(directive)
    newest, greatest = said.newest, said.greatest
    return (newest and newest.epoch, greatest and greatest.epoch)


async def test_only_a_trusted_key_is_gone_by(tmp_path: Path) -> None:
    gate = signatures(tmp_path)
    own = gate.signer
    assert own is not None
    good = record(0, 3, own)
    assert await topmost(gate, good) == (3, 3)
    forged = record(1, 900, None, state="tripped")
    assert await topmost(gate, good, forged) == (None, 3)
    assert await topmost(gate, good, record(1, 900, keys.STRANGER)) == (None, 3)
    assert await topmost(gate, good, forged, record(2, 4, own)) == (4, 4)
    altered = Record(Topic.CONTROL, 0, 1, 0, 0, good.headers, b"r", forged.value)
    assert await topmost(gate, good, altered) == (None, 3)
    tombstone = Record(Topic.CONTROL, 0, 1, 0, 0, {}, b"r", b"")
    assert await topmost(gate, good, tombstone) == (None, 3)


async def test_what_the_key_before_signed_is_written_anew(tmp_path: Path) -> None:
    """Else its last directives would end with its validity, for routers that start after that."""
    before = Signer(bytes(range(3, 35)))
    gate = signatures(tmp_path, before)
    own = gate.signer
    assert own is not None
    log: Any = Log(record(0, 3, before))
    found = await remembered(log, 0, gate)
    assert found.restated == {"r"}
    assert await topmost(gate, record(0, 3, before)) == (3, 3), "the gate's own, nobody else's"
    log = Log(record(0, 3, before), record(1, 4, own))
    assert (await remembered(log, 0, gate)).restated == set()
    assert not any(gate.gauges()["refused/directive"].values())
    # What a stranger writes in its place is nobody's, and counted once.
    log = Log(record(0, 3, before), record(1, 4, keys.STRANGER))
    assert (await remembered(log, 0, gate)).restated == set()
    assert gate.gauges()["refused/directive"]["unknown_key"] == 1


def test_a_key_that_ends_soon_is_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = signatures(tmp_path)
    gate.announce()
    assert (gate.key_valid_s(), caplog.text) == (-1, "")
    entries = read_trust_file(tmp_path / "trust.yaml")
    (name,) = entries
    ending = replace(entries[name].key, valid_until_us=now_us() + 7_300_000_000)
    (tmp_path / "trust.yaml").write_text(trust_text({name: Entry(ending)}))
    gate.poll(10.0)
    gate.announce()
    assert 7200 < gate.key_valid_s() <= 7300
    assert f"{name}, which signs directives, ends in 2 hours" in caplog.text


def test_it_goes_on_with_its_key_while_the_next_may_not_sign_directives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers would refuse every directive, until leases run out."""
    gate = signatures(tmp_path)
    own, entries = gate.signer, read_trust_file(tmp_path / "trust.yaml")
    assert own is not None
    following = create_key_file(tmp_path / "next.key")
    directives, commands = frozenset({Use.DIRECTIVES}), frozenset({Use.COMMANDS})
    public, now = following.public_key, now_us()
    wrong = [
        TrustedKey(public, commands),
        TrustedKey(public, directives, valid_until_us=now - 1),
        TrustedKey(public, directives, valid_from_us=now + 60_000_000),
    ]
    (tmp_path / "next.key").replace(tmp_path / "gate.key")
    for at_s, key in enumerate([*wrong, TrustedKey(public, directives)]):
        (tmp_path / "trust.yaml").write_text(trust_text({**entries, following.key_id: Entry(key)}))
        gate.poll(10.0 * (at_s + 1))
        assert gate.signer is not None
        assert gate.signer.key_id == (own.key_id if key in wrong else following.key_id)
    assert "may not sign this now" in caplog.text


def test_a_key_that_is_taken_out_of_the_trust_file_has_no_time_left(tmp_path: Path) -> None:
    """Known-bad: -1, which stands for a key without end."""
    gate = signatures(tmp_path)
    (tmp_path / "trust.yaml").write_text(trust_text({}))
    gate.poll(10.0)
    assert gate.key_valid_s() == 0


async def test_without_signatures_every_record_counts() -> None:
    gate = GateSignatures(None, None, 1)
    assert await topmost(gate, record(0, 3, None), record(1, 900, keys.STRANGER)) == (900, 900)
    assert gate.headers(Topic.CONTROL, b"r", b"v") == []


async def test_a_gate_that_signs_but_requires_nothing_signs_what_was_not(tmp_path: Path) -> None:
    """The first step of an installation on its way to signatures."""
    signer = create_key_file(tmp_path / "gate.key")
    gate = GateSignatures(WatchedKey(tmp_path / "gate.key"), None, 1)
    log: Any = Log(record(0, 3, None))
    assert (await remembered(log, 0, gate)).restated == {"r"}
    log = Log(record(0, 3, None), record(1, 4, signer))
    assert (await remembered(log, 0, gate)).restated == set()
    assert [name for name, _ in gate.headers(Topic.CONTROL, b"r", b"v")] == ["klaxon-signature"]
    assert gate.headers(Topic.DECISIONS, b"r", b"v") == []
