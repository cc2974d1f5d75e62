"""The gate's shell: one seat per gating partition, taken when it is assigned and left when it is revoked."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from typing import Final

from pipeline.config import Config
from pipeline.core.gate.gating import GateSettings
from pipeline.errors import PipelineError
from pipeline.monitoring.timing import Timing
from pipeline.policy_file import parse_policy, read_policy_file, shipped_policy_text
from pipeline.workers.content import content_settings
from pipeline.workers.gate_counts import GateCounts, seat_gauges
from pipeline.workers.gate_seat import Parts, Seat
from pipeline.workers.gate_signatures import GateSignatures
from pipeline.workers.gate_writer import FencedError
from pipeline.workers.records import Partition, Record
from pipeline.workers.runner import WorkerSpec
from pipeline.workers.transport import Link
from pipeline.workers.waits import StuckError
from schemas.plain import Log, Plain
from schemas.topics import SOURCES, Topic

log: Log = logging.getLogger("klaxon.gate")

READS: Final = (Topic.BUCKETS, Topic.PARTIALS, Topic.COMMANDS)
WRITES: Final = (Topic.CONTROL, Topic.DECISIONS, Topic.ROLLOUTS, Topic.STATE, Topic.DEAD_LETTER)
TELL_EVERY_S: Final = 60.0
ATTEMPTS: Final = 2
"""A seat that cannot be taken is tried again with new connections before the process ends."""


class SplitSeatError(PipelineError):
    """The group gave us a gating partition of one topic but not of the others."""


class GateWorker:
    """Processor of `gate`."""

    def __init__(
        self,
        link: Link,
        config: Config,
        settings: GateSettings,
        sources: Mapping[str, int],
        signatures: GateSignatures,
    ) -> None:
        signatures.announce()
        self._signatures = signatures
        self._link = link
        self._sources = sources
        self._watched = GateCounts()
        self._parts = Parts(link, config, settings, sources, signatures, self._watched, self._tell_foreign)
        self._seats: dict[int, Seat] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        """By gating partition, as the seats are."""
        self._told_foreign_s = -TELL_EVERY_S
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def assigned(self, places: frozenset[Partition]) -> None:
        partitions = {place.partition for place in places}
        if places != {Partition(topic.value, number) for topic in READS for number in partitions}:
            raise SplitSeatError(
                "the group assigned gating partitions of one topic without those of the others; run every "
                "gate worker at the same version, and see `klaxon topics check`"
            )
        for number in set(self._seats) | partitions:
            await self._leave(number)
        for number in partitions:
            self._take(number)

    async def revoked(self, places: frozenset[Partition]) -> None:
        for number in {place.partition for place in places}:
            await self._leave(number)

    def _take(self, number: int, attempt: int = 1) -> None:
        places = tuple(Partition(topic.value, number) for topic in READS)
        seat = self._seats[number] = Seat(number, places, self._parts, attempt)
        task = self._serving[number] = asyncio.create_task(seat.serve())
        task.add_done_callback(functools.partial(self._served, seat))

    async def _leave(self, number: int) -> None:
        """Give up a seat: abort what is open. Whoever takes it next rebuilds it from the log."""
        seat = self._seats.pop(number, None)
        if seat is None:
            return
        seat.leave()
        task = self._serving.pop(number)
        task.cancel()
        await asyncio.wait([task])

    def _served(self, seat: Seat, task: asyncio.Task[None]) -> None:
        if task.cancelled() or not (error := task.exception()) or self._failed.done():
            return
        stuck = isinstance(error, StuckError)
        if stuck and not seat.settled.is_set() and seat.attempt < ATTEMPTS:
            log.warning("%s; trying again with new connections", error)
            self._take(seat.partition, seat.attempt + 1)
            # A record that waits for this one is read by the next, which reads the log to its end.
            seat.leave()
        elif not (stuck and seat.left):
            self._failed.set_exception(error)

    async def read(self, record: Record) -> None:
        if (seat := self._seats.get(record.partition)) is not None:  # else delivered after it was revoked
            await seat.read(record)

    async def run(self) -> None:
        await self._failed

    def gauges(self) -> dict[str, dict[str, int]]:
        said = self._watched.gauges()
        for thing, refused in self._signatures.gauges().items():
            said[thing] = {**said.get(thing, {}), **refused}
        valid_s = self._signatures.key_valid_s()
        for number, seat in sorted(self._seats.items()):
            said |= seat_gauges(seat.core, taken=seat.settled.is_set(), fenced=self._watched.fenced[number])
            said[f"gating/{number}"]["signing_key_valid_s"] = valid_s
            for place in seat.places:
                position, expected = self._link.position(place), seat.intake.expected(place)
                if position is not None and expected is not None:
                    said[str(place)] = {"lag_records": max(position.end_offset - expected, 0)}
        for number, fenced in self._watched.fenced.items():
            # Whose seat was taken leaves it at once, and ends: until then it says why.
            said.setdefault(f"gating/{number}", {"fenced": fenced})
        return said

    def timings(self) -> dict[str, Timing]:
        return {"decision": self._watched.decision, "transaction": self._watched.transaction}

    @property
    def recovered(self) -> int:
        return sum(seat.intake.recovered for seat in self._seats.values())

    def missing(self) -> tuple[str, ...]:
        return tuple(
            f"gating partition {number}: its memory is being rebuilt from the log"
            for number, seat in sorted(self._seats.items())
            if not seat.settled.is_set()
        )

    async def stop(self) -> None:
        for number in list(self._seats):
            await self._leave(number)

    def _tell_foreign(self, topic: str, partition: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_foreign_s >= TELL_EVERY_S:
            self._told_foreign_s = now_s
            log.warning(
                "%s/%d: closed with other content settings; its seconds are unknown and hold every roll-out "
                "until all workers run the same release with the same `content` section, and all have the "
                "scoring kernel or none",
                Plain(topic if topic in self._sources else "an unknown topic"),
                partition,
            )


def gate_settings(config: Config) -> GateSettings:
    """As configured. Reads the policy file: blocks; raises PolicyError."""
    content, settings = content_settings(config.content), config.gate
    policy = config.policy.file
    return GateSettings(
        lease_us=settings.lease_s * 1_000_000,
        renew_us=settings.renew_s * 1_000_000,
        dead_man_us=settings.dead_man_s * 1_000_000,
        blind_after_us=settings.blind_after_s * 1_000_000,
        join_timeout_us=content.join_timeout_us,
        lateness_us=content.lateness_us,
        settings_hash=content.hash,
        parse_policy=parse_policy,
        default_policy=shipped_policy_text() if policy is None else read_policy_file(policy).text,
    )


def gate(config: Config) -> WorkerSpec:
    """The worker, configured. Reads policy and key files: blocks; raises PipelineError for wrong ones."""
    signatures = GateSignatures.of(config.signatures)
    told = gate_settings(config)

    def make(link: Link, counts: Mapping[Topic, int]) -> GateWorker:
        sources = {topic.value: counts[topic] for topic in SOURCES}
        return GateWorker(link, config, told, sources, signatures)

    return WorkerSpec(
        "gate",
        reads=READS,
        needs=(*WRITES, *SOURCES),
        make=make,
        new_groups_start_at_end=True,
        ends_scraped_after=(FencedError,),
    )
