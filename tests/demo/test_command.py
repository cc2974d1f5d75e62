"""`klaxon demo`: wrong usage ends at once with exit code 2 and says what to do; the real thing runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from pipeline.cli.demo.command import demo
from pipeline.cli.exits import CommandError, Exit

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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    keep = tmp_path / "kept"
    demo_process = subprocess.Popen(
        [*KLAXON, "demo", "--keep", str(keep)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert demo_process.stderr is not None
    said = []
    for line in demo_process.stderr:
        said.append(line)
        if "topics;" in line:  # the workers are being started
            break
    children = psutil.Process(demo_process.pid).children(recursive=True)
    demo_process.send_signal(number)
    said.append(demo_process.communicate(timeout=90)[1])
    assert demo_process.returncode == 130, said
    assert "interrupted" in said[-1]
    assert "Traceback" not in said[-1]
    assert children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(keep) in " ".join(p.info["cmdline"] or ())]
    assert mine == []
