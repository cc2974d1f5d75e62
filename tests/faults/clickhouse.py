"""ClickHouse broken on purpose under real archive workers: `python -m tests.faults.clickhouse [--only NAME]`.

A scripted HTTP front stands before the real engine (`tests/store/http_server.py` says what it can do). Each
scenario returns one line of what it saw; what must hold is asserted. The short forms are pytest tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from pipeline.cli.demo.ports import free_port
from pipeline.store.client import connect
from pipeline.store.migrate import migrate
from schemas.codec import BatchHeader, decode_requests, encode_requests
from schemas.topics import COLUMNS, CONTENT_TYPE, JSON, Topic
from tests.conftest import REPOSITORY
from tests.faults.disk import small_disk
from tests.kafka.broker import Broker, apache_kafka
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import committed_offsets, fresh_topics, now_us
from tests.kafka.waiting import eventually
from tests.store.http_server import ALL_MODES, INSERT_MODES
from tests.system.stack import NOBODY_DIES, PATIENCE_S, SECOND, Stack, stack
from tests.system.workload import PARTITIONS, Traffic
from tests.workers.events import request

GROUP: Final = "klaxon-archive"
PLACES: Final = [TopicPartition(Topic.REQUESTS.value, number) for number in range(PARTITIONS)]
MOST_RSS_BYTES: Final = 500 << 20
TIMEOUT_S: Final = 2
SETTINGS: Final = {
    **GAUGES_EVERY_SECOND,
    "KLAXON_CLICKHOUSE_TIMEOUT_S": str(TIMEOUT_S),
    "KLAXON_ARCHIVE_BLOCK_AGE_MS": "200",
    "KLAXON_ARCHIVE_BLOCK_ROWS": "400",
}
POINTS: Final = ("before_insert", "inside_insert", "after_insert_before_commit", "after_insert_commit")
BEFALLEN: Final = 4
"""Inserts that a fault befalls: the driver's own second attempt among them, in both partitions."""
HOUR_S: Final = 3_600
EVENTS_PER_S: Final = 200


class Server:
    """The engine behind its front, in a process of its own; it keeps its port over a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns once it listens. What it held before stands."""
        self.kill()
        with self.folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.store.http_server", str(self.folder), str(self._port)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            self._port = json.loads(said.readline())["port"]
        self._stop_merges()

    def _stop_merges(self) -> None:
        """Of the tables there are: what was inserted twice is to be seen, not merged away."""
        store = connect(self.dsn, "default")
        try:
            store.command("SYSTEM STOP MERGES")
        finally:
            store.close()

    def empty(self) -> None:
        """Running, migrated, without rows, and no fault yet."""
        if self.dead:
            self.start()
        self.set("up")
        Path(f"{self.folder}.fired").unlink(missing_ok=True)
        store = connect(self.dsn, "klaxon", create_database=True)
        try:
            store.command("DROP DATABASE klaxon SYNC")
        finally:
            store.close()
        store = connect(self.dsn, "klaxon", create_database=True)
        try:
            migrate(store, now_us=now_us())
        finally:
            store.close()
        self._stop_merges()

    def kill(self) -> None:
        """SIGKILL: connections are refused from now on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self._process is None or self._process.poll() is not None

    def set(self, mode: str) -> None:
        """What befalls requests from now on."""
        Path(f"{self.folder}.mode").write_text(mode)

    def fired(self) -> Counter[str]:
        """How many requests each fault befell."""
        path = Path(f"{self.folder}.fired")
        return Counter(path.read_text().split()) if path.exists() else Counter()


@dataclass
class Archiving:
    """A server, topics from nothing, and the events that were acknowledged."""

    broker: Broker
    folder: Path
    server: Server
    producer: AIOKafkaProducer
    rng: random.Random
    expected: set[tuple[int, int, int]] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """Of the workers."""
        return {**SETTINGS, "KLAXON_CLICKHOUSE_DSN": self.server.dsn}

    def worker(self, fault: str | None = None, defect: str | None = None) -> Worker:
        """An archive, not started yet. One that is to die has a short session: its successor waits."""
        command = (sys.executable, "-m", "tests.faults.bad_archives", defect) if defect else None
        session = {"KLAXON_KAFKA_SESSION_TIMEOUT_MS": "2000"} if fault else NOBODY_DIES
        environment = {**self.environment, **session}
        return Worker(
            "archive", self.broker, self.folder, fault=fault, environment=environment, command=command
        )

    async def send(self, records: int, events: int = 5, columnar: bool = False) -> None:
        """Request events in records of so many, over both partitions; returns when all are acknowledged."""
        waiting = []
        for number in range(records):
            partition = number % PARTITIONS
            batch = [request(now_us(), signature=f"{self.rng.getrandbits(128):032x}") for _ in range(events)]
            value, kind = msgspec.json.encode(batch), JSON
            if columnar:
                header = BatchHeader("flood", number, {})
                value, kind = encode_requests(decode_requests(value, JSON).columns, header), COLUMNS
            waiting.append(await self._send(partition, value, kind))
        for sent in waiting:
            self._note(await sent, events)

    async def flood(self, records: int, events: int, seconds: int) -> None:
        """As `send`, columnar, and quick: the same few batches over and over, their event time running on
        from so many seconds ago until now."""
        begin_us, batches = now_us() - seconds * SECOND, []
        for _ in range(20):
            batch = [
                request(
                    begin_us + position * seconds * SECOND // (records * events),
                    signature=f"{self.rng.getrandbits(128):032x}",
                )
                for position in range(events)
            ]
            batches.append(decode_requests(msgspec.json.encode(batch), JSON).columns)
        for first in range(0, records, 500):
            sent = []
            for number in range(first, min(first + 500, records)):
                columns = batches[number % len(batches)]
                later = replace(columns, ts_us=columns.ts_us + number * seconds * SECOND // records)
                value = encode_requests(later, BatchHeader("flood", number, {}))
                sent.append(await self._send(number % PARTITIONS, value, COLUMNS))
            for each in sent:
                self._note(await each, events)

    async def _send(self, partition: int, value: bytes, kind: str) -> Awaitable[object]:
        headers = [(CONTENT_TYPE, kind.encode())]
        sent: Awaitable[object] = await self.producer.send(
            Topic.REQUESTS.value, value, partition=partition, headers=headers
        )
        return sent

    def _note(self, at: object, events: int) -> None:
        partition, offset = at.partition, at.offset  # type: ignore[attr-defined]
        self.expected.update((partition, offset, position) for position in range(events))
        place = f"{Topic.REQUESTS.value}/{partition}"
        self.ends[place] = max(self.ends.get(place, 0), offset + 1)

    async def until_committed(self, worker: Worker, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the archive has committed all that was sent."""

        async def done() -> bool:
            assert worker.running, worker.log
            self.note_memory(worker)
            committed = await committed_offsets(self.broker, GROUP, PLACES)
            return all(committed.get(place, 0) >= end for place, end in self.ends.items())

        await eventually(done, timeout_s=timeout_s)

    def note_memory(self, worker: Worker) -> None:
        """Its newest gauge, for the peak."""
        rss = worker.gauges().get("process", {}).get("rss_bytes", 0)
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)

    async def judged(self, *, late_inserts: bool = False) -> list[str]:
        """What the table holds against what was acknowledged: everything once.

        `late_inserts`: somebody may have inserted after losing the partition; then a row may physically stand
        there twice until it is merged, and what is read is judged.
        """
        found = await asyncio.to_thread(
            self._stored, "inference_log FINAL" if late_inserts else "inference_log"
        )
        doubled = [(place, count) for place, count in sorted(found.items()) if count > 1]
        return [
            *(f"lost: {place}" for place in sorted(self.expected - found.keys())[:5]),
            *(f"invented: {place}" for place in sorted(found.keys() - self.expected)[:5]),
            *(f"{count} times: {place}" for place, count in doubled[:5]),
        ]

    def holds_rows(self) -> bool:
        """Whether any row of ours is stored."""
        return bool(self._stored("inference_log"))

    def spanned_s(self) -> int:
        """Between the first and the last event that is stored, by their own times."""
        store = connect(self.server.dsn, "klaxon")
        try:
            query = "SELECT dateDiff('second', min(ts_us), max(ts_us)) FROM inference_log"
            ((seconds,),) = store.rows(f"{query} WHERE part < {PARTITIONS}")
        finally:
            store.close()
        return int(seconds)

    def _stored(self, table: str) -> dict[tuple[int, int, int], int]:
        store = connect(self.server.dsn, "klaxon")
        try:
            # What uses up a token stands in a partition of its own, beyond all others.
            rows = store.rows(
                f"SELECT part, off, pos, count() FROM {table} WHERE part < {PARTITIONS} GROUP BY 1, 2, 3"
            )
        finally:
            store.close()
        return {(part, off, pos): count for part, off, pos, count in rows}


@asynccontextmanager
async def archiving(server: Server, broker: Broker, folder: Path, seed: int) -> AsyncIterator[Archiving]:
    """Everything but the worker, from nothing; the server stays."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    await fresh_topics(broker)
    await asyncio.to_thread(server.empty)
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all", linger_ms=5)
    await producer.start()
    try:
        yield Archiving(broker, folder, server, producer, random.Random(seed))
    finally:
        await producer.stop()


async def _waves(on: Archiving, worker: Worker, modes: Sequence[str]) -> None:
    """Records under each mode, until every fault has befallen enough requests and all is committed."""
    for mode in modes:
        if mode == "refused":
            on.server.kill()
            await on.send(6)
            await worker.until_log("cannot be reached")
            await asyncio.to_thread(on.server.start)
        else:
            wanted = 2 if mode in ALL_MODES else BEFALLEN
            on.server.set(mode if mode in ALL_MODES else f"{mode}:{wanted}")
            await on.send(6)
            # Where an insert needs no second attempt there are only as many as blocks.
            await _until_fired(on.server, mode, wanted, meanwhile=lambda: on.send(2))
            on.server.set("up")
        await on.until_committed(worker)


async def _until_fired(
    server: Server, mode: str, wanted: int, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait until a fault has befallen so many requests; `meanwhile` is done every second."""
    next_s, until_s = time.monotonic() + 1, time.monotonic() + PATIENCE_S
    while (fired := server.fired()[mode]) < wanted:
        assert time.monotonic() < until_s, f"{mode} befell {fired} requests of {wanted}"
        if meanwhile is not None and time.monotonic() > next_s:
            await meanwhile()
            next_s = time.monotonic() + 1
        await asyncio.sleep(0.05)


async def broken_answers(
    server: Server,
    broker: Broker,
    folder: Path,
    seed: int,
    modes: Sequence[str] = ("refused", *INSERT_MODES, *ALL_MODES),
    defect: str | None = None,
) -> str:
    """Every way not to answer, one after another, under one worker that never leaves its group."""
    async with archiving(server, broker, folder, seed) as on, on.worker(defect=defect) as worker:
        await on.send(4)
        await on.until_committed(worker)
        began_s = time.monotonic()
        await _waves(on, worker, modes)
        took_s = time.monotonic() - began_s
        assert worker.log.count("archive: assigned") == 1, f"it lost its partitions:\n{worker.log}"
        assert "Traceback" not in worker.log, worker.log
        assert await worker.stop() == 0, worker.log
        findings = await on.judged()
        assert not findings, "\n".join(findings)
        assert on.peak_rss_bytes < MOST_RSS_BYTES
        fired = on.server.fired()
        return (
            f"{len(modes)} ways in {took_s:.0f} s, requests befallen {dict(sorted(fired.items()))}: "
            f"{len(on.expected)} events exactly once, one assignment, {on.peak_rss_bytes >> 20} MiB at most"
        )


async def killed_meanwhile(
    server: Server,
    broker: Broker,
    folder: Path,
    seed: int,
    modes: Sequence[str] = (*INSERT_MODES, "slow"),
) -> str:
    """The worker killed at every point around an insert while answers break."""
    deaths = 0
    async with archiving(server, broker, folder, seed) as on:
        for mode in modes:
            for point in POINTS:
                on.server.set(f"{mode}:2" if mode in INSERT_MODES else mode)
                await on.send(6)
                async with on.worker(f"{point}:{on.rng.randint(1, 2)}") as worker:
                    await worker.until_fault(point)
                    deaths += 1
            assert on.server.fired()[mode] > 0, f"{mode} befell no request"
        on.server.set("up")
        async with on.worker() as worker:
            await on.until_committed(worker)
            assert await worker.stop() == 0, worker.log
        findings = await on.judged(late_inserts=True)
        assert not findings, "\n".join(findings)
        assert deaths == len(modes) * len(POINTS)
        return f"{deaths} deaths under {len(modes)} faults: {len(on.expected)} events exactly once"


async def killed_behind_a_failure(
    server: Server, broker: Broker, folder: Path, seed: int, defect: str | None = None
) -> str:
    """The worker killed as soon as the first rows stand, after its first inserts had failed for seconds."""
    async with archiving(server, broker, folder, seed) as on:
        on.server.set("lost")
        async with on.worker(defect=defect) as worker:
            await on.send(6)
            await _until_fired(on.server, "lost", 20)
            await on.send(6)
            on.server.set("up")
            await eventually(lambda: asyncio.to_thread(on.holds_rows))
            await worker.kill()
        async with on.worker() as worker:
            await worker.until_log("archive: ready")
            await on.send(8)  # stored after all else, whatever the group's commit says
            await on.until_committed(worker)
            assert await worker.stop() == 0, worker.log
        findings = await on.judged(late_inserts=True)
        assert not findings, "\n".join(findings)
        return f"{len(on.expected)} events exactly once"


async def trips_go_on(server: Server, broker: Broker, folder: Path, seed: int) -> str:
    """A roll-out trips while ClickHouse hangs, and the archive is stuck before, at and after it."""
    await asyncio.to_thread(server.empty)
    # Two dozen partitions share one engine: its answers take seconds on a busy machine.
    patience = {"KLAXON_CLICKHOUSE_TIMEOUT_S": "8", "KLAXON_ARCHIVE_BLOCK_AGE_MS": "1000"}
    variables = {
        **SETTINGS,
        **patience,
        **NOBODY_DIES,
        "KLAXON_CLICKHOUSE_DSN": server.dsn,
    }
    async with stack(broker, folder, variables=variables) as on:
        workers = {kind: on.worker(kind) for kind in ("measure", "pair", "gate", "archive")}
        for worker in workers.values():
            await worker.start()
        await workers["gate"].until_log("gating partition 3: taken", timeout_s=PATIENCE_S)
        await workers["archive"].until_log("going on at", timeout_s=PATIENCE_S)
        server.set("hang")
        traffic = Traffic(seed, "everywhere", seconds=6.0)
        await on.start_rollout(traffic)
        await _until_fired(server, "hang", 1)  # the start's own decision is to be archived
        began_us = now_us()
        await asyncio.gather(on.play(traffic), on.follower.until(lambda: _trips(on, traffic) != [], "a trip"))
        (tripped_us,) = _trips(on, traffic)
        hung = server.fired()["hang"]
        await _until_fired(server, "hang", hung + 1)
        server.set("up")
        await on.until_archived(on.log())
        assert workers["archive"].log.count("archive: assigned") == 1, "it lost its partitions"
        return (
            f"tripped {(tripped_us - began_us) / SECOND:.1f} s after its first event while {hung} "
            "requests hung; archived afterwards"
        )


def _trips(on: Stack, traffic: Traffic) -> list[int]:
    """When the roll-out tripped, in µs."""
    decisions = on.follower.decisions.get(traffic.rollout, [])
    return [said["inputs"]["now_us"] for said in decisions if said["kind"] == "trip"]


async def hour_away(server: Server, broker: Broker, folder: Path, seed: int, seconds: int = HOUR_S) -> str:
    """ClickHouse is away while an hour's events come: by their own time, produced as fast as it goes."""
    records = seconds * EVENTS_PER_S // 100
    async with archiving(server, broker, folder, seed) as on, on.worker() as worker:
        await on.send(2)
        await on.until_committed(worker)
        on.server.kill()
        await on.flood(records, 100, seconds)
        await worker.until_log("cannot be reached")
        await eventually(lambda: _shows_lag(on, worker, records), timeout_s=PATIENCE_S)
        waiting_rss_bytes = on.peak_rss_bytes
        await asyncio.to_thread(on.server.start)
        began_s = time.monotonic()
        await on.until_committed(worker, timeout_s=1_800)
        took_s = time.monotonic() - began_s
        assert worker.log.count("archive: assigned") == 1, "it lost its partitions"
        assert await worker.stop() == 0, worker.log
        findings = await on.judged()
        assert not findings, "\n".join(findings)
        assert on.peak_rss_bytes < MOST_RSS_BYTES, on.peak_rss_bytes
        spanned_s = await asyncio.to_thread(on.spanned_s)
        assert seconds - 1 <= spanned_s, f"stored events span {spanned_s} s, {seconds} s were sent"
        return (
            f"{len(on.expected)} events of {spanned_s} s exactly once, caught up in {took_s:.1f} s "
            f"({len(on.expected) / took_s:.0f} events/s); at most {waiting_rss_bytes >> 20} MiB while it "
            f"waited, {on.peak_rss_bytes >> 20} MiB in all"
        )


async def _shows_lag(on: Archiving, worker: Worker, records: int) -> bool:
    """Whether the gauges show (nearly) all that waits, most of which the worker has not even read."""
    on.note_memory(worker)
    gauges = worker.gauges()
    behind = sum(gauges.get(f"{at.topic}/{at.partition}", {}).get("lag_records", 0) for at in PLACES)
    return behind >= records * 0.9


async def retention_alert(
    server: Server, broker: Broker, folder: Path, seed: int, retention_s: int = 60
) -> str:
    """An operator hears of it while the records still stand."""
    async with archiving(server, broker, folder, seed) as on:
        await _keep_for(broker, Topic.REQUESTS, retention_s)
        async with on.worker() as worker:
            await worker.until_log("going on at")  # records do not wait for its start
            on.server.set("hang")
            began_s = time.monotonic()
            await on.send(4)
            await worker.until_log("not archived, the oldest for")
            after_s = time.monotonic() - began_s
            line = next(each for each in worker.log.splitlines() if "not archived, the oldest for" in each)
            await eventually(lambda: _at_risk(worker))
            gauges = worker.gauges()
            place = max(
                (f"{at.topic}/{at.partition}" for at in PLACES), key=lambda at: gauges[at]["behind_us"]
            )
            assert 0 < gauges[place]["retention_left_us"] < retention_s * SECOND / 2
            assert gauges[place]["deleted_records"] == 0, "said in time"
            await _keep_for(broker, Topic.REQUESTS, 3_600)  # as it says: a slow machine loses nothing here
            on.server.set("up")
            await on.until_committed(worker)
            await eventually(lambda: _at_ease(worker))
            assert await worker.stop() == 0, worker.log
        findings = await on.judged()
        assert not findings, "\n".join(findings)
        return f"said after {after_s:.0f} s of {retention_s} s: {line.partition('WARNING ')[2]}"


async def _at_risk(worker: Worker) -> bool:
    return worker.gauges().get("archive", {}).get("retention_at_risk", 0) > 0


async def _at_ease(worker: Worker) -> bool:
    gauges = worker.gauges().get("archive", {})
    return gauges["retention_at_risk"] == gauges["lag_records"] == gauges["behind_us"] == 0


async def _keep_for(broker: Broker, topic: Topic, seconds: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        setting = ConfigResource(
            ConfigResourceType.TOPIC,
            topic.value,
            {"retention.ms": str(seconds * 1000), "message.timestamp.type": "LogAppendTime"},
        )
        await admin.alter_configs([setting])
    finally:
        await admin.close()


async def full_disk(_server: Server, broker: Broker, folder: Path, seed: int) -> str:
    """The engine's disk is full for a while; then there is room again. A server of its own, on that disk."""
    with small_disk(folder / "disk", 200 << 20) as disk:
        server = Server(disk / "clickhouse")
        ballast = disk / "ballast"
        try:
            async with archiving(server, broker, folder, seed) as on, on.worker() as worker:
                await on.send(4)
                await on.until_committed(worker)
                _fill(ballast)
                await on.send(30)
                await worker.until_log("trying again")
                line = next(each for each in reversed(worker.log.splitlines()) if "trying again" in each)
                await worker.until_log("trying again")  # and again, on the full disk
                ballast.unlink()
                if server.dead:
                    await asyncio.to_thread(server.start)
                await on.until_committed(worker)
                assert worker.log.count("archive: assigned") == 1, "it lost its partitions"
                assert await worker.stop() == 0, worker.log
                findings = await on.judged()
            assert not findings, "\n".join(findings)
            return f"{len(on.expected)} events exactly once; said: {line.partition('WARNING ')[2][:200]}"
        finally:
            server.kill()


def _fill(path: Path) -> None:
    """Until nothing more fits."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 14))


Scenario = Callable[[Server, Broker, Path, int], Awaitable[str]]
SCENARIOS: Final[Mapping[str, Scenario]] = {
    "broken_answers": broken_answers,
    "killed_meanwhile": killed_meanwhile,
    "killed_behind_a_failure": killed_behind_a_failure,
    "trips_go_on": trips_go_on,
    "full_disk": full_disk,
    "hour_away": hour_away,
    "retention_alert": retention_alert,
}


async def _all(names: Sequence[str], broker: Broker, folder: Path, seed: int) -> int:
    failed = 0
    server = Server(folder / "clickhouse")
    try:
        for name in names:
            began_s = time.monotonic()
            (folder / name).mkdir()
            try:
                found = await SCENARIOS[name](server, broker, folder / name, seed)
            except Exception as error:  # whatever it is: the others are played all the same
                failed += 1
                found = f"FAILED: {''.join(traceback.format_exception(error)[-3:])[-3000:]}"
            print(f"{name}: {found} ({time.monotonic() - began_s:.0f} s, seed {seed})", flush=True)
    finally:
        server.kill()
    return failed


def main() -> int:
    """Play the scenarios; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.clickhouse")
    parser.add_argument("--seed", type=int, default=20260717)
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), default=[])
    arguments = parser.parse_args()
    names = arguments.only or list(SCENARIOS)
    with tempfile.TemporaryDirectory() as folder, apache_kafka(Path(folder) / "broker") as broker:
        failed = asyncio.run(_all(names, broker, Path(folder), arguments.seed))
    print(f"{len(names)} scenarios, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
