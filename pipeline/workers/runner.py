"""The life of a worker process: wait for the broker, join, work, leave; signals, watchdog, exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from aiokafka.errors import KafkaError

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.monitoring.endpoint import Asked, Endpoint
from pipeline.monitoring.exposition import Snapshot
from pipeline.monitoring.process import resident_bytes
from pipeline.monitoring.timing import Timing
from pipeline.workers.broker import RefusedError
from pipeline.workers.faults import fault
from pipeline.workers.memory import keep_freed_memory
from pipeline.workers.records import Partition, Record
from pipeline.workers.rights import denied, wait_for_topics
from pipeline.workers.stopping import on_stop, unless
from pipeline.workers.transport import KlaxonApp, Link
from pipeline.workers.watchdog import EXIT_CODE, Watchdog, end_process
from schemas.header_names import batches_left_out
from schemas.plain import Log, Plain, PlainJson
from schemas.topics import Topic

log: Log = logging.getLogger("klaxon.worker")

STALL_S: Final = 60
"""Without a turn of the loop, or with records waiting and none read, for this long, the process ends."""
STOP_GRACE_S: Final = 10.0
"""On top of the rebalance timeout: a stop while joining a group ends only when the join ends."""
CANCEL_AGAIN_S: Final = 2.0
"""How long what was cancelled may take to end before it is taken to have lost that."""
FAILED_GRACE_S: Final = 5.0
"""To leave the group after an error. A process that cannot must not hold its partitions any longer."""
PATIENT_NICE: Final = 10
"""How much a patient worker yields where it shares a machine: to archive can wait, to trip cannot."""
GARBAGE_CHECK: Final = 50_000
"""Containers made and not yet freed before the interpreter looks for cycles among the newest."""

OK: Final = 0
CRASHED: Final = 1
REFUSED: Final = 2
"""The broker refuses who this process is or how it speaks: the configuration must be mended."""


class Processor(Protocol):
    """What a worker does. Every call comes from the one event loop; `read` gets one record at a time.

    An exception from any of them ends the process: whoever restarts it resumes at the commit.
    """

    async def assigned(self, places: frozenset[Partition]) -> None:
        """These partitions are ours now, all of them; may be called with some we had. Must return soon."""

    async def revoked(self, places: frozenset[Partition]) -> None:
        """These partitions may be somebody else's from now on. Must return soon."""

    async def read(self, record: Record) -> None:
        """The next record; while it awaits, nothing further is read (back-pressure)."""

    async def run(self) -> None:
        """Work between records: flushes, ticks, leases. Cancelled at stop."""

    def gauges(self) -> Mapping[str, Mapping[str, int]]:
        """Sizes, ages and counts by name, per thing they belong to (`klaxon.logits/3`, `gating/1`)."""

    def timings(self) -> Mapping[str, Timing]:
        """How long things took, by name."""

    @property
    def recovered(self) -> int:
        """Records that Faust left out and that were read again."""

    def missing(self) -> tuple[str, ...]:
        """What keeps it from being ready though it has joined, a line each: catching up, seats not taken."""

    async def stop(self) -> None:
        """The last call before the group is left, after `run` was cancelled."""


MakeProcessor = Callable[[Link, Mapping[Topic, int]], Processor]
"""Builds the processor, given the link and the partition count of every topic it needs."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker: its group, what it reads, what else must exist, and what it does."""

    name: str
    reads: tuple[Topic, ...]
    needs: tuple[Topic, ...]
    make: MakeProcessor
    new_groups_start_at_end: bool = False
    patient: bool = False
    """Whether half a second of delay is nothing to it: it then reads in few large fetches."""
    ends_scraped_after: tuple[type[PipelineError], ...] = ()
    """Errors that a counter tells of: where somebody scrapes it, the process ends after one more scrape."""

    @property
    def group(self) -> str:
        """The consumer group, one per kind of worker: a backlog in one never stops the others."""
        return f"klaxon-{self.name}"


class Runner:
    """Runs one worker in this process, from waiting for the broker to leaving the group."""

    def __init__(self, spec: WorkerSpec, config: Config) -> None:
        self._spec = spec
        self._name = Plain(spec.name)
        self._kafka = config.kafka
        self._gauges_every_s = config.worker.gauges_every_s
        self._watchdog = Watchdog(STALL_S)
        self._told_to_stop = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places: frozenset[Partition] = frozenset()
        self._reads = 0
        self._reading: Record | None = None
        """The record being read; one that failed stays."""
        self._said_why = asyncio.Event()
        self._failed_s = 0.0
        self._started_us = time.time_ns() // 1000
        self._beat_s = time.monotonic()
        self._joined = False
        self._link: Link | None = None
        self._processor: Processor | None = None
        asked = Asked(spec.name, self._snapshot, self._missing, lambda: self._beat_s)
        self._endpoint = Endpoint(config.monitoring, asked)

    async def run(self) -> int:
        """Until SIGTERM or SIGINT (returns OK) or an error (logged; CRASHED or REFUSED). Blocks that long."""
        on_stop(self._asked_to_stop)
        self._watchdog.start()
        self._endpoint.start()
        beating = asyncio.create_task(self._beat())
        working = asyncio.create_task(self._work())
        told_to_stop = asyncio.create_task(self._told_to_stop.wait())
        failed = asyncio.create_task(self._said_why.wait())
        await asyncio.wait([working, told_to_stop, failed], return_when=asyncio.FIRST_COMPLETED)
        if self._said_why.is_set():
            grace_s, code = FAILED_GRACE_S, CRASHED
        else:
            working.cancel()
            grace_s, code = self._kafka.rebalance_timeout_ms / 1000 + STOP_GRACE_S, EXIT_CODE
        await asyncio.wait([working], timeout=grace_s)
        error = working.exception() if working.done() and not working.cancelled() else None
        if isinstance(error, self._spec.ends_scraped_after):
            await unless(self._told_to_stop, self._endpoint.scraped_since(self._failed_s))
        self._watchdog.stop()
        self._endpoint.stop()
        if not working.done():
            end_process(f"not stopped within {grace_s:g} s", code)
        beating.cancel()
        told_to_stop.cancel()
        failed.cancel()
        if working.cancelled():
            return OK
        self._say_why(error)
        return REFUSED if isinstance(error, RefusedError) else CRASHED

    def _say_why(self, error: BaseException | None) -> None:
        """Log it, once: the first error is the cause of any that follow."""
        if self._said_why.is_set():
            return
        self._failed_s = time.monotonic()
        if isinstance(error, PipelineError):
            log.error("%s: %s", self._name, error)
        elif (reason := denied(self._kafka, error)) is not None:
            log.error("%s: %s", self._name, Plain(reason))
        elif isinstance(error, KafkaError):
            at = Plain(self._kafka.bootstrap)
            log.error("%s: Kafka at %s: %r; start it again", self._name, at, error)
        else:
            record = self._reading
            where = f" at {record.place} offset {record.offset}" if record is not None else ""
            log.error("%s: ended by an error%s", self._name, Plain(where), exc_info=error)
        self._said_why.set()

    async def _work(self) -> None:
        topics = dict.fromkeys(self._spec.reads + self._spec.needs)
        counts = await wait_for_topics(self._kafka, topics, self._spec.name)
        app = KlaxonApp(
            self._spec.group,
            self._kafka,
            new_groups_start_at_end=self._spec.new_groups_start_at_end,
            patient=self._spec.patient,
        )
        link = Link(app)
        processor = self._spec.make(link, counts)
        self._link, self._processor = link, processor
        self._connect(app, processor)
        try:
            await first_end_of(self._serve(app, processor, link), self._until_failed(), app.until_ended())
        except Exception as error:  # whatever it is: said before leaving the group, which takes its time
            self._say_why(error)
            raise
        finally:
            try:
                await processor.stop()
            finally:
                await app.stop()

    def _connect(self, app: KlaxonApp, processor: Processor) -> None:
        async def read(record: Record) -> None:
            if self._failed.done():
                return  # what comes after a record that failed must not be processed
            self._reading = record
            try:
                await self._guarded(processor.read(record))
            finally:
                if not self._failed.done():
                    self._reading = None
            self._reads += 1
            fault("after_read")

        async def assigned(places: frozenset[Partition]) -> None:
            self._places, self._joined = places, True
            await self._guarded(processor.assigned(places))
            log.info("%s: assigned %s", self._name, Plain(_listed(places)))
            fault("on_assigned")

        async def revoked(places: frozenset[Partition]) -> None:
            self._places -= places
            await self._guarded(processor.revoked(places))
            if places:
                log.info("%s: revoked %s", self._name, Plain(_listed(places)))
            fault("on_revoked")

        app.connect(self._spec.reads, read=read, assigned=assigned, revoked=revoked)

    async def _guarded(self, call: Awaitable[None]) -> None:
        """An error of the processor is kept, and ends the process."""
        try:
            await call
        except Exception as error:  # noqa: BLE001 (handed on, whatever it is)
            if not self._failed.done():
                self._failed.set_exception(error)

    async def _serve(self, app: KlaxonApp, processor: Processor, link: Link) -> None:
        await app.start()
        log.info("%s: ready", self._name)
        await first_end_of(processor.run(), self._watch_fetching(link), self._log_gauges())

    async def _until_failed(self) -> None:
        """Said at once: what else runs may take its time to end, and the grace counts from here."""
        try:
            await self._failed
        except Exception as error:  # whatever a processor raised
            self._say_why(error)
            raise

    async def _beat(self) -> None:
        while True:
            self._watchdog.beat()
            self._beat_s = time.monotonic()
            await asyncio.sleep(0.5)

    async def _watch_fetching(self, link: Link) -> None:
        """End the process when records have waited for STALL_S checks in a row and none was being read."""
        idle_checks, seen_reads = 0, self._reads
        while True:
            await asyncio.sleep(1)
            waiting = [
                place
                for place in self._places
                if (position := link.position(place)) is not None and not position.at_end
            ]
            idle = bool(waiting) and self._reading is None and self._reads == seen_reads
            idle_checks, seen_reads = (idle_checks + 1 if idle else 0), self._reads
            if idle_checks >= STALL_S:
                end_process(f"{_listed(waiting)}: records wait and none was read for {STALL_S} s")

    def _snapshot(self) -> Snapshot:
        """Everything that is logged and scraped, from one place."""
        link, processor = self._link, self._processor
        process = {
            "rss_bytes": resident_bytes(),
            "started_us": self._started_us,
            "reads": self._reads,
            "assigned_partitions": len(self._places),
            "ready": int(not self._missing()),
            "commits": 0 if link is None else link.commits,
            "commits_refused": 0 if link is None else link.commits_refused,
            "recovered": 0 if processor is None else processor.recovered,
            "batches_left_out": batches_left_out(),
        }
        letters = {} if link is None else link.dead_letters
        dead_letters = {
            f"dead_letters/{topic.value}": dict(letters.get(topic.value, {})) for topic in self._spec.reads
        }
        if processor is None:
            return Snapshot({"process": process, **dead_letters})
        return Snapshot({"process": process, **dead_letters, **processor.gauges()}, processor.timings())

    def _missing(self) -> tuple[str, ...]:
        if self._said_why.is_set():
            return ("it failed, and ends",)
        if self._processor is None:
            return ("Kafka and its topics are waited for",)
        if not self._joined:
            return ("the consumer group was not joined yet",)
        return self._processor.missing()

    async def _log_gauges(self) -> None:
        """One line now and then that says how big everything is: `gauges {…}`, JSON."""
        if not self._gauges_every_s:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._gauges_every_s)
            gauges = msgspec.json.encode(self._snapshot().gauges, order="sorted")
            log.info("%s: gauges %s", self._name, PlainJson(gauges.decode()))

    def _asked_to_stop(self, number: signal.Signals) -> None:
        log.info("%s: %s, leaving the group", self._name, Plain(number.name))
        self.stop()

    def stop(self) -> None:
        """Make `run` leave the group and return OK; does not wait."""
        self._told_to_stop.set()


def run_worker(spec: WorkerSpec, config: Config) -> int:
    """Run a worker until it is told to stop (exit code 0), fails (1) or is refused (2); blocks."""
    # Nothing made per record refers back to itself: counting references frees it, looking for cycles costs.
    gc.freeze()
    gc.set_threshold(GARBAGE_CHECK)
    keep_freed_memory()
    if spec.patient:
        os.nice(PATIENT_NICE)

    async def run() -> int:
        return await Runner(spec, config).run()

    return asyncio.run(run())


async def first_end_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run them together until one ends, which none should; raises its error. Leaves none running: one that
    lost its cancellation, as code of others now and then does, is cancelled again."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        left = set(tasks)
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        await asyncio.gather(*tasks, return_exceptions=True)


def _listed(places: Iterable[Partition]) -> str:
    return ", ".join(str(place) for place in sorted(places)) or "nothing"
