"""Secret keys of the gateway in files: read back as written, refused with a reason that quotes nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.secret_key_file import (
    DAY_US,
    KeyKind,
    SecretKey,
    SecretKeyError,
    create_secret_key_file,
    new_secret_key,
    read_secret_key,
)

NOW_US = 1_767_225_600_000_000
KEY = SecretKey(KeyKind.PSEUDONYM, bytes(range(32)), NOW_US, NOW_US + 90 * DAY_US)


def written(folder: Path, key: SecretKey = KEY) -> Path:
    path = folder / "one.key"
    create_secret_key_file(path, key)
    return path


def refusal(path: Path, kind: KeyKind = KeyKind.PSEUDONYM) -> str:
    with pytest.raises(SecretKeyError) as raised:
        read_secret_key(path, kind)
    return str(raised.value)


@pytest.mark.parametrize("kind", KeyKind)
def test_what_is_written_is_read_back(tmp_path: Path, kind: KeyKind) -> None:
    key = new_secret_key(kind, NOW_US, 90)
    path = written(tmp_path / "new" / "folder", key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret_key(path, kind) == key
    assert (key.created_us, key.valid_until_us) == (NOW_US, NOW_US + 90 * DAY_US)
    assert new_secret_key(kind, NOW_US, 90).key != key.key
    assert base64.b64encode(key.key).decode() not in repr(key)
    assert repr(key.key) not in repr(key)


def test_the_id_says_nothing_of_the_key_and_differs_by_kind() -> None:
    assert KEY.key_id == hmac.new(KEY.key, b"klaxon key id/1\0pseudonym", hashlib.sha256).hexdigest()[:16]
    ids = {SecretKey(kind, KEY.key, 0, 0).key_id for kind in KeyKind}
    assert len(ids) == len(KeyKind)


def test_a_key_is_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(SecretKeyError, match=r"one\.key: exists, and no secret key is overwritten"):
        create_secret_key_file(path, KEY)
    assert path.read_bytes() == before
    path.chmod(0o604)
    assert f"chmod 600 {path}" in refusal(path)
    path.chmod(0o640)
    assert read_secret_key(path, KeyKind.PSEUDONYM) == KEY, "its group: the doctor tells"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecretKeyError):
        create_secret_key_file(tmp_path / "link", KEY)
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_refused_names_file_and_remedy(tmp_path: Path) -> None:
    assert "klaxon keys create FOLDER --for text" in refusal(tmp_path / "none", KeyKind.TEXT)
    assert "no regular file" in refusal(tmp_path)
    path = written(tmp_path)
    assert "this key is for pseudonym, not for signature" in refusal(path, KeyKind.SIGNATURE)
    with pytest.raises(SecretKeyError, match="name another folder"):
        create_secret_key_file(path / "below", KEY)


@pytest.mark.parametrize("days", [90, 91])
def test_a_key_for_texts_is_good_for_90_days_at_most(tmp_path: Path, days: int) -> None:
    """C1: also of a file that was written by other means, or in which somebody changed the time."""
    path = written(tmp_path, SecretKey(KeyKind.TEXT, KEY.key, NOW_US, NOW_US + days * DAY_US))
    if days == 90:
        assert read_secret_key(path, KeyKind.TEXT).valid_until_us == NOW_US + 90 * DAY_US
    else:
        assert "90 days at most (C1)" in refusal(path, KeyKind.TEXT)
        assert "klaxon keys rotate text" in refusal(path, KeyKind.TEXT)
    written(tmp_path / "other", SecretKey(KeyKind.PSEUDONYM, KEY.key, NOW_US, NOW_US + 91 * DAY_US))
    assert read_secret_key(tmp_path / "other" / "one.key", KeyKind.PSEUDONYM)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        ("^v: 1", "v: 2"), ("^v: 1", "w: 1"), ("kind: .*", "kind: master"), ("kind: .*", "kind: [a]"),
        ("key_id: .*", "key_id: 0000000000000000"), ("^key: ", "key: '?"), ("^key: .*", "key: AAAA"),
        ("created: .*", "created: yesterday"), ("created: .*", "created: 7"), ("valid_until.*\n", ""),
        ("$", "\nmore: 1"), ("^v", "\t"), ("(?s).*", ""), ("(?s).*", "[1]"), ("(?s).*", "-----KEY-----"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_not_quoted(tmp_path: Path, pattern: str, replacement: str) -> None:
    path = written(tmp_path)
    text = re.sub(pattern, replacement, path.read_text(), count=1, flags=re.MULTILINE)
    assert text != path.read_text()
    path.write_text(text)
    said = refusal(path)
    assert said == (
        f"{path}: no secret key of Klaxon's; `klaxon keys create FOLDER --for pseudonym` makes one"
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.binary(max_size=200))
def test_whatever_stands_there_it_is_refused_or_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any"
    path.write_bytes(content)
    path.chmod(0o600)
    assert "no secret key of Klaxon's" in refusal(path)
