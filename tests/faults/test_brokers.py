"""Brokers killed, stalled, without replicas or with a wrong clock; the long form: `tests.faults.brokers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import failover
from tests.faults.brokers import (
    SEED,
    acks_of_the_leader_alone,
    alone_on,
    broken,
    clock_steps_back,
    kill_one,
    stall,
)
from tests.faults.cluster import Cluster, cluster, no_clocks
from tests.faults.watched import Row

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers for the whole module; by clocks that can be shifted, where there is a C compiler."""
    with cluster(tmp_path_factory.mktemp("brokers"), clocks=not no_clocks()) as made:
        yield made


def passed(row: Row) -> None:
    print(row)
    assert row.passed, str(row)


async def test_a_partition_without_a_leader_then_a_stall_then_a_leaders_clock_that_steps_back(
    of: Cluster, tmp_path: Path
) -> None:
    """One after another under the same traffic."""
    first = of.member(1)
    faults = [kill_one(first, 5.0, alone=True), stall(12.0)]
    if not (why_no_clock := no_clocks()):
        faults.append(clock_steps_back(6.0))
    passed(await broken("killed, stalled, clock back", of, tmp_path, SEED, faults, alone_on(of, first)))
    if why_no_clock:
        pytest.skip(f"all but the clock passed: {why_no_clock}")


@pytest.mark.long
async def test_a_successor_of_the_owner_of_a_rollout_writes_on(of: Cluster, tmp_path: Path) -> None:
    passed(await failover.row(of, tmp_path, SEED + 2, kills=4, timed=False))


async def test_what_one_replica_acknowledged_and_lost_is_found(of: Cluster) -> None:
    passed(await acks_of_the_leader_alone(of))
