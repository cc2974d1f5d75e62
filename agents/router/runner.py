"""Follows the control topic and keeps one `RouterState` per roll-out. Plain aiokafka, no consumer group.

Each router reads the compacted topic from its beginning to its end, then follows it, read-committed: a
directive of an aborted or open transaction is never seen, one that no trusted key signed is not believed.
Every directive applied is reported to the caller and published on `klaxon.applied`. A directive file on this
machine is obeyed beside it, Kafka or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

from agents.router.core import Effective, Outcome, RouterState, without_canary
from agents.router.directive_file import WatchedFile
from agents.router.reading import ControlReading, Ignored, Trusting
from agents.router.reports import Reports
from schemas import header_names  # noqa: F401 (its import is what it does)
from schemas.control import Aborted, Directive, RolloutState
from schemas.control_log import GreatestBelieved, Stated
from schemas.plain import Log, Plain
from schemas.signing import SIGNATURE, Verdict
from schemas.topics import Topic, gating_partition
from schemas.unpacking import AT_ONCE
from schemas.whole import whole

log: Log = logging.getLogger(__name__)

_Told: TypeAlias = tuple[int | None, RolloutState | None, Effective]
"""Generation, state and behaviour, as last reported."""

MAX_ROLLOUTS: Final = 1024
"""Roll-outs one router holds; for a further one the longest expired goes, or it is refused, loudly."""
LOOK_EVERY_S: Final = 0.2
"""How often the directive file is read, and time is looked at while no record comes."""
COMPLAIN_EVERY_S: Final = 10.0


async def _as_text(error: KafkaError | None) -> str:
    return f"topic {Topic.CONTROL} does not exist yet" if error is None else f"broker: {error!r}"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Where the control topic is, and who this router is."""

    bootstrap: str
    name: str
    fetch_wait_ms: int = 50
    retry_max_s: float = 10.0
    security: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """aiokafka's options (`security_protocol`, `ssl_context`, `sasl_*`), as they are."""
    explain: Callable[[KafkaError | None], Awaitable[str]] = field(default=_as_text, repr=False)
    """What an error means to people; None: that the broker shows no control topic."""


@dataclass(frozen=True, slots=True)
class Change:
    """The router's behaviour for one roll-out changed."""

    rollout: str
    generation: int | None
    """Of the directive; None, as its epoch, where only the directive file knows of the roll-out."""
    epoch: int | None
    reason: str
    """`applied`, `lease_expired`, `dead_man`, `lease_renewed`, `aborted_by_file` or `file_lifted`."""
    effective: Effective
    directive: Directive | None
    changed_us: int


class Router:
    """Runs until `stop` is set. Retries an absent broker or topic with back-off, saying so once a try."""

    def __init__(
        self,
        settings: RouterSettings,
        on_change: Callable[[Change], None],
        file: WatchedFile | None = None,
        trust: Trusting | None = None,
    ) -> None:
        """`trust` None: signatures are not required."""
        self._settings = settings
        self._on_change = on_change
        self._file = file
        self._reading = ControlReading(trust)
        self._log = GreatestBelieved(lambda stated: self._believes(stated, time.time_ns() // 1000))
        self._states: dict[str, RouterState] = {}
        self._told: dict[str, _Told] = {}
        self._reports = Reports(settings.name)
        self._caught_up = False
        self._complained_s = -COMPLAIN_EVERY_S
        self._read_to: dict[int, int] = {}
        """Offsets read of each partition, on whatever connection."""
        self._changes = 0
        self._newest_us: int | None = None

    @property
    def malformed(self) -> int:
        """Records of the control topic that are no directive, or stand where no gate puts them."""
        return self._reading.malformed

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the control topic, and look at the directive file, until `stop` is set."""
        looking = asyncio.create_task(self._look(stop))
        try:
            await self._follow_topic(stop)
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            if not looking.cancelled():
                looking.result()

    @property
    def caught_up(self) -> bool:
        """Whether the control topic was read to the end it had at the start."""
        return self._caught_up

    def gauges(self) -> dict[str, dict[str, int]]:
        """Sizes and counts by name, by what they belong to; call it from the event loop."""
        now_us = time.time_ns() // 1000
        effective = [told[2] for told in self._told.values()]
        router = {
            "rollouts": len(self._states),
            "expired_leases": sum(not each.lease_valid for each in effective if not each.aborted),
            "dead_man": sum(each.dead_man for each in effective),
            "aborted": sum(each.aborted for each in effective),
            "changes": self._changes,
        }
        if self._newest_us is not None:
            router["directive_age_us"] = max(0, now_us - self._newest_us)
        return {"router": router, "refused/directive": self._reading.gauges()}

    async def _look(self, stop: asyncio.Event) -> None:
        """Obey the directive file and the passing of time, whatever the broker does."""
        try:
            while not stop.is_set():
                if self._file is not None:
                    self._file.poll()
                self._reading.poll(time.monotonic())
                self._tell(time.time_ns() // 1000)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            stop.set()

    async def _follow_topic(self, stop: asyncio.Event) -> None:
        delay_s = 0.5
        away = False
        while not stop.is_set():
            consumer = AIOKafkaConsumer(
                bootstrap_servers=self._settings.bootstrap,
                group_id=None,
                isolation_level="read_committed",
                fetch_max_wait_ms=self._settings.fetch_wait_ms,
                max_poll_records=AT_ONCE,
                client_id=self._settings.name,
                **self._settings.security,
            )
            producer = AIOKafkaProducer(
                bootstrap_servers=self._settings.bootstrap, acks="all", **self._settings.security
            )
            try:
                await whole(consumer.start())
                await whole(producer.start())
                if await self._assign(consumer, producer):
                    delay_s = 0.5
                    if away:
                        log.info("%s is followed again", Plain(Topic.CONTROL.value))
                    away = False
                    await self._follow(consumer, producer, stop)
                else:
                    away = True
                    reason = Plain(await self._settings.explain(None))
                    log.warning("%s; next try in %.1f s", reason, delay_s)
            except KafkaError as error:
                away = True
                reason = Plain(await self._settings.explain(error))
                log.warning("%s; next try in %.1f s", reason, delay_s)
            finally:
                try:
                    await whole(consumer.stop())
                finally:  # cancelled meanwhile, too
                    await whole(producer.stop())
            await _wait(stop, delay_s)
            delay_s = min(delay_s * 2, self._settings.retry_max_s)

    async def _assign(self, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer) -> bool:
        if Topic.CONTROL not in await consumer.topics():
            return False
        # Asked of the producer: a consumer without a subscription keeps no metadata of any topic.
        partitions = await producer.partitions_for(Topic.CONTROL)
        consumer.assign([TopicPartition(Topic.CONTROL, p) for p in sorted(partitions)])
        await consumer.seek_to_beginning()
        return True

    async def _follow(
        self, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer, stop: asyncio.Event
    ) -> None:
        ends = await consumer.end_offsets(consumer.assignment())
        for place, end in ends.items():  # a topic that was made anew counts from 0 again
            self._read_to[place.partition] = min(end, self._read_to.get(place.partition, 0))
        reporting: asyncio.Task[None] | None = None
        try:
            while not stop.is_set():
                await self._read(consumer, ends)
                if self._caught_up and reporting is None:
                    reporting = asyncio.create_task(self._reports.publish(producer, self._settings.explain))
        finally:
            if reporting is not None:
                reporting.cancel()
                await asyncio.wait([reporting])
                if not reporting.cancelled():
                    reporting.result()

    async def _read(self, consumer: AIOKafkaConsumer, ends: Mapping[TopicPartition, int]) -> None:
        """What has come, and what it changes. `ends`: where the topic ended when this connection began."""
        batches = await consumer.getmany(timeout_ms=200)
        now_us = time.time_ns() // 1000
        for records in batches.values():
            for record in records:
                self._take_record(record, now_us)
        if not self._caught_up:
            positions = [await consumer.position(tp) >= end for tp, end in ends.items()]
            if all(positions):
                for directive in self._log.settle().values():
                    self._obey(directive, now_us)
                self._caught_up = True
        self._tell(now_us)

    def _take_record(self, record: ConsumerRecord[bytes, bytes], now_us: int) -> None:
        place, offset = record.partition, record.offset
        before = offset < self._read_to.get(place, 0)
        self._read_to[place] = max(offset + 1, self._read_to.get(place, 0))
        header = dict(record.headers).get(SIGNATURE)
        self._take(place, record.key, record.value, now_us, header, read_before=before)

    def _take(
        self,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        now_us: int,
        header: bytes | None = None,
        *,
        read_before: bool = False,
    ) -> None:
        """One record. `read_before`: on an earlier connection, and counted there."""
        stated = self._reading.read(partition, key, value, header)
        if isinstance(stated, Ignored):
            if read_before:
                return
            self._reading.count(stated)
            what = "a tombstone" if stated is Ignored.TOMBSTONE else "a record that no gate writes"
            self._complain(f"{Topic.CONTROL}/{partition}: {what} was ignored")
            return
        if self._reading.verifies and not self._caught_up:
            self._log.offer(stated)
            return
        state = self._states.get(stated.directive.rollout)
        if read_before and state is not None and state.has_seen(stated.directive):
            return
        if self._believes(stated, now_us, counted=read_before):
            self._obey(stated.directive, now_us, count_stale=not read_before)

    def _believes(self, stated: Stated, now_us: int, *, counted: bool = False) -> bool:
        """`counted`: on an earlier connection, whose keys may have been others."""
        verdict = self._reading.judge(stated, now_us)
        if verdict is not Verdict.TRUSTED and not counted:
            self._reading.count(verdict)
            place, why = gating_partition(stated.directive.rollout), verdict.value.replace("_", " ")
            self._complain(f"{Topic.CONTROL}/{place}: a directive was ignored: {why}")
        return verdict is Verdict.TRUSTED

    def _obey(self, directive: Directive, now_us: int, *, count_stale: bool = False) -> None:
        state = self._states.get(directive.rollout)
        if state is None:
            if len(self._states) >= MAX_ROLLOUTS and not self._strike_longest_expired(now_us):
                self._reading.count(Ignored.TOO_MANY)
                self._complain(f"more than {MAX_ROLLOUTS} roll-outs; {directive.rollout} was ignored")
                return
            state = self._states[directive.rollout] = RouterState()
        self._newest_us = max(self._newest_us or 0, directive.ts_us)
        outcome = state.apply(directive, now_us)
        if state.directive is not None:
            self._reports.note(state.directive, now_us)
        if outcome is Outcome.STALE and count_stale:
            self._reading.count(Ignored.REPLAYED)
        elif outcome is Outcome.EXPIRED:
            self._reading.count(Ignored.EXPIRED)
            log.warning(
                "%s generation %d epoch %d: its lease is over, an increase was refused",
                Plain(directive.rollout),
                directive.generation,
                directive.epoch,
            )

    def _complain(self, text: str) -> None:
        """An error, at most one in COMPLAIN_EVERY_S: whoever floods the topic must not flood the log."""
        if time.monotonic() - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = time.monotonic()
            log.error("%s (%d records ignored so far)", Plain(text), self._reading.ignored)

    def _strike_longest_expired(self, now_us: int) -> bool:
        """Forget the roll-out of which nothing was heard for longest; False while all leases are valid."""
        name, state = min(self._states.items(), key=lambda item: item[1].lease_until_us())
        if state.lease_until_us() >= now_us:
            return False
        for kept in (self._states, self._told):
            kept.pop(name, None)
        self._reports.forget(name)
        return True

    def _tell(self, now_us: int) -> None:
        """Report every change of behaviour.

        What an older record said is of no interest to anyone: without the file's word, only from the end of
        the topic on.
        """
        aborted = {} if self._file is None else self._file.aborted
        known = self._states.keys() if self._caught_up else ()
        for rollout in sorted({*aborted, *known, *self._told}):
            change = self._change(rollout, aborted.get(rollout), now_us)
            if change is not None:
                self._changes += 1
                self._on_change(change)

    def _change(self, rollout: str, order: Aborted | None, now_us: int) -> Change | None:
        """What this router does differently since it was last told; a renewed lease alone is no change."""
        state = self._states.get(rollout)
        directive = None if state is None or not self._caught_up else state.directive
        effective = None
        if state is not None and directive is not None:
            effective = state.effective(now_us, unsure=self._file is not None and self._file.unsure)
        if order is not None:
            effective = without_canary(effective, directive, order)
        before = self._told.get(rollout)
        if effective is None:
            if before is not None:  # only the file knew of it
                effective = Effective({}, (), lease_valid=False, dead_man=False)
                del self._told[rollout]
                return Change(rollout, None, None, "file_lifted", effective, None, now_us)
            return None
        now = (
            None if directive is None else directive.generation,
            None if directive is None else directive.state,
            effective,
        )
        if before == now:
            return None
        self._told[rollout] = now
        epoch = None if directive is None else directive.epoch
        return Change(rollout, now[0], epoch, _reason(before, now), effective, directive, now_us)


def _reason(before: _Told | None, now: _Told) -> str:
    is_now = now[2]
    if is_now.aborted != (before is not None and before[2].aborted):
        return "aborted_by_file" if is_now.aborted else "file_lifted"
    if before is None:
        return "applied"
    (generation, state, was), (generation_now, state_now, _) = before, now
    if now == (generation, state, replace(was, lease_valid=is_now.lease_valid, dead_man=is_now.dead_man)):
        return "lease_renewed" if is_now.lease_valid else "lease_expired"
    if is_now.dead_man and (generation, state) == (generation_now, state_now):
        return "dead_man"
    return "applied"


async def _wait(stop: asyncio.Event, delay_s: float) -> None:
    try:
        async with asyncio.timeout(delay_s):
            await stop.wait()
    except TimeoutError:
        return
