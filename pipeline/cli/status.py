"""`klaxon status`: what is deciding, what is not, and why."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Final

import click
import msgspec
from msgspec import Struct

from pipeline.cli.exits import Exit
from pipeline.cli.gate_link import everything, require_topics, run, tail
from pipeline.cli.options import config_option, json_option
from pipeline.cli.standing import (
    Standing,
    clock,
    deciding,
    human,
    obstacles_of,
    read_standings,
    silent_after_us,
)
from pipeline.config import Config
from pipeline.core.gate.answer import SAME_SETTINGS
from pipeline.core.gate.state import PartitionMemory, StateError, decode_state
from pipeline.workers.broker import leaderless, partition_counts
from pipeline.workers.content import content_settings
from pipeline.workers.records import Partition, Record
from schemas.buckets import FinalBuckets
from schemas.records import UnknownVersionError, read_msgpack
from schemas.topics import SOURCES, Topic

TAILS: Final = (400, 6_400)
"""Final buckets that are looked at: several seconds of every source, more where one was not heard."""
WORKER: Final = {Topic.LOGITS.value: "pair"}
"""Source topic → the worker that closes its seconds; all others are measure's."""


class SourceStanding(Struct, frozen=True, kw_only=True):
    """A source partition. `closed_through`: its newest closed second, null if nothing was heard lately."""

    source: str
    worker: str
    closed_through: int | None
    age_s: int | None
    whole: bool
    problem: str


@click.command()
@config_option
@json_option
def status(config: Config, as_json: bool) -> int:
    """Why is nothing deciding? Per roll-out what its rules have and lack, and when the next step is due; then
    the sources that the evidence comes from.

    Example: klaxon status --json
    """
    standings, sources = run(_read(config))
    now_us = time.time_ns() // 1000
    silent_us = silent_after_us(config.gate)
    if as_json:
        judged = [_judged(one, now_us, silent_us) for one in standings]
        told = {"deciding": judged, "rollouts": standings, "sources": sources}
        click.echo(msgspec.json.encode(told).decode())
        return Exit.OK
    for one in standings:
        click.echo(human(one, now_us, silent_us))
    if not standings:
        click.echo("no roll-out is known; start one with `klaxon rollout start SPEC`")
    for line in source_lines(sources):
        click.echo(line)
    return Exit.OK


def _judged(one: Standing, now_us: int, silent_us: int) -> dict[str, object]:
    yes, why = deciding(one, now_us, silent_us)
    found = obstacles_of(one, now_us, silent_us)
    return {"rollout": one.rollout, "deciding": yes, "why": why, "obstacles": found}


async def _read(config: Config) -> tuple[list[Standing], list[SourceStanding]]:
    await require_topics(config.kafka, (*SOURCES, Topic.BUCKETS, Topic.STATE))
    standings = await read_standings(config)
    return standings, await read_sources(config)


async def read_sources(config: Config) -> list[SourceStanding]:
    """Every source, as gating partition 0's newest final buckets tell of it. Every topic must exist."""
    counts = await partition_counts(config.kafka, SOURCES)
    states = await everything(config.kafka, Topic.STATE)
    settings_hash = gates_content(states, time.time_ns() // 1000, silent_after_us(config.gate))
    whose = "the gate's" if settings_hash else "here"
    settings_hash = settings_hash or content_settings(config.content).hash
    sources: list[SourceStanding] = []
    for records in TAILS:
        sources = source_standings(
            {topic.value: counts[topic] for topic in SOURCES},
            await tail(config.kafka, Partition(Topic.BUCKETS.value, 0), records),
            settings_hash,
            time.time_ns() // 1000,
            config.gate.blind_after_s,
            whose,
        )
        if all(one.closed_through is not None for one in sources):
            break
    return without_leader(sources, await leaderless(config.kafka, SOURCES))


def gates_content(states: Iterable[Record], now_us: int, silent_us: int) -> str:
    """Hash of the content settings that the gate runs with which wrote last; "" if none did within
    `silent_us`, or it is of an older release. Gates that differ are the doctor's to tell."""
    found = ""
    for record in sorted(states, key=lambda one: one.append_us):
        if not record.value or now_us - record.append_us > silent_us:
            continue
        try:
            memory = decode_state(record.value)
        except (StateError, UnknownVersionError):
            continue  # of another version of the gate, which says so itself
        if isinstance(memory, PartitionMemory):
            found = memory.content_hash
    return found


def source_standings(
    counts: dict[str, int],
    records: list[Record],
    settings_hash: str,
    now_us: int,
    blind_after_s: int,
    whose: str = "here",
) -> list[SourceStanding]:
    """Every source as the newest final buckets tell of it, and what is wrong with it.

    `whose` content settings have this hash: a source that was closed with others counts for nothing there.
    """
    latest: dict[tuple[str, int], FinalBuckets] = {}
    for record in records:
        try:
            final = read_msgpack(record.value, FinalBuckets)
        except msgspec.MsgspecError:
            continue  # not ours; the gate counts and dead-letters it
        before = latest.get((final.topic, final.partition))
        if before is None or final.closed_through >= before.closed_through:
            latest[final.topic, final.partition] = final
    return [
        _source(topic, partition, latest.get((topic, partition)), settings_hash, now_us, blind_after_s, whose)
        for topic, count in counts.items()
        for partition in range(count)
    ]


def _source(
    topic: str,
    partition: int,
    final: FinalBuckets | None,
    settings_hash: str,
    now_us: int,
    blind_after_s: int,
    whose: str,
) -> SourceStanding:
    worker = WORKER.get(topic, "measure")
    age_s = None if final is None else max(0, now_us // 1_000_000 - final.closed_through)
    problem = ""
    if final is None or age_s is None:
        problem = f"nothing heard: is `klaxon worker {worker}` running?"
    elif age_s > blind_after_s:
        since = clock((final.closed_through + 1) * 1_000_000)
        silent = f"closes nothing for {age_s} s, since {since}"
        problem = f"{silent}: is `klaxon worker {worker}` running, or far behind?"
    elif final.settings_hash != settings_hash:
        problem = f"closed with other content settings than {whose}: {SAME_SETTINGS}"
    elif final.whole_from > final.closed_through:
        problem = f"its worker warms up until second {final.whole_from}"
    return SourceStanding(
        source=f"{topic}/{partition}",
        worker=worker,
        closed_through=None if final is None else final.closed_through,
        age_s=age_s,
        whole=not problem,
        problem=problem,
    )


def without_leader(sources: list[SourceStanding], lost: Collection[Partition]) -> list[SourceStanding]:
    """The same; for a partition that no broker leads, that is the problem."""
    problem = "no broker leads it: start the brokers that hold its replicas"
    names = {str(place) for place in lost}
    return [
        msgspec.structs.replace(one, whole=False, problem=problem) if one.source in names else one
        for one in sources
    ]


def source_lines(sources: list[SourceStanding]) -> list[str]:
    """Bad sources one by one, good ones in a sentence."""
    bad = [one for one in sources if one.problem]
    lines = [f"{one.source}: {one.problem}" for one in bad]
    good = [one.age_s for one in sources if not one.problem and one.age_s is not None]
    if good:
        lines.append(
            f"{len(good)} of {len(sources)} sources close their seconds, the slowest {max(good)} s ago"
        )
    return lines
