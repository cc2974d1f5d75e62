"""`klaxon rollout abort --router`: files written whole, nothing else touched, no broker asked."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from agents.router.directive_file import read_directive_file
from pipeline.cli.break_glass import break_glass
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.main import cli
from schemas.control import Aborted, DirectiveFile
from tests.conftest import REPOSITORY


def klaxon(*arguments: str) -> Result:
    """With a broker that is not there: asking it would take 30 s and end with 3."""
    environment = {"KLAXON_KAFKA_BOOTSTRAP": "127.0.0.1:1"}
    return CliRunner(env=environment).invoke(cli, arguments, standalone_mode=False)


def code(result: Result) -> int:
    if isinstance(result.exception, CommandError):
        return int(result.exception.exit_code)
    assert result.exception is None, result.exception
    return int(result.return_value)


def aborted(path: Path) -> dict[str, Aborted]:
    found = read_directive_file(path)
    assert found is not None
    return found.aborted


def test_it_writes_every_file_and_keeps_what_stood_there(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert code(klaxon("rollout", "abort", "chat", "--router", str(one), "--fallback", "v1")) == Exit.OK
    result = klaxon("rollout", "abort", "code", "--router", str(one), str(two), "--json")
    assert code(result) == Exit.OK
    assert json.loads(result.stdout) == {
        "rollout": "code", "aborted": True, "written": [str(one), str(two)], "failed": {},
    }  # fmt: skip
    assert {name: order.fallback for name, order in aborted(one).items()} == {"chat": "v1", "code": None}
    assert list(aborted(two)) == ["code"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"], "no litter"
    assert "the gate does not know of it" in result.stderr


def test_what_is_no_directive_file_is_not_overwritten(tmp_path: Path) -> None:
    """A wrong path in a hurry must cost nothing; the other files are written all the same."""
    spec, good, nowhere = tmp_path / "spec.yaml", tmp_path / "good.json", tmp_path / "no" / "folder.json"
    spec.write_text("rollout: chat\n")
    result = klaxon("rollout", "abort", "chat", "--json", *(
        word for path in (spec, nowhere, good) for word in ("--router", str(path))))  # fmt: skip
    assert code(result) == Exit.USAGE
    said = json.loads(result.stdout)
    assert (said["aborted"], said["written"]) == (False, [str(good)])
    assert list(said["failed"]) == [str(spec), str(nowhere)]
    assert f"{spec}: no directive file: " in result.stderr
    assert f"{nowhere}: cannot be written: No such file or directory" in result.stderr
    assert spec.read_text() == "rollout: chat\n"
    assert list(aborted(good)) == ["chat"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "file.json"],
        ["chat", "--fallback", "v1"],
        ["chat", "--router", "file.json", "--expect", "1,2"],
        ["", "--router", "file.json"],
        ["x" * 257, "--router", "file.json"],
        ["chat", "--router", "file.json", "--fallback", ""],
    ],
)
def test_what_is_refused_writes_nothing(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code(klaxon("rollout", "abort", *arguments)) == Exit.USAGE
    assert list(tmp_path.iterdir()) == []


def test_aborts_at_the_same_time_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    names = [f"rollout-{number}" for number in range(24)]
    threads = [
        threading.Thread(target=break_glass, args=([path], name, Aborted(by="op", ts_us=1))) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(aborted(path)) == sorted(names)


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the rename, the old file is whole."""
    path = tmp_path / "router.json"
    break_glass([path], "chat", Aborted(by="op", ts_us=1))
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    written, failed = break_glass([path], "code", Aborted(by="op", ts_us=1))
    assert (written, list(failed)) == ([], [str(path)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_through_a_link_the_file_itself_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    break_glass([link], "chat", Aborted(by="op", ts_us=1))
    assert link.is_symlink()
    assert list(aborted(real)) == ["chat"]


PAGE = (REPOSITORY / "docs" / "routers.md").read_text(encoding="utf-8")


def test_the_command_lines_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    lines = re.findall(r"^klaxon (rollout abort .+)$", PAGE, flags=re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        words = [word.replace("/var/lib/klaxon", str(tmp_path)) for word in shlex.split(line)]
        assert code(klaxon(*words)) == Exit.OK, line
    (example,) = re.findall(r"```json\n(.+?)```", PAGE, flags=re.DOTALL)
    documented = msgspec.json.decode(example, type=DirectiveFile)
    assert {name: one.fallback for name, one in documented.aborted.items()} == {
        name: one.fallback for name, one in aborted(tmp_path / "router.json").items()
    }
    others = re.findall(r"^klaxon (.+)$", PAGE, flags=re.MULTILINE)
    for line in set(others) - set(lines):
        words = shlex.split(line)
        command = cli.get_command(None, words[0])  # type: ignore[arg-type]
        assert command is not None
        with command.make_context(words[0], words[1:]):
            pass
