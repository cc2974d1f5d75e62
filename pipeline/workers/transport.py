"""Faust, and all we ask of it: a consumer group, its assignment, records as bytes, sends, a life cycle.

Numbers never come from Faust: no acks, tables, windows or joins (they lose or double events in the pinned
version). Offsets are committed by us, reads are `read_committed` with a short fetch wait, an error ends the
process. The private names used here are listed in PRIVATE_NAMES and touched by a test against the exact pins.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import faust
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from faust.types import TP
from mode.supervisors import CrashingSupervisor

from pipeline.config import KafkaConfig
from pipeline.errors import PipelineError
from pipeline.workers.broker import isolation, wait_for_topics
from pipeline.workers.faults import fault
from pipeline.workers.records import Partition, Record
from pipeline.workers.watchdog import Watchdog, end_process
from schemas.topics import CONTENT_TYPE, Topic

log = logging.getLogger("klaxon.transport")

PRIVATE_NAMES: Final = {
    "faust.app.base.App": ("_new_transport", "_create_directories"),
    "faust.transport.consumer.Consumer": ("_commit_offsets",),
    "faust.transport.consumer.ThreadDelegateConsumer": ("_thread", "_new_consumer_thread"),
    "faust.transport.drivers.aiokafka.AIOKafkaConsumerThread": (
        "_create_worker_consumer",
        "_ensure_consumer",
    ),
    "aiokafka.AIOKafkaConsumer": ("_isolation_level", "_fetch_max_wait_ms", "_subscription"),
}

YEAR_S: Final = 31_536_000
"""Poll interval: back-pressure longer than it would stop the worker silently, for good."""
BUFFERED_RECORDS: Final = 128
FETCH_BYTES: Final = 4 << 20
REQUEST_TIMEOUT_S: Final = 40.0
LINGER_S: Final = 0.01
STALL_S: Final = 60
"""Without a turn of the loop, or with records waiting and none read, for this long, the process ends."""
STOP_GRACE_S: Final = 10.0
"""On top of the rebalance timeout: a stop while joining a group ends only when the join ends."""

OK: Final = 0
CRASHED: Final = 1


class Processor(Protocol):
    """What a worker does. Every call comes from the one event loop; `read` gets one record at a time.

    An exception from any of them ends the process: whoever restarts it resumes at the commit.
    """

    async def assigned(self, places: frozenset[Partition]) -> None:
        """These partitions are ours now, all of them; may be called with some we had. Must return soon."""

    async def revoked(self, places: frozenset[Partition]) -> None:
        """These partitions may be somebody else's from now on. Must return soon."""

    async def read(self, record: Record) -> None:
        """The next record; while it awaits, nothing further is read (back-pressure)."""

    async def run(self) -> None:
        """Work between records: flushes, ticks, leases. Cancelled at stop."""

    async def stop(self) -> None:
        """The last call before the group is left, after `run` was cancelled."""


class _CommittedReads(AIOKafkaConsumerThread):
    """Faust's consumer thread, reading committed records only and without its fetch wait of 1.5 s."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = isolation(self.app.kafka)
        consumer._fetch_max_wait_ms = self.app.kafka.fetch_wait_ms
        return consumer


class _Consumer(Consumer):
    def _new_consumer_thread(self) -> AIOKafkaConsumerThread:
        return _CommittedReads(self, loop=self.loop, beacon=self.beacon)


class _Transport(Transport):
    Consumer: ClassVar[type[Consumer]] = _Consumer


class KlaxonApp(faust.App):
    """A Faust app with our transport, and without the folders Faust makes for tables."""

    def __init__(self, group: str, kafka: KafkaConfig, *, new_groups_start_at_end: bool = False) -> None:
        self.kafka = kafka
        session_s = kafka.session_timeout_ms / 1000
        super().__init__(
            group,
            broker=";".join(f"kafka://{server}" for server in kafka.bootstrap.split(",")),
            web_enabled=False,
            key_serializer="raw",
            value_serializer="raw",
            agent_supervisor=CrashingSupervisor,
            stream_wait_empty=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            stream_buffer_maxsize=BUFFERED_RECORDS,
            consumer_max_fetch_size=FETCH_BYTES,
            consumer_auto_offset_reset="latest" if new_groups_start_at_end else "earliest",
            broker_session_timeout=session_s,
            broker_heartbeat_interval=session_s / 5,
            broker_rebalance_timeout=kafka.rebalance_timeout_ms / 1000,
            broker_request_timeout=max(REQUEST_TIMEOUT_S, session_s),
            broker_max_poll_interval=YEAR_S,
            producer_request_timeout=REQUEST_TIMEOUT_S,
            producer_linger=LINGER_S,
            producer_compression_type="lz4",
        )

    def _new_transport(self) -> Transport:
        return _Transport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Position:
    """How far a partition is fetched, and how far it reaches (committed records), at the last fetch."""

    next_offset: int
    end_offset: int

    @property
    def at_end(self) -> bool:
        return self.next_offset >= self.end_offset


class Link:
    """What a processor may ask of the transport. Use it from the event loop only."""

    def __init__(self, app: KlaxonApp) -> None:
        self._app = app

    async def send(
        self,
        topic: Topic,
        value: bytes,
        *,
        key: bytes | None,
        content_type: str,
        partition: int | None = None,
    ) -> Awaitable[Any]:
        """Hand a record to the producer; blocks only while its buffer is full.

        Await what it returns for the acknowledgement (`acks=all`); without one that raises aiokafka's error.
        """
        headers = [(CONTENT_TYPE, content_type.encode())]
        sent: Awaitable[Any] = await self._app.producer.send(
            topic.value, key, value, partition, None, headers
        )
        return sent

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit the next offset to read per partition; partitions that are no longer ours are left out.

        Everything sent before it should be acknowledged by then: this flushes, but does not look at results.
        False: not committed, the group has rebalanced; what was not committed is read again.
        """
        committed: bool = await self._app.consumer._commit_offsets(
            {TP(*place): offset for place, offset in offsets.items()}
        )
        return committed

    def position(self, place: Partition) -> Position | None:
        """None before the first fetch after an assignment, or when the partition is not ours."""
        consumer = self._app.consumer._thread._ensure_consumer()
        subscription = consumer._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None or TP(*place) not in assignment.tps:
            return None
        state = assignment.state_value(TP(*place))
        end = state.lso if self._app.kafka.transactions else state.highwater
        if end is None or not state.has_valid_position:
            return None
        return Position(state.position, end)


MakeProcessor = Callable[[Link, Mapping[Topic, int]], Processor]
"""Builds the processor, given the link and the partition count of every topic it needs."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker: its group, what it reads, what else must exist, and what it does."""

    name: str
    reads: tuple[Topic, ...]
    needs: tuple[Topic, ...]
    make: MakeProcessor
    new_groups_start_at_end: bool = False

    @property
    def group(self) -> str:
        """The consumer group, one per kind of worker: a backlog in one never stops the others."""
        return f"klaxon-{self.name}"


class Runner:
    """Runs one worker in this process, from waiting for the broker to leaving the group."""

    def __init__(self, spec: WorkerSpec, kafka: KafkaConfig) -> None:
        self._spec = spec
        self._kafka = kafka
        self._watchdog = Watchdog(STALL_S)
        self._told_to_stop = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places: frozenset[Partition] = frozenset()
        self._reads = 0
        self._reading = False

    async def run(self) -> int:
        """Until SIGTERM or SIGINT (returns OK) or an error (logged; returns CRASHED). Blocks that long."""
        self._install_signals()
        self._watchdog.start()
        beating = asyncio.create_task(self._beat())
        working = asyncio.create_task(self._work())
        told_to_stop = asyncio.create_task(self._told_to_stop.wait())
        await asyncio.wait([working, told_to_stop], return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        grace_s = self._kafka.rebalance_timeout_ms / 1000 + STOP_GRACE_S
        await asyncio.wait([working], timeout=grace_s)
        self._watchdog.stop()
        if not working.done():
            end_process(f"not stopped within {grace_s:g} s")
        beating.cancel()
        told_to_stop.cancel()
        if working.cancelled():
            return OK
        error = working.exception()
        if isinstance(error, PipelineError):
            log.error("%s: %s", self._spec.name, error)
        else:
            log.error("%s: ended by an error", self._spec.name, exc_info=error)
        return CRASHED

    async def _work(self) -> None:
        counts = await wait_for_topics(self._kafka, dict.fromkeys(self._spec.reads + self._spec.needs))
        app = KlaxonApp(
            self._spec.group, self._kafka, new_groups_start_at_end=self._spec.new_groups_start_at_end
        )
        link = Link(app)
        processor = self._spec.make(link, counts)
        self._connect(app, processor)
        try:
            await _first_end_of(
                self._serve(app, processor, link), self._until_failed(), self._until_crashed(app)
            )
        finally:
            await processor.stop()
            await app.stop()

    async def _serve(self, app: KlaxonApp, processor: Processor, link: Link) -> None:
        await app.start()
        log.info("%s: ready", self._spec.name)
        await _first_end_of(processor.run(), self._watch_fetching(link))

    async def _until_failed(self) -> None:
        await self._failed

    @staticmethod
    async def _until_crashed(app: KlaxonApp) -> None:
        await app.wait_until_stopped()
        raise app.crash_reason or RuntimeError("Faust stopped by itself")

    async def _guarded(self, call: Awaitable[None]) -> None:
        """An error of ours ends the process; Faust would log it many times over, and go on."""
        try:
            await call
        except Exception as error:  # noqa: BLE001 (handed on, whatever it is)
            if not self._failed.done():
                self._failed.set_exception(error)

    def _connect(self, app: KlaxonApp, processor: Processor) -> None:
        """Tie the processor to Faust's one agent and its two signals."""

        async def read_all(stream: Any) -> None:
            async for event in stream.noack().events():
                await self._read(processor, event.message)

        async def assigned(_app: Any, assigned: Iterable[TP], **_: Any) -> None:
            self._places = _places_of(assigned)
            await self._guarded(processor.assigned(self._places))
            log.info("%s: assigned %s", self._spec.name, _listed(self._places))
            fault("on_assigned")

        async def revoked(_app: Any, revoked: Iterable[TP], **_: Any) -> None:
            places = _places_of(revoked)
            self._places -= places
            await self._guarded(processor.revoked(places))
            log.info("%s: revoked %s", self._spec.name, _listed(places))
            fault("on_revoked")

        app.agent(app.topic(*(topic.value for topic in self._spec.reads)))(read_all)
        app.on_partitions_assigned.connect(assigned)
        app.on_partitions_revoked.connect(revoked)

    async def _read(self, processor: Processor, message: Any) -> None:
        if self._failed.done():
            return  # what comes after a record that failed must not be processed
        record = Record(
            topic=Topic(message.topic),
            partition=message.partition,
            offset=message.offset,
            append_us=round(message.timestamp * 1_000_000),
            timestamp_type=message.timestamp_type,
            headers=dict(message.headers or ()),
            key=message.key,
            value=message.value or b"",
        )
        self._reading = True
        await self._guarded(processor.read(record))
        self._reading = False
        self._reads += 1
        fault("after_read")

    async def _beat(self) -> None:
        while True:
            self._watchdog.beat()
            await asyncio.sleep(0.5)

    async def _watch_fetching(self, link: Link) -> None:
        """End the process when records have waited for STALL_S checks in a row and none was being read."""
        idle_checks, seen_reads = 0, self._reads
        while True:
            await asyncio.sleep(1)
            waiting = [
                place
                for place in self._places
                if (position := link.position(place)) is not None and not position.at_end
            ]
            idle = bool(waiting) and not self._reading and self._reads == seen_reads
            idle_checks, seen_reads = (idle_checks + 1 if idle else 0), self._reads
            if idle_checks >= STALL_S:
                end_process(f"{_listed(waiting)}: records wait and none was read for {STALL_S} s")

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._told_to_stop.is_set():
            end_process(f"second {number.name}")
        log.info("%s: %s, leaving the group", self._spec.name, number.name)
        self.stop()

    def stop(self) -> None:
        """Make `run` leave the group and return OK; does not wait."""
        self._told_to_stop.set()


def run_worker(spec: WorkerSpec, kafka: KafkaConfig) -> int:
    """Run a worker until it is told to stop (exit code 0) or fails (1); blocks."""

    async def run() -> int:
        return await Runner(spec, kafka).run()

    return asyncio.run(run())


async def _first_end_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run them together until one ends, which none should; raises its error. Leaves none running."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _places_of(partitions: Iterable[TP]) -> frozenset[Partition]:
    return frozenset(Partition(*partition) for partition in partitions)


def _listed(places: Iterable[Partition]) -> str:
    return ", ".join(str(place) for place in sorted(places)) or "nothing"
