"""`klaxon keys`: keys that nobody overwrites, and a rotation in which nobody is ever distrusted."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import keys as module
from pipeline.cli.exits import CommandError
from pipeline.cli.main import cli
from pipeline.config import load_config
from pipeline.key_file import WatchedKey, read_key_file
from pipeline.secret_key_file import KeyKind, read_secret_key
from pipeline.signatures import KEY_SETTING, key_for, trust_for
from pipeline.trust_file import WatchedTrust, read_trust_file
from schemas.signing import Use, Verdict
from schemas.topics import Topic

DAY_US = 86_400_000_000


def klaxon(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *arguments])


def refusal(*arguments: str) -> str:
    result = klaxon(*arguments)
    assert isinstance(result.exception, CommandError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)


def now_us() -> int:
    return time.time_ns() // 1000


def test_create_makes_what_a_process_needs(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    result = klaxon("create", str(folder))
    assert result.exit_code == 0, result.output
    entries = read_trust_file(folder / "trust.yaml")
    assert len(entries) == 2
    for use in KEY_SETTING:
        private = folder / f"{use.value}.key"
        assert private.stat().st_mode & 0o777 == 0o600
        name = read_key_file(private).key_id
        assert entries[name].key.signs == {use}
        assert f"{private}: private key {name}, signs {use.value}" in result.output
        assert f"  {name}:" in result.output
        assert "PRIVATE" not in result.output
    # What it prints for the configuration file is right as it stands there.
    configuration = tmp_path / "klaxon.yaml"
    configuration.write_text(result.output[result.output.index("\nsignatures:") :])
    config = load_config(str(configuration), {}).signatures
    trust = trust_for(config)
    assert trust is not None
    for use, topic in ((Use.DIRECTIVES, Topic.CONTROL), (Use.COMMANDS, Topic.COMMANDS)):
        key = key_for(config, use)
        assert key is not None
        _, header = key.signer.header(topic, b"r", b"v")
        assert trust.check(topic, b"r", b"v", header, now_us()) is Verdict.TRUSTED


def test_an_existing_key_stays(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert klaxon("create", folder, "--for", "commands").exit_code == 0
    before = (tmp_path / "commands.key").read_bytes()
    trust = (tmp_path / "trust.yaml").read_text()
    assert "commands.key: exists, and no private key is overwritten" in refusal(
        "create", folder, "--for", "commands"
    )
    assert (tmp_path / "trust.yaml").read_text() == trust
    done = klaxon("create", folder, "--if-absent", "--json")
    assert [made["use"] for made in json.loads(done.output)["keys"]] == ["directives"]
    assert (tmp_path / "commands.key").read_bytes() == before
    assert len(read_trust_file(tmp_path / "trust.yaml")) == 2
    assert klaxon("create", folder, "--if-absent").exit_code == 0
    (tmp_path / "trust.yaml").unlink()
    assert "nobody trusts it" in refusal("create", folder, "--if-absent")
    assert not (tmp_path / "trust.yaml").exists(), "what was taken out on purpose stays out"


def test_no_key_is_left_that_nobody_would_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left behind, it would stand in the way, and `--if-absent` would take it for a good one."""
    folder = str(tmp_path)
    klaxon("create", folder, "--for", "commands")
    assert "commands.key: exists" in refusal("create", folder)
    assert not (tmp_path / "directives.key").exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "replace_file", full)
    assert "No space left" in refusal("create", folder, "--for", "directives")
    assert "No space left" in refusal("rotate", "commands", folder)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["commands.key", "trust.yaml"]


def test_create_refuses_without_a_place_or_beside_a_bad_trust_file(tmp_path: Path) -> None:
    named = "signatures.directive_key_file, signatures.command_key_file, signatures.trust_file"
    assert named in refusal("create")
    (tmp_path / "trust.yaml").write_text("v: 1\nkeys: {x: {}}\n")
    assert f"{tmp_path}/trust.yaml:2: keys.x" in refusal("create", str(tmp_path))
    assert not (tmp_path / "directives.key").exists(), "nothing is made that nobody would trust"
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "name another folder" in refusal("create", str(blocked / "keys"))


def test_rotation_without_a_moment_of_distrust(tmp_path: Path) -> None:
    """Every reader believes every record: before, between and after, whoever is first to change over."""
    folder = str(tmp_path)
    klaxon("create", folder, "--for", "directives")
    path = tmp_path / "directives.key"
    writer = WatchedKey(path)
    reader, slow = (WatchedTrust(tmp_path / "trust.yaml") for _ in range(2))

    def believed(by: WatchedTrust, at_us: int) -> bool:
        _, header = writer.signer.header(Topic.CONTROL, b"r", b"v")
        return by.check(Topic.CONTROL, b"r", b"v", header, at_us) is Verdict.TRUSTED

    old = writer.signer.key_id
    assert believed(reader, now_us())
    done = json.loads(klaxon("rotate", "directives", folder, "--overlap-days", "2", "--json").output)
    assert (done["old"], done["private_key_file"]) == (old, f"{path}.next")
    assert Path(f"{path}.next").stat().st_mode & 0o777 == 0o600
    reader.poll(10.0)
    writer.poll(10.0)
    assert writer.signer.key_id == old, "the writer changes over when it is told to"
    assert believed(reader, now_us())
    assert believed(slow, now_us())
    Path(f"{path}.next").rename(path)
    writer.poll(20.0)
    assert writer.signer.key_id == done["new"]
    assert believed(reader, now_us())
    assert not believed(slow, now_us()), "a reader that was left out: why the trust file goes first"
    # The old one ends with the overlap.
    trust = reader.trust.keys[old]
    assert trust.is_valid(now_us() + DAY_US)
    assert not trust.is_valid(now_us() + 2 * DAY_US)
    assert reader.trust.keys[done["new"]].is_valid(now_us() + 364 * DAY_US)


def test_rotate_says_what_is_left_to_do_and_refuses_to_guess(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert "directives.key: cannot be read" in refusal("rotate", "directives", folder)
    klaxon("create", folder)
    said = klaxon("rotate", "commands", folder).output
    assert "restart" not in said.partition("3. ")[2]
    assert f"mv {tmp_path}/commands.key.next {tmp_path}/commands.key" in said
    assert "copy" in said
    assert "3. restart the gates" in klaxon("rotate", "directives", folder).output
    assert "a successor exists" in refusal("rotate", "commands", folder)
    (tmp_path / "trust.yaml").write_text("v: 1\nkeys: {}\n")
    assert "nobody trusts it" in refusal("rotate", "directives", folder)


@pytest.mark.parametrize(
    "arguments", [["create", "x", "--days", "0"], ["create", "x", "--for", "all"], ["rotate"]]
)
def test_wrong_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert klaxon(*arguments).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_gateways_secret_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    result = klaxon("create", str(folder), "--for", "gateway")
    assert result.exit_code == 0, result.output
    assert {one.name for one in folder.iterdir()} == {"signature.key", "pseudonym.key", "text.key"}
    for kind in KeyKind:
        path = folder / f"{kind.value}.key"
        key = read_secret_key(path, kind)
        assert (key.valid_until_us - key.created_us) == 90 * DAY_US
        assert f"{path}: secret key {key.key_id} for {kind.value}, until " in result.output
        assert base64.b64encode(key.key).decode() not in result.output
    assert klaxon("create", str(folder), "--for", "text", "--if-absent").exit_code == 0
    assert "text.key: exists, and no secret key is overwritten" in refusal(
        "create", str(folder), "--for", "text"
    )
    assert "90 days at most (C1)" in refusal("create", str(tmp_path), "--for", "text", "--days", "91")
    made = json.loads(klaxon("create", str(tmp_path), "--kind", "text", "--days", "9", "--json").output)
    assert [(one["use"], one["secret_key_file"]) for one in made["keys"]] == [
        ("text", f"{tmp_path}/text.key")
    ]
    assert "trust_file" not in made


def test_half_a_set_of_keys_is_not_left_behind(tmp_path: Path) -> None:
    klaxon("create", str(tmp_path), "--for", "text")
    assert "text.key: exists" in refusal("create", str(tmp_path), "--for", "gateway")
    assert {one.name for one in tmp_path.iterdir()} == {"text.key"}
    klaxon("create", str(tmp_path), "--for", "consent")
    assert "consent.key: exists" in refusal("create", str(tmp_path), "--for", "consent", "--for", "signature")
    assert {one.name for one in tmp_path.iterdir()} == {"text.key", "consent.key", "trust.yaml"}


def test_a_key_for_consents_goes_to_who_asks_for_them(tmp_path: Path) -> None:
    result = klaxon("create", str(tmp_path), "--for", "consent")
    assert result.exit_code == 0, result.output
    signer = read_key_file(tmp_path / "consent.key")
    assert read_trust_file(tmp_path / "trust.yaml")[signer.key_id].key.signs == {Use.CONSENT}
    assert f"consent_trust_file: {tmp_path}/trust.yaml" in result.output
    assert "signatures:" not in result.output
    assert "name a folder" in refusal("create", "--for", "consent")
    done = klaxon("rotate", "consent", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert f"copy {tmp_path}/trust.yaml to all gateways" in done.output
    assert len(read_trust_file(tmp_path / "trust.yaml")) == 2


@pytest.mark.parametrize("kind", KeyKind)
def test_a_secret_keys_successor(tmp_path: Path, kind: KeyKind) -> None:
    folder = str(tmp_path)
    klaxon("create", folder, "--for", kind.value)
    path = tmp_path / f"{kind.value}.key"
    old = read_secret_key(path, kind)
    done = klaxon("rotate", kind.value, folder)
    assert done.exit_code == 0, done.output
    new = read_secret_key(Path(f"{path}.next"), kind)
    assert new.key_id != old.key_id
    assert read_secret_key(path, kind) == old, "until it is put in its place"
    kept = tmp_path / f"{kind.value}-{old.key_id}.key"
    assert f"`mv {path} {kept}` and `mv {path}.next {path}`" in done.output
    assert f"{path}.next: a successor exists" in refusal("rotate", kind.value, folder)
    path.rename(kept)
    Path(f"{path}.next").rename(path)
    said = json.loads(klaxon("rotate", kind.value, folder, "--json").output)
    assert (said["old"], said["use"]) == (new.key_id, kind.value)
    assert "cannot be read" in refusal("rotate", kind.value, str(tmp_path / "none"))


def test_secret_keys_where_the_configuration_names_them(tmp_path: Path) -> None:
    named = {
        f"{kind.value}_key_file": str(tmp_path / f"my-{kind.value}")
        for kind in (KeyKind.TEXT, KeyKind.PSEUDONYM)
    }
    engine = {"node": "n1", "url": "http://127.0.0.1:1"}
    pool = {"arm": "baseline", "kind": "vllm", "model_version": "v1", "engines": [engine]}
    path = tmp_path / "klaxon.yaml"
    path.write_text(json.dumps({"gateway": {"rollout": "r", "pools": [pool], "privacy": named}}))
    configured = ("--config", str(path))
    assert klaxon("create", "--for", "text", "--for", "pseudonym", *configured).exit_code == 0
    for kind in (KeyKind.TEXT, KeyKind.PSEUDONYM):
        assert read_secret_key(tmp_path / f"my-{kind.value}", kind)
    assert klaxon("rotate", "text", *configured).exit_code == 0
    assert (tmp_path / "my-text.next").exists()
    assert "does not name gateway.privacy.signature_key_file" in refusal(
        "create", "--for", "gateway", *configured
    )
