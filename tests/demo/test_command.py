"""`klaxon demo`: wrong usage ends at once with exit code 2 and says what to do; the real thing runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from pipeline.cli.demo.command import demo
from pipeline.cli.demo.run import Plan
from pipeline.cli.demo.stage import StageError
from pipeline.cli.exits import CommandError, Exit

STATED_STOP_S = 10
"""docs/operate.md"""
LEEWAY_S = 60
"""For a busy machine."""
KLAXON = [sys.executable, "-c", "from pipeline.cli.main import main; main()"]


def usage_error(*arguments: str) -> str:
    """What a wrong command line says; it must end with exit code 2 before anything is started."""
    done = CliRunner().invoke(demo, arguments)
    if isinstance(done.exception, CommandError):
        assert done.exception.exit_code is Exit.USAGE
        return str(done.exception)
    assert done.exit_code == 2, done
    return done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "kernel"], "'kernel' is not one of 'long_context', 'none'"),
        (["--requests", "0"], "--requests"),
        (["--speed", "0"], "--speed"),
        (["--speed", "nan"], "--speed"),
        (["--speed", "inf"], "--speed"),
        (["--engines", "vllm"], "llama.cpp"),
        (["--trace", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["--recording", "nowhere.gz"], "nowhere.gz: cannot be read"),
        (["--engines", "llama.cpp", "--speed", "2"], "--engines takes no"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    assert message in usage_error(*arguments)


def test_a_folder_in_use_is_not_mixed_with(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    assert "not empty" in usage_error("--keep", str(tmp_path))


def run_demo(*arguments: str) -> tuple[int, dict[str, object], str]:
    done = subprocess.run(
        [*KLAXON, "demo", "--json", *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.count("\n") == 1, (done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_fault_is_found_and_the_canary_taken_out() -> None:
    code, result, said = run_demo("--requests", "4400")
    assert result["problems"] == [], said
    assert code == 0
    assert result["outcome"] == result["expected"] == "tripped"
    located = result["located"]
    assert isinstance(located, dict)
    assert (located["dimension"], located["value"]) == ("node_context", "canary-3|>2048")
    affected = result["affected_pairs"]
    assert isinstance(affected, int)
    assert affected > 100
    assert result["router"]["weight_percent"] == 0  # type: ignore[index]
    assert isinstance(result["decision_latency_us"], int)
    assert result["decision_latency_us"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_fault_the_canary_climbs() -> None:
    code, result, said = run_demo("--fault", "none", "--requests", "4400")
    assert result["problems"] == [], said
    assert code == 0
    assert result["outcome"] == result["expected"] == "no_trip"
    steps = result["router"]["steps"]  # type: ignore[index]
    assert max(steps) > steps[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    keep = tmp_path / "kept"
    demo_process = started("--keep", str(keep))
    read_until(demo_process, "playing")
    children = psutil.Process(demo_process.pid).children(recursive=True)
    assert len(children) == 6  # broker, four workers, router
    # Ctrl-C on a terminal goes to its foreground group: to the demo alone, which stops the others in order.
    assert all(os.getsid(child.pid) != os.getsid(demo_process.pid) for child in children)
    demo_process.send_signal(number)
    demo_process.send_signal(number)  # at once, then
    _, complaints = demo_process.communicate(timeout=LEEWAY_S)
    assert demo_process.returncode == 130
    assert complaints.split() == ["klaxon:", "interrupted"]
    nothing_runs(children, keep)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_demo_that_stays_answers_other_commands_until_it_is_interrupted(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    demo_process = started("--requests", "150", "--fault", "none", "--stay", "--keep", str(keep))
    told = read_until(demo_process, "  klaxon sql")
    children = psutil.Process(demo_process.pid).children(recursive=True)
    config = keep / "klaxon.yaml"
    assert "everything runs on until Ctrl-C:\n" in told
    hints = [line.strip().replace("klaxon ", "", 1) for line in told if line.startswith("  klaxon ")]
    for arguments in (shlex.split(hint) for hint in hints if " watch " not in f" {hint} "):
        done = subprocess.run([*KLAXON, *arguments], capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        assert ("demo: observing" if arguments[0] == "status" else "command") in done.stdout
    assert f"status --config {config}" in hints
    assert demo_process.poll() is None
    demo_process.send_signal(signal.SIGINT)
    _, complaints = demo_process.communicate(timeout=STATED_STOP_S + LEEWAY_S)
    # So few requests are no pass: the judgement of the drill stands, however the staying ended.
    assert demo_process.returncode == 1
    assert complaints == f"logs and configuration are kept in {keep}\n"
    nothing_runs(children, keep)


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*KLAXON, "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Lines of standard output through the first that begins so."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return lines
    raise AssertionError(lines)


def nothing_runs(children: list[psutil.Process], keep: Path) -> None:
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(keep) in " ".join(p.info["cmdline"] or ())]
    assert mine == []


def test_the_temporary_folder_is_kept_and_named_only_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome: list[Exception] = [StageError("pair ended"), KeyboardInterrupt()]  # type: ignore[list-item]

    async def fails(_: Plan, folder: Path, *__: object) -> None:
        (folder / "logs").mkdir()
        raise outcome.pop(0)

    monkeypatch.setattr("pipeline.cli.demo.command.run", fails)
    done = CliRunner().invoke(demo, [])
    assert isinstance(done.exception, CommandError)
    (kept,) = tmp_path.iterdir()
    assert done.stderr == f"logs and configuration are kept in {kept}\n"
    done = CliRunner().invoke(demo, [])
    assert done.stderr.strip() == "Aborted!"
    assert list(tmp_path.iterdir()) == [kept]
