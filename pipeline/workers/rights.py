"""What this process may do on Kafka, as the brokers say, against the table of rights; asked before it starts.

A broker hides what a client may not describe: without the question a topic looks as if it did not exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from pipeline.config import KafkaConfig
from pipeline.workers.acl_table import Kind, Operation, granted, table
from pipeline.workers.broker import (
    BrokerAwayError,
    BrokerError,
    away,
    back_off_s,
    bare_client,
    partition_counts,
    security_options,
)
from pipeline.workers.kafka_requests import DescribeGroup, DescribeTopics
from pipeline.workers.refusal import refusal
from schemas.plain import Log, Plain
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.broker")

REMEDY: Final = "run `klaxon topics create --acls` as a super user of the brokers, and see docs/security.md"
UNKNOWN_TOPIC: Final = 3
DENIED: Final = (29, 30)
"""Kafka's codes for topic and group."""
KINDS: Final[Mapping[Any, Kind]] = {
    TopicAuthorizationFailedError: Kind.TOPIC,
    GroupAuthorizationFailedError: Kind.GROUP,
    TransactionalIdAuthorizationFailed: Kind.TRANSACTIONAL_ID,
    ClusterAuthorizationFailedError: Kind.CLUSTER,
}

Lack = tuple[Operation, Kind, str]
"""What may not be done, to which kind of thing, of which name."""


def who(kafka: KafkaConfig) -> str:
    """What the brokers take this process for, as far as it knows itself."""
    if kafka.username:
        return f"User:{kafka.username}"
    return f"the holder of {kafka.certificate_file}" if kafka.certificate_file else "User:ANONYMOUS"


def denial(kafka: KafkaConfig, lacking: Collection[Lack], role: str) -> str:
    """One line about everything that is lacking."""
    listed = ", ".join(f"{operation} {kind} {name}" for operation, kind, name in sorted(lacking))
    return f"{who(kafka)} may not {listed}, as role {role} must: {REMEDY}"


def denied(kafka: KafkaConfig, error: BaseException | None) -> str | None:
    """A client's error as such a line, if it is about a right; it names no operation."""
    kind = KINDS.get(type(error))
    if kind is None or error is None:
        return None
    names = ", ".join(_names(error.args))
    return f"{who(kafka)} lacks a right on {kind}{' ' * bool(names)}{names}: {REMEDY}"


async def explained(kafka: KafkaConfig, error: BaseException) -> str:
    """What a client's error means to people: a right it lacks, a broker that refuses it, else as it is."""
    try:
        reason = denied(kafka, error) or await refusal(kafka.bootstrap, security_options(kafka))
    except BrokerError as broken:  # a certificate's file is no longer in order
        reason = str(broken)
    return reason or f"Kafka at {kafka.bootstrap}: {error!r}"


def _names(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, set | list | tuple | frozenset):
            yield from sorted(map(str, value))


async def lacking_rights(
    kafka: KafkaConfig, role: str, topics: Iterable[Topic] | None = None, *, group: str | None = None
) -> list[Lack]:
    """What the table grants the role on these topics (None: all) and its group, and the broker does not.

    Empty where connections are plain: nobody is anybody there. Topics that do not exist lack nothing. Raises
    BrokerAwayError, RefusedError.
    """
    if kafka.security == "plaintext":
        return []
    wanted = {
        topic.value: operations
        for topic in (Topic if topics is None else topics)
        if (operations := granted(table(), role, Kind.TOPIC, topic.value))
    }
    async with bare_client(kafka) as client:
        try:
            found = await _on_topics(client, wanted)
            lacking = [(op, Kind.TOPIC, name) for name, ops in wanted.items() for op in ops - found[name]]
            if group is not None:
                ops = granted(table(), role, Kind.GROUP, group)
                lacking += [(op, Kind.GROUP, group) for op in ops - await _on_group(client, group, ops)]
        except (KafkaError, OSError) as error:
            raise away(kafka, error) from None
    return [one for one in lacking if not _follows(one, lacking)]


def _follows(lack: Lack, lacking: Collection[Lack]) -> bool:
    """Whether granting another of these grants this: it is not worth a word of its own."""
    operation, kind, name = lack
    return operation is Operation.DESCRIBE and any(
        other in (Operation.READ, Operation.WRITE) for other, *thing in lacking if thing == [kind, name]
    )


async def _on_topics(
    client: AIOKafkaClient, wanted: Mapping[str, frozenset[Operation]]
) -> dict[str, frozenset[Operation]]:
    answer = await client.send(client.get_random_node(), DescribeTopics(tuple(wanted)))
    found = {}
    for code, name, _internal, _partitions, bits in answer.topics:
        allowed = frozenset() if code in DENIED else _operations(bits)
        found[name] = wanted[name] if code == UNKNOWN_TOPIC else allowed
    return found


async def _on_group(client: AIOKafkaClient, group: str, wanted: frozenset[Operation]) -> frozenset[Operation]:
    """A coordinator that cannot be asked yet is believed to grant what is wanted: joining will tell."""
    try:
        coordinator = await client.coordinator_lookup(CoordinationType.GROUP, group)
        answer = await client.send(coordinator, DescribeGroup(group))
    except GroupAuthorizationFailedError:
        return frozenset()
    except KafkaError as error:
        if not error.retriable:
            raise
        return wanted
    ((code, *_, bits),) = answer.groups
    if code in DENIED:
        return frozenset()
    return wanted if code else _operations(bits)


def _operations(bits: int) -> frozenset[Operation]:
    return frozenset(one for one in Operation if bits >> one & 1)


async def wait_for_topics(kafka: KafkaConfig, topics: Iterable[Topic], role: str) -> dict[Topic, int]:
    """Partition count per topic, once the broker answers, all of them exist and the role has its rights.

    Says what is missing and tries again with back-off, without end: a worker has nothing better to do.
    Raises RefusedError.
    """
    wanted = tuple(topics)
    attempt = 0
    while True:
        try:
            lacking = await lacking_rights(kafka, role, group=f"klaxon-{role}")
            counts = await partition_counts(kafka, wanted)
        except BrokerAwayError as error:
            problem = str(error)
        else:
            missing = [topic.value for topic in wanted if topic not in counts]
            if lacking:
                problem = denial(kafka, lacking, role)
            elif missing:
                problem = f"no topic {', '.join(missing)} at {kafka.bootstrap}: run `klaxon topics create`"
            else:
                return counts
        delay_s = back_off_s(attempt)
        log.warning("%s; trying again in %.1f s", Plain(problem), delay_s)
        await asyncio.sleep(delay_s)
        attempt += 1
