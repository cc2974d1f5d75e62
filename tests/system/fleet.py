"""Traffic without end under which workers are broken, and the verdict on what came of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.system import archived, judge
from tests.system.findings import Finding
from tests.system.stack import JOIN_TIMEOUT_S, PATIENCE_S, SECOND, SOURCES, Stack, now_us, settled
from tests.system.workload import FAULTS, PARTITIONS, Traffic

ROLLOUTS_AT_ONCE = 3


@dataclass
class Fleet:
    """Roll-outs one after another, each with its own seed, until told to stop."""

    on: Stack
    seeds: Iterator[int]
    started: list[Traffic] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        """Some at once; returns when those that had begun at the time of `stopping` are done."""
        await asyncio.gather(*(self._one_after_another(number) for number in range(ROLLOUTS_AT_ONCE)))

    async def _one_after_another(self, number: int) -> None:
        await asyncio.sleep(3.0 * number)
        while not self.stopping:
            seed = next(self.seeds)
            traffic = Traffic(seed, FAULTS[seed % len(FAULTS)], seconds=8.0, prompts_per_s=7.0)
            await self.on.start_rollout(traffic)
            self.started.append(traffic)
            await self.on.play(traffic)
            if traffic.fault == "twice":
                await self.on.command(traffic, "new_generation")
                await self.on.play(traffic, generation=2)


@asynccontextmanager
async def fleet(on: Stack, first_seed: int) -> AsyncIterator[Fleet]:
    """Traffic while the body runs."""
    made = Fleet(on, itertools.count(first_seed))
    task = asyncio.create_task(made.run())
    try:
        yield made
        made.stopping = True
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def verdict(
    on: Stack, seeds: list[Traffic], asked_as: Callable[[str], str] = lambda sql: sql
) -> list[Finding]:
    """Everything the judge has to say, once traffic has ended; stops the workers.

    `asked_as`: how the archive is asked, see `archived.through_views`.
    """
    end_us = now_us() + (JOIN_TIMEOUT_S + 3) * SECOND
    await on.until_closed(end_us)
    log = await settled(on, seeds)
    await on.until_archived(log)
    assert all(log.pairs(partition) for partition in range(PARTITIONS)), "nothing was scored"
    found = [line for topic in SOURCES for line in judge.finals(log, topic, end_us // SECOND)]
    found += judge.pairs(log, end_us)
    found += judge.dead_letters(log, once=False)
    found += judge.one_writer(log)
    found += [line for each in seeds for line in judge.decided(log, each)]
    running = [worker for worker in on.started if worker.running]
    codes = await asyncio.gather(*(worker.stop(timeout_s=PATIENCE_S) for worker in running))
    found += [
        Finding("wrong", f"{worker.kind} told to stop: exit code {code}\n{worker.log[-1500:]}")
        for worker, code in zip(running, codes, strict=True)
        if code != 0
    ]
    answers = await on.query(*map(asked_as, archived.QUERIES))
    return found + archived.differences(log, dict(zip(archived.QUERIES, answers.values(), strict=True)))
