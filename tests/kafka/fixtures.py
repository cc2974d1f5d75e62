"""Session brokers, and topics that start from nothing in every test that asks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.kafka.broker import Broker, apache_kafka, tansu
from tests.kafka.records import fresh_topics


@pytest.fixture(scope="session")
def kafka_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One Apache Kafka for the whole run."""
    with apache_kafka(tmp_path_factory.mktemp("kafka") / "broker") as broker:
        yield broker


@pytest_asyncio.fixture
async def kafka(kafka_session: Broker) -> Broker:
    """Apache Kafka with all our topics created anew (mark the test `kafka` and `slow`)."""
    await fresh_topics(kafka_session)
    return kafka_session


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Broker]:
    """The embedded broker, started for this test, without topics."""
    with tansu(tmp_path / "broker.log") as broker:
        yield broker


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that refuses every connection, and is given to nobody else meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """Where a test's worker processes keep their logs; shown by the assertion that fails."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder
