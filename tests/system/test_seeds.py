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
SEEDS = 20
AT_ONCE = 10
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
    async with stack(kafka_session, tmp_path) as on:
        workers = [on.worker(kind) for kind in WORKERS]
        for worker in workers:
            await worker.start()
        for worker in workers:
            await worker.until_log(f"{worker.kind}: ready", timeout_s=PATIENCE_S)
        await workers[2].until_log("gating partition", timeout_s=PATIENCE_S)
        rounds = []
        numbers = range(FIRST_SEED, FIRST_SEED + SEEDS)
        seeds = [Traffic(seed, FAULTS[seed % len(FAULTS)]) for seed in numbers]
        for first in range(0, SEEDS, AT_ONCE):
            rounds += [asyncio.create_task(_round(on, each)) for each in seeds[first : first + AT_ONCE]]
            await asyncio.wait(rounds[first : first + AT_ONCE - 1])
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
        kinds = Counter(said["kind"] for each in seeds for said in on.follower.decisions[each.rollout])
        print(
            f"seeds {FIRST_SEED} and {SEEDS - 1} more: {len(log.sent)} records, aborted {on.sent.aborted}, "
            f"decisions {dict(kinds)}"
        )
        # Not a proof of anything if nothing happened.
        assert kinds["trip"] >= SEEDS // 3, kinds
        assert {"step", "hold", "advise"} <= set(kinds), kinds
