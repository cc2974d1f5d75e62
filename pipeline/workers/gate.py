"""The gate's shell: one seat per gating partition, and one fenced writer per seat.

A seat is taken when its partition is assigned: the writer fences every predecessor, the core is rebuilt from
the log, what happened since is read, and only then are Faust's records used. All judgement is in the core;
the clock, the broker and the order of calls are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from aiokafka.errors import ConsumerStoppedError, KafkaError

from pipeline.config import Config
from pipeline.core.gate.gating import Effect, GateCore, GateSettings
from pipeline.core.gate.soundness import unsound
from pipeline.errors import PipelineError
from pipeline.monitoring.timing import Timing
from pipeline.policy_file import parse_policy, read_policy_file, shipped_policy_text
from pipeline.workers.broker import RangeReader
from pipeline.workers.content import content_settings
from pipeline.workers.dead_letters import VersionError, dead_letters, send_letters
from pipeline.workers.faults import fault
from pipeline.workers.gate_counts import GateCounts, seat_gauges
from pipeline.workers.gate_log import remembered, since
from pipeline.workers.gate_seat import Seat
from pipeline.workers.gate_signatures import GateSignatures
from pipeline.workers.gate_watch import PAUSE_S, ControlWatch
from pipeline.workers.gate_writer import FencedError, GateWriter, control_value
from pipeline.workers.intake import Intake
from pipeline.workers.records import Partition, Record
from pipeline.workers.runner import WorkerSpec
from pipeline.workers.transport import Link
from pipeline.workers.waits import StuckError, Waits
from schemas.buckets import FinalBuckets, FreshCells
from schemas.columns import Rejected
from schemas.commands import COMMANDS
from schemas.control import Command
from schemas.plain import Log, Plain
from schemas.records import UnknownVersionError, read_msgpack
from schemas.signing import SIGNATURE
from schemas.topics import SOURCES, Topic, gating_partition

log: Log = logging.getLogger("klaxon.gate")

READS: Final = (Topic.BUCKETS, Topic.PARTIALS, Topic.COMMANDS)
WRITES: Final = (Topic.CONTROL, Topic.DECISIONS, Topic.ROLLOUTS, Topic.STATE, Topic.DEAD_LETTER)
PACE_S: Final = 0.01
"""From one look at what is new to the next, at least."""
LOOK_EVERY_S: Final = 0.1
"""And at most: leases are renewed by the clock."""
RENEWED_AT_ONCE: Final = 64
"""Renewals of so many roll-outs share a transaction. One each, they would keep a trip waiting."""
FRESH_TIMES: Final = 10
"""Fresh evidence is judged again after so many times what it took last, at most `gate.fresh_interval_ms`."""
LETTERS_AT_ONCE: Final = 1_000
"""Dead letters of so many are waited for."""
UPKEEP_EVERY_S: Final = 1.0
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
        self._config = config
        self._settings = settings
        self._sources = sources
        self._seats: dict[int, Seat] = {}
        self._told_foreign_s = -TELL_EVERY_S
        self._watched = GateCounts()
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
            self._seats[number] = self._new_seat(number)

    async def revoked(self, places: frozenset[Partition]) -> None:
        for number in {place.partition for place in places}:
            await self._leave(number)

    def _new_seat(self, number: int, attempt: int = 1) -> Seat:
        seat = Seat(
            number,
            tuple(Partition(topic.value, number) for topic in READS),
            GateCore(number, self._sources, self._settings),
            GateWriter(self._config.kafka, number, self._signatures),
            ControlWatch(self._config.kafka, number, self._signatures),
            Intake(self._link, self._config.kafka),
            Waits(f"gating partition {number}"),
            attempt,
        )
        seat.task = asyncio.create_task(seat.waits.watch(self._serve(seat)))
        seat.task.add_done_callback(functools.partial(self._served, seat))
        return seat

    async def _leave(self, number: int) -> None:
        """Give up a seat: abort what is open. Whoever takes it next rebuilds it from the log."""
        seat = self._seats.pop(number, None)
        if seat is None:
            return
        seat.left = True
        seat.settled.set()
        assert seat.task is not None
        seat.task.cancel()
        await asyncio.wait([seat.task])

    def _served(self, seat: Seat, task: asyncio.Task[None]) -> None:
        if task.cancelled() or not (error := task.exception()) or self._failed.done():
            return
        stuck = isinstance(error, StuckError)
        if stuck and not seat.settled.is_set() and seat.attempt < ATTEMPTS:
            log.warning("%s; trying again with new connections", error)
            self._seats[seat.partition] = self._new_seat(seat.partition, seat.attempt + 1)
            # A record that waits for this one is read by the next, which reads the log to its end.
            seat.left = True
            seat.settled.set()
        elif not (stuck and seat.left):
            self._failed.set_exception(error)

    async def read(self, record: Record) -> None:
        seat = self._seats.get(record.partition)
        if seat is None:
            return  # delivered after the partition was revoked
        await seat.settled.wait()
        async with seat.lock:
            if not seat.left:
                try:
                    async for each in seat.intake.take(record):
                        await self._apply(seat, each)
                except (KafkaError, ConsumerStoppedError):
                    if not seat.left:
                        raise  # else we stopped the intake's reader ourselves

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

    async def _serve(self, seat: Seat) -> None:
        """Take the seat, then judge whenever there is something new, until it is left."""
        beside: tuple[asyncio.Task[None], ...] = ()
        try:
            seat.waits.step("the transaction coordinator, which fences the predecessor")
            await seat.writer.start()
            fault("gate_fenced_before_memory")
            await self._catch_up(seat)
            beside = (asyncio.create_task(self._watch(seat)), asyncio.create_task(self._commit(seat)))
            upkeep_s = 0.0
            while True:
                for each in beside:
                    if each.done():
                        each.result()
                seat.waits.step("a record to be dealt with")
                async with seat.lock:
                    seat.waits.step("its transactions to be committed")
                    await self._judge(seat)
                    seat.waits.step("what the group left out")
                    if time.monotonic() - upkeep_s >= UPKEEP_EVERY_S:
                        upkeep_s = time.monotonic()
                        await self._upkeep(seat)
                seat.waits.rest()
                await asyncio.sleep(PACE_S)
                await self._until_news(seat)
        finally:
            for each in beside:
                each.cancel()
            if beside:
                await asyncio.wait(beside)
            await seat.writer.close()
            await seat.watch.stop()
            await seat.intake.stop()

    async def _until_news(self, seat: Seat) -> None:
        """Wait until there is something that may be judged, at most LOOK_EVERY_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                if not (seat.news_finals or seat.news_fresh):
                    seat.news.clear()
                    await seat.news.wait()
                if not seat.news_finals:
                    await asyncio.sleep(seat.fresh_due_s - time.monotonic())

    async def _catch_up(self, seat: Seat) -> None:
        """Rebuild the core from the log, up to where Faust's records go on."""
        waits = seat.waits
        reader = RangeReader(self._config.kafka, waits.moved)
        waits.step("a connection to read with")
        await reader.start()
        try:
            waits.step("its memory: state, directives and roll-outs")
            memory = await remembered(reader, seat.partition, self._signatures)
            seat.core.restore(memory.states, memory.control, memory.rollouts)
            waits.step("a connection to watch the control topic with")
            await seat.watch.start(memory.control_end)
            waits.step("the transaction of what is said again")
            await self._write(seat, seat.core.reassert(_now_us()))
            fault("gate_memory_before_log")
            await self._until_positioned(seat)
            waits.step("what was written since: buckets, fresh cells and commands")
            ends = await reader.end_offsets(seat.places)
            async for record in since(reader, seat.partition, seat.core.read_from(), ends):
                await self._apply(seat, record)
                fault("during_warm_up")
        finally:
            waits.step("the reader's connection to be closed")
            await reader.stop()
        for place in seat.places:
            seat.intake.expect(place, ends[place])
        seat.settled.set()
        log.info("gating partition %d: taken, %d roll-outs", seat.partition, seat.core.gauges()["rollouts"])

    async def _until_positioned(self, seat: Seat) -> None:
        """Wait until Faust knows where it reads on: what lies before is then covered by the catch-up."""
        while unknown := [place for place in seat.places if self._link.position(place) is None]:
            seat.waits.step(f"the first fetch of {', '.join(map(str, unknown))}")
            await asyncio.sleep(PACE_S)  # there is no event

    async def _apply(self, seat: Seat, record: Record) -> None:
        seat.waits.moved()
        if record.topic is Topic.COMMANDS:
            await self._obey(seat, record)
            return
        buckets: FinalBuckets | FreshCells
        try:
            if record.topic is Topic.BUCKETS:
                buckets = read_msgpack(record.value, FinalBuckets)
            else:
                buckets = read_msgpack(record.value, FreshCells)
        except UnknownVersionError as error:
            raise VersionError(record, error.version) from None
        except msgspec.MsgspecError as error:
            await self._refuse(seat, record, [Rejected(None, "", str(error))])
            return
        if buckets.settings_hash != self._settings.settings_hash:
            self._tell_foreign(buckets.topic, buckets.partition)
        if reason := unsound(buckets, _now_us()):
            await self._refuse(seat, record, [Rejected(None, "seconds", reason, "unsound")])
        elif isinstance(buckets, FinalBuckets):
            seat.core.on_final(buckets)
            seat.news_finals = True
        else:
            seat.core.on_fresh(buckets)
            seat.news_fresh = True
        if seat.news_since_s is None:
            seat.news_since_s = time.monotonic()
        seat.news.set()

    def _tell_foreign(self, topic: str, partition: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_foreign_s >= TELL_EVERY_S:
            self._told_foreign_s = now_s
            log.warning(
                "%s/%d: closed with other content settings; its seconds are unknown and hold every roll-out "
                "until all workers run the same release with the same `content` section",
                Plain(topic if topic in self._sources else "an unknown topic"),
                partition,
            )

    async def _obey(self, seat: Seat, record: Record) -> None:
        if (refusal := self._signatures.command_fault(record, _now_us())) is not None:
            await self._refuse(seat, record, [Rejected(None, SIGNATURE, refusal, "untrusted")])
            return
        commands, positions, rejected = COMMANDS.read(record.value)
        ours: list[Command] = []
        for command, position in zip(commands, positions.tolist(), strict=True):
            owner = gating_partition(command.rollout)
            known = seat.core.knows(command.command_id)
            if not known and (age := self._signatures.age_fault(command, _now_us())) is not None:
                rejected.append(Rejected(position, "ts_us", age, "untrusted"))
            elif owner == seat.partition:
                ours.append(command)
            else:  # obeyed here as well, the roll-out would have two gates
                reason = f"partition {owner} decides about this roll-out; key its commands by its name"
                rejected.append(Rejected(position, "rollout", reason, "misplaced"))
        await self._refuse(seat, record, rejected)
        seat.news_since_s = seat.news_since_s or time.monotonic()
        for command in ours:
            await self._write(seat, seat.core.on_command(command, record.offset, _now_us()))
        seat.news_finals = True
        seat.news.set()

    async def _refuse(self, seat: Seat, record: Record, rejected: list[Rejected]) -> None:
        letters = dead_letters(record, rejected, payload=self._config.dead_letter.payload)
        seat.letters += await send_letters(self._link, letters)
        if len(seat.letters) >= LETTERS_AT_ONCE:
            await seat.acknowledged()

    async def _judge(self, seat: Seat) -> None:
        if seat.news_finals:
            seat.news_finals = False
            await self._write(seat, seat.core.judge_complete(_now_us()))
        began_s = time.monotonic()
        if seat.news_fresh and began_s >= seat.fresh_due_s:
            seat.news_fresh = False
            effects = seat.core.judge_fresh(_now_us())
            longest_s = self._config.gate.fresh_interval_ms / 1000
            spent_s = time.monotonic() - began_s
            seat.fresh_due_s = began_s + min(max(PACE_S, FRESH_TIMES * spent_s), longest_s)
            await self._write(seat, effects)
        if not (seat.news_finals or seat.news_fresh):
            seat.news_since_s = None
        renewals = seat.core.renew(_now_us())
        for first in range(0, len(renewals), RENEWED_AT_ONCE):
            await self._write_together(seat, renewals[first : first + RENEWED_AT_ONCE])

    async def _watch(self, seat: Seat) -> None:
        """Write above every foreign record on the control topic."""
        while True:
            for name, directives in (await seat.watch.foreign()).items():
                async with seat.lock:
                    effects = seat.core.on_foreign(name, directives, _now_us())
                    await self._write(seat, effects)
                answer = "its own directive now stands above them" if effects else "no roll-out of this gate"
                known = name if name in seat.core.names() else None
                seat.watch.tell(known, len(directives), answer)
            await asyncio.sleep(PAUSE_S)

    async def _write(self, seat: Seat, effects: Iterable[Effect]) -> None:
        """Each in a transaction of its own."""
        for effect in effects:
            await self._write_together(seat, [effect])

    async def _write_together(self, seat: Seat, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if effect.directive is not None:
                seat.watch.expect(control_value(effect.directive))
        began_s = time.monotonic()
        try:
            await seat.writer.write(effects)
        except (KafkaError, FencedError) as error:
            if seat.left:
                return  # we closed the writer ourselves: that is no fencing
            self._watched.fenced[seat.partition] += isinstance(error, FencedError)
            raise
        self._watched.wrote(effects, began_s, seat.news_since_s, time.monotonic())
        seat.waits.moved()
        for effect in effects:
            if (decision := effect.decision) is not None:
                reason = decision.reason
                if decision.kind == "refused":  # it may quote what was sent
                    reason = "command; why stands with its command id on klaxon.decisions"
                log.info("%s: %s %s", Plain(effect.name), Plain(decision.kind), Plain(reason))

    async def _upkeep(self, seat: Seat) -> None:
        """Read what Faust left out, and note how far that is."""
        self._signatures.poll(time.monotonic())
        for place in seat.places:
            async for record in seat.intake.left_behind(place):
                await self._apply(seat, record)
        seat.dealt_with = {
            place: offset for place in seat.places if (offset := seat.intake.expected(place)) is not None
        }

    async def _commit(self, seat: Seat) -> None:
        """Now and then, so that lag is visible: the core's memory decides, not this.

        Nobody waits for it: while the group has no coordinator aiokafka tries again for ever.
        """
        committed: dict[Partition, int] = {}
        while True:
            offsets = seat.dealt_with
            await seat.acknowledged()
            if offsets != committed and await self._link.commit(offsets):
                committed = offsets
                fault("after_commit")
            await asyncio.sleep(UPKEEP_EVERY_S)


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

    return WorkerSpec("gate", reads=READS, needs=(*WRITES, *SOURCES), make=make, new_groups_start_at_end=True)


def _now_us() -> int:
    return time.time_ns() // 1000
