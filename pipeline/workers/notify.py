"""Sends what happened to a webhook: reads klaxon.decisions in a group of its own, in the way of nobody.

At least once: an offset is committed after the receiver has taken the notification, or never will. Memory
holds one fetch; what waits, waits in the topic. A group that is new begins at the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, KafkaError
from aiokafka.structs import ConsumerRecord

from pipeline.config import KafkaConfig
from pipeline.core.notification import Judgement, Notification, headers, judged, notification_of, wait_s
from pipeline.workers.broker import back_off_s, client_options, isolation, started
from pipeline.workers.faults import fault
from pipeline.workers.rights import explained
from pipeline.workers.stopping import unless
from schemas.control import Decision
from schemas.plain import Log, Plain
from schemas.records import UnknownVersionError, read_json
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.notify")

GROUP: Final = "klaxon-notify"
FETCH_RECORDS: Final = 100
POLL_MS: Final = 500
ONE_YEAR_MS: Final = 31_536_000_000 // 1000
ANSWER_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where to, signed with which keys, how long to wait for an answer and how long to try."""

    url: str = field(repr=False)
    keys: tuple[bytes, ...] = field(repr=False)
    kinds: frozenset[str]
    timeout_s: float
    give_up_s: float

    @property
    def host(self) -> Plain:
        """What a log may say of it: the other parts of a webhook's address are secrets."""
        parts = urlsplit(self.url)
        port = "" if parts.port is None else f":{parts.port}"
        return Plain(f"{parts.hostname}{port}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one attempt; `said`: for people."""

    judgement: Judgement
    said: Plain
    retry_after_s: float | None = None


class Sender:
    """Sends notifications one after the other. Use as an asynchronous context manager."""

    def __init__(
        self, webhook: Webhook, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._webhook = webhook
        self._sleep = sleep
        self.counts = {"delivered": 0, "retried": 0, "refused": 0, "given_up": 0}
        self._since_s: float | None = None
        """When the notification that is under way was first tried."""

    def gauges(self) -> dict[str, int]:
        """What became of notifications so far, and how long the one under way waits."""
        wait_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return {**self.counts, "wait_us": int(wait_s * 1_000_000)}

    async def __aenter__(self) -> Sender:
        timeout = aiohttp.ClientTimeout(total=self._webhook.timeout_s)
        self._session = aiohttp.ClientSession(timeout=timeout, headers={"user-agent": "klaxon"})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def deliver(self, message: Notification) -> None:
        """Until it is taken, refused for good, or waited for `give_up_s` in all."""
        self._since_s = time.monotonic()
        try:
            await self._deliver(message)
        finally:
            self._since_s = None

    async def _deliver(self, message: Notification) -> None:
        name, waited_s = Plain(message.id), 0.0
        attempt = 0
        while True:
            answer = await self.attempt(message)
            if answer.judgement == "delivered":
                self.counts["delivered"] += 1
                log.info("%s: delivered to %s", name, self._webhook.host)
                return
            if answer.judgement == "refused":
                self.counts["refused"] += 1
                log.error("%s: %s refuses it (%s); left out", name, self._webhook.host, answer.said)
                return
            delay_s = wait_s(attempt, answer.retry_after_s, random.random())  # noqa: S311 (jitter)
            waited_s += delay_s
            if waited_s > self._webhook.give_up_s:
                self.counts["given_up"] += 1
                log.error("%s: given up after %d attempts: %s", name, attempt + 1, answer.said)
                return
            self.counts["retried"] += 1
            log.warning("%s: %s: %s; again in %.0f s", name, self._webhook.host, answer.said, delay_s)
            await self._sleep(delay_s)
            attempt += 1

    async def attempt(self, message: Notification) -> Answer:
        """Once. Never follows a redirect: signed data goes to the address that was configured alone."""
        webhook = self._webhook
        try:
            async with self._session.post(
                webhook.url,
                data=message.body,
                headers=headers(message, int(time.time()), webhook.keys),
                allow_redirects=False,
            ) as response:
                await response.content.read(ANSWER_BYTES)
                return Answer(
                    judged(response.status),
                    Plain(f"status {response.status}"),
                    _seconds(response.headers.get("retry-after")),
                )
        except TimeoutError:
            return Answer("again", Plain(f"no answer within {webhook.timeout_s:g} s"))
        except (aiohttp.ClientError, OSError) as error:
            return Answer("again", Plain(type(error).__name__))  # its text may quote the address


class Notifier:
    """Reads decisions and has them sent, until asked to stop."""

    def __init__(self, kafka: KafkaConfig, webhook: Webhook, sender: Sender) -> None:
        self._kafka = kafka
        self._webhook = webhook
        self._sender = sender
        self.joined = False
        """Whether the group has given this process its share of the topic, which may be none of it."""

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; waits for an absent broker or topic, with back-off."""
        attempt = 0
        while not stop.is_set():
            try:
                async with started(self._consumer()) as consumer:
                    consumer.subscribe(
                        [Topic.DECISIONS.value], listener=_BeginAtTheEnd(consumer, self._has_joined)
                    )
                    kinds = Plain(", ".join(sorted(self._webhook.kinds)))
                    log.info("ready: %s to %s", kinds, self._webhook.host)
                    attempt = 0
                    await unless(stop, self._follow(consumer))
            except (KafkaError, OSError) as error:
                log.warning("%s; trying again", Plain(await explained(self._kafka, error)))
            finally:
                self.joined = False
            await unless(stop, asyncio.sleep(back_off_s(attempt)))
            attempt += 1

    def _has_joined(self) -> None:
        self.joined = True

    def _consumer(self) -> AIOKafkaConsumer[bytes, bytes]:
        return AIOKafkaConsumer(
            **client_options(self._kafka),
            group_id=GROUP,
            isolation_level=isolation(self._kafka),
            enable_auto_commit=False,
            auto_offset_reset="latest",
            session_timeout_ms=self._kafka.session_timeout_ms,
            # A receiver that is away for hours must not cost the partitions.
            max_poll_interval_ms=ONE_YEAR_MS,
        )

    async def _follow(self, consumer: AIOKafkaConsumer[bytes, bytes]) -> None:
        while True:
            batches = await consumer.getmany(timeout_ms=POLL_MS, max_records=FETCH_RECORDS)
            for place, records in batches.items():
                await self._tell(consumer, place, records)

    async def _tell(
        self,
        consumer: AIOKafkaConsumer[bytes, bytes],
        place: TopicPartition,
        records: Sequence[ConsumerRecord[bytes, bytes]],
    ) -> None:
        for record in records:
            message = self._message(record)
            if message is None:
                continue
            await self._sender.deliver(message)
            fault("notify_sent_before_commit")
            if not await self._commit(consumer, place, record.offset + 1):
                return
        await self._commit(consumer, place, records[-1].offset + 1)

    def _message(self, record: ConsumerRecord[bytes, bytes]) -> Notification | None:
        where = f"{record.topic}/{record.partition}/{record.offset}"
        try:
            decision = read_json(record.value or b"", Decision)
        except UnknownVersionError as error:
            log.error(
                "%s is of version %s, which this release cannot read: left out", Plain(where), error.version
            )
            return None
        except msgspec.MsgspecError:
            return None  # no gate's
        rollout = (record.key or b"").decode("utf-8", "replace")
        return notification_of(decision, rollout, where, self._webhook.kinds)

    async def _commit(
        self, consumer: AIOKafkaConsumer[bytes, bytes], place: TopicPartition, offset: int
    ) -> bool:
        """False if the partition is somebody else's by now, who sends from the last commit on."""
        try:
            await consumer.commit({place: offset})
        except CommitFailedError:
            log.info("%s: no longer ours", Plain(f"{place.topic}/{place.partition}"))
            return False
        return True


class _BeginAtTheEnd(ConsumerRebalanceListener):
    """A partition that nobody has read is committed at its end at once: from there on nothing is left out."""

    def __init__(self, consumer: AIOKafkaConsumer[bytes, bytes], joined: Callable[[], None]) -> None:
        self._consumer = consumer
        self._joined = joined

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Nothing is open: a commit follows each delivery."""

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        new = [place for place in assigned if await self._consumer.committed(place) is None]
        if new:
            await self._consumer.commit(await self._consumer.end_offsets(new))
            listed = Plain(", ".join(f"{place.topic}/{place.partition}" for place in sorted(new)))
            log.info("%s: begins at the end, nobody has read it before", listed)
        self._joined()


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After in seconds; its other form, a date, is not used by anybody who asks for little."""
    return float(text) if text is not None and text.isdecimal() else None
