"""The publisher: one lane per topic and partition, each sending one numbered batch at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from math import floor
from typing import Any, Final

from agents.publish.batches import (
    CODECS,
    TOPIC_OF,
    Event,
    Sound,
    cut_to_record,
    drop_key,
    encode_sound,
    key_of,
    wire_bytes,
)
from agents.publish.lane import Item, Lane
from agents.publish.producer import DeliveryError, RecordProducer
from agents.publish.settings import DropReason, PublisherSettings, PublisherStats
from schemas.columns import BatchHeader
from schemas.events import Arm, LogitEvent
from schemas.plain import Log, Plain
from schemas.topics import MAX_RECORD_BYTES, Topic, partition_of

log: Log = logging.getLogger(__name__)

_MILLION: Final = 1_000_000
_MOST_DROP_KEYS: Final = 256
"""Distinct "rollout/arm" that a header reports at most; drops beyond are counted in the stats only."""


class Publisher:
    """Sends events in batches. Use from one event loop.

    `publish` never blocks and never raises because of load, of the broker, or of what an event holds: what
    cannot be queued, encoded or delivered is dropped, counted by reason, and reported in the header of the
    topic's next acknowledged batch, so that it lowers coverage where it is judged.
    """

    def __init__(self, producer: RecordProducer, settings: PublisherSettings) -> None:
        self._producer = producer
        self._settings = settings
        self._partitions: dict[Topic, int] = {}
        self._lanes: dict[tuple[Topic, int], Lane] = {}
        self._unrouted: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurry = False
        self._first_tick = 0.0
        self._closed = False
        self._connected = False
        self._queued_events = 0
        self._queued_bytes = 0
        self._accepted = 0
        self._acknowledged = 0
        self._cut = 0
        self._batches = 0
        self._retries = 0
        self._reported = 0
        self._dropped: Counter[DropReason] = Counter()
        self._unreported: dict[Topic, Counter[str]] = {topic: Counter() for topic in CODECS}

    # --- the caller's side ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect and to send, in the background; returns at once. Needs a running event loop."""
        self._first_tick = asyncio.get_running_loop().time()
        self._spawn(self._route(), "publisher-route")

    def publish(self, event: Event) -> bool:
        """Queue an event. False where it was dropped at once (counted). Never blocks, never raises."""
        topic = TOPIC_OF.get(type(event))
        if topic is None:
            return self._refuse(None, None, "invalid")
        if self._closed:
            return self._refuse(topic, event, "closed")
        try:
            key = key_of(event)
            if isinstance(event, LogitEvent):
                whole = event
                event = cut_to_record(whole)
                self._cut += event is not whole
            size = wire_bytes(event)
        except (AttributeError, TypeError, ValueError, ZeroDivisionError):
            return self._refuse(topic, event, "invalid")
        if size > MAX_RECORD_BYTES:
            return self._refuse(topic, event, "too_large")
        if (
            self._queued_events >= self._settings.queue_events
            or self._queued_bytes + size > self._settings.queue_bytes
        ):
            return self._refuse(topic, event, "queue_full")
        item = Item(event, size, asyncio.get_running_loop().time())
        self._accepted += 1
        self._queued_events += 1
        self._queued_bytes += size
        self._idle.clear()
        partitions = self._partitions.get(topic)
        if partitions is None:
            self._unrouted.append(item)
            self._arrived.set()
        else:
            self._lane(topic, partition_of(key, partitions)).add(item)
        return True

    def report_drop(self, topic: Topic, rollout: str, arm: Arm) -> None:
        """An event that its producer never came to have is reported as one that was dropped here would be.

        Never blocks, never raises. Where nothing else goes to the topic, a batch of no events says it.
        """
        if self._closed:
            return
        self._reported += 1
        self._note(topic, f"{rollout}/{arm}")
        if topic not in self._partitions:
            self._arrived.set()

    async def drain(self, deadline_s: float) -> bool:
        """Send what is queued without waiting for batches to fill. True when nothing is left in time."""
        self._hurry = True
        self._wake_lanes()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        finally:
            self._hurry = self._closed
        return True

    async def close(self, deadline_s: float) -> PublisherStats:
        """Refuse new events, drain until the deadline, drop the rest (counted), disconnect."""
        self._closed = True
        end = asyncio.get_running_loop().time() + deadline_s
        await self.drain(deadline_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for lane in [lane for lane in self._lanes.values() if lane.partition == 0]:
            left = max(end - asyncio.get_running_loop().time(), 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._send(lane, [])
        self._dropped["closed"] += self._queued_events
        self._queued_events = self._queued_bytes = 0
        self._unrouted.clear()
        self._lanes.clear()
        await self._producer.stop()
        return self.stats()

    def stats(self) -> PublisherStats:
        """Counts since the start."""
        return PublisherStats(
            accepted=self._accepted,
            acknowledged=self._acknowledged,
            dropped={reason: n for reason, n in self._dropped.items() if n},
            reported=self._reported,
            cut=self._cut,
            batches=self._batches,
            retries=self._retries,
            queued_events=self._queued_events,
            queued_bytes=self._queued_bytes,
        )

    # --- dropping ---------------------------------------------------------------------------------------

    def _refuse(self, topic: Topic | None, event: Event | None, reason: DropReason) -> bool:
        """Count an event that was never accepted."""
        self._dropped[reason] += 1
        if topic is not None and event is not None:
            self._owe(topic, event)
        return False

    def _owe(self, topic: Topic, event: Event) -> None:
        """Note a dropped event for the next header of its topic, and see to it that there will be one."""
        key = drop_key(event)
        if key is not None:
            self._note(topic, key)

    def _note(self, topic: Topic, key: str) -> None:
        owed = self._unreported[topic]
        if key in owed or len(owed) < _MOST_DROP_KEYS:
            owed[key] += 1
            lane = self._lanes.get((topic, 0))
            if lane is not None:
                lane.wake.set()

    def _settle(self, items: list[Item]) -> None:
        """These accepted events wait no longer."""
        self._queued_events -= len(items)
        self._queued_bytes -= sum(item.size for item in items)
        if self._queued_events == 0:
            self._idle.set()

    def _give_up(self, topic: Topic, items: list[Item], reason: DropReason) -> None:
        self._dropped[reason] += len(items)
        for item in items:
            self._owe(topic, item.event)
        self._settle(items)

    # --- routing ----------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A defect of ours. What that lane holds stays queued, so that it shows in the stats.
            log.error("%s ended", Plain(task.get_name()), exc_info=task.exception())

    def _lane(self, topic: Topic, partition: int) -> Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None:
            lane = Lane(topic, partition, self._settings.batch_limits[topic])
            self._lanes[topic, partition] = lane
            self._spawn(self._run(lane), f"publisher-{topic.value}-{partition}")
        return lane

    def _wake_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.wake.set()

    async def _route(self) -> None:
        """Connect, learn partition counts, and hand over what came before they were known."""
        delay_us = self._settings.retry_first_us
        said = ""
        while True:
            await self._arrived.wait()
            try:
                if not self._connected:
                    await self._producer.start()
                    self._connected = True
                # Others may come while one is asked for.
                while topics := self._unknown_topics():
                    for topic in topics:
                        self._partitions[topic] = await self._producer.partitions(topic.value)
            except DeliveryError as error:
                if str(error) != said:  # each reason once, however long it lasts
                    said = str(error)
                    log.warning("not publishing yet, trying again: %s", error)
                self._drop_overdue()
                await asyncio.sleep(delay_us / _MILLION)
                delay_us = min(2 * delay_us, self._settings.retry_most_us)
                continue
            delay_us = self._settings.retry_first_us
            if said:
                log.info("publishing now")
            said = ""
            self._arrived.clear()
            while self._unrouted:
                item = self._unrouted.popleft()
                topic = TOPIC_OF[type(item.event)]
                partition = partition_of(key_of(item.event), self._partitions[topic])
                self._lane(topic, partition).add(item)
            for topic in self._partitions:
                self._lane(topic, 0).wake.set()

    def _unknown_topics(self) -> set[Topic]:
        """Whose partitions have to be learnt, for events or for drops that are to be reported."""
        wanted = {TOPIC_OF[type(item.event)] for item in self._unrouted}
        wanted |= {topic for topic, owed in self._unreported.items() if owed}
        return wanted - self._partitions.keys()

    def _drop_overdue(self) -> None:
        """Give up on unrouted events that have waited too long: they would be late anyway."""
        oldest = asyncio.get_running_loop().time() - self._settings.give_up_us / _MILLION
        while self._unrouted and self._unrouted[0].since < oldest:
            item = self._unrouted.popleft()
            self._give_up(TOPIC_OF[type(item.event)], [item], "undeliverable")

    # --- sending ----------------------------------------------------------------------------------------

    async def _run(self, lane: Lane) -> None:
        """Send this lane's batches, one at a time: numbers stay in order."""
        while True:
            await lane.wake.wait()
            lane.wake.clear()
            if not lane.items and not (lane.partition == 0 and self._unreported[lane.topic]):
                continue
            await self._wait_until_due(lane)
            while True:
                await self._send(lane, lane.take())
                if not (lane.full() or (self._hurry and lane.items)):
                    break
            if lane.items:
                lane.wake.set()

    async def _wait_until_due(self, lane: Lane) -> None:
        now = asyncio.get_running_loop().time
        since = lane.items[0].since if lane.items else now()
        due = self._tick_after(since)
        while not (lane.full() or self._hurry):
            left = due - now()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await lane.wake.wait()
            except TimeoutError:
                return
            lane.wake.clear()

    def _tick_after(self, since: float) -> float:
        """When what came then is sent at the latest.

        All lanes share the ticks: what is sent at one moment is one request to the broker, and whoever reads
        several of the partitions wakes up once.
        """
        age = self._settings.flush_age_us / _MILLION
        return self._first_tick + (floor((since - self._first_tick) / age) + 1) * age

    async def _send(self, lane: Lane, items: list[Item]) -> None:
        """Encode and deliver one batch; without events only if there are drops to report."""
        owed = self._unreported[lane.topic]
        if not items and not owed:
            return
        self._unreported[lane.topic] = Counter()
        sound = self._encode(lane, items, owed)
        if sound.refused:
            refused = [items[i] for i in sound.refused]
            bad = set(sound.refused)
            items = [item for i, item in enumerate(items) if i not in bad]
            self._give_up(lane.topic, refused, "invalid")
            if not items and not owed:
                return
        if len(sound.value) > MAX_RECORD_BYTES:
            self._unreported[lane.topic].update(owed)
            await self._halve(lane, items)
            return
        lane.sequence += 1
        if await self._deliver(lane, sound.value):
            self._batches += 1
            self._acknowledged += len(items)
            self._settle(items)
        else:
            self._unreported[lane.topic].update(owed)
            self._give_up(lane.topic, items, "undeliverable")

    def _encode(self, lane: Lane, items: list[Item], owed: Mapping[str, int]) -> Sound:
        header = BatchHeader(self._settings.producer_id, lane.sequence, owed)
        return encode_sound(
            CODECS[lane.topic],
            [item.event for item in items],
            header,
            read_back=self._settings.read_back,
        )

    async def _halve(self, lane: Lane, items: list[Item]) -> None:
        """A record over the limit, in spite of the estimate: send it in halves, drop a single event."""
        if len(items) <= 1:
            self._give_up(lane.topic, items, "too_large")
            return
        middle = len(items) // 2
        await self._send(lane, items[:middle])
        await self._send(lane, items[middle:])

    async def _deliver(self, lane: Lane, value: bytes) -> bool:
        """Send until acknowledged; False when given up. A retry sends the same bytes, the same number."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + self._settings.give_up_us / _MILLION
        delay_us = self._settings.retry_first_us
        codec = CODECS[lane.topic]
        while True:
            try:
                await self._producer.send(lane.topic.value, lane.partition, None, value, codec.headers)
            except DeliveryError as error:
                if error.permanent or now() + delay_us / _MILLION > give_up_at:
                    log.warning("batch %d of %s given up: %s", lane.sequence - 1, lane.topic, error)
                    return False
                self._retries += 1
                await asyncio.sleep(delay_us / _MILLION)
                delay_us = min(2 * delay_us, self._settings.retry_most_us)
            else:
                return True
