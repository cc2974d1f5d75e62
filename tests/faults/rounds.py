"""A round: two of each worker on fresh topics under traffic, a schedule of faults, and the verdict."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.faults.crew import Crew, Outcome
from tests.faults.schedule import WORKERS, Fault, Worker
from tests.kafka.broker import Broker
from tests.system import archived
from tests.system.findings import Finding
from tests.system.fleet import Fleet, fleet, verdict
from tests.system.stack import Stack, stack


@dataclass(frozen=True)
class Plan:
    """The faults of one round, in each worker's order. `defects`: of which worker which known one."""

    seed: int
    number: int
    faults: Sequence[Fault]
    defects: Mapping[Worker, str] = field(default_factory=dict)
    cells_per_bucket: int = 2048


@dataclass
class Round:
    """What came of a round."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    rollouts: int = 0
    records: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@contextmanager
def archive_server(folder: Path) -> Iterator[str]:
    """ClickHouse's engine in a process of its own, as two archives need it; yields its address."""
    with (
        (folder / "clickhouse.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.store.http_server", str(folder / "clickhouse")],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as server,
    ):
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        finally:
            server.kill()


async def play(broker: Broker, folder: Path, address: str, plan: Plan) -> Round:
    """One round, from nothing to the verdict, logs in `folder`. Prints every fault as it fires."""
    began_s = time.monotonic()
    round_ = Round(plan)
    database = f"seed{plan.seed}_round{plan.number}"
    variables = {
        "KLAXON_CLICKHOUSE_DSN": address,
        "KLAXON_CLICKHOUSE_DATABASE": database,
        # Eight workers that ask for records every 50 ms, and blocks of half a second, cost half a core; here
        # nobody waits for the latency.
        "KLAXON_KAFKA_FETCH_WAIT_MS": "250",
        "KLAXON_ARCHIVE_BLOCK_AGE_MS": "1500",
    }
    try:
        await _played(round_, broker, folder, variables, began_s)
    except AssertionError as error:  # whatever did not come: the other rounds are played all the same
        round_.findings.append(
            Finding("wrong", f"seed {plan.seed}: not played to its end: {str(error)[:2000]}")
        )
    round_.seconds = time.monotonic() - began_s
    return round_


async def _played(
    round_: Round, broker: Broker, folder: Path, variables: Mapping[str, str], began_s: float
) -> None:
    plan = round_.plan
    async with stack(broker, folder, plan.cells_per_bucket, variables=variables) as on:
        crews = [Crew(on, worker, plan.defects.get(worker)) for worker in WORKERS]
        for crew in crews:
            await crew.start()
        await asyncio.gather(*(crew.balanced() for crew in crews))
        async with fleet(on, (plan.seed * 1000 + plan.number) * 1000) as traffic:
            await _broken(round_, crews, began_s, silent=False)
        await _broken(round_, crews, began_s, silent=True)
        round_.findings += [finding for crew in crews for finding in crew.findings]
        round_.findings += await _judged(on, traffic, plan)
        round_.rollouts, round_.records = len(traffic.started), len(on.sent.batches)
        said = [each for name in traffic.started for each in on.follower.decisions.get(name.rollout, ())]
        round_.decisions = Counter(each["kind"] for each in said)


async def _broken(round_: Round, crews: list[Crew], began_s: float, *, silent: bool) -> None:
    """All crews at once suffer their faults, those that need silence or the others."""

    async def one(crew: Crew) -> None:
        mine = [each for each in round_.plan.faults if each.worker == crew.kind]
        faults = [each for each in mine if (each.point.when == "silent") == silent]
        for fault, following in zip_longest(faults, faults[1:]):
            outcome = await crew.suffer(fault, following)
            round_.outcomes.append(outcome)
            said = f"back after {outcome.back_s:.1f} s" if outcome.back_s is not None else outcome.why
            print(
                f"round {round_.plan.number} at {time.monotonic() - began_s:3.0f} s: {outcome.fault} "
                f"{'fired' if outcome.fired else 'NOT FIRED'}, {said} (seed {round_.plan.seed})",
                flush=True,
            )
        await crew.balanced()

    await asyncio.gather(*map(one, crews))


async def _judged(on: Stack, traffic: Fleet, plan: Plan) -> list[Finding]:
    try:
        return await verdict(on, traffic.started, archived.through_views)
    except AssertionError as error:
        # Something never came: that is a finding like any other.
        return [Finding("wrong", f"seed {plan.seed}: no verdict: {str(error)[:2000]}")]
