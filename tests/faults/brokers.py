"""Brokers broken under load: `python -m tests.faults.brokers [--seed S] [--only NAME,…] [--short]`.

Three real brokers, every worker under a process manager, roll-outs one after another. Whatever happens to the
brokers, the judge must find what the oracle expects, and everything that was acknowledged must be in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from pipeline.workers import topics
from pipeline.workers.broker import started
from schemas.topics import Topic
from tests.faults import catch_up, failover
from tests.faults.cluster import SESSION_S, Cluster, Member, cluster, no_clocks
from tests.faults.watched import (
    ALL_SOURCES,
    Closings,
    Ledger,
    Row,
    Supervised,
    closings,
    listed,
    supervised,
)
from tests.kafka.records import dump
from tests.kafka.waiting import eventually
from tests.system.findings import Finding
from tests.system.fleet import Fleet, fleet, verdict
from tests.system.judge import decode_final
from tests.system.stack import PATIENCE_S, SECOND, Stack, now_us, stack
from tests.system.workload import PARTITIONS, Traffic

KINDS: Final = ("measure", "pair", "gate", "archive")
ALONE: Final = (Topic.LOGITS.value, 1)
"""The partition without replicas, where there is one."""
SEED: Final = 20260717
NAMES: Final = ("kill", "leaderless", "stall", "clock", "acks", "failover", "catch-up")
"""What can be played; see `run`."""
CLOCK_STEP_S: Final = 8
"""More than lateness and what events may be ahead of their record (5 s): some become late."""


@dataclass
class Scene:
    """Roll-outs under way on a cluster, everything watched."""

    cluster: Cluster
    on: Stack
    traffic: Fleet
    closings: Closings
    workers: list[Supervised]
    ledger: Ledger
    fired: int = 0
    figures: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    async def all_close(self, since_s: float) -> None:
        """Wait until every source has closed a second since then."""
        wanted = set(ALL_SOURCES)

        async def done() -> bool:
            return self.closings.closed_since(since_s) >= wanted

        await eventually(done, timeout_s=PATIENCE_S)

    async def trip_once_more(self, seed: int) -> None:
        """After all faults a bad canary trips; that it does is for the judge to say, how soon is printed."""
        traffic = Traffic(seed * 1000 + 999, "everywhere", seconds=6.0)
        await self.on.start_rollout(traffic)
        self.traffic.started.append(traffic)
        began_s = time.monotonic()
        playing = asyncio.create_task(self.on.play(traffic))
        said = self.on.follower.decisions
        try:
            await self.on.follower.until(
                lambda: any(each["kind"] == "trip" for each in said[traffic.rollout]),
                f"a trip of {traffic.rollout}",
            )
            self.figures.append(
                f"a bad canary afterwards trips {time.monotonic() - began_s:.1f} s after its start"
            )
            await playing
        finally:
            playing.cancel()
            await asyncio.wait([playing])


Fault = Callable[[Scene], Awaitable[None]]


@asynccontextmanager
async def scene(
    of: Cluster, folder: Path, seed: int, prepare: Callable[[], Awaitable[object]] | None = None
) -> AsyncIterator[Scene]:
    """Traffic and workers while the body runs; the verdict is in `findings` afterwards."""
    async with of.reachable(), stack(of.broker, folder, prepare=prepare) as on:
        on.producer = ledger = Ledger(on.producer)
        async with supervised(on, KINDS) as workers, closings(on) as seen:
            async with fleet(on, seed * 1000) as traffic:
                made = Scene(of, on, traffic, seen, workers, ledger)
                await made.all_close(time.monotonic())
                yield made
                traffic.stopping = True
                try:
                    await made.trip_once_more(seed)
                except AssertionError as error:
                    made.findings.append(Finding("missed_trip", str(error)[:2000]))
            try:
                made.findings += await verdict(on, traffic.started)
            except AssertionError as error:
                made.findings.append(Finding("wrong", f"no verdict: {str(error)[:2000]}"))
        made.findings += ledger.lost(itertools.chain(*on.follower.records.values()))
        _sum_up(made)


def _sum_up(made: Scene) -> None:
    trips = sum(
        said["kind"] == "trip"
        for each in made.traffic.started
        for said in made.on.follower.decisions.get(each.rollout, ())
    )
    rollouts, records = len(made.traffic.started), len(made.on.sent.batches)
    made.figures.append(f"{rollouts} roll-outs, {records} records, {trips} trips")
    for each in made.workers:
        if each.ends:
            made.figures.append(f"{each.kind} started again {len(each.ends)} times: {each.ends}")


def kill_one(of: Member, down_s: float, alone: bool = False) -> Fault:
    """SIGKILL a broker and start it again after `down_s`; `alone`: it holds the only replica of ALONE."""

    async def suffer(made: Scene) -> None:
        await asyncio.to_thread(of.kill)
        killed_s = time.monotonic()
        if alone:
            await _others_go_on(made, killed_s)
        await asyncio.sleep(max(0.0, killed_s + down_s - time.monotonic()))
        await asyncio.to_thread(of.start)
        serves_s = time.monotonic()
        await made.all_close(serves_s)
        made.fired += 1
        pauses = made.closings.pauses(killed_s)
        what = "with the only replica of logits/1 " if alone else ""
        made.figures.append(
            f"broker {of.number} {what}killed (sessions of brokers {SESSION_S:g} s), down for "
            f"{serves_s - killed_s:.1f} s; last final before to first after, s: {listed(pauses)}"
        )

    return suffer


async def _others_go_on(made: Scene, killed_s: float) -> None:
    """While a partition has no leader every other source closes seconds, and `klaxon status` names it."""
    others = set(ALL_SOURCES) - {ALONE}
    killed_second = now_us() // SECOND

    async def done() -> bool:
        return made.closings.closed_since(killed_s + SESSION_S + 2.0) >= others

    await eventually(done, timeout_s=PATIENCE_S)
    took_s = time.monotonic() - killed_s
    if made.closings.through.get(ALONE, -1) > killed_second:
        made.findings.append(Finding("wrong", "a partition without a leader closed seconds"))
    said = json.loads(await made.on.klaxon("status", "--json"))
    problems = {each["source"]: each["problem"] for each in said["sources"]}
    place = f"{ALONE[0]}/{ALONE[1]}"
    if "no broker leads it" not in problems[place]:
        made.findings.append(Finding("wrong", f"klaxon status says of {place}: {problems[place]!r}"))
    made.figures.append(
        f"without a leader of logits/1 the other {len(others)} sources went on within {took_s:.1f} s of the "
        f"kill; klaxon status: {place}: {problems[place]}"
    )


def stall(seconds: float) -> Fault:
    """No byte passes between any client and any broker for so long; connections stay."""

    async def suffer(made: Scene) -> None:
        proxies = made.cluster.proxies.values()
        before = sum(each.stalled_bytes for each in proxies)
        stalled_s = time.monotonic()
        for each in proxies:
            each.set("stall")
        await asyncio.sleep(seconds)
        for each in proxies:
            each.set("up")
        flows_s = time.monotonic()
        await made.all_close(flows_s)
        made.fired += sum(each.stalled_bytes for each in proxies) > before
        first = {
            source: next(at for at in seen if at > flows_s) - flows_s
            for source, seen in made.closings.seen.items()
        }
        made.figures.append(
            f"stall of {flows_s - stalled_s:.1f} s; first final after its end, s: {listed(first)}; longest "
            f"pause {max(made.closings.pauses(stalled_s).values()):.1f} s"
        )

    return suffer


def clock_steps_back(seconds: float) -> Fault:
    """The clock of the leader of logits/0 steps back, and forward again after so long."""

    async def suffer(made: Scene) -> None:
        member = await made.cluster.leader((Topic.LOGITS.value, 0))
        assert member.clock is not None, "the leader runs by the machine's clock"
        heard = {
            place: len(records)
            for place, records in made.on.follower.records.items()
            if place[0] == Topic.BUCKETS
        }
        held = _assignments(made.workers)
        stepped_us, stepped_s = now_us(), time.monotonic()
        member.set_clock(-CLOCK_STEP_S)
        await asyncio.sleep(seconds)
        member.set_clock(0)
        await made.all_close(time.monotonic())

        async def felt() -> tuple[list[float], int] | None:
            falls, late = _falls_s(made.on), _late(made.on, stepped_us // SECOND)
            return (falls, late) if falls and late else None

        # Neither: the step was not felt, and this fails.
        found = await eventually(felt)
        assert found is not None
        falls_s, late = found
        made.fired += 1
        if _assignments(made.workers) == held:  # who takes a partition says again what was said before
            made.findings += _log_time_moves_on(made.on, heard)
        pauses = made.closings.pauses(stepped_s)
        made.figures.append(
            f"clock of broker {member.number}, leader of logits/0, back by {CLOCK_STEP_S} s for {seconds:g} "
            f"s: append times fell {len(falls_s)} times by up to {max(falls_s):.1f} s, {late} events "
            f"counted as late; longest pauses, s: {listed(pauses)}"
        )

    return suffer


def _falls_s(on: Stack) -> list[float]:
    """By how much the append time of a source's records fell below that of the one before, where it did."""
    return [
        (before.timestamp - after.timestamp) / 1000
        for place, records in on.follower.records.items()
        if place in ALL_SOURCES
        for before, after in itertools.pairwise(records)
        if after.timestamp < before.timestamp - 1000
    ]


def _assignments(workers: Sequence[Supervised]) -> list[tuple[int, int]]:
    """How often each was started again, and was assigned its partitions since."""
    return [
        (len(each.ends), 0 if each.worker is None else each.worker.log.count(f"{each.kind}: assigned"))
        for each in workers
    ]


def _log_time_moves_on(on: Stack, heard: Mapping[tuple[str, int], int]) -> list[Finding]:
    """Every statement of a source about closed seconds, but for the first so many of each partition of the
    log, reaches at least as far as those before it."""
    found: list[Finding] = []
    reached: dict[tuple[str, int, int], int] = {}
    later = [record for place, count in heard.items() for record in on.follower.records[place][count:]]
    for record in later:
        final = decode_final(record.value)
        source = (final.topic, final.partition, final.gating_partition)
        if final.closed_through < reached.get(source, -1):
            found.append(
                Finding("wrong", f"{source}: closed through {final.closed_through} after {reached[source]}")
            )
        reached[source] = max(reached.get(source, -1), final.closed_through)
    return found


def _late(on: Stack, from_second: int) -> int:
    """Events that finals count as late, in seconds from this one on."""
    total = 0
    for record in on.follower.of(Topic.BUCKETS):
        for second in decode_final(record.value).seconds:
            if second.second >= from_second:
                total += sum(
                    count
                    for group in second.contents
                    for cell in group.cells
                    if cell.dimension == "all"
                    for name, count in cell.counters.items()
                    if name in ("late", "unmatched.late")
                )
    return total


async def broken(
    name: str,
    of: Cluster,
    folder: Path,
    seed: int,
    faults: list[Fault],
    prepare: Callable[[], Awaitable[object]] | None = None,
) -> Row:
    """One scene with these faults one after another; its verdict."""
    async with scene(of, folder, seed, prepare) as made:
        try:
            for suffer in faults:
                await suffer(made)
        except AssertionError as error:
            made.findings.append(Finding("wrong", f"{str(error)[:2000]}"))
            await asyncio.to_thread(of.heal)
    return Row(name, len(faults), made.fired, "; ".join(made.figures), tuple(made.findings))


def alone_on(of: Cluster, member: Member) -> Callable[[], Awaitable[None]]:
    """Makes the topic of ALONE: its partitions have one replica each, that one there, the rest elsewhere."""

    async def create() -> None:
        (item,) = [each for each in topics.plan(of.broker.config) if each.topic == ALONE[0]]
        other = next(each for each in of.members if each is not member)
        replicas = {
            number: [member.number if number == ALONE[1] else other.number] for number in range(PARTITIONS)
        }
        settings = {**item.settings, "min.insync.replicas": "1"}
        await _create(of, NewTopic(ALONE[0], -1, -1, replicas, settings))

    return create


async def _create(of: Cluster, topic: NewTopic) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=of.broker.bootstrap)
    await admin.start()
    try:
        answer = await admin.create_topics([topic])
        assert all(code == 0 for _, code, *_ in answer.topic_errors), answer
    finally:
        await admin.close()


async def acks_of_the_leader_alone(of: Cluster) -> Row:
    """The control: a producer that does not wait for replicas loses what it was told is written."""
    place = (f"acks-{time.monotonic_ns()}", 0)
    async with of.reachable():
        leader = of.members[0]
        followers = [member for member in of.members if member is not leader]
        replicas = [member.number for member in (leader, *followers)]  # the first one leads
        await _create(of, NewTopic(place[0], -1, -1, {0: replicas}))
        patient, hasty = (
            AIOKafkaProducer(bootstrap_servers=of.broker.bootstrap, acks=acks) for acks in ("all", 1)
        )
        ledger = Ledger(hasty)
        async with started(patient), started(hasty):
            try:
                await patient.send_and_wait(place[0], b"on all", partition=place[1])
                await hasty.partitions_for(place[0])  # it knows the leader, and asks no frozen member for it
                for member in followers:
                    member.freeze()
                for _ in range(20):
                    await ledger.send_and_wait(place[0], b"on the leader", partition=place[1])
                await asyncio.to_thread(leader.kill)
            finally:
                for member in followers:
                    member.thaw()

        async def led_by_another() -> bool:
            return await of.leader(place) is not leader

        await eventually(led_by_another, timeout_s=PATIENCE_S)
        # Not before what every replica has can be read: an empty answer would prove nothing.
        lost = ledger.lost(await eventually(lambda: dump(of.broker, place[0]), timeout_s=PATIENCE_S))
    found = () if lost else (Finding("wrong", "a producer with acks=1 lost nothing: the judge saw nothing"),)
    figures = f"{len(lost)} of {len(ledger.acknowledged())} acknowledged were found lost"
    return Row("control: acks=1", 1, 1, figures, found)


async def run(seed: int, folder: Path, long: bool, only: frozenset[str]) -> list[Row]:
    """These kinds of fault, `long` or as in CI; each row is printed as it comes."""
    rows: list[Row] = []
    with cluster(folder / "cluster", clocks=not no_clocks()) as of:
        first = of.member(1)
        everyone = of.members if long else of.members[:1]
        plays: dict[str, Callable[[], Awaitable[Row]]] = {
            "kill": lambda: broken(
                "a broker killed and restarted",
                of,
                folder / "kill",
                seed,
                [kill_one(member, 15.0 if long else 6.0) for member in everyone],
            ),
            "leaderless": lambda: broken(
                "a partition without a leader",
                of,
                folder / "leaderless",
                seed + 1,
                [kill_one(first, 60.0 if long else 8.0, alone=True)],
                alone_on(of, first),
            ),
            "stall": lambda: broken(
                "brokers stall", of, folder / "stall", seed + 2, [stall(60.0 if long else 12.0)]
            ),
            "clock": lambda: broken(
                "clock steps back", of, folder / "clock", seed + 4, [clock_steps_back(20.0 if long else 6.0)]
            ),
            "acks": lambda: acks_of_the_leader_alone(of),
            "failover": lambda: failover.row(
                of, folder / "failover", seed + 3, 20 if long else 4, timed=long
            ),
            "catch-up": lambda: catch_up.row(folder / "catch-up", long),
        }
        assert tuple(plays) == NAMES
        if "clock" in only and (missing := no_clocks()):
            print(f"clock steps back: left out: {missing}", flush=True)
            del plays["clock"]
        for name, play in plays.items():
            if name not in only:
                continue
            began_s = time.monotonic()
            (folder / name).mkdir(exist_ok=True)
            rows.append(await _played(name, play))
            await asyncio.to_thread(of.heal)
            print(f"{rows[-1]} ({time.monotonic() - began_s:.0f} s, seed {seed})", flush=True)
    return rows


async def _played(name: str, play: Callable[[], Awaitable[Row]]) -> Row:
    try:
        return await play()
    except Exception as error:  # whatever it is: a finding of this row, and the others are played
        where = "".join(traceback.format_exception(error)[-3:])
        return Row(name, 1, 0, "not played to its end", (Finding("wrong", where[-2000:]),))


def _names(text: str) -> tuple[str, ...]:
    """What `--only` says; a name that is none would play nothing, and pass."""
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(NAMES)):
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(NAMES)}")
    return names


def main() -> int:
    """Play them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.brokers", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=_names, default=NAMES, metavar="NAME,…", help=", ".join(NAMES))
    parser.add_argument("--short", action="store_true", help="as in CI")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all logs there")
    arguments = parser.parse_args()
    # As Ctrl-C: whoever ends this ends the workers, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # brokers are away all the time
    folder: Path = arguments.keep or Path(tempfile.mkdtemp(prefix="klaxon-brokers-"))
    try:
        rows = asyncio.run(run(arguments.seed, folder, not arguments.short, frozenset(arguments.only)))
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if rows and all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
