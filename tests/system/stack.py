"""The installation under test: topics, worker processes, a follower of every topic, and traffic into it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import ConsumerRecord

from schemas.topics import CONTENT_TYPE, GATING_PARTITIONS, JSON, TICK, Topic, gating_partition
from tests import oracle
from tests.conftest import REPOSITORY
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import committed_offsets, delete_topics
from tests.kafka.waiting import eventually
from tests.system.decisions import differences
from tests.system.judge import Log, decode_final
from tests.system.workload import PARTITIONS, Batch, Traffic, command, make_traffic, spec

SECOND: Final = 1_000_000
LATENESS_S: Final = 1
PATIENCE_S: Final = 300.0
"""Before a condition counts as never met: no measure of speed, machines may be busy."""
PATIENCE_MS: Final = 300_000
JOIN_TIMEOUT_S: Final = 3
ASKING: Final = (sys.executable, "-m", "tests.system.asking")
Consumed = ConsumerRecord[bytes, bytes]
Place = tuple[str, int]
SOURCES: Final = (Topic.REQUESTS, Topic.LOGITS, Topic.TELEMETRY)
NOBODY_DIES: Final = {"KLAXON_KAFKA_SESSION_TIMEOUT_MS": "30000"}
"""Where no worker is to lose its partitions: a machine that stands still for seconds costs none either."""
ARCHIVED: Final = (*SOURCES, Topic.PAIRS, Topic.BUCKETS, Topic.DECISIONS)
FOLLOWED: Final = (
    *SOURCES, Topic.BUCKETS, Topic.PAIRS, Topic.COMMANDS, Topic.CONTROL, Topic.DECISIONS, Topic.DEAD_LETTER,
)  # fmt: skip


@dataclass
class Sent:
    """What was acknowledged: which batch stands at which offset."""

    batches: dict[tuple[str, int, int], Batch] = field(default_factory=dict)
    aborted: int = 0
    behind_us: int = 0
    """How late the last batch of a roll-out was at worst: a machine that is too slow for this test."""


class Follower:
    """Reads every topic, committed records only, and lets a test wait for what it reads."""

    def __init__(self, broker: Broker) -> None:
        self.records: dict[Place, list[Consumed]] = {}
        self.decisions: dict[str, list[dict[str, Any]]] = {}
        """By roll-out, in order."""
        self.closed: dict[tuple[str, int, int], int] = {}
        """(source topic, partition, gating partition) → newest second said to be closed."""
        self._changed = asyncio.Event()
        self._consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
            bootstrap_servers=broker.bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            fetch_max_wait_ms=100,
        )

    async def __aenter__(self) -> Follower:
        await self._consumer.start()
        cluster = self._consumer._client.cluster

        async def knows_all() -> bool:  # one of several brokers may hear of a topic later than another
            await self._consumer._client.force_metadata_update()
            return {topic.value for topic in FOLLOWED} <= cluster.topics()

        await eventually(knows_all)
        places = [
            TopicPartition(topic.value, number)
            for topic in FOLLOWED
            for number in sorted(cluster.partitions_for_topic(topic.value) or ())
        ]
        self.records = {(place.topic, place.partition): [] for place in places}
        self._consumer.assign(places)
        await self._consumer.seek_to_beginning(*places)
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.stop()

    async def stop(self) -> None:
        """Disconnect; harmless when it never began."""
        await self._consumer.stop()

    async def _read(self) -> None:
        while True:
            for place, records in (await self._consumer.getmany(timeout_ms=500)).items():
                self.records[place.topic, place.partition] += records
                for record in records:
                    self._index(record)
            self._changed.set()

    def _index(self, record: Consumed) -> None:
        if record.topic == Topic.DECISIONS:
            said = json.loads(record.value)
            self.decisions.setdefault(record.key.decode(), []).append(said)
        elif record.topic == Topic.BUCKETS:
            final = decode_final(record.value)
            if final.part + 1 == final.parts:
                source = (final.topic, final.partition, final.gating_partition)
                self.closed[source] = max(self.closed.get(source, -1), final.closed_through)

    def of(self, topic: Topic) -> list[Consumed]:
        """All records of a topic so far, by partition and offset."""
        return [
            record for (name, _), found in sorted(self.records.items()) if name == topic for record in found
        ]

    async def until(self, done: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `done()`, asked whenever something was read; fails saying what did not come."""
        deadline_s = time.monotonic() + timeout_s
        while not done():
            if self._task.done():
                self._task.result()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s:g} s: {what}")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._changed.wait()

    async def caught_up(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until everything that is committed now was read."""
        places = [TopicPartition(*place) for place in self.records]
        ends = await self._consumer.end_offsets(places)
        deadline_s = time.monotonic() + timeout_s
        for place in places:
            while await self._consumer.position(place) < ends[place]:
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"{place}: not read up to {ends[place]} within {timeout_s:g} s")
                await asyncio.sleep(0.05)


@dataclass
class Stack:
    """One broker with its topics, a folder for the archive, and the workers that a test starts."""

    broker: Broker
    folder: Path
    follower: Follower
    producer: AIOKafkaProducer
    transactions: AIOKafkaProducer
    sent: Sent = field(default_factory=Sent)
    started: list[Worker] = field(default_factory=list)
    cells_per_bucket: int = 2048
    variables: Mapping[str, str] = field(default_factory=dict)
    """Configuration of the test's own, over all other. Without any the archive is chDB in the folder."""
    _one_transaction: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What workers are configured with besides the broker."""
        return {
            "KLAXON_KAFKA_SESSION_TIMEOUT_MS": "4000",
            "KLAXON_KAFKA_REBALANCE_TIMEOUT_MS": "6000",
            "KLAXON_CONTENT_LATENESS_S": str(LATENESS_S),
            "KLAXON_CONTENT_JOIN_TIMEOUT_S": str(JOIN_TIMEOUT_S),
            "KLAXON_GATE_RENEW_S": "1",
            "KLAXON_GATE_LEASE_S": "5",
            # A gate that was kept from judging for long must not raise weights; here it is to say what it
            # would have said.
            "KLAXON_GATE_BLIND_AFTER_S": "3600",
            "KLAXON_ARCHIVE_BLOCK_AGE_MS": "500",
            "KLAXON_CONTENT_CELLS_PER_BUCKET": str(self.cells_per_bucket),
            "KLAXON_CLICKHOUSE_DSN": f"chdb://{self.folder / 'archive'}",
            **self.variables,
        }

    @property
    def settings(self) -> oracle.Settings:
        """The same configuration for the oracle."""
        return oracle.Settings(
            LATENESS_S * SECOND, JOIN_TIMEOUT_S * SECOND, cells_per_bucket=self.cells_per_bucket
        )

    def log(self) -> Log:
        """Everything read so far."""
        return Log(self.follower.records, self.sent.batches, self.settings)

    def worker(
        self, kind: str, *, fault: str | None = None, command: tuple[str, ...] | None = None
    ) -> Worker:
        """A worker that is not started yet; `command`: a test's own way of being that worker."""
        made = Worker(
            kind,
            self.broker,
            self.folder,
            fault=fault,
            environment=self.environment,
            command=command,
        )
        self.started.append(made)
        return made

    async def klaxon(self, *arguments: str) -> str:
        """Run a command to its end; returns its standard output. Fails if the command does."""
        return await self._run(*KLAXON, *arguments)

    async def _run(self, *command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=REPOSITORY,
            env={**_plain_environment(), **self.broker.environment, **self.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 0, f"{' '.join(command)}: {process.returncode}\n{err.decode()}"
        return out.decode()

    async def query(self, *queries: str) -> dict[str, list[list[Any]]]:
        """Rows of queries on the archive, which no worker may hold open; one process asks them all."""
        answers: list[list[list[Any]]] = json.loads(await self._run(*ASKING, *queries))
        return dict(zip(queries, answers, strict=True))

    async def command(self, traffic: Traffic, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Send an operator's command and wait for the decision that answers it."""
        await self.order(traffic.rollout, name, arguments)

    async def order(self, rollout: str, name: str, arguments: dict[str, Any] | None = None) -> None:
        """`command`, of a roll-out that has no traffic of a seed."""
        key, value = command(rollout, name, now_us(), arguments)
        await self.producer.send_and_wait(
            Topic.COMMANDS.value,
            value,
            key=key,
            partition=gating_partition(rollout),
            headers=[(CONTENT_TYPE, JSON.encode()), keys.command_header(key, value)],
        )
        wanted = f"{rollout}/{name}"
        await self.follower.until(
            lambda: any(
                decision.get("command_id") == wanted for decision in self.follower.decisions.get(rollout, ())
            ),
            f"an answer to {wanted}",
        )

    async def start_rollout(self, traffic: Traffic) -> None:
        """Its start command, answered."""
        await self.command(traffic, "start", {"spec": spec(traffic)})

    async def play(self, traffic: Traffic, generation: int = 1) -> None:
        """Send a generation's traffic in real time; returns when all of it is acknowledged."""
        # Made in a thread, and before its first event: traffic that is sent too late is only late.
        start_us = now_us() + SECOND
        batches = await asyncio.to_thread(make_traffic, traffic, start_us, generation)
        waiting = []
        for batch in batches:
            if (left_us := batch.at_us - now_us()) > 0:
                await asyncio.sleep(left_us / SECOND)
            if batch.transaction is None:
                waiting.append((batch, await _send(self.producer, batch)))
            else:
                await self._transact(batch)
        self.sent.behind_us = max(self.sent.behind_us, now_us() - batches[-1].at_us)
        for batch, acknowledged in waiting:
            self._note(batch, await acknowledged)

    async def _transact(self, batch: Batch) -> None:
        async with self._one_transaction:
            await self.transactions.begin_transaction()
            at = await (await _send(self.transactions, batch))
            if batch.transaction == "aborted":
                await self.transactions.abort_transaction()
                self.sent.aborted += 1
            else:
                await self.transactions.commit_transaction()
                self._note(batch, at)

    def _note(self, batch: Batch, at: Any) -> None:
        self.sent.batches[at.topic, at.partition, at.offset] = batch

    async def until_closed(self, through_us: int, sources: Iterable[Topic] = SOURCES) -> None:
        """Wait until every source has closed the second of this time for every gating partition."""
        second = through_us // SECOND
        wanted = [
            (topic.value, partition, gating)
            for topic in sources
            for partition in range(PARTITIONS)
            for gating in range(GATING_PARTITIONS)
        ]
        closed = self.follower.closed

        def done() -> bool:
            return all(closed.get(source, -1) >= second for source in wanted)

        try:
            await self.follower.until(done, f"second {second} closed")
        except AssertionError as error:
            raise AssertionError(f"{error}; closed: {closed}\n{self.tails()}") from None

    async def until_archived(self, log: Log) -> None:
        """Wait until the archive has committed past the last record that leaves a row, of every topic."""
        last = {
            TopicPartition(*place): max(record.offset for record in records if _leaves_rows(record))
            for place, records in log.records.items()
            if place[0] in ARCHIVED and any(map(_leaves_rows, records))
        }

        async def done() -> bool:
            return await self.has_committed("klaxon-archive", last)

        await eventually(done, timeout_s=PATIENCE_S)

    async def has_committed(self, group: str, offsets: Mapping[TopicPartition, int]) -> bool:
        """Whether a group has committed past all of these."""
        committed = await committed_offsets(self.broker, group, list(offsets))
        return all(committed.get(f"{at.topic}/{at.partition}", 0) > offset for at, offset in offsets.items())

    def tails(self) -> str:
        """The ends of all logs, for a message."""
        return "\n".join(f"--- {worker.log_path.name}\n{worker.log[-1500:]}" for worker in self.started)


@asynccontextmanager
async def stack(
    broker: Broker,
    folder: Path,
    cells_per_bucket: int = 2048,
    prepare: Callable[[], Awaitable[object]] | None = None,
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[Stack]:
    """Topics from nothing, created by the command that operators use; every process is gone at the end.

    `prepare`: called when there is no topic, for those that are to be other than the command would make them.
    """
    await delete_topics(broker)
    if prepare is not None:
        await prepare()
    async with AsyncExitStack() as exits:
        # It must know where everything went, brokers broken or not: it tries for longer than they are away.
        patient = {"bootstrap_servers": broker.bootstrap, "acks": "all", "request_timeout_ms": PATIENCE_MS}
        producer = AIOKafkaProducer(**patient, enable_idempotence=True)
        transactions = AIOKafkaProducer(
            **patient, transactional_id=f"foreign-{time.monotonic_ns()}", transaction_timeout_ms=PATIENCE_MS
        )
        made = Stack(
            broker,
            folder,
            Follower(broker),
            producer,
            transactions,
            cells_per_bucket=cells_per_bucket,
            variables=variables or {},
        )
        for client in (producer, transactions, made.follower):
            exits.push_async_callback(client.stop)
        await asyncio.gather(made.klaxon("topics", "create"), made.klaxon("migrate"))
        for client in (producer, transactions):
            await client.start()
        await exits.enter_async_context(made.follower)
        exits.push_async_callback(_end_all, made)
        yield made


def _leaves_rows(record: Consumed) -> bool:
    return dict(record.headers).get(CONTENT_TYPE) != TICK.encode()


async def _end_all(made: Stack) -> None:
    for worker in made.started:
        if worker.running:
            worker.thaw()
            await worker.kill()


async def _send(producer: AIOKafkaProducer, batch: Batch) -> Any:
    headers = [] if batch.content_type is None else [(CONTENT_TYPE, batch.content_type.encode())]
    return await producer.send(batch.topic.value, batch.value, partition=batch.partition, headers=headers)


async def settled(on: Stack, seeds: Sequence[Traffic]) -> Log:
    """Everything there is, once the gate has decided all that the seconds closed by now decide.

    What it does not decide within a quarter of a minute after it has read them is for the judge to name.
    """
    await on.follower.caught_up()
    log = on.log()
    evidence = await asyncio.to_thread(log.evidence)
    checked, answer = -1, False

    def decided() -> bool:
        nonlocal checked, answer
        count = sum(map(len, on.follower.decisions.values()))
        if count != checked:
            checked = count
            said = on.follower.decisions
            answer = not any(differences(evidence, each, said[each.rollout]) for each in seeds)
        return answer

    async def heard() -> bool:
        return decided() or await on.has_committed("klaxon-gate", finals)

    finals = {
        TopicPartition(*place): records[-1].offset
        for place, records in log.records.items()
        if place[0] == Topic.BUCKETS and records
    }
    await eventually(heard, timeout_s=PATIENCE_S)
    with contextlib.suppress(AssertionError):
        await on.follower.until(decided, "the oracle's decisions", timeout_s=15)
    await on.follower.caught_up()
    return log.later(on.follower.records)


def now_us() -> int:
    """Wall clock, in µs."""
    return time.time_ns() // 1000


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KLAXON_")}
