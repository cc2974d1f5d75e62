"""The broker outside Faust: connection options, waiting for it, reading a range of offsets once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import CoordinatorLoadInProgressError, KafkaConnectionError, KafkaError
from aiokafka.structs import ConsumerRecord

from pipeline.config import KafkaConfig
from pipeline.errors import PipelineError
from pipeline.tls import TlsFileError, client_context
from pipeline.workers.records import Partition, Record
from pipeline.workers.refusal import refusal
from schemas import header_names  # noqa: F401 (its import is what it does)
from schemas.plain import Log, Plain
from schemas.topics import Topic
from schemas.unpacking import AT_ONCE
from schemas.whole import whole

log: Log = logging.getLogger("klaxon.broker")

RETRY_FIRST_S: Final = 0.5
RETRY_LONGEST_S: Final = 15.0
REQUEST_TIMEOUT_MS: Final = 40_000
NOTICE_S: Final = 2.0
"""How long a command waits for the broker in silence."""
COORDINATOR_TRIES: Final = 8
STOP_AGAIN_S: Final = 1.0


class BrokerError(PipelineError):
    """The broker cannot be used as it is; the message names what is wrong, where, and the remedy."""


class BrokerAwayError(BrokerError):
    """The broker could not be reached."""


class RefusedError(BrokerError):
    """The broker refuses who we are or how we speak: waiting does not mend it."""


def away(kafka: KafkaConfig, error: Exception) -> BrokerAwayError:
    """What a client's error means to people: its own text names addresses in the client's types."""
    why = "" if isinstance(error, KafkaConnectionError) else f" ({error or type(error).__name__})"
    return BrokerAwayError(f"cannot reach Kafka at {kafka.bootstrap}{why}")


async def not_connected(kafka: KafkaConfig, error: Exception) -> BrokerError:
    """Why a client could not connect: RefusedError if the broker says so, else BrokerAwayError."""
    reason = await refusal(kafka.bootstrap, security_options(kafka))
    return away(kafka, error) if reason is None else RefusedError(reason)


def client_options(kafka: KafkaConfig) -> dict[str, Any]:
    """Connection options of every aiokafka client of ours. Raises RefusedError as `security_options` does."""
    return {
        "bootstrap_servers": kafka.bootstrap.split(","),
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        **security_options(kafka),
    }


def security_options(kafka: KafkaConfig) -> dict[str, Any]:
    """How aiokafka protects a connection and who it is there. Reads the certificates' files, small ones.

    They were in order when the configuration was read; RefusedError when they no longer are.
    """
    options: dict[str, Any] = {"security_protocol": kafka.security.upper()}
    if kafka.security in ("ssl", "sasl_ssl"):
        try:
            options["ssl_context"] = client_context(
                kafka.ca_file, kafka.certificate_file, kafka.key_file, kafka.key_password
            )
        except TlsFileError as error:
            raise RefusedError(f"kafka.{error.setting}: {error}") from None
    if kafka.security in ("sasl_ssl", "sasl_plaintext"):
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.username,
            "sasl_plain_password": kafka.password.reveal(),
        }
    return options


def isolation(kafka: KafkaConfig) -> str:
    """Every reader skips aborted and waits for open transactions, where the broker knows any."""
    return "read_committed" if kafka.transactions else "read_uncommitted"


@asynccontextmanager
async def bare_client(kafka: KafkaConfig) -> AsyncIterator[AIOKafkaClient]:
    """A connected client for requests that have no call of their own; raises as `admin_client` does."""
    client = AIOKafkaClient(**client_options(kafka))
    try:
        with quiet_aiokafka():
            try:
                await whole(client.bootstrap())
            except (KafkaError, OSError) as error:
                raise await not_connected(kafka, error) from None
        yield client
    finally:
        await whole(client.close())


class Startable(Protocol):
    """A producer or a consumer of aiokafka."""

    async def start(self) -> None:
        """Connect; raises aiokafka's KafkaError."""

    async def stop(self) -> None:
        """Disconnect; harmless when not started."""


Client = TypeVar("Client", bound=Startable)


@asynccontextmanager
async def started(client: Client) -> AsyncIterator[Client]:
    """The client while it is connected. However that ends, or where it cannot connect, nothing stays open."""
    try:
        with quiet_aiokafka():
            await whole(client.start())
        yield client
    finally:
        await whole(client.stop())


@asynccontextmanager
async def admin_client(kafka: KafkaConfig) -> AsyncIterator[AIOKafkaAdminClient]:
    """A started admin client; raises BrokerAwayError when the broker cannot be reached, else RefusedError."""
    admin = AIOKafkaAdminClient(**client_options(kafka))
    try:
        with quiet_aiokafka():
            try:
                await whole(admin.start())
            except (KafkaError, OSError) as error:
                raise await not_connected(kafka, error) from None
        yield admin
    finally:
        await whole(admin.close())


class quiet_aiokafka:  # noqa: N801 (used as a function)
    """Keeps aiokafka's own lines about a failed connection off the log: ours says it once, and clearer."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("aiokafka")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)


def back_off_s(attempt: int) -> float:
    """Seconds to wait after the n-th failure (from 0): doubling, at most RETRY_LONGEST_S, with jitter."""
    longest = min(RETRY_LONGEST_S, RETRY_FIRST_S * 2.0 ** min(attempt, 16))
    return longest * random.uniform(0.75, 1.0)  # noqa: S311 (jitter, not a secret)


T = TypeVar("T")


async def until_reached(kafka: KafkaConfig, operation: Callable[[KafkaConfig], Awaitable[T]]) -> T:
    """Do it, again with back-off while the broker is away, for at most `connect_timeout_s`.

    For commands, which cannot wait for ever; raises the last BrokerAwayError. Says that it waits (as a
    warning, on standard error where nothing else is set up) after NOTICE_S.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + kafka.connect_timeout_s
    notice = loop.call_later(NOTICE_S, log.warning, "waiting for Kafka at %s", Plain(kafka.bootstrap))
    attempt = 0
    try:
        while True:
            try:
                return await operation(kafka)
            except BrokerAwayError:
                delay_s = back_off_s(attempt)
                if loop.time() + delay_s > deadline_s:
                    raise
            await asyncio.sleep(delay_s)
            attempt += 1
    finally:
        notice.cancel()


async def partition_counts(kafka: KafkaConfig, topics: Iterable[Topic]) -> dict[Topic, int]:
    """Partitions of the topics that exist; raises BrokerAwayError."""
    async with admin_client(kafka) as admin:
        try:
            # All of them: a broker that creates topics on demand creates those that a request names.
            described = await admin.describe_topics()
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    wanted = {topic.value for topic in topics}
    return {
        Topic(topic["topic"]): len(topic["partitions"])
        for topic in described
        if topic["topic"] in wanted and topic["error_code"] == 0 and topic["partitions"]
    }


async def leaderless(kafka: KafkaConfig, topics: Iterable[Topic]) -> frozenset[Partition]:
    """Partitions that no broker leads: nobody reads or writes them. Raises BrokerAwayError."""
    async with admin_client(kafka) as admin:
        try:
            described = await admin.describe_topics()
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    wanted = {topic.value for topic in topics}
    return frozenset(
        Partition(topic["topic"], partition["partition"])
        for topic in described
        if topic["topic"] in wanted
        for partition in topic["partitions"]
        if partition["leader"] < 0
    )


def as_record(record: ConsumerRecord[bytes, bytes]) -> Record:
    """The record of an aiokafka consumer as ours."""
    return Record(
        topic=Topic(record.topic),
        partition=record.partition,
        offset=record.offset,
        append_us=record.timestamp * 1000,
        timestamp_type=record.timestamp_type,
        headers=dict(record.headers),
        key=record.key,
        value=record.value or b"",
    )


async def committed_offset(kafka: KafkaConfig, group: str, place: Partition) -> int | None:
    """What a group has committed for a partition; None if nothing. Raises aiokafka's KafkaError.

    Waits a while for a coordinator: on a new broker, and where one moves or its broker died, there is none
    for a moment.
    """
    partition = TopicPartition(*place)
    async with admin_client(kafka) as admin:
        for attempt in range(COORDINATOR_TRIES):
            try:
                found = await admin.list_consumer_group_offsets(group, partitions=[partition])
                # aiokafka drops an error of the whole answer: a coordinator that is still loading the group
                # says nothing about the partition, which is not "nothing committed".
                if (answer := found.get(partition)) is None:
                    raise CoordinatorLoadInProgressError
            except KafkaError as error:
                if not error.retriable or attempt == COORDINATOR_TRIES - 1:
                    raise
                await asyncio.sleep(back_off_s(attempt))
            else:
                return int(answer.offset) if answer.offset >= 0 else None
    raise AssertionError("the last try returns or raises")


class RangeReader:
    """Reads ranges of offsets, outside any consumer group. `start` before use, `stop` after."""

    def __init__(self, kafka: KafkaConfig, moved: Callable[[], None] = lambda: None) -> None:
        """`moved` is called whenever a read goes on."""
        self._moved = moved
        self._consumer: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
            **client_options(kafka),
            isolation_level=isolation(kafka),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=kafka.fetch_wait_ms,
            max_poll_records=AT_ONCE,
        )

    async def start(self) -> None:
        """Connect; raises aiokafka's KafkaConnectionError. What does not come to that leaves nothing open."""
        try:
            await whole(self._consumer.start())
        except BaseException:  # cancelled, too: a seat may be left while its reader connects
            await whole(self._consumer.stop())
            raise

    async def stop(self) -> None:
        """Disconnect; comes to an end in the midst of a read, too."""
        await whole(self._stopped())

    async def _stopped(self) -> None:
        # aiokafka's fetcher loses a cancellation that comes while it drops an old assignment, and whoever
        # stops it then waits for ever. Cancelling that wait cancels the fetcher anew.
        stopping = asyncio.create_task(self._consumer.stop())
        try:
            while not (await asyncio.wait([stopping], timeout=STOP_AGAIN_S))[0]:
                stopping.cancel()
        except asyncio.CancelledError:
            stopping.cancel()
            raise
        if not stopping.cancelled():
            stopping.result()

    async def end_offsets(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """First offset after the last readable record, per partition (read_committed: the stable end)."""
        ends = await self._consumer.end_offsets([TopicPartition(*place) for place in places])
        return {Partition(*place): offset for place, offset in ends.items()}

    async def begin_offsets(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """First offset that is still retained, per partition."""
        begins = await self._consumer.beginning_offsets([TopicPartition(*place) for place in places])
        return {Partition(*place): offset for place, offset in begins.items()}

    async def offsets_at(self, times_us: Mapping[Partition, int]) -> dict[Partition, int | None]:
        """First offset whose record time is not before the given one; None where there is none yet."""
        found = await self._consumer.offsets_for_times(
            {TopicPartition(*place): max(0, time_us // 1000) for place, time_us in times_us.items()}
        )
        return {Partition(*place): None if at is None else at.offset for place, at in found.items()}

    async def read(self, ranges: Mapping[Partition, tuple[int, int]]) -> AsyncIterator[Record]:
        """Every readable record with first ≤ offset < end, each partition in offset order.

        Ends when each partition's position has passed its end, so a range that holds nothing but markers and
        aborted records ends too.
        """
        open_ranges = {TopicPartition(*place): end for place, (first, end) in ranges.items() if first < end}
        if not open_ranges:
            return
        self._consumer.assign(list(open_ranges))
        for place in open_ranges:
            self._consumer.seek(place, ranges[Partition(*place)][0])
        while open_ranges:
            batches = await self._consumer.getmany(*open_ranges, timeout_ms=100)
            for place, records in batches.items():
                for record in records:
                    if record.offset < open_ranges[place]:
                        self._moved()
                        yield as_record(record)
            for place in list(open_ranges):
                if await self._consumer.position(place) >= open_ranges[place]:
                    self._moved()
                    del open_ranges[place]
