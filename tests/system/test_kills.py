"""Workers killed at named points, swapped, frozen and thawed, while traffic goes on; judged by the oracle.

Buckets, decisions and the archive must come out as if nothing had happened, and every fault must have fired.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from aiokafka import TopicPartition

from schemas.topics import Topic, gating_partition
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import committed_offsets, dump
from tests.kafka.waiting import eventually
from tests.system import judge
from tests.system.fleet import fleet, verdict
from tests.system.stack import (
    JOIN_TIMEOUT_S,
    PATIENCE_S,
    SECOND,
    Stack,
    now_us,
    settled,
    stack,
)
from tests.system.workload import PARTITIONS, Traffic

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("SEED", "20260717"))
CELLS = 100
"""Cap on cells where decisions need not come to a trip: low enough that seconds overflow."""

# Point and the range its passage is drawn from. The first ones come while nothing is committed yet; once
# something is, a successor begins inside the log and must warm up.
PLAN = {
    "pair": (
        ("flush_acked_before_commit", 5, 40),
        ("half_waiting", 1, 20),
        ("after_commit", 1, 2),
        ("during_warm_up", 1, 2),
        ("half_waiting", 1, 60),
        ("during_warm_up", 2, 30),
        ("flush_sent_before_acknowledged", 5, 40),
        ("half_waiting", 20, 90),
    ),
    "measure": (
        ("flush_acked_before_commit", 5, 60),
        ("after_commit", 1, 2),
        ("during_warm_up", 1, 12),
        ("flush_sent_before_acknowledged", 5, 60),
        ("flush_acked_before_commit", 5, 90),
        ("after_read", 20, 120),
        ("before_flush", 10, 60),
        ("on_assigned", 1, 2),
    ),
    "gate": (
        ("gate_in_transaction", 1, 4),
        ("gate_in_transaction", 3, 12),
        ("gate_before_transaction", 2, 12),
        ("gate_in_transaction", 4, 20),
        ("gate_after_transaction", 2, 12),
        ("during_warm_up", 1, 60),
        ("gate_in_transaction", 8, 30),
        ("gate_after_transaction", 8, 30),
    ),
    "archive": (
        ("before_insert", 1, 8),
        ("after_insert_before_commit", 1, 4),
        ("after_insert_commit", 1, 12),
        ("after_insert_before_commit", 3, 12),
        ("after_insert_before_commit", 6, 20),
        ("after_insert_commit", 4, 16),
    ),
}
AT_LEAST_THRICE = ("flush_acked_before_commit", "during_warm_up", "half_waiting", "gate_in_transaction")


async def started(on: Stack, kind: str, fault: str | None = None) -> Worker:
    """A worker that runs."""
    worker = on.worker(kind, fault=fault)
    await worker.start()
    return worker


async def kills(on: Stack, kind: str, fired: Counter[str]) -> None:
    """One kind of worker killed and started again through its plan; the last one stays."""
    rng = random.Random(f"{SEED}/{kind}")
    for number, (point, least, most) in enumerate(PLAN[kind]):
        passage = rng.randrange(least, most)
        began_s = time.monotonic()
        if point == "during_warm_up" and kind in READS:
            await until_a_successor_warms_up(on, kind)
        worker = await started(on, kind, f"{point}:{passage}")
        await worker.until_fault(point, timeout_s=PATIENCE_S)
        fired[point] += 1
        print(
            f"kill {kind} {number}: {point}:{passage} after {time.monotonic() - began_s:.1f} s (seed {SEED})"
        )
    await started(on, kind)


READS = {"pair": (Topic.LOGITS,), "measure": (Topic.REQUESTS, Topic.TELEMETRY)}


async def until_a_successor_warms_up(on: Stack, kind: str) -> None:
    """Let a worker run, if need be, until offsets inside the log are committed; it is killed then."""
    places = [TopicPartition(topic.value, number) for topic in READS[kind] for number in range(PARTITIONS)]

    async def committed() -> bool:
        found = await committed_offsets(on.broker, f"klaxon-{kind}", places)
        return len(found) == len(places) and all(found.values())

    if not await committed():
        worker = await started(on, kind)
        await eventually(committed, timeout_s=PATIENCE_S)
        await worker.kill()


async def test_kills_at_every_point_change_nothing(kafka_session: Broker, tmp_path: Path) -> None:
    fired: Counter[str] = Counter()
    async with stack(kafka_session, tmp_path) as on:
        async with fleet(on, 1000) as traffic:
            await asyncio.gather(*(kills(on, kind, fired) for kind in PLAN))
        found = await verdict(on, traffic.started)
        kinds = Counter(
            said["kind"] for each in traffic.started for said in on.follower.decisions[each.rollout]
        )
        print(
            f"seed {SEED}: {len(traffic.started)} roll-outs, {len(on.sent.batches)} records, decisions "
            f"{dict(kinds)}; faults fired {sum(fired.values())}: {dict(sorted(fired.items()))}"
        )
        assert not found, "\n".join(found)
    assert sum(fired.values()) == sum(len(plan) for plan in PLAN.values()) >= 30
    assert all(fired[point] >= 3 for point in AT_LEAST_THRICE), fired
    assert kinds["trip"] >= 3, kinds


async def test_a_gate_killed_inside_and_after_the_transaction_of_its_trip_trips_once(
    kafka_session: Broker, tmp_path: Path
) -> None:
    traffic = Traffic(SEED, "everywhere", seconds=6.0)
    async with stack(kafka_session, tmp_path) as on:
        for kind in ("measure", "pair"):
            await started(on, kind)
        gate = await started(on, "gate")
        await gate.until_log(TAKEN["gate"], timeout_s=PATIENCE_S)
        await on.start_rollout(traffic)
        await gate.kill()
        # Without a gate the evidence piles up: the first thing that its successor has to write is the trip.
        await on.play(traffic)
        end_us = now_us() + (JOIN_TIMEOUT_S + 3) * SECOND
        await on.until_closed(end_us)
        for point in ("gate_in_transaction", "gate_after_transaction"):
            await (await started(on, "gate", f"{point}:1")).until_fault(point, timeout_s=PATIENCE_S)
        await started(on, "gate")
        log = await settled(on, [traffic])
        written = await dump(on.broker, Topic.DECISIONS, committed_only=False)
    kinds = [json.loads(record.value)["kind"] for record in written]
    assert kinds == ["command", "trip", "trip"], "one of the trips was aborted with its transaction"
    assert len(log.records[Topic.DECISIONS.value, gating_partition(traffic.rollout)]) == 2
    found = [*judge.one_writer(log), *judge.decided(log, traffic)]
    assert not found, "\n".join(found)


async def test_a_generation_begins_before_a_new_gate_has_heard_of_any_second(
    kafka_session: Broker, tmp_path: Path
) -> None:
    """After a trip a gate reads no finals again: with the workers away it knows of no complete second."""
    traffic = Traffic(SEED, "twice", seconds=6.0)
    async with stack(kafka_session, tmp_path) as on:
        sources = [await started(on, kind) for kind in ("measure", "pair")]
        gate = await started(on, "gate")
        await gate.until_log(TAKEN["gate"], timeout_s=PATIENCE_S)
        await on.start_rollout(traffic)
        await gate.kill()
        # Its successor finds seconds that are all complete, so the trip does not rest on fresh evidence.
        await on.play(traffic)
        await on.until_closed(now_us() + (JOIN_TIMEOUT_S + 3) * SECOND)
        gate = await started(on, "gate")
        await gate.until_log("trip", timeout_s=PATIENCE_S)
        for worker in (*sources, gate):
            await worker.kill()
        gate = await started(on, "gate")
        await gate.until_log(TAKEN["gate"], timeout_s=PATIENCE_S)
        await on.command(traffic, "new_generation")
        for kind in ("measure", "pair"):
            await started(on, kind)
        await on.play(traffic, generation=2)
        await on.until_closed(now_us() + (JOIN_TIMEOUT_S + 3) * SECOND)
        log = await settled(on, [traffic])
    began = [said["inputs"] for said in on.follower.decisions[traffic.rollout] if said["kind"] == "command"]
    assert began[1]["complete_through"] == -1, "the new gate had heard of a second after all"
    found = [*judge.one_writer(log), *judge.decided(log, traffic)]
    assert not found, "\n".join(found)


async def test_two_pair_workers_swap_partitions_and_swap_back(kafka_session: Broker, tmp_path: Path) -> None:
    turn = tmp_path / "turn"
    turn.write_text("0")
    async with stack(kafka_session, tmp_path, CELLS) as on:
        pairs = [
            on.worker("pair", command=(sys.executable, "-m", "tests.system.swapping", str(turn)))
            for _ in range(2)
        ]
        for worker in pairs:
            await worker.start()
        for kind in ("measure", "gate", "archive"):
            await started(on, kind)
        async with fleet(on, 2000) as traffic:
            holders = [await holding(pairs, None)]
            for swap in (1, 2):
                # Both must have read and published something of their own in between.
                await on.until_closed(now_us() + SECOND, sources=[Topic.LOGITS])
                turn.write_text(str(swap % 2))
                pairs[swap % 2].send(signal.SIGUSR1)
                holders.append(await holding(pairs, holders[-1]))
            await on.until_closed(now_us() + SECOND, sources=[Topic.LOGITS])
        found = await verdict(on, traffic.started)
    print(f"partition 0 was held by {holders}")
    assert holders[0] == holders[2] != holders[1]
    assert not found, "\n".join(found)


async def holding(workers: list[Worker], other_than: int | None) -> int:
    """Which worker holds partition 0 once each holds one, and it is not `other_than`."""

    async def found() -> tuple[int] | None:
        held = [assignments(worker) for worker in workers]
        if sorted(held) == [["klaxon.logits/0"], ["klaxon.logits/1"]]:
            holder = held.index(["klaxon.logits/0"])
            return None if holder == other_than else (holder,)
        return None

    answer = await eventually(found, timeout_s=PATIENCE_S)
    assert answer is not None
    return answer[0]


def assignments(worker: Worker) -> list[str]:
    """What a worker was assigned last, by its log."""
    lines = [
        line.partition("pair: assigned ")[2] for line in worker.log.splitlines() if "pair: assigned " in line
    ]
    return lines[-1].split(", ") if lines else []


async def test_frozen_workers_wake_up_beside_their_successors(kafka_session: Broker, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    async with stack(kafka_session, tmp_path, CELLS) as on:
        for kind in ("measure", "archive"):
            await started(on, kind)
        holders = {kind: await started(on, kind) for kind in TAKEN}
        for kind, worker in holders.items():
            await worker.until_log(TAKEN[kind], timeout_s=PATIENCE_S)
        async with fleet(on, 3000) as traffic:
            await asyncio.gather(*(frozen(on, kind, holders, rng.random()) for kind in holders))
        found = await verdict(on, traffic.started)
    assert not found, "\n".join(found)


TAKEN = {"pair": "pair: assigned klaxon.logits/0, klaxon.logits/1", "gate": "gating partition 3: taken"}


async def frozen(on: Stack, kind: str, holders: dict[str, Worker], after_s: float) -> None:
    """Freeze the holder past its session, let a successor take everything and work, thaw; both live on."""
    frozen = holders[kind]
    # Two seconds closed under it, then somewhere inside a second: it holds open groups and unsent cells.
    await on.until_closed(now_us() + 2 * SECOND, sources=[Topic.LOGITS])
    await asyncio.sleep(after_s)
    frozen.freeze()
    told = frozen.log.count(f"{kind}: assigned")
    holders[kind] = successor = await started(on, kind)
    await successor.until_log(TAKEN[kind], timeout_s=PATIENCE_S)
    if kind == "pair":
        await on.until_closed(now_us() + 2 * SECOND, sources=[Topic.LOGITS])
    else:
        written = len(on.follower.of(Topic.CONTROL))
        await on.follower.until(
            lambda: len(on.follower.of(Topic.CONTROL)) > written + 5, "directives of the successor"
        )
    frozen.thaw()
    # The zombie either ends because it was fenced, or sees that the group went on without it. It is told to
    # stop when it is back there: who is joining cannot leave at once.
    await eventually(lambda: woken(frozen, kind, told), timeout_s=PATIENCE_S)
    code = await frozen.stop()
    assert code == 0 or (kind == "gate" and "another gate process has taken over" in frozen.log), frozen.log
    print(f"{kind} frozen and thawed: {'went on' if code == 0 else 'fenced'}")


async def woken(worker: Worker, kind: str, told: int) -> bool:
    """Whether a thawed worker has ended, or was assigned its share anew, after `told` times before."""
    return not worker.running or worker.log.count(f"{kind}: assigned") > told
