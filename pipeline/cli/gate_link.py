"""What commands say to the gate and read of it: commands out, decisions and memory in. Blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from pipeline.cli.exits import CommandError, Exit
from pipeline.config import Config, KafkaConfig
from pipeline.errors import PipelineError
from pipeline.signatures import key_for
from pipeline.trust_file import WatchedTrust
from pipeline.workers.acl_table import Operation
from pipeline.workers.broker import (
    BrokerAwayError,
    BrokerError,
    RangeReader,
    as_record,
    client_options,
    isolation,
    partition_counts,
    started,
    until_reached,
)
from pipeline.workers.records import Partition, Record
from pipeline.workers.rights import denial, lacking_rights
from schemas.control import Command, Decision
from schemas.records import read_json
from schemas.signing import SIGNATURE, Signer, Use, Verdict
from schemas.topics import CONTENT_TYPE, GATING_PARTITIONS, JSON, Topic, gating_partition
from schemas.unpacking import AT_ONCE

T = TypeVar("T")
POLL_MS: Final = 100
DATA: Final = (Operation.READ, Operation.WRITE, Operation.DESCRIBE)
"""Rights that commands need; those on settings are for others of the role."""


class UnansweredError(CommandError):
    """No gate answered a command in time; it stays in the log."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; an absent broker ends the command with exit code 3."""
    try:
        return asyncio.run(work)
    except BrokerAwayError as error:
        raise CommandError(f"{error}; check kafka.bootstrap", Exit.UNREACHABLE) from None
    except BrokerError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    except (KafkaError, OSError) as error:
        raise CommandError(f"the broker went away: {error}; try again", Exit.UNREACHABLE) from None


async def require_topics(
    kafka: KafkaConfig,
    topics: Iterable[Topic],
    *,
    role: str = "operator",
    to: Collection[Operation] = DATA,
) -> dict[Topic, int]:
    """Wait for the broker (BrokerAwayError after `connect_timeout_s`); returns how many partitions each has.

    A missing topic, or one of these rights if the role should have it there, ends the command.
    """
    wanted = tuple(topics)

    async def counts(of: KafkaConfig) -> dict[Topic, int]:
        return await partition_counts(of, wanted)

    found = await until_reached(kafka, counts)
    rights = await lacking_rights(kafka, role, wanted)
    if lacking := [right for right in rights if right[0] in to]:
        raise CommandError(denial(kafka, lacking, role), Exit.USAGE)
    missing = [topic.value for topic in wanted if topic not in found]
    if missing:
        raise CommandError(
            f"no topic {', '.join(missing)} at {kafka.bootstrap}: run `klaxon topics create`", Exit.USAGE
        )
    return found


def signer_of_commands(config: Config) -> Signer | None:
    """The key that signs commands; None where none is needed. A missing or wrong one ends the command."""
    try:
        key = key_for(config.signatures, Use.COMMANDS)
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    return None if key is None else key.signer


def believed_directives(config: Config) -> Callable[[Record], bool]:
    """Whether a record of the control topic is a gate's, for commands that only show it.

    Where no trust file is configured, every one counts. A wrong file ends the command.
    """
    if not config.signatures.required or config.signatures.trust_file is None:
        return lambda _: True
    try:
        trust = WatchedTrust(Path(config.signatures.trust_file)).trust
    except PipelineError as error:
        raise CommandError(str(error), Exit.USAGE) from None

    def believed(record: Record) -> bool:
        header, now_us = record.headers.get(SIGNATURE), time.time_ns() // 1000
        return trust.check(Topic.CONTROL, record.key, record.value, header, now_us) is Verdict.TRUSTED

    return believed


async def ask(kafka: KafkaConfig, command: Command, timeout_s: float, signer: Signer | None) -> Decision:
    """Send a command and wait for the decision that answers it. Raises UnansweredError."""
    await require_topics(kafka, (Topic.COMMANDS, Topic.DECISIONS))
    place = Partition(Topic.DECISIONS.value, gating_partition(command.rollout))
    reader = RangeReader(kafka)
    await reader.start()
    try:
        first = (await reader.end_offsets([place]))[place]
    finally:
        await reader.stop()
    await _send(kafka, command, signer)
    try:
        async with asyncio.timeout(timeout_s):
            async for record in follow(kafka, {place: first}):
                try:
                    decision = read_json(record.value, Decision)
                except msgspec.MsgspecError:
                    continue  # not the gate's
                if decision.command_id == command.command_id:
                    return decision
    except TimeoutError:
        pass
    raise UnansweredError(
        f"no gate answered within {timeout_s:g} s: is `klaxon worker gate` running? Does its trust file"
        " hold the key of this command? It stays in the log and is obeyed when a gate starts before it is too"
        " old (signatures.command_age_s); see `klaxon status`",
        Exit.UNREACHABLE,
    )


async def _send(kafka: KafkaConfig, command: Command, signer: Signer | None) -> None:
    topic, key, value = Topic.COMMANDS.value, command.rollout.encode(), msgspec.json.encode(command)
    headers = [(CONTENT_TYPE, JSON.encode())]
    if signer is not None:
        headers.append(signer.header(topic, key, value))
    async with started(AIOKafkaProducer(**client_options(kafka), acks="all")) as producer:
        await producer.send_and_wait(
            topic, value, key=key, partition=gating_partition(command.rollout), headers=headers
        )


async def follow(kafka: KafkaConfig, first: Mapping[Partition, int]) -> AsyncIterator[Record]:
    """Committed records of these partitions from these offsets on, without end."""
    made: AIOKafkaConsumer[bytes, bytes] = AIOKafkaConsumer(
        **client_options(kafka),
        isolation_level=isolation(kafka),
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=kafka.fetch_wait_ms,
        max_poll_records=AT_ONCE,
    )
    async with started(made) as consumer:
        consumer.assign([TopicPartition(*place) for place in first])
        for place, offset in first.items():
            consumer.seek(TopicPartition(*place), offset)
        while True:
            batches = await consumer.getmany(timeout_ms=POLL_MS)
            for records in batches.values():
                for record in records:
                    yield as_record(record)


async def newest(kafka: KafkaConfig, topic: Topic) -> tuple[dict[bytes, Record], dict[Partition, int]]:
    """Newest record per key of one of the gate's topics, and where each partition ends."""
    places = [Partition(topic.value, number) for number in range(GATING_PARTITIONS)]
    reader = RangeReader(kafka)
    await reader.start()
    try:
        begins, ends = await reader.begin_offsets(places), await reader.end_offsets(places)
        found: dict[bytes, Record] = {}
        async for record in reader.read({place: (begins[place], ends[place]) for place in places}):
            found[record.key or b""] = record
    finally:
        await reader.stop()
    return found, ends


async def everything(kafka: KafkaConfig, topic: Topic) -> list[Record]:
    """Newest record per partition and key of one of the gate's compacted topics."""
    places = [Partition(topic.value, number) for number in range(GATING_PARTITIONS)]
    reader = RangeReader(kafka)
    await reader.start()
    try:
        begins, ends = await reader.begin_offsets(places), await reader.end_offsets(places)
        found: dict[tuple[int, bytes], Record] = {}
        async for record in reader.read({place: (begins[place], ends[place]) for place in places}):
            found[record.partition, record.key or b""] = record
    finally:
        await reader.stop()
    return list(found.values())


async def kept(kafka: KafkaConfig, place: Partition) -> AsyncIterator[Record]:
    """Every record of one partition that is kept, to where it ends now; one fetch at a time is held."""
    reader = RangeReader(kafka)
    await reader.start()
    try:
        begin = (await reader.begin_offsets([place]))[place]
        end = (await reader.end_offsets([place]))[place]
        async for record in reader.read({place: (begin, end)}):
            yield record
    finally:
        await reader.stop()


async def tail(kafka: KafkaConfig, place: Partition, records: int) -> list[Record]:
    """The last records of one partition: at most this many, fewer where markers stand between them."""
    reader = RangeReader(kafka)
    await reader.start()
    try:
        begin = (await reader.begin_offsets([place]))[place]
        end = (await reader.end_offsets([place]))[place]
        return [one async for one in reader.read({place: (max(begin, end - records), end)})]
    finally:
        await reader.stop()
