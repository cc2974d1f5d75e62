"""Batches that no aiokafka producer writes, on a real broker: header names of any bytes, much in little."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest

from agents.router.runner import Change, Router, RouterSettings
from pipeline.workers.broker import bare_client
from schemas.control import DeadLetter
from schemas.records import read_json
from schemas.topics import Topic
from tests.agents.test_router_signatures import directive
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import Written, dump, fresh_topics, produce
from tests.kafka.waiting import eventually
from tests.schemas.test_header_counts import batch, record
from tests.schemas.test_header_names import log

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

ZSTD = 4
BOMB_BYTES = 300 << 20
UNPATCHED = (
    sys.executable,
    "-c",
    "from aiokafka.consumer import fetcher; kept = fetcher.MemoryRecords, fetcher.PartitionRecords\n"
    "from schemas import header_names\n"
    "fetcher.MemoryRecords, fetcher.PartitionRecords = kept\n"
    "from pipeline.cli.main import main; main()",
)
"""`klaxon` with aiokafka as it comes."""


async def write(broker: Broker, topic: Topic, batch: bytes, partition: int = 0) -> None:
    """A batch as it is; again while a topic that was just made has no leader."""
    request = ProduceRequest(None, -1, 10_000, [(topic.value, [(partition, batch)])])
    async with bare_client(broker.config) as client:

        async def written() -> bool:
            if (leader := await _leader(client, topic, partition)) is None:
                return False
            answer = await client.send(leader, request)
            ((_, ((_, code, *_),)),) = answer.topics
            assert code == 0 or for_code(code).retriable, for_code(code)
            return code == 0

        await eventually(written)


async def _leader(client: AIOKafkaClient, topic: Topic, partition: int) -> int | None:
    await client.force_metadata_update()
    found: dict[int, Any] = client.cluster._partitions.get(topic.value, {})
    leader = found[partition].leader if partition in found else -1
    return None if leader < 0 else int(leader)


async def letters(broker: Broker) -> set[int]:
    """Offsets of what was refused."""
    found = [read_json(record.value or b"", DeadLetter) for record in await dump(broker, Topic.DEAD_LETTER)]
    return {letter.offset for letter in found}


async def spoiled(broker: Broker, topic: Topic) -> None:
    """Records 0 to 3 are no events; the names of a header of 1 and 2 are no UTF-8."""
    await produce(broker, [Written(topic, b"{", partition=0)])
    await write(broker, topic, log([[b"a\xff", b"\xed\xa0\x80"]], 0))
    await produce(broker, [Written(topic, b"{", partition=0)])


@pytest.mark.parametrize(("worker", "topic"), [("measure", Topic.REQUESTS), ("pair", Topic.LOGITS)])
async def test_workers_read_past_names_that_are_not_utf8(
    kafka: Broker, log_folder: Path, worker: str, topic: Topic
) -> None:
    await spoiled(kafka, topic)
    async with Worker(worker, kafka, log_folder) as process:

        async def all_refused() -> bool:
            return await letters(kafka) == {0, 1, 2, 3}

        await eventually(all_refused)
        assert await process.stop() == 0, process.log


async def test_known_bad_aiokafka_as_it_comes_never_passes_them(kafka: Broker, log_folder: Path) -> None:
    await spoiled(kafka, Topic.REQUESTS)
    command = (*UNPATCHED, "worker", "measure")
    async with Worker("measure", kafka, log_folder, command=command) as process:
        await process.until_log("UnicodeDecodeError")
        assert await letters(kafka) <= {0}


async def test_a_router_reads_past_them(kafka: Broker) -> None:
    changes: asyncio.Queue[Change] = asyncio.Queue()
    stop = asyncio.Event()
    following = asyncio.create_task(
        Router(RouterSettings(kafka.bootstrap, "r"), changes.put_nowait).run(stop)
    )
    try:
        for topic in (0, 1, 2, 3):
            await write(kafka, Topic.CONTROL, log([[b"\xff"]], 0), topic)
        said = directive(1, 5.0, at_s=4_000_000_000)
        await produce(kafka, [Written(Topic.CONTROL, msgspec.json.encode(said), key=b"chat")])
        change = await asyncio.wait_for(changes.get(), 60)
        assert change.effective.weights == {"v1": 95.0, "v2": 5.0}
    finally:
        stop.set()
        await following


def most_resident_bytes(process: Worker) -> int:
    """The most memory that it ever held."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


SPOILT: dict[str, Callable[[], bytes]] = {
    "unpacks to more than 64 MiB": lambda: log([[b"a"]], ZSTD, zeros=BOMB_BYTES),
    "holds a record of more than 512 headers": lambda: batch([record(20_000_000)], ZSTD),
}


@pytest.mark.parametrize("spoilt", ["", *SPOILT])
async def test_a_batch_that_unpacks_to_too_much_costs_its_records_alone(
    kafka: Broker, log_folder: Path, spoilt: str
) -> None:
    """300 MiB in 10 kB, 20 million headers in 4 kB; memory stays what it is without."""
    await produce(kafka, [Written(Topic.REQUESTS, b"{", partition=0)])
    if spoilt:
        await write(kafka, Topic.REQUESTS, SPOILT[spoilt]())
    await produce(kafka, [Written(Topic.REQUESTS, b"{", partition=0)])
    async with Worker("measure", kafka, log_folder) as process:

        async def all_refused() -> bool:
            return await letters(kafka) == ({0, 2} if spoilt else {0, 1})

        await eventually(all_refused)
        if spoilt:
            await process.until_log(f"klaxon.requests/0: a batch at offset 1 to 1 {spoilt}")
        most = most_resident_bytes(process)
        print(f"most resident: {most >> 20} MiB")
        assert most < BOMB_BYTES
        assert await process.stop() == 0, process.log


async def test_millions_of_headers_cost_their_records_alone(embedded: Broker, log_folder: Path) -> None:
    """20 million in 4 kB would take 1.4 GB. This broker looks into no batch: one that lies gets there."""
    await fresh_topics(embedded)
    await produce(embedded, [Written(Topic.REQUESTS, b"{", partition=0)])
    for spoilt in (batch([record(20_000_000)], ZSTD), batch([record(600, said=1 << 30)])):
        await write(embedded, Topic.REQUESTS, spoilt)
    await produce(embedded, [Written(Topic.REQUESTS, b"{", partition=0)])
    async with Worker("measure", embedded, log_folder) as process:

        async def all_refused() -> bool:
            return await letters(embedded) == {0, 3}

        await eventually(all_refused)
        for offset in (1, 2):
            batch_at = f"klaxon.requests/0: a batch at offset {offset} to {offset}"
            await process.until_log(f"{batch_at} holds a record of more than 512 headers")
        assert most_resident_bytes(process) < BOMB_BYTES
        assert await process.stop() == 0, process.log
