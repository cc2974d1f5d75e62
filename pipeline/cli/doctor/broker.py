"""The broker: reachable, topics as planned, transactions, and a clock that agrees with ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)

from pipeline.cli.doctor.findings import Finding, Severity
from pipeline.config import KafkaConfig
from pipeline.workers.broker import (
    BrokerAwayError,
    RefusedError,
    client_options,
    leaderless,
    partition_counts,
    started,
    until_reached,
)
from pipeline.workers.records import APPEND_TIME, Partition
from pipeline.workers.topics import TopicProblem, topic_problems
from schemas.topics import CONTENT_TYPE, INPUTS, TICK, Topic
from schemas.whole import whole

SEVERITY_OF: Final[dict[str, Severity]] = {"retention": "warning", "replicas": "warning"}
FORBIDDEN: Final = (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)
ANSWER_S: Final = 10.0
SKEW_NOTED_US: Final = 1_000_000
SKEW_WRONG_US: Final = 5_000_000
"""An event's time is cut at its record's append time plus this: later ones change their second."""


async def broker_findings(kafka: KafkaConfig) -> list[Finding]:
    """Kafka itself and the topics. A broker that is away is the only finding then."""
    try:
        await until_reached(kafka, lambda of: partition_counts(of, ()))
    except BrokerAwayError as error:
        away = Finding(
            severity="error",
            code="kafka_unreachable",
            where=f"Kafka at {kafka.bootstrap}",
            what=str(error).replace(f" Kafka at {kafka.bootstrap}", " it"),
            remedy="start the broker, or correct kafka.bootstrap",
        )
        return [away]
    except RefusedError as error:
        what, _, remedy = str(error).rpartition(": ")
        refused = Finding(
            severity="error",
            code="kafka_refused",
            where=f"Kafka at {kafka.bootstrap}",
            what=what,
            remedy=remedy,
        )
        return [refused]
    problems = await topic_problems(kafka)
    found = [topic_finding(problem) for problem in problems]
    absent = {problem.topic for problem in problems if problem.code == "absent"}
    found += leader_findings(await leaderless(kafka, Topic))
    if kafka.transactions:
        found += [one async for one in _transactions(kafka)]
    if kafka.append_time:
        for topic in INPUTS:
            if topic not in absent:
                found += [one async for one in _clock(kafka, topic)]
    return _once(found)


def topic_finding(problem: TopicProblem) -> Finding:
    """As a finding: `topic_absent`, `topic_partitions`, …"""
    return Finding(
        severity=SEVERITY_OF.get(problem.code, "error"),
        code=f"topic_{problem.code}",
        where=problem.topic.value,
        what=problem.what,
        remedy=problem.remedy,
    )


def leader_findings(places: Iterable[Partition]) -> Iterator[Finding]:
    """Partitions that no broker leads."""
    for place in sorted(places):
        yield Finding(
            severity="error",
            code="no_leader",
            where=str(place),
            what="no broker leads it: nobody reads or writes it",
            remedy="start the brokers that hold its replicas",
        )


async def _transactions(kafka: KafkaConfig) -> AsyncIterator[Finding]:
    """Ask for a transactional producer and leave it; nothing is written."""
    producer = AIOKafkaProducer(**client_options(kafka), transactional_id="klaxon-doctor")
    try:
        async with asyncio.timeout(ANSWER_S):
            await whole(producer.start())
    except FORBIDDEN as error:
        yield not_checked(f"Kafka at {kafka.bootstrap}", f"transactions cannot be tried: {error!r}")
    except (KafkaError, TimeoutError) as error:
        why = repr(error) if isinstance(error, KafkaError) else f"no answer within {ANSWER_S:g} s"
        yield Finding(
            severity="error",
            code="transactions_unavailable",
            where=f"Kafka at {kafka.bootstrap}",
            what=f"no transactional producer: {why}; a gate cannot start",
            remedy="use Apache Kafka, with transaction.state.log.replication.factor at most its number of"
            " brokers; for a demo with one gate: kafka.transactions: false",
        )
    finally:
        await whole(producer.stop())


async def _clock(kafka: KafkaConfig, topic: Topic) -> AsyncIterator[Finding]:
    """Write a tick, which everybody ignores, and compare the broker's time with ours."""
    try:
        async with started(AIOKafkaProducer(**client_options(kafka))) as producer:
            before_us = now_us()
            written = await producer.send_and_wait(
                topic.value, b"", partition=0, headers=[(CONTENT_TYPE, TICK.encode())]
            )
            after_us = now_us()
    except KafkaError as error:
        yield not_checked(topic.value, f"the broker's time cannot be asked for: {error!r}")
        return
    if written.timestamp_type == APPEND_TIME and written.timestamp is not None:
        skew_us = skew(before_us, after_us, written.timestamp * 1000)
        if (finding := clock_finding(kafka, skew_us)) is not None:
            yield finding


def not_checked(where: str, what: str) -> Finding:
    """What this user may not look at."""
    remedy = "run the doctor as a user who may, or grant it"
    return Finding(severity="note", code="not_checked", where=where, what=what, remedy=remedy)


def skew(before_us: int, after_us: int, broker_us: int) -> int:
    """How far our clock is ahead of the broker's, at least; 0 where its time (whole ms) lies between ours."""
    if broker_us + 1_000 < before_us:
        return before_us - broker_us
    return min(0, after_us - broker_us)


def clock_finding(kafka: KafkaConfig, skew_us: int) -> Finding | None:
    """None where the clocks agree within SKEW_NOTED_US."""
    if abs(skew_us) <= SKEW_NOTED_US:
        return None
    which = "ahead of" if skew_us > 0 else "behind"
    return Finding(
        severity="error" if abs(skew_us) > SKEW_WRONG_US else "warning",
        code="clock_skew",
        where=f"Kafka at {kafka.bootstrap}",
        what=f"this machine's clock is {abs(skew_us) / 1e6:.1f} s {which} the broker's: leases, and what is"
        " late, are judged by both",
        remedy="run NTP on both: `timedatectl set-ntp true`",
    )


def now_us() -> int:
    """Wall clock, in µs."""
    return time.time_ns() // 1000


def _once(findings: list[Finding]) -> list[Finding]:
    """Each code and place once: every topic tells of the same clock."""
    kept = {(one.code, one.where): one for one in reversed(findings)}
    return [one for one in findings if kept[one.code, one.where] is one]
