"""The gate that owns a roll-out is killed, again and again, while another one stands by."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Final

from schemas.topics import GATING_PARTITIONS, Topic, gating_partition
from tests.faults.cluster import Cluster
from tests.faults.watched import Row, supervised
from tests.kafka.processes import Worker
from tests.kafka.waiting import eventually
from tests.system import judge
from tests.system.findings import Finding
from tests.system.stack import PATIENCE_S, Stack, now_us, stack
from tests.system.workload import Traffic

SESSION_S: Final = 4.0
"""Of the stack's consumer groups."""
BOUND_S: Final = SESSION_S + 5.0
"""At the 99th percentile. Asserted on a machine that does nothing else: see `row`."""
SECOND_US: Final = 1_000_000


async def row(of: Cluster, folder: Path, seed: int, kills: int, *, timed: bool) -> Row:
    """Time from each kill to the first directive that the successor wrote for the roll-out.

    `timed`: more than BOUND_S is a finding. Without, it is printed alone: the machine may be busy.
    """
    traffic = Traffic(seed, "none", seconds=8.0)
    partition = gating_partition(traffic.rollout)
    took_s: list[float] = []
    findings: list[Finding] = []
    async with of.reachable(), stack(of.broker, folder) as on, supervised(on, ("measure", "pair")):
        gates = [await _standing_by(on, [])]
        await on.start_rollout(traffic)
        playing = asyncio.create_task(on.play(traffic))
        try:
            for number in range(kills):
                gates.append(await _standing_by(on, gates))
                owner = await _owner(gates, partition)
                killed_us = now_us()
                await owner.kill()
                gates.remove(owner)
                read_us = await _next_directive(on, traffic.rollout, now_us())
                took_s.append((read_us - killed_us) / SECOND_US)
                print(f"gate {number}: owner killed, next directive after {took_s[-1]:.2f} s", flush=True)
            await _shared(gates)
            await playing
        except AssertionError as error:
            findings.append(Finding("wrong", f"kill {len(took_s)}: {str(error)[:2000]}"))
        finally:
            playing.cancel()
            await asyncio.wait([playing])
        await on.follower.caught_up()
        findings += judge.one_writer(on.log())
    p99_s = nearest_rank(took_s, 0.99)
    if timed and p99_s > BOUND_S:
        findings.append(Finding("wrong", f"failover p99 {p99_s:.2f} s, more than {BOUND_S:g} s"))
    figures = (
        "owner of a roll-out killed, to the first directive of its successor, s: p50 "
        f"{nearest_rank(took_s, 0.5):.2f}, "
        f"p99 {p99_s:.2f}, longest {max(took_s, default=math.inf):.2f}; bound: session {SESSION_S:g} + 5"
        f"{'' if timed else ', not asserted here'}"
    )
    return Row("gate failover", kills, len(took_s), figures, tuple(findings))


def nearest_rank(values: list[float], share: float) -> float:
    """A quantile that is one of the values; infinite where there is none."""
    found = sorted(values)
    return found[max(math.ceil(share * len(found)) - 1, 0)] if found else math.inf


async def _standing_by(on: Stack, others: list[Worker]) -> Worker:
    """One more gate, once every gate has taken its share of the partitions."""
    gate = on.worker("gate")
    await gate.start()
    await _shared([*others, gate])
    return gate


async def _shared(gates: list[Worker]) -> None:
    """Wait until these gates hold every gating partition, each of them some, none twice."""

    async def done() -> bool:
        held = [seats(each) for each in gates]
        return all(held) and sum(map(len, held)) == len(set().union(*held)) == GATING_PARTITIONS

    await eventually(done, timeout_s=PATIENCE_S)


def seats(gate: Worker) -> set[int]:
    """Gating partitions that a gate holds, by its log; empty while it takes them."""
    lines = gate.log.splitlines()
    last = max((at for at, line in enumerate(lines) if "gate: assigned " in line), default=None)
    if last is None or any("gate: revoked " in line for line in lines[last:]):
        return set()
    assigned = {
        int(place.rpartition("/")[2])
        for place in lines[last].partition("gate: assigned ")[2].split(", ")
        if place.startswith(Topic.BUCKETS.value)
    }
    taken = {
        number
        for number in assigned
        if any(f"gating partition {number}: taken" in line for line in lines[last:])
    }
    return assigned if taken == assigned else set()


async def _owner(gates: list[Worker], partition: int) -> Worker:
    (owner,) = [gate for gate in gates if partition in seats(gate)]
    return owner


async def _next_directive(on: Stack, rollout: str, since_us: int) -> int:
    """Wait for the roll-out's first directive made after that time; returns when it was read."""

    def written() -> bool:
        return any(
            json.loads(record.value)["ts_us"] > since_us
            for record in reversed(on.follower.of(Topic.CONTROL))
            if record.key == rollout.encode()
        )

    await on.follower.until(written, f"a directive for {rollout}")
    return now_us()
