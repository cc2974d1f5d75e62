"""Faust, and all we ask of it: a consumer group, its assignment, records as bytes, sends, a life cycle.

Numbers never come from Faust: no acks, tables, windows or joins (they lose or double events in the pinned
version). Offsets are committed by us, reads are `read_committed` with a short fetch wait, an error ends the
process. The private names used here are listed in PRIVATE_NAMES and touched by a test against the exact pins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import faust
from aiokafka.structs import ConsumerRecord
from faust.auth import Credentials, SASLCredentials, SSLCredentials
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from faust.types import TP
from faust.types.transports import SchedulingStrategyT
from faust.types.tuples import ConsumerMessage
from mode.supervisors import CrashingSupervisor
from mode.threads import ServiceThread

from pipeline.config import HEARTBEATS_PER_SESSION, KafkaConfig
from pipeline.workers import answers  # noqa: F401 (its import is what it does)
from pipeline.workers.broker import as_record, isolation, security_options
from pipeline.workers.records import Partition, Record
from schemas import header_names  # noqa: F401 (its import is what it does)
from schemas.topics import CONTENT_TYPE, Topic

PRIVATE_NAMES: Final = {
    "faust.app.base.App": ("_new_transport", "_create_directories"),
    "faust.transport.consumer.Consumer": ("_to_message", "scheduler"),
    "faust.transport.consumer.ThreadDelegateConsumer": ("_commit", "_thread", "_new_consumer_thread"),
    "mode.threads.ServiceThread": ("_thread",),
    "faust.transport.drivers.aiokafka.AIOKafkaConsumerThread": (
        "_create_worker_consumer",
        "_ensure_consumer",
        "_commit",
    ),
    "aiokafka.AIOKafkaConsumer": (
        "_isolation_level",
        "_fetch_max_wait_ms",
        "_fetch_min_bytes",
        "_subscription",
    ),
}

YEAR_S: Final = 31_536_000
"""Poll interval: back-pressure longer than it would stop the worker silently, for good."""
POLLED_RECORDS: Final = 32
"""Records unpacked at once on their way to the buffer. Faust's default is all that were fetched, and a fetch
of compressed records unpacks to many times its size."""
RUN_BYTES: Final = 2 << 20
"""What passes through Faust as one message, unless it is one record that is larger."""
BUFFERED_RUNS: Final = 16
"""Of those, how many wait at most to be read."""
FETCH_BYTES: Final = 4 << 20
PATIENT_BYTES: Final = 1 << 19
PATIENT_WAIT_MS: Final = 500
"""What a patient reader's fetches wait for at the broker. Others are answered at the first new record of any
partition: of a busy archive hundreds a second, which broker and reader both pay for."""
REQUEST_TIMEOUT_S: Final = 40.0
LINGER_S: Final = 0.0
"""What is sent in one turn of the loop leaves together without it, and more only while nothing is under way.
aiokafka lets each partition's batch wait from its own first record on, which tears a flush into several
requests and delays them all."""
BATCH_BYTES: Final = 1 << 18
"""What a flush sends to a partition leaves in one request, as far as it fits; aiokafka's own is 16 KiB."""
COMPRESSION: Final = "snappy"
"""Of what we publish: 2 ns a byte, to 0.37 of the size. lz4 (at aiokafka's fixed level 9) takes 10 to 40 ns,
to 0.30; zstd 4 to 7 ns, to 0.26; readers pay the same for each."""
METADATA_AGE_MS: Final = 5_000
"""How long a partition without a commit may go unread after its leader has moved: aiokafka asks the old
leader for its first offset again and again, and learns of another at this age alone (its own: 5 min)."""


class _CommittedReads(AIOKafkaConsumerThread):
    """Faust's consumer thread, reading committed records only and without its fetch wait of 1.5 s."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = isolation(self.app.kafka)
        consumer._fetch_max_wait_ms = self.app.kafka.fetch_wait_ms
        if self.app.patient:
            consumer._fetch_max_wait_ms = max(PATIENT_WAIT_MS, self.app.kafka.fetch_wait_ms)
            consumer._fetch_min_bytes = PATIENT_BYTES
        return consumer

    async def stop(self) -> None:
        """As mode's, which waits for its thread without turning the loop; a rebalance there needs it."""
        if self._started.is_set():
            await super(ServiceThread, self).stop()
            if self._thread is not None:
                await asyncio.to_thread(self._thread.stop)

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        """As Faust's, which crashes when all of these partitions were revoked on the way to this thread."""
        assigned = self.assignment()
        return any(place in assigned for place in offsets) and bool(await super()._commit(offsets))


class _Run(ConsumerMessage):
    """Records of a partition that follow each other; for Faust one message, at the offset of the last.

    Of each message Faust makes four tasks and turns of the loop: 0.2 ms.
    """

    __slots__ = ("records",)
    records: Sequence[ConsumerRecord[bytes, bytes]]


def _size(record: ConsumerRecord[bytes, bytes]) -> int:
    """Bytes of its content, which a producer may put into the key and headers as well."""
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


class _Runs(SchedulingStrategyT):
    """Cuts what a poll brought into runs."""

    def __init__(self) -> None:
        """Keeps nothing."""

    def iterate(self, records: Mapping[TP, list[Any]]) -> Iterator[tuple[TP, Any]]:
        """Partition and records of each."""
        for place, polled in records.items():
            first, held = 0, 0
            for number, record in enumerate(polled):
                size = _size(record)
                if held + size > RUN_BYTES and number > first:
                    yield place, polled[first:number]
                    first, held = number, 0
                held += size
            yield place, polled[first:]


class _Consumer(Consumer):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.scheduler = _Runs()

    def _to_message(self, tp: TP, record: Any) -> _Run:
        """`record`: one run's."""
        generation = self.app.consumer_generation_id
        run = _Run(*tp, record[-1].offset, 0, 0, None, None, b"", None, tp=tp, generation_id=generation)
        run.records = record
        return run

    def _new_consumer_thread(self) -> AIOKafkaConsumerThread:
        return _CommittedReads(self, loop=self.loop, beacon=self.beacon)


class _Transport(Transport):
    Consumer: ClassVar[type[Consumer]] = _Consumer


class KlaxonApp(faust.App):
    """A Faust app with our transport, and without the folders Faust makes for tables."""

    def __init__(
        self,
        group: str,
        kafka: KafkaConfig,
        *,
        new_groups_start_at_end: bool = False,
        patient: bool = False,
    ) -> None:
        """`patient`: rather few large reads than every record at once."""
        self.kafka = kafka
        self.patient = patient
        session_s = kafka.session_timeout_ms / 1000
        super().__init__(
            group,
            broker=";".join(f"kafka://{server}" for server in kafka.bootstrap.split(",")),
            broker_credentials=_credentials(kafka),
            web_enabled=False,
            key_serializer="raw",
            value_serializer="raw",
            agent_supervisor=CrashingSupervisor,
            stream_wait_empty=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            stream_buffer_maxsize=BUFFERED_RUNS,
            broker_max_poll_records=POLLED_RECORDS,
            consumer_max_fetch_size=FETCH_BYTES,
            consumer_auto_offset_reset="latest" if new_groups_start_at_end else "earliest",
            consumer_metadata_max_age_ms=METADATA_AGE_MS,
            broker_session_timeout=session_s,
            broker_heartbeat_interval=session_s / HEARTBEATS_PER_SESSION,
            broker_rebalance_timeout=kafka.rebalance_timeout_ms / 1000,
            broker_request_timeout=max(REQUEST_TIMEOUT_S, session_s),
            broker_max_poll_interval=YEAR_S,
            producer_request_timeout=REQUEST_TIMEOUT_S,
            producer_linger=LINGER_S,
            producer_max_batch_size=BATCH_BYTES,
            producer_compression_type=COMPRESSION,
        )

    def connect(
        self,
        topics: Iterable[Topic],
        *,
        read: Callable[[Record], Awaitable[None]],
        assigned: Callable[[frozenset[Partition]], Awaitable[None]],
        revoked: Callable[[frozenset[Partition]], Awaitable[None]],
    ) -> None:
        """Tie three functions to Faust's one agent and its two signals; once, before `start`.

        They must not raise: Faust would say so many times over, and go on.
        """

        async def read_all(stream: Any) -> None:
            async for event in stream.noack().events():
                await self._read(event.message, read)

        # Faust calls with these keywords: they shadow the functions of the same name.
        tell_assigned, tell_revoked = assigned, revoked

        async def on_assigned(_app: Any, assigned: Iterable[TP], **_: Any) -> None:
            await tell_assigned(_places(assigned))

        async def on_revoked(_app: Any, revoked: Iterable[TP], **_: Any) -> None:
            await tell_revoked(_places(revoked))

        # Without acks: else Faust keeps every gap of the offsets for ever, and merges all of them at each.
        self.agent(self.topic(*(topic.value for topic in topics), acks=False))(read_all)
        self.on_partitions_assigned.connect(on_assigned)
        self.on_partitions_revoked.connect(on_revoked)

    async def until_ended(self) -> None:
        """Wait until Faust stops by itself, which it does only in an error; raises that."""
        await self.wait_until_stopped()
        raise self.crash_reason or RuntimeError("Faust stopped by itself")

    async def _read(self, run: _Run, read: Callable[[Record], Awaitable[None]]) -> None:
        """Hand a run over, until the group rebalances: whoever has the partition then reads the rest."""
        for record in run.records:
            if not self.flow_control.is_active() or run.generation_id != self.consumer_generation_id:
                return
            await read(as_record(record))

    def _new_transport(self) -> Transport:
        return _Transport(self.conf.broker_consumer, self)

    def _create_directories(self) -> None:
        """None: Faust keeps nothing of ours on disk."""


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
        self.commits = 0
        self.commits_refused = 0
        self.dead_letters: dict[str, Counter[str]] = {}
        """Letters sent, by topic and reason."""

    @property
    def group(self) -> str:
        """The consumer group's id."""
        return str(self._app.conf.id)

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

        Everything that a commit rests on is acknowledged by then: this does not flush, as Faust would, which
        would wait for what is on its way to a partition without a leader.
        False: not committed, the group has rebalanced; what was not committed is read again.
        """
        ours = self._app.consumer.assignment()
        kept = {TP(*place): offset for place, offset in offsets.items() if TP(*place) in ours}
        committed = bool(kept) and bool(await self._app.consumer._commit(kept))
        self.commits += committed
        self.commits_refused += not committed
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


def _credentials(kafka: KafkaConfig) -> Credentials | None:
    """The options of our other clients, as Faust takes them."""
    options = security_options(kafka)
    if options["security_protocol"] == "PLAINTEXT":
        return None
    if options["security_protocol"] == "SSL":
        return SSLCredentials(options["ssl_context"])
    return SASLCredentials(
        username=options["sasl_plain_username"],
        password=options["sasl_plain_password"],
        mechanism=options["sasl_mechanism"],
        ssl_context=options.get("ssl_context"),
    )


def _places(partitions: Iterable[TP]) -> frozenset[Partition]:
    return frozenset(Partition(*partition) for partition in partitions)
