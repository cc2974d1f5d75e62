"""What `klaxon gateway` makes of its keys' files: which it uses, until when, and what it says of old ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.gateway.settings import GatewaySettings, PrivacySettings
from pipeline.cli.gateway import WARN_US, keys_of, told_of_keys
from pipeline.secret_key_file import DAY_US, KeyKind, SecretKey, SecretKeyError, create_secret_key_file

NOW_US = 1_767_225_600_000_000


def settings(folder: Path, *kinds: KeyKind) -> GatewaySettings:
    paths = {}
    for number, kind in enumerate(kinds):
        path = folder / f"{kind.value}.key"
        create_secret_key_file(path, SecretKey(kind, bytes([number]) * 32, NOW_US, NOW_US + 90 * DAY_US))
        paths[f"{kind.value}_key_file"] = str(path)
    return GatewaySettings(privacy=PrivacySettings(**paths))


def test_keys_are_used_for_what_they_are_and_their_ends_are_told(tmp_path: Path) -> None:
    keys = keys_of(settings(tmp_path, *KeyKind), None)
    assert len({keys.signer.key_id, keys.pseudonyms.key_id}) == 2
    assert keys.sealing is not None
    assert keys.gauges(NOW_US) == {f"{kind.value}_key_valid_s": 90 * 86_400 for kind in KeyKind}
    assert set(keys.gauges(NOW_US + 91 * DAY_US).values()) == {0}
    assert "Bearer" not in repr(keys)


def test_without_a_key_for_texts_none_leaves(tmp_path: Path) -> None:
    keys = keys_of(settings(tmp_path, KeyKind.SIGNATURE, KeyKind.PSEUDONYM), None)
    assert keys.sealing is None
    assert "text_key_valid_s" not in keys.gauges(NOW_US), "absent is not past"


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    good = settings(tmp_path, *KeyKind).privacy
    wrong = PrivacySettings(
        signature_key_file=good.pseudonym_key_file, pseudonym_key_file=good.pseudonym_key_file
    )
    with pytest.raises(SecretKeyError, match="is for pseudonym, not for signature"):
        keys_of(GatewaySettings(privacy=wrong), None)


@pytest.mark.parametrize(
    ("left_us", "said"),
    [(WARN_US, None), (WARN_US - 1, "is to be replaced"), (0, "is to be replaced"),
     (-1, "should have been replaced")],
)  # fmt: skip
def test_what_is_said_of_keys_that_end(left_us: int, said: str | None) -> None:
    told = list(told_of_keys({"text": NOW_US + left_us, "signature": NOW_US + 2 * WARN_US}, NOW_US))
    assert len(told) == (said is not None)
    for one in told:
        assert f"the key for text {said} by 20" in one
        assert one.endswith("no text leaves after that: `klaxon keys rotate text`")
