"""The archive worker against clickhouse-connect alone, both with ClickHouse in process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas.topics import Topic
from tests.bench.backlog import Out
from tests.bench.context import Context
from tests.bench.drain import FROZEN_SAFELY, PATIENCE_S, cpu_s, loader, write
from tests.bench.errors import BenchError
from tests.bench.peers import Peer
from tests.bench.rows import Row, Spread, row
from tests.conftest import REPOSITORY
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import committed_offsets, now_us
from tests.kafka.waiting import eventually

PARTITIONS: Final = 4
FLOOR: Final = 0.6
PLAIN: Final = Peer(Path(__file__).with_name("plain_insert.py"))


async def archive(context: Context) -> list[Row]:
    """Rows of `inference_log` per CPU second, records of 100 requests: the worker against plain inserts."""
    backlog = await context.requests(partitions=PARTITIONS)
    ours: list[float] = []
    plain: list[float] = []
    async with archiving(context, PARTITIONS) as worker:
        for number in range(context.rounds(4, 2)):
            records = list(backlog.records(now_us()))
            first = number * len(records)
            plain.append(await _plain(context.folder / "plain", records, first, backlog.events))
            ours.append(backlog.events / await worker.cost(records))
            context.say(f"archive: {ours[-1]:,.0f} rows per CPU second, inserts alone {plain[-1]:,.0f}")
    await _check(worker.dsn, backlog.events * len(ours))
    ratios = tuple(worker_s / insert_s for worker_s, insert_s in zip(ours, plain, strict=True))
    return [
        *Spread(ratios).rows("archive.over_insert", floor=FLOOR),
        row("archive.rows_per_cpu_s", max(ours), "rows/s"),
        row("archive.insert_rows_per_cpu_s", max(plain), "rows/s"),
    ]


@dataclass(frozen=True, slots=True)
class Archiving:
    """An archive worker that is frozen while its backlog is written."""

    worker: Worker
    dsn: str
    broker: Broker
    producer: AIOKafkaProducer
    asker: AIOKafkaConsumer
    places: tuple[TopicPartition, ...]

    async def cost(self, records: list[Out]) -> float:
        """CPU seconds from the first record to the last commit."""
        self.worker.freeze()
        try:
            await write(self.producer, Topic.REQUESTS.value, records)
            ends = await self.asker.end_offsets(self.places)
            before_s = cpu_s(self.worker.pid)
        finally:
            self.worker.thaw()
        await eventually(partial(self._stored, ends), timeout_s=PATIENCE_S)
        return cpu_s(self.worker.pid) - before_s

    async def _stored(self, ends: Mapping[TopicPartition, int]) -> bool:
        if not self.worker.running:
            raise BenchError(f"archive ended:\n{self.worker.log[-2000:]}")
        done = await committed_offsets(self.broker, "klaxon-archive", list(ends))
        return all(done.get(f"{at.topic}/{at.partition}", 0) >= end for at, end in ends.items())


@asynccontextmanager
async def archiving(context: Context, partitions: int) -> AsyncIterator[Archiving]:
    """An archive worker on fresh topics and a folder of its own, idle; stopped at the end."""
    broker = await context.with_partitions(partitions)
    dsn = f"chdb://{context.folder / 'archive'}"
    environment = {**FROZEN_SAFELY, "KLAXON_CLICKHOUSE_DSN": dsn}
    await _klaxon("migrate", environment=environment)
    places = tuple(TopicPartition(Topic.REQUESTS.value, number) for number in range(partitions))
    async with (
        loader(broker) as producer,
        AIOKafkaConsumer(bootstrap_servers=broker.bootstrap) as asker,
        Worker("archive", broker, context.folder, environment=environment) as worker,
    ):

        async def opened() -> bool:
            if not worker.running:
                raise BenchError(f"archive ended:\n{worker.log[-2000:]}")
            return all(f"klaxon.requests/{at.partition}: going on at" in worker.log for at in places)

        await eventually(opened)
        await asyncio.sleep(2)
        yield Archiving(worker, dsn, broker, producer, asker, places)
        await worker.stop()


async def _check(dsn: str, expected: int) -> None:
    """Every row is there, once."""
    environment = {"KLAXON_CLICKHOUSE_DSN": dsn}
    query = "SELECT count(), uniqExact(topic, part, off, pos) FROM inference_log"
    said = json.loads(await _klaxon("sql", "--json", query, environment=environment))
    if said["rows"] != [[expected, expected]]:
        raise BenchError(f"archive: {said['rows']} rows and different ones, {expected} were sent")


async def _plain(folder: Path, records: list[Out], first: int, events: int) -> float:
    """Rows per CPU second of inserting the same rows, in a process of its own.

    Into one folder round after round, as the worker: whoever inserts pays for merging what stands there.
    """
    numbered = [(each.partition, number, each) for number, each in enumerate(records, first)]
    path = folder.with_suffix(".records")
    await asyncio.to_thread(path.write_bytes, msgspec.msgpack.encode(numbered))
    said = await PLAIN.measured("run", f"chdb://{folder}", path, events=events)
    return said.events_per_cpu_s


async def _klaxon(*arguments: str, environment: Mapping[str, str]) -> str:
    """Run a command to its end; returns its standard output."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KLAXON_")}
    process = await asyncio.create_subprocess_exec(
        *KLAXON,
        *arguments,
        cwd=REPOSITORY,
        env={**plain, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise BenchError(f"klaxon {' '.join(arguments)}: {err.decode(errors='replace')[-2000:]}")
    return out.decode()
