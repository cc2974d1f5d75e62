"""One gating partition while it is this process's: its memory rebuilt, records read, judgements written.

The writer fences every predecessor, the core is rebuilt from the log, what happened since is read, and only
then are Faust's records used. All judgement is in the core; the clock, the broker and the order of calls are
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiokafka.errors import ConsumerStoppedError, KafkaError

from pipeline.config import Config
from pipeline.core.gate.gating import Effect, GateCore, GateSettings
from pipeline.core.gate.soundness import unsound
from pipeline.workers.broker import RangeReader
from pipeline.workers.dead_letters import VersionError, dead_letters, send_letters
from pipeline.workers.faults import fault
from pipeline.workers.gate_counts import GateCounts
from pipeline.workers.gate_log import remembered, since
from pipeline.workers.gate_signatures import GateSignatures
from pipeline.workers.gate_watch import PAUSE_S, ControlWatch
from pipeline.workers.gate_writer import FencedError, GateWriter, control_value
from pipeline.workers.intake import Intake
from pipeline.workers.records import Partition, Record
from pipeline.workers.transport import Link
from pipeline.workers.waits import Waits
from schemas.buckets import FinalBuckets, FreshCells
from schemas.columns import Rejected
from schemas.commands import COMMANDS
from schemas.control import Command
from schemas.plain import Log, Plain
from schemas.records import UnknownVersionError, read_msgpack
from schemas.signing import SIGNATURE
from schemas.topics import Topic, gating_partition

log: Log = logging.getLogger("klaxon.gate")

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


@dataclass(frozen=True, slots=True)
class Parts:
    """What the seats of a process share."""

    link: Link
    config: Config
    settings: GateSettings
    sources: Mapping[str, int]
    signatures: GateSignatures
    counts: GateCounts
    tell_foreign: Callable[[str, int], None]
    """Says that a source's partition was closed with other content settings."""


class Seat:
    """One gating partition, from its assignment to its revocation. Core and writer are used one at a time."""

    def __init__(self, number: int, places: tuple[Partition, ...], parts: Parts, attempt: int) -> None:
        """`places`: what it reads through the group. `attempt`: to take it, counted from 1."""
        config = parts.config
        self.partition = number
        self.places = places
        self.attempt = attempt
        self.core = GateCore(number, parts.sources, parts.settings)
        self.intake = Intake(parts.link, config.kafka)
        self.settled = asyncio.Event()
        """Set when the seat is caught up, or left."""
        self.left = False
        self._parts = parts
        self._writer = GateWriter(config.kafka, number, parts.signatures)
        self._watch = ControlWatch(config.kafka, number, parts.signatures)
        self._waits = Waits(f"gating partition {number}")
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        """Set when there is something to judge."""
        self._news_finals = True
        self._news_fresh = True
        self._news_since_s: float | None = None
        """Since when the oldest news waits."""
        self._fresh_due_s = 0.0
        """When fresh evidence may be judged again."""
        self._dealt_with: dict[Partition, int] = {}
        """Next offset to read, as of the last upkeep."""
        self._letters: list[Awaitable[Any]] = []
        """Dead letters that were sent; commits rest on their acknowledgement, and judgement does not."""

    async def serve(self) -> None:
        """Take the seat, and judge until cancelled. Raises StuckError where a step never ends."""
        await self._waits.watch(self._serve())

    def leave(self) -> None:
        """Nothing is read or written here any more; what waits for the seat goes on."""
        self.left = True
        self.settled.set()

    async def read(self, record: Record) -> None:
        """The next record of the group; waits until the seat is caught up. Of one that is left: nothing."""
        await self.settled.wait()
        async with self._lock:
            if not self.left:
                try:
                    async for each in self.intake.take(record):
                        await self._apply(each)
                except (KafkaError, ConsumerStoppedError):
                    if not self.left:
                        raise  # else we stopped the intake's reader ourselves

    async def _serve(self) -> None:
        """Take the seat, then judge whenever there is something new, until it is left."""
        beside: tuple[asyncio.Task[None], ...] = ()
        try:
            self._waits.step("the transaction coordinator, which fences the predecessor")
            await self._writer.start()
            fault("gate_fenced_before_memory")
            await self._catch_up()
            beside = (asyncio.create_task(self._answer_foreign()), asyncio.create_task(self._commit()))
            upkeep_s = 0.0
            while True:
                for each in beside:
                    if each.done():
                        each.result()
                self._waits.step("a record to be dealt with")
                async with self._lock:
                    self._waits.step("its transactions to be committed")
                    await self._judge()
                    self._waits.step("what the group left out")
                    if time.monotonic() - upkeep_s >= UPKEEP_EVERY_S:
                        upkeep_s = time.monotonic()
                        await self._upkeep()
                self._waits.rest()
                await asyncio.sleep(PACE_S)
                await self._until_news()
        finally:
            for each in beside:
                each.cancel()
            if beside:
                await asyncio.wait(beside)
            await self._writer.close()
            await self._watch.stop()
            await self.intake.stop()

    async def _until_news(self) -> None:
        """Wait until there is something that may be judged, at most LOOK_EVERY_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                if not (self._news_finals or self._news_fresh):
                    self._news.clear()
                    await self._news.wait()
                if not self._news_finals:
                    await asyncio.sleep(self._fresh_due_s - time.monotonic())

    async def _catch_up(self) -> None:
        """Rebuild the core from the log, up to where Faust's records go on."""
        waits = self._waits
        reader = RangeReader(self._parts.config.kafka, waits.moved)
        waits.step("a connection to read with")
        await reader.start()
        try:
            waits.step("its memory: state, directives and roll-outs")
            memory = await remembered(reader, self.partition, self._parts.signatures)
            self.core.restore(memory.states, memory.control, memory.rollouts, memory.restated)
            waits.step("a connection to watch the control topic with")
            await self._watch.start(memory.control_end)
            waits.step("the transaction of what is said again")
            await self._write(self.core.reassert(_now_us()))
            fault("gate_memory_before_log")
            await self._until_positioned()
            waits.step("what was written since: buckets, fresh cells and commands")
            ends = await reader.end_offsets(self.places)
            async for record in since(reader, self.partition, self.core.read_from(), ends):
                await self._apply(record)
                fault("during_warm_up")
        finally:
            waits.step("the reader's connection to be closed")
            await reader.stop()
        for place in self.places:
            self.intake.expect(place, ends[place])
        self.settled.set()
        log.info("gating partition %d: taken, %d roll-outs", self.partition, self.core.gauges()["rollouts"])

    async def _until_positioned(self) -> None:
        """Wait until Faust knows where it reads on: what lies before is then covered by the catch-up."""
        while unknown := [place for place in self.places if self._parts.link.position(place) is None]:
            self._waits.step(f"the first fetch of {', '.join(map(str, unknown))}")
            await asyncio.sleep(PACE_S)  # there is no event

    async def _apply(self, record: Record) -> None:
        self._waits.moved()
        if record.topic is Topic.COMMANDS:
            await self._obey(record)
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
            await self._refuse(record, [Rejected(None, "", str(error))])
            return
        if buckets.settings_hash != self._parts.settings.settings_hash:
            self._parts.tell_foreign(buckets.topic, buckets.partition)
        if reason := unsound(buckets, _now_us()):
            await self._refuse(record, [Rejected(None, "seconds", reason, "unsound")])
        elif isinstance(buckets, FinalBuckets):
            self.core.on_final(buckets)
            self._news_finals = True
        else:
            self.core.on_fresh(buckets)
            self._news_fresh = True
        if self._news_since_s is None:
            self._news_since_s = time.monotonic()
        self._news.set()

    async def _obey(self, record: Record) -> None:
        if (refusal := self._parts.signatures.command_fault(record, _now_us())) is not None:
            await self._refuse(record, [Rejected(None, SIGNATURE, refusal, "untrusted")])
            return
        commands, positions, rejected = COMMANDS.read(record.value)
        ours: list[Command] = []
        for command, position in zip(commands, positions.tolist(), strict=True):
            owner = gating_partition(command.rollout)
            known = self.core.knows(command.command_id)
            if not known and (age := self._parts.signatures.age_fault(command, _now_us())) is not None:
                rejected.append(Rejected(position, "ts_us", age, "untrusted"))
            elif owner == self.partition:
                ours.append(command)
            else:  # obeyed here as well, the roll-out would have two gates
                reason = f"partition {owner} decides about this roll-out; key its commands by its name"
                rejected.append(Rejected(position, "rollout", reason, "misplaced"))
        await self._refuse(record, rejected)
        self._news_since_s = self._news_since_s or time.monotonic()
        for command in ours:
            await self._write(self.core.on_command(command, record.offset, _now_us()))
        self._news_finals = True
        self._news.set()

    async def _refuse(self, record: Record, rejected: list[Rejected]) -> None:
        letters = dead_letters(record, rejected, payload=self._parts.config.dead_letter.payload)
        self._letters += await send_letters(self._parts.link, letters)
        if len(self._letters) >= LETTERS_AT_ONCE:
            await self._acknowledged()

    async def _judge(self) -> None:
        if self._news_finals:
            self._news_finals = False
            await self._write(self.core.judge_complete(_now_us()))
        began_s = time.monotonic()
        if self._news_fresh and began_s >= self._fresh_due_s:
            self._news_fresh = False
            effects = self.core.judge_fresh(_now_us())
            longest_s = self._parts.config.gate.fresh_interval_ms / 1000
            spent_s = time.monotonic() - began_s
            self._fresh_due_s = began_s + min(max(PACE_S, FRESH_TIMES * spent_s), longest_s)
            await self._write(effects)
        if not (self._news_finals or self._news_fresh):
            self._news_since_s = None
        renewals = self.core.renew(_now_us())
        for first in range(0, len(renewals), RENEWED_AT_ONCE):
            await self._write_together(renewals[first : first + RENEWED_AT_ONCE])

    async def _answer_foreign(self) -> None:
        """Write above every foreign record on the control topic."""
        while True:
            for name, directives in (await self._watch.foreign()).items():
                async with self._lock:
                    effects = self.core.on_foreign(name, directives, _now_us())
                    await self._write(effects)
                answer = "its own directive now stands above them" if effects else "no roll-out of this gate"
                known = name if name in self.core.names() else None
                self._watch.tell(known, len(directives), answer)
            await asyncio.sleep(PAUSE_S)

    async def _write(self, effects: Iterable[Effect]) -> None:
        """Each in a transaction of its own."""
        for effect in effects:
            await self._write_together([effect])

    async def _write_together(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if effect.directive is not None:
                self._watch.expect(control_value(effect.directive))
        began_s = time.monotonic()
        try:
            await self._writer.write(effects)
        except (KafkaError, FencedError) as error:
            if self.left:
                return  # we closed the writer ourselves: that is no fencing
            self._parts.counts.fenced[self.partition] += isinstance(error, FencedError)
            raise
        self._parts.counts.wrote(effects, began_s, self._news_since_s, time.monotonic())
        self._waits.moved()
        for effect in effects:
            if (decision := effect.decision) is not None:
                reason = decision.reason
                if decision.kind == "refused":  # it may quote what was sent
                    reason = "command; why stands with its command id on klaxon.decisions"
                log.info("%s: %s %s", Plain(effect.name), Plain(decision.kind), Plain(reason))

    async def _upkeep(self) -> None:
        """Read what Faust left out, and note how far that is."""
        self._parts.signatures.poll(time.monotonic())
        for place in self.places:
            async for record in self.intake.left_behind(place):
                await self._apply(record)
        self._dealt_with = {
            place: offset for place in self.places if (offset := self.intake.expected(place)) is not None
        }

    async def _commit(self) -> None:
        """Now and then, so that lag is visible: the core's memory decides, not this.

        Nobody waits for it: while the group has no coordinator aiokafka tries again for ever.
        """
        committed: dict[Partition, int] = {}
        while True:
            offsets = self._dealt_with
            await self._acknowledged()
            for place, offset in offsets.items():
                if place.topic == Topic.COMMANDS:
                    self.core.answered(offset - 1)
            if offsets != committed and await self._parts.link.commit(offsets):
                committed = offsets
                fault("after_commit")
            await asyncio.sleep(UPKEEP_EVERY_S)

    async def _acknowledged(self) -> None:
        """Wait until all dead letters that were sent so far are; raises aiokafka's error."""
        letters = tuple(self._letters)
        for letter in letters:
            await letter
        # Only now: whoever commits waits for them as well.
        known = set(map(id, letters))
        self._letters = [each for each in self._letters if id(each) not in known]


def _now_us() -> int:
    return time.time_ns() // 1000
