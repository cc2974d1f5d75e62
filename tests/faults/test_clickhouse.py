"""ClickHouse broken on purpose, in short: nothing lost, nothing twice, trips unaffected, lag said in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import clickhouse
from tests.kafka.broker import Broker

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.timeout(900),
]

SEED = 20260717


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clickhouse.Server]:
    """One for all: starting it costs seconds. Every scenario empties it."""
    made = clickhouse.Server(tmp_path_factory.mktemp("server") / "clickhouse")
    yield made
    made.kill()


async def test_every_way_not_to_answer_neither_loses_nor_doubles(
    server: clickhouse.Server, kafka_session: Broker, tmp_path: Path
) -> None:
    print(await clickhouse.broken_answers(server, kafka_session, tmp_path / "on", SEED))


@pytest.mark.long
async def test_a_death_around_an_insert_that_is_not_answered(
    server: clickhouse.Server, kafka_session: Broker, tmp_path: Path
) -> None:
    print(await clickhouse.killed_meanwhile(server, kafka_session, tmp_path / "on", SEED, modes=("late",)))


async def test_a_rollout_trips_while_clickhouse_hangs(
    server: clickhouse.Server, kafka_session: Broker, tmp_path: Path
) -> None:
    print(await clickhouse.trips_go_on(server, kafka_session, tmp_path, SEED))


@pytest.mark.long
async def test_a_full_disk_is_waited_out(
    server: clickhouse.Server, kafka_session: Broker, tmp_path: Path
) -> None:
    print(await clickhouse.full_disk(server, kafka_session, tmp_path, SEED))


@pytest.mark.long
async def test_retention_is_said_to_run_out_before_it_does(
    server: clickhouse.Server, kafka_session: Broker, tmp_path: Path
) -> None:
    print(await clickhouse.retention_alert(server, kafka_session, tmp_path / "on", SEED, retention_s=30))


@pytest.mark.parametrize(
    ("defect", "modes", "found"),
    [
        ("believes_every_answer", ("in_body",), "lost"),
        pytest.param("retries_without_token_or_counting", ("late",), "[2-9] times", marks=pytest.mark.long),
    ],
)
async def test_known_bad_archives_are_found(
    server: clickhouse.Server,
    kafka_session: Broker,
    tmp_path: Path,
    defect: str,
    modes: tuple[str, ...],
    found: str,
) -> None:
    with pytest.raises(AssertionError, match=found):
        await clickhouse.broken_answers(
            server, kafka_session, tmp_path / "on", SEED, modes=modes, defect=defect
        )


@pytest.mark.long
async def test_a_known_bad_archive_that_does_not_wait_for_its_inserts_is_found(
    server: clickhouse.Server, kafka_session: Broker, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="lost"):
        await clickhouse.killed_behind_a_failure(
            server, kafka_session, tmp_path / "on", SEED, "commits_before_the_insert"
        )
