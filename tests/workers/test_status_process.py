"""`klaxon status` beside real workers: evidence is withheld in turn, and the first reason is that."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.standing import obstacles_of, read_standings
from pipeline.config import load_config
from pipeline.core.gate.answer import Obstacle
from schemas.topics import Topic
from tests.conftest import REPOSITORY
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import Written, now_us, produce
from tests.kafka.waiting import eventually
from tests.workers.events import POLICY, encoded, start_command
from tests.workers.fleet import QUICK, SEAT, directives, send_pairs

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

GATE = {**QUICK, "KLAXON_GATE_LEASE_S": "3", "KLAXON_GATE_BLIND_AFTER_S": "4"}
COVERED = """
coverage: {limit: 0.9, window: 5s, min_samples: 10, action: hold}
progression: {mode: auto, min_pairs: 100}
"""
AWAY_US = 4_000_000
PATIENT_US = 600_000_000


async def send(broker: Broker, name: str, command_id: str, **arguments: Any) -> None:
    """A command for r1."""
    command = {**start_command(command_id, POLICY.replace("10s", "5s") + COVERED), "command": name}
    command["arguments"] = arguments or command["arguments"]
    await produce(broker, [Written(Topic.COMMANDS, encoded(command), key=b"r1", partition=SEAT)])


async def first_of(
    broker: Broker,
    code: str,
    silent_after_us: int = AWAY_US,
    *,
    saying: Callable[[str], bool] = lambda _: True,
) -> Obstacle:
    """Wait until this is the first reason, in such words, and give it."""

    async def told() -> Obstacle | None:
        standings = await read_standings(load_config(None, broker.environment))
        found = [one for standing in standings for one in obstacles_of(standing, now_us(), silent_after_us)]
        return found[0] if found and found[0].code == code and saying(found[0].sentence) else None

    obstacle = await eventually(told)
    assert obstacle is not None
    return obstacle


@asynccontextmanager
async def a_few_pairs(broker: Broker) -> AsyncIterator[None]:
    """While the body looks: never more than four in 5 s, and always some."""

    async def send() -> None:
        for number in itertools.count():
            await send_pairs(broker, 1, bad=False, first=number)
            await asyncio.sleep(1.5)

    task = asyncio.create_task(send())
    try:
        yield
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def status(broker: Broker, *arguments: str) -> str:
    """What `klaxon status` prints."""
    process = await asyncio.create_subprocess_exec(
        *KLAXON, "status", *arguments, cwd=REPOSITORY, env={**os.environ, **broker.environment, **GATE},
        stdout=PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_what_is_withheld_is_what_status_names(kafka: Broker, log_folder: Path) -> None:
    async with (
        Worker("measure", kafka, log_folder, environment=QUICK) as measure,
        Worker("pair", kafka, log_folder, environment=QUICK) as pair,
        Worker("gate", kafka, log_folder, environment=GATE) as gate,
    ):
        await pair.until_log("pair: ready")
        await gate.until_log(f"gating partition {SEAT}: taken")
        await send(kafka, "start", "c1")

        async def started() -> list[dict[str, Any]]:
            return await directives(kafka)

        await eventually(started)
        nothing = await first_of(kafka, "no_canary_traffic")
        assert nothing.sentence.startswith(
            "no canary traffic: not one sample for G3-divergence in the last 5 s"
        )

        async with a_few_pairs(kafka):
            few = await first_of(kafka, "too_few_samples")
        assert re.match(r"G3-divergence: [1-4] of 10 samples in 5 s, [6-9] missing; ", few.sentence)

        await measure.kill()
        silent = [f"{topic}/{n}" for topic in (Topic.REQUESTS, Topic.TELEMETRY) for n in range(2)]
        # They fall silent one after the other.
        await first_of(kafka, "blind", saying=lambda said: re.findall(r"klaxon\.[a-z]+/\d", said) == silent)
        said = json.loads(await status(kafka, "--json"))
        (judged,) = said["deciding"]
        named = judged["obstacles"][0]
        assert (named["code"], "klaxon worker measure" in named["remedy"]) == ("blind", True)

        await measure.start()
        await measure.until_log("measure: ready")
        await send(kafka, "pause", "c2")
        paused = await first_of(kafka, "paused")
        assert paused.remedy == "`klaxon rollout resume r1`"
        assert "waits for: it is paused: the weight holds" in await status(kafka)

        await gate.kill()
        over = await first_of(kafka, "lease_over", PATIENT_US)
        assert re.match(r"the lease ran out \d+ s ago: routers raise no weight", over.sentence)
        away = await first_of(kafka, "gate_away")
        assert re.match(r"no gate has written for \d+ s", away.sentence)
        text = await status(kafka)
    assert re.search(r"deciding: no, no gate has written for \d+ s", text)
    assert "start `klaxon worker gate`" in text
