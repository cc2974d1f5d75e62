"""Trust files and key files: what is refused and how it is said, and changes while a process runs."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import SignaturesConfig
from pipeline.key_file import KeyFileError, WatchedKey, create_key_file, read_key_file
from pipeline.signatures import SigningSetupError, key_for, trust_for
from pipeline.trust_file import (
    Entry,
    TrustFileError,
    WatchedTrust,
    parse_trust,
    read_trust_file,
    trust_of,
    trust_text,
)
from schemas.signing import Signer, TrustedKey, Use

SIGNER = Signer(bytes(range(32)))
OTHER = Signer(bytes(range(1, 33)))
NAME = "56475aa75463474c"
GOOD = """\
v: 1
keys:
  56475aa75463474c:
    public_key: A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg=
    signs: [directives]
    valid_from: 2026-01-01T00:00:00Z
    valid_until: 2027-01-01T00:00:00Z
"""
KEY = "A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="


def entry(signer: Signer, *signs: Use, until_us: int | None = None) -> dict[str, Entry]:
    key = TrustedKey(signer.public_key, frozenset(signs or Use), 0, until_us)
    return {signer.key_id: Entry(key, "of the test")}


def test_a_good_file() -> None:
    ((name, found),) = parse_trust(GOOD, "t").items()
    assert name == SIGNER.key_id
    assert found.key == TrustedKey(
        SIGNER.public_key, frozenset({Use.DIRECTIVES}), 1_767_225_600_000_000, 1_798_761_600_000_000
    )
    assert parse_trust("v: 1\nkeys: {}", "t") == {}


def test_what_is_written_is_read_back() -> None:
    entries = {**entry(SIGNER, Use.COMMANDS, until_us=5_000_000), **entry(OTHER)}
    assert parse_trust(trust_text(entries), "t") == entries


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("v: 1\n", "", "t:1: v: this Klaxon reads version 1; write `v: 1`"),
        ("v: 1", "v: 2", "t:1: v: this Klaxon reads version 1"),
        ("v: 1", "v: true", "t:1: v: this Klaxon reads version 1"),
        ("keys:", "key:", "t:1: no trust file"),
        (GOOD, "keys: [a]\nv: 1", "t:1: keys: key ids are expected"),
        (GOOD, "", "t:1: no trust file"),
        (GOOD, "a: [", "t:1: "),
        ("keys:", "vv: 1\nkeys:", "t:2: vv: unknown; did you mean 'v'?"),
        ("56475aa75463474c", "aa475aa75463474c", "t:3: keys.aa475aa75463474c: this public key's id"),
        (KEY, "abc", "t:4: keys.{NAME}.public_key: no base64"),
        (KEY, "AAAA", "t:4: keys.{NAME}.public_key: 3 bytes; base64 of the 32 bytes"),
        (KEY, "[]", "t:4: keys.{NAME}.public_key: base64 of the 32"),
        ("[directives]", "directives", "t:5: keys.{NAME}.signs: a list of what it may sign"),
        ("[directives]", "[]", "t:5: keys.{NAME}.signs: a list of what it may sign"),
        ("[directives]", "[directive]", "t:5: keys.{NAME}.signs: nothing is called 'directive'"),
        ("    signs:", "    sign:", "t:5: keys.{NAME}.sign: unknown; did you mean 'signs'?"),
        ("2026-01-01T00:00:00Z", "2026-01-01", "t:6: keys.{NAME}.valid_from: a time with its zone"),
        ("2026-01-01T00:00:00Z", "soon", "t:6: keys.{NAME}.valid_from: a time with its zone"),
        ("2027-01-01T00:00:00Z", "2025-01-01T00:00:00Z", "t:7: keys.{NAME}.valid_until: lies before"),
        ("    valid_until", "    note: 3\n    valid_until", "t:7: keys.{NAME}.note: text is expected"),
        ("    public_key", "    public_key: x\n    public_key", "t:5: 'public_key' stands twice"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_line_key_and_remedy(old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(TrustFileError) as raised:
        parse_trust(GOOD.replace(old, new), "t")
    assert str(raised.value).startswith(told.replace("{NAME}", NAME))


@given(st.data())
def test_whatever_a_file_says_it_is_read_or_refused(data: st.DataObject) -> None:
    """Lines of a good file left out, put elsewhere, spoilt: never anything but TrustFileError."""
    lines = data.draw(st.lists(st.sampled_from(GOOD.splitlines()), max_size=12))
    at = data.draw(st.integers(0, max(0, len(lines) - 1)))
    times = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", ".inf", "[]", "''")
    spoilt = "    valid_from: " + data.draw(st.sampled_from(times))
    text = "\n".join([*lines[:at], spoilt, *lines[at:], data.draw(st.text(max_size=20))])
    with suppress(TrustFileError):
        trust_of(parse_trust(text, "t"))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TrustFileError, match=r"none: cannot be read: No such file.*klaxon keys create"):
        read_trust_file(tmp_path / "none")
    with pytest.raises(TrustFileError, match="no regular file"):
        read_trust_file(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe4")
    with pytest.raises(TrustFileError, match="not UTF-8"):
        read_trust_file(tmp_path / "latin")
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(TrustFileError, match="so it is no trust file"):
        read_trust_file(tmp_path / "large")


def test_a_running_process_sees_a_change_and_keeps_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trust.yaml"
    path.write_text(trust_text(entry(SIGNER)))
    watched = WatchedTrust(path)
    assert set(watched.trust.keys) == {SIGNER.key_id}
    path.write_text(trust_text({**entry(SIGNER), **entry(OTHER)}))
    watched.poll(0.5)
    assert set(watched.trust.keys) == {SIGNER.key_id}, "looked at again after a second, no sooner"
    watched.poll(1.5)
    assert set(watched.trust.keys) == {SIGNER.key_id, OTHER.key_id}
    assert f"new: {OTHER.key_id}; gone: none" in caplog.text
    caplog.clear()
    path.write_text("v: 1")
    for now_s in (3.0, 5.0):
        watched.poll(now_s)
    assert set(watched.trust.keys) == {SIGNER.key_id, OTHER.key_id}
    path.unlink()
    watched.poll(7.0)
    assert set(watched.trust.keys) == {SIGNER.key_id, OTHER.key_id}
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]
    path.write_text(trust_text(entry(OTHER)))
    watched.poll(9.0)
    assert set(watched.trust.keys) == {OTHER.key_id}, "revoked"


def test_a_private_key_is_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.key"
    signer = create_key_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path).key_id == signer.key_id
    before = path.read_bytes()
    with pytest.raises(KeyFileError, match=r"a\.key: exists, and no private key is overwritten"):
        create_key_file(path)
    assert path.read_bytes() == before
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match=r"everybody here may read this private key; chmod 600"):
        read_key_file(path)
    path.chmod(0o440)
    assert read_key_file(path).key_id == signer.key_id
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyFileError):
        create_key_file(link)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "content", [b"", b"secret", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_file_without_a_key_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"a\.key: no Ed25519 private key .*klaxon keys create") as raised:
        read_key_file(path)
    assert "secret" not in str(raised.value)


def test_another_key_in_a_keys_place_is_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, following = tmp_path / "a.key", tmp_path / "b.key"
    first, second = create_key_file(path), create_key_file(following)
    watched = WatchedKey(path)
    following.replace(path)
    watched.poll(0.5)
    assert watched.signer.key_id == first.key_id
    watched.poll(1.5)
    assert watched.signer.key_id == second.key_id
    path.write_text("")
    watched.poll(3.0)
    watched.poll(5.0)
    assert watched.signer.key_id == second.key_id
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]


def test_a_key_takes_over_when_it_is_trusted_no_sooner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, following = tmp_path / "a.key", tmp_path / "b.key"
    first, second = create_key_file(path), create_key_file(following)
    watched, trusted = WatchedKey(path), {first.key_id}
    following.replace(path)
    for now_s in (1.5, 3.0, 4.5):
        watched.poll(now_s, lambda signer: signer.key_id in trusted)
        assert watched.signer.key_id == first.key_id
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "said once"
    assert f"by the trust file here {second.key_id} may not sign this now" in caplog.text
    trusted.add(second.key_id)
    watched.poll(6.0, lambda signer: signer.key_id in trusted)
    assert watched.signer.key_id == second.key_id


def test_a_process_that_must_sign_or_verify_does_not_begin_without(tmp_path: Path) -> None:
    for name, made in (
        ("directive_key_file", lambda: key_for(SignaturesConfig(), Use.DIRECTIVES)),
        ("command_key_file", lambda: key_for(SignaturesConfig(), Use.COMMANDS)),
        ("trust_file", lambda: trust_for(SignaturesConfig())),
    ):
        with pytest.raises(SigningSetupError) as raised:
            made()
        told = str(raised.value)
        assert f"signatures.{name} (KLAXON_SIGNATURES_{name.upper()})" in told
        assert "`klaxon keys create`" in told
        assert "KLAXON_SIGNATURES_REQUIRED=false" in told
    off = SignaturesConfig(required=False)
    assert key_for(off, Use.COMMANDS) is None
    assert trust_for(off) is None


def test_a_key_that_nobody_trusts_is_found_where_it_signs(tmp_path: Path) -> None:
    path, trust = tmp_path / "a.key", tmp_path / "trust.yaml"
    signer = create_key_file(path)
    config = SignaturesConfig(trust_file=str(trust), command_key_file=str(path))
    for entries, told in (
        (entry(OTHER), f"does not hold {signer.key_id}"),
        (entry(signer, Use.DIRECTIVES), "may not sign commands"),
        (entry(signer, until_us=1_000_000), "is valid from 1970-01-01T00:00:00Z until 1970-01-01T00:00:01Z"),
    ):
        trust.write_text(trust_text(entries))
        with pytest.raises(SigningSetupError, match=told):
            key_for(config, Use.COMMANDS)
    trust.write_text(trust_text(entry(signer)))
    key = key_for(config, Use.COMMANDS)
    assert key is not None
    assert key.signer.key_id == signer.key_id
