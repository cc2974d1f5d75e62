"""What every measurement is given: the broker, a folder, the shared program, and how long it may take."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from schemas.topics import Topic
from tests.bench.backlog import Backlog, SingleEvents, read_backlog, read_single
from tests.bench.errors import BrokerAbsentError
from tests.bench.peers import Peer
from tests.kafka.broker import Broker, apache_kafka, broker_of
from tests.kafka.records import fresh_topics

PAIRS: Final = 20_000
"""What `bare.py make` makes by default: 60 s of traffic."""
REQUESTS: Final = 200_000
RESPONSES_PER_RECORD: Final = 64
REQUESTS_PER_RECORD: Final = 100
BROKER: Final = "broker"
"""The broker's folder in the bench's."""


@contextmanager
def started_broker(folder: Path) -> Iterator[Broker]:
    """One Apache Kafka. Raises BrokerAbsentError where it does not start."""
    with ExitStack() as exits:
        try:
            broker = exits.enter_context(apache_kafka(folder, measured=True))
        except RuntimeError as error:
            raise BrokerAbsentError(str(error)) from None
        yield broker


def end_on_sigterm() -> None:
    """From here on SIGTERM cancels the calling task, so that what it started is stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


@dataclass(frozen=True, slots=True)
class Context:
    """One run of the bench. `quick`: fewer rounds of everything."""

    broker: Broker
    folder: Path
    cache: Path
    """Generated events are kept here between runs."""
    shared: Path
    quick: bool

    @property
    def broker_pid(self) -> int:
        """The broker's process."""
        return int((self.folder / BROKER / "broker.pid").read_text())

    @property
    def bare(self) -> Peer:
        """The shared hand-written loop."""
        return Peer(self.shared / "tools" / "peers" / "bare.py")

    def say(self, text: str) -> None:
        """Progress, on standard error."""
        print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def rounds(self, full: int, quick: int) -> int:
        """How often to measure."""
        return quick if self.quick else full

    async def with_partitions(self, partitions: int, *, append_time: bool = False) -> Broker:
        """Our topics from nothing, input topics with so many partitions, records with producers' times."""
        # What the client says while topics come and go is no news here.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        config = msgspec.structs.replace(self.broker.config, partitions=partitions, append_time=append_time)
        broker = broker_of(config)
        await fresh_topics(broker)
        return broker

    async def pairs(self, *, partitions: int = 4, pairs: int = PAIRS) -> Backlog:
        """Logit events, 64 of one arm a record."""
        return read_backlog(
            await self.file("pairs", "make", PAIRS),
            Topic.LOGITS,
            partitions=partitions,
            per_record=RESPONSES_PER_RECORD,
            most=2 * pairs,
        )

    async def requests(self, *, partitions: int = 4, most: int = REQUESTS) -> Backlog:
        """Request events, 100 of one arm a record."""
        return read_backlog(
            await self.file("requests", "requests-make", REQUESTS),
            Topic.REQUESTS,
            partitions=partitions,
            per_record=REQUESTS_PER_RECORD,
            most=most,
        )

    async def single_requests(self, *, most: int, partitions: int = 4) -> SingleEvents:
        """Request events as JSON, one a record."""
        return read_single(
            await self.file("requests", "requests-make", REQUESTS), partitions=partitions, most=most
        )

    async def file(self, name: str, command: str, count: int) -> Path:
        """A file of events of the shared generator, made if it is not there yet."""
        path = self.cache / f"{name}-{count}.jsonl"
        if not path.exists():
            self.say(f"making {count} {name}")
            self.cache.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            await self.bare.run(command, unfinished, str(count))
            unfinished.rename(path)
        return path

    async def topic(self, name: str, partitions: int) -> None:
        """A topic beside ours, for a loop to read."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.bootstrap)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(name, partitions, 1)])
        finally:
            await admin.close()
