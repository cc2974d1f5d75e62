"""Seeds through real Kafka and the real processes, against the oracle."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.kafka.broker import Broker
from tests.system import archived, judge
from tests.system.stack import (
    JOIN_TIMEOUT_S,
    NOBODY_DIES,
    PATIENCE_S,
    SECOND,
    SOURCES,
    Stack,
    now_us,
    settled,
    stack,
)
from tests.system.workload import FAULTS, Traffic

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1800)]

FIRST_SEED = int(os.environ.get("SEED", "0"))
SEEDS = 16
MOST_SEEDS = 64
AT_ONCE = 8
BEHIND_US = SECOND // 4
"""Traffic that is sent later than this is on its way to being late: the machine is too slow for so much."""
WORKERS = ("measure", "pair", "gate", "archive")


async def _round(on: Stack, traffic: Traffic) -> None:
    """One seed's roll-out from its start to its last event."""
    await on.start_rollout(traffic)
    await on.play(traffic)
    if traffic.fault == "twice":
        await on.command(traffic, "new_generation")
        await on.play(traffic, generation=2)


async def test_every_seed_is_counted_judged_and_archived_as_the_oracle_says(
    kafka_session: Broker, tmp_path: Path
) -> None:
    async with stack(kafka_session, tmp_path, variables=NOBODY_DIES) as on:
        workers = [on.worker(kind) for kind in WORKERS]
        for worker in workers:
            await worker.start()
        for worker in workers:
            await worker.until_log(f"{worker.kind}: ready", timeout_s=PATIENCE_S)
        await workers[2].until_log("gating partition", timeout_s=PATIENCE_S)
        seeds: list[Traffic] = []
        rounds: list[asyncio.Task[None]] = []
        at_once = AT_ONCE
        while len(seeds) < SEEDS or (not _enough(on) and len(seeds) < MOST_SEEDS):
            numbers = range(FIRST_SEED + len(seeds), FIRST_SEED + len(seeds) + at_once)
            more = [Traffic(seed, FAULTS[seed % len(FAULTS)]) for seed in numbers]
            on.sent.behind_us = 0
            begun = [asyncio.create_task(_round(on, each)) for each in more]
            seeds, rounds = seeds + more, rounds + begun
            await asyncio.wait(begun[:-1])
            at_once = AT_ONCE if on.sent.behind_us < BEHIND_US else AT_ONCE // 2
        await asyncio.gather(*rounds)
        # Early events count up to 5 s after they came; halves wait for J.
        end_us = now_us() + (JOIN_TIMEOUT_S + 3) * SECOND
        await on.until_closed(end_us)
        log = await settled(on, seeds)
        await on.until_archived(log)
        found = [line for topic in SOURCES for line in judge.finals(log, topic, end_us // SECOND)]
        found += judge.pairs(log, end_us)
        found += judge.dead_letters(log, once=True)
        found += judge.one_writer(log)
        found += [line for each in seeds for line in judge.decided(log, each)]
        codes = await asyncio.gather(*(worker.stop() for worker in workers))
        assert not any(codes), on.tails()
        found += archived.differences(log, await on.query(*archived.QUERIES))
        assert not found, "\n".join(found)
        kinds = _kinds(on)
        print(
            f"seeds {FIRST_SEED} and {len(seeds) - 1} more: {len(log.sent)} records, aborted "
            f"{on.sent.aborted}, decisions {dict(kinds)}"
        )
        # Not a proof of anything if nothing happened.
        assert _enough(on), kinds


def _kinds(on: Stack) -> Counter[str]:
    return Counter(said["kind"] for decisions in on.follower.decisions.values() for said in decisions)


def _enough(on: Stack) -> bool:
    kinds = _kinds(on)
    return kinds["trip"] >= SEEDS // 3 and {"step", "hold", "advise"} <= set(kinds)
