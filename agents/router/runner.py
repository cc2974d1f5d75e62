"""Follows the control topic and keeps one `RouterState` per roll-out. Plain aiokafka, no consumer group.

Each router reads the compacted topic from its beginning to its end, then follows it, read-committed: a
directive of an aborted or open transaction is never seen. Every directive applied is reported to the caller
and published on `klaxon.applied`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from agents.router.core import Effective, Outcome, RouterState
from schemas.control import Applied, Directive, RolloutState
from schemas.records import read_json
from schemas.topics import Topic

log = logging.getLogger(__name__)

_Told: TypeAlias = tuple[int, RolloutState, Effective]
"""Generation, state and behaviour, as last reported."""

MAX_ROLLOUTS: Final = 1024
"""Roll-outs one router holds; further ones are refused, loudly."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Where the control topic is, and who this router is."""

    bootstrap: str
    name: str
    fetch_wait_ms: int = 50
    retry_max_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Change:
    """The router's behaviour for one roll-out changed."""

    rollout: str
    generation: int
    epoch: int
    reason: str
    """`applied`, `lease_expired`, `dead_man` or `lease_renewed`."""
    effective: Effective
    directive: Directive
    changed_us: int


class Router:
    """Runs until `stop` is set. Retries an absent broker or topic with back-off, saying so once a try."""

    def __init__(self, settings: RouterSettings, on_change: Callable[[Change], None]) -> None:
        self._settings = settings
        self._on_change = on_change
        self._states: dict[str, RouterState] = {}
        self._told: dict[str, _Told] = {}
        self._published: dict[str, tuple[int, int]] = {}
        self.malformed = 0
        """Records of the control topic that are no directive."""

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the control topic until `stop` is set."""
        delay_s = 0.5
        while not stop.is_set():
            consumer = AIOKafkaConsumer(
                bootstrap_servers=self._settings.bootstrap,
                group_id=None,
                isolation_level="read_committed",
                fetch_max_wait_ms=self._settings.fetch_wait_ms,
                client_id=self._settings.name,
            )
            producer = AIOKafkaProducer(bootstrap_servers=self._settings.bootstrap, acks="all")
            try:
                await consumer.start()
                await producer.start()
                if await self._assign(consumer, producer):
                    delay_s = 0.5
                    await self._follow(consumer, producer, stop)
                else:
                    log.warning("topic %s does not exist yet; next try in %.1f s", Topic.CONTROL, delay_s)
            except KafkaError as error:
                log.warning(
                    "broker %s: %s; next try in %.1f s",
                    self._settings.bootstrap,
                    error or type(error),
                    delay_s,
                )
            finally:
                await consumer.stop()
                await producer.stop()
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
        caught_up = False
        while not stop.is_set():
            batches = await consumer.getmany(timeout_ms=200)
            now_us = time.time_ns() // 1000
            for records in batches.values():
                for record in records:
                    self._take(record.key, record.value, now_us)
            if not caught_up:
                positions = [await consumer.position(tp) >= end for tp, end in ends.items()]
                caught_up = all(positions)
            # What an older record said is of no interest to anyone: report only from the end on.
            if caught_up:
                for change in self._changes(now_us):
                    self._on_change(change)
                await self._publish(producer, now_us)

    def _take(self, key: bytes | None, value: bytes | None, now_us: int) -> None:
        if value is None:
            self._strike((key or b"").decode("utf-8", "replace"), now_us)
            return
        try:
            directive = read_json(value, Directive)
        except msgspec.DecodeError as error:
            self.malformed += 1
            log.error("%s: a record is no directive and was ignored: %s", Topic.CONTROL, error)
            return
        state = self._states.get(directive.rollout)
        if state is None:
            if len(self._states) >= MAX_ROLLOUTS:
                log.error("more than %d roll-outs; %s was ignored", MAX_ROLLOUTS, directive.rollout)
                return
            state = self._states[directive.rollout] = RouterState()
        if state.apply(directive, now_us) is Outcome.EXPIRED:
            log.warning(
                "%s generation %d epoch %d: its lease is over, an increase was refused",
                directive.rollout,
                directive.generation,
                directive.epoch,
            )

    def _strike(self, rollout: str, now_us: int) -> None:
        """A tombstone: forget the roll-out. Not while its gate vouches for it: an older record that comes
        after the tombstone would then be obeyed, and a trip undone."""
        state = self._states.get(rollout)
        effective = None if state is None else state.effective(now_us)
        if effective is not None and effective.lease_valid:
            log.error("%s: a tombstone of %s was ignored: its lease is valid", Topic.CONTROL, rollout)
            return
        self._states.pop(rollout, None)
        self._told.pop(rollout, None)
        self._published.pop(rollout, None)

    def _changes(self, now_us: int) -> list[Change]:
        """What this router does differently since it was last told; a renewed lease alone is no change."""
        changes = []
        for rollout, state in self._states.items():
            directive, effective = state.directive, state.effective(now_us)
            if directive is None or effective is None:
                continue
            now = (directive.generation, directive.state, effective)
            before = self._told.get(rollout)
            if before == now:
                continue
            self._told[rollout] = now
            reason = "applied" if before is None else _reason(before, now)
            generation, epoch = directive.generation, directive.epoch
            changes.append(Change(rollout, generation, epoch, reason, effective, directive, now_us))
        return changes

    async def _publish(self, producer: AIOKafkaProducer, now_us: int) -> None:
        """One record per directive obeyed, renewals too: whoever reads them sees which routers keep up."""
        for rollout, state in self._states.items():
            directive = state.directive
            if directive is None:
                continue
            key = (directive.generation, directive.epoch)
            if self._published.get(rollout) == key:
                continue
            self._published[rollout] = key
            applied = Applied(
                rollout=rollout,
                router=self._settings.name,
                generation=directive.generation,
                epoch=directive.epoch,
                applied_us=now_us,
            )
            await producer.send(Topic.APPLIED, msgspec.json.encode(applied), key=rollout.encode())


def _reason(before: _Told, now: _Told) -> str:
    (generation, state, was), (generation_now, state_now, is_now) = before, now
    if now == (generation, state, replace(was, lease_valid=is_now.lease_valid, dead_man=is_now.dead_man)):
        return "lease_renewed" if is_now.lease_valid else "lease_expired"
    if is_now.dead_man and (generation, state) == (generation_now, state_now):
        return "dead_man"
    return "applied"


async def _wait(stop: asyncio.Event, delay_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), delay_s)
    except TimeoutError:
        return
