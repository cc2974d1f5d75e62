"""`klaxon rollout`: specs that are refused before anything is sent, and the gate's answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.rollout import answer_line, exit_code, rollout
from pipeline.cli.spec_file import read_spec
from schemas.control import Decision, Directive, Inputs
from tests.conftest import REPOSITORY
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.workers.fleet import QUICK, SEAT, fleet, send_pairs

SPEC = """rollout: chat
arms:
  baseline: {model_version: v1, nodes: ["b-*"]}
  canary: {model_version: v2, nodes: ["c-*"]}
fallback: v1
"""


def written(folder: Path, text: str) -> str:
    path = folder / "spec.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("fallback: v1\n", "", 1, "fallback: missing"),
        ("fallback: v1", "fallback: v2", 5, "canary itself"),
        ("fallback: v1", "fallbak: v1", 1, "fallback: missing"),
        ("fallback: v1", "fallback: v1\nstep: [1]", 6, "did you mean 'steps'"),
        ("fallback: v1", "fallback: v1\nsteps: [5, 1]", 6, "rise"),
        ("fallback: v1", "fallback: v1\nsteps: [5, 101]", 6, "steps.1"),
        ("fallback: v1", "fallback: v1\npolicy: 'rules: 3'", 1, "spec.yaml: policy:1"),
        ("model_version: v2", "modl_version: v2", 4, "model_version"),
        ("canary:", "canry:", 4, "did you mean 'canary'"),
        ('["c-*"]', "[]", 4, "arms.canary.nodes: "),
        ("model_version: v2", "model_version: 2024-01-01", 4, "arms.canary.model_version: "),
        ('{model_version: v2, nodes: ["c-*"]}', "", 4, "arms.canary: "),
        ("fallback: v1", "fallback: v1\nsteps: [1, .nan]", 6, "steps.1"),
        ("rollout: chat", 'rollout: "\\ud800"', 1, "surrogates"),
        ('  canary: {model_version: v2, nodes: ["c-*"]}\n', "", 2, "canary missing"),
        ("v2", "v1", 2, "both 'v1'"),
        ("rollout: chat", "rollout: [chat", 1, "mend the YAML"),
    ],
)
def test_bad_specs(tmp_path: Path, before: str, after: str, line: int, words: str) -> None:
    assert before in SPEC
    with pytest.raises(CommandError) as caught:
        read_spec(written(tmp_path, SPEC.replace(before, after)), None)
    assert words in str(caught.value)
    assert caught.value.exit_code is Exit.USAGE
    if "policy" not in words and "mend" not in words:
        assert f"spec.yaml:{line}:" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["pause", ""],
        ["pause", "x" * 257],
        ["pause", "chat", "--timeout", "nan"],
        ["pause", "chat", "--timeout", "0"],
        ["pause", "chat", "--timeout", "inf"],
        ["pause", "chat", "--expect", "1"],
        ["pause", "chat", "--expect", "1,-1"],
    ],
)
def test_commands_that_no_gate_could_read_are_not_sent(arguments: list[str]) -> None:
    """No broker is asked for them: there is none."""
    done = CliRunner().invoke(rollout, arguments)
    told = done.exception
    assert told.exit_code is Exit.USAGE if isinstance(told, CommandError) else done.exit_code == 2
    assert done.stdout == ""


def test_a_policy_file_travels_in_the_spec(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules: [{id: a, metric: kl_lower, window: 5m, limit: 0.05, action: pause}]")
    assert read_spec(written(tmp_path, SPEC), str(policy)).policy == policy.read_text()
    policy.write_text("rules: 3")
    with pytest.raises(CommandError, match=r"policy\.yaml:1"):
        read_spec(written(tmp_path, SPEC), str(policy))


def decision(kind: str, reason: str) -> Decision:
    inputs = Inputs(offsets={}, command_offset=0, complete_through=0, now_us=0)
    directive = Directive(
        rollout="chat", generation=1, epoch=2, ts_us=0, lease_until_us=0, dead_man_us=0, state="observing",
        weights={"v1": 99.0, "v2": 1.0}, last_promoted={}, fallback="v1",
    )  # fmt: skip
    return Decision(kind=kind, directive=directive, inputs=inputs, reason=reason)  # type: ignore[arg-type]


def test_answers_and_exit_codes() -> None:
    good = decision("command", "start: started at 1 %")
    assert answer_line("chat", good) == (
        "chat: start: started at 1 % · generation 1 epoch 2 · observing · v1 99 % · v2 1 %"
    )
    assert exit_code(good) is Exit.OK
    assert exit_code(decision("refused", "start: 'chat' exists")) is Exit.BAD
    assert exit_code(decision("refused", "pause: it is paused already")) is Exit.BAD
    refused = decision("refused", "step: no pass: 3 of 300 pairs in this weight step")
    assert exit_code(refused) is Exit.NOT_ENOUGH_DATA


def test_without_a_broker_a_clear_line_and_exit_3(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        **keys.settings(),
        "KLAXON_KAFKA_BOOTSTRAP": "127.0.0.1:1",
        "KLAXON_KAFKA_CONNECT_TIMEOUT_S": "1",
    }
    for arguments in (
        ["rollout", "start", written(tmp_path, SPEC)],
        ["rollout", "status"],
        ["status"],
        ["watch"],
        ["explain", "chat"],
    ):
        done = subprocess.run(
            [*KLAXON, *arguments],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 3
        assert "cannot reach Kafka at 127.0.0.1:1" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


async def started(broker: Broker, *arguments: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, **broker.environment, **QUICK}
    return await asyncio.create_subprocess_exec(
        *KLAXON, *arguments, cwd=REPOSITORY, env=environment, stdout=PIPE, stderr=PIPE
    )


async def klaxon(broker: Broker, *arguments: str, timeout_s: float = 150.0) -> tuple[int, str, str]:
    """Run a command against a broker; exit code, standard output, standard error."""
    process = await started(broker, *arguments)
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        await ended(process)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def watched(broker: Broker, then: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
    """What `watch` says of what is in force, and of what comes after `then`: one line each."""
    process = await started(broker, "watch", "--json", "--count", "2")
    try:
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readline(), 150)
        await then()
        second = await asyncio.wait_for(process.stdout.readline(), 150)
        assert await asyncio.wait_for(process.wait(), 150) == 0
    finally:
        await ended(process)
    return [json.loads(first), json.loads(second)]


POLICY = """rules:
  - {id: kl, metric: kl_lower, window: 5m, limit: 0.05, min_samples: 10, action: rollback_l1}
coverage: {window: 5s, min_samples: 10}
progression: {mode: manual, min_pairs: 10}
"""


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_life_of_a_rollout_on_the_command_line(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    spec = written(tmp_path, SPEC.replace("chat", "r1").replace("v1", "m1").replace("v2", "m2"))
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    async with fleet(kafka, log_folder) as (_, gate):
        await gate.until_log(f"gating partition {SEAT}: taken")
        code, out, _ = await klaxon(kafka, "rollout", "start", spec, "--policy", str(policy), "--json")
        answer = json.loads(out)
        assert (code, answer["accepted"]) == (0, True)
        assert answer["decision"]["directive"]["weights"] == {"m1": 99.0, "m2": 1.0}
        code, _, err = await klaxon(kafka, "rollout", "start", spec)
        assert (code, "refused: start: 'r1' exists" in err) == (1, True), err
        code, out, _ = await klaxon(kafka, "rollout", "pause", "r1")
        assert (code, "paused" in out) == (0, True)
        code, _, err = await klaxon(kafka, "rollout", "step", "r1")
        assert (code, "no pass" in err) == (4, True), err
        code, _, err = await klaxon(kafka, "rollout", "resume", "r1", "--expect", "1,0")
        assert (code, "stale" in err) == (1, True), err
        code, _, _ = await klaxon(kafka, "rollout", "resume", "r1")
        assert code == 0
        code, _, err = await klaxon(kafka, "rollout", "pause", "nobody")
        assert (code, "there is no roll-out 'nobody'" in err) == (1, True), err
        lines = await watched(kafka, lambda: send_pairs(kafka, 20, bad=True))
        assert [line["state"] for line in lines] == ["observing", "tripped"]
        assert lines[1]["weights"] == {"m1": 100.0, "m2": 0.0}
        assert lines[1]["cause"]["rule"] == "kl"
        code, out, _ = await klaxon(kafka, "rollout", "status", "r1", "--json")
        (standing,) = json.loads(out)["rollouts"]
        assert (standing["state"], standing["cause"]["rule"]) == ("tripped", "kl")
        code, out, _ = await klaxon(kafka, "explain", "r1", "--json", "--history")
        told = json.loads(out)
        assert (code, told["reasons"][0]["rule"], told["decision"]["kind"]) == (0, "kl", "trip")
        assert "The canary `m2` was taken out of rotation (weight 1 % to 0) in generation 1" in told["text"]
        assert (told["notes"], told["waits_for"]) == ([], None)
        assert any((row["rule"], row["verdict"]) == ("kl", "trip") for row in told["history"])
        code, out, _ = await klaxon(kafka, "explain", "r1", "--epoch", "1")
        assert (code, "An operator's `start` was obeyed in generation 1" in out) == (0, True), out
        code, out, err = await klaxon(kafka, "explain", "absent")
        assert (code, out, "holds nothing about 'absent'" in err) == (4, "", True), err
        code, out, _ = await klaxon(kafka, "status")
        assert code == 0
        assert "tripped is final until a new generation" in out
        assert "close their seconds" in out
        code, out, _ = await klaxon(kafka, "rollout", "new-generation", "r1")
        assert (code, "generation 2" in out) == (0, True)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_without_a_gate_the_command_waits_in_the_log(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    spec = written(tmp_path, SPEC.replace("chat", "r1"))
    code, _, err = await klaxon(kafka, "rollout", "start", spec, "--timeout", "1")
    assert code == 3
    assert "is `klaxon worker gate` running?" in err
    async with Worker("gate", kafka, log_folder, environment=QUICK) as gate:
        await gate.until_log("r1: command start")
        code, out, err = await klaxon(kafka, "rollout", "pause", "r1")
    assert (code, "paused" in out) == (0, True), err
