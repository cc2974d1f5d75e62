"""The workers, gates and routers, as groups and topics tell of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, TypeVar

import msgspec
from aiokafka.errors import KafkaError

from pipeline.cli.doctor.findings import Finding, Severity
from pipeline.cli.gate_link import believed_directives, everything, tail
from pipeline.cli.standing import Standing, obstacles_of, silent_after_us, standings
from pipeline.cli.status import SourceStanding, read_sources
from pipeline.config import Config, KafkaConfig
from pipeline.core.gate.answer import SAME_SETTINGS
from pipeline.core.gate.state import PartitionMemory, StateError, decode_state
from pipeline.policy_file import PolicyError
from pipeline.store.lag import Lag, lag_of, risk_line
from pipeline.store.lag import Standing as LagStanding
from pipeline.workers import archive, gate, measure, pair
from pipeline.workers.broker import COORDINATOR_TRIES, RangeReader, admin_client, back_off_s
from pipeline.workers.records import Partition, Record
from pipeline.workers.topics import RETENTION_MS
from schemas.control import Applied, DeadLetter
from schemas.records import UnknownVersionError, read_json
from schemas.topics import Topic

T = TypeVar("T")

READS: Final[Mapping[str, tuple[Topic, ...]]] = {
    "measure": measure.READS,
    "pair": pair.READS,
    "gate": gate.READS,
    "archive": archive.READS,
}
BESIDE: Final = ("archive", "notify")
"""Processes whose absence stops no decision."""
LAGGING: Final = ("gate", "archive")
"""Workers that commit what they have done. Measure and pair commit far behind on purpose: the age of their
newest closed second tells of them."""
SLOW_US: Final = 60_000_000
"""How old the oldest record may be that is not done with."""
LETTERS_US: Final = 600_000_000
TAIL: Final = 2_000


async def worker_findings(config: Config, look_s: float) -> list[Finding]:
    """Groups, lag (looked at twice, `look_s` apart), sources, leases, settings, routers, dead letters.

    Every topic must exist. Raises aiokafka's KafkaError.
    """
    members = await _members(config.kafka, [*READS, *(["notify"] if config.notify.url else [])])
    found = list(group_findings(members))
    before_lags, before_sources = await _lags(config.kafka), await read_sources(config)
    await asyncio.sleep(look_s)
    lags, sources = await _lags(config.kafka), await read_sources(config)
    found += lag_findings(before_lags, lags)
    found += source_findings(before_sources, sources, members)
    states = await everything(config.kafka, Topic.STATE)
    control = await everything(config.kafka, Topic.CONTROL)
    known = standings(states, filter(believed_directives(config), control))
    now_us, silent_us = time.time_ns() // 1000, silent_after_us(config.gate)
    found += lease_findings(known, now_us, silent_us)
    found += settings_findings(states, _own_hash(config), now_us, silent_us)
    found += router_findings(known, await tail(config.kafka, Partition(Topic.APPLIED.value, 0), TAIL))
    found += letter_findings(await _letters(config.kafka, now_us))
    return found


def group_findings(members: Mapping[str, int]) -> Iterator[Finding]:
    """Workers that nobody runs."""
    for name, count in members.items():
        if not count:
            severity: Severity = "warning" if name in BESIDE else "error"
            yield Finding(
                severity=severity,
                code="group_empty",
                where=f"group klaxon-{name}",
                what="nobody is a member",
                remedy="klaxon notify" if name == "notify" else f"klaxon worker {name}",
            )


def lag_findings(
    before: Mapping[str, Mapping[Partition, Lag]], now: Mapping[str, Mapping[Partition, Lag]]
) -> Iterator[Finding]:
    """Workers that are behind, and whether they fall further behind."""
    for name, lags in now.items():
        records = sum(lag.lag_records for lag in lags.values())
        oldest_us = max((lag.behind_us for lag in lags.values()), default=0)
        grown = records - sum(lag.lag_records for lag in before.get(name, {}).values())
        if oldest_us > SLOW_US:
            trend = "and growing" if grown > 0 else "and shrinking" if grown < 0 else "and standing still"
            yield Finding(
                severity="warning",
                code="lag",
                where=f"group klaxon-{name}",
                what=f"{records} records behind {trend}, the oldest for {oldest_us // 1_000_000} s",
                remedy=f"klaxon worker {name}: run more of them, or see its log for what it waits for",
            )
        risky = {place: lag for place, lag in lags.items() if lag.at_risk}
        if risky and name == "archive":
            worst = max(risky, key=lambda place: (risky[place].deleted_records, risky[place].behind_us))
            yield Finding(
                severity="error",
                code="retention_at_risk",
                where=str(worst),
                what=risk_line(str(worst), risky[worst], len(risky) - 1),
                remedy="bring ClickHouse and `klaxon worker archive` back, or lengthen retention.ms",
            )


def source_findings(
    before: list[SourceStanding], now: list[SourceStanding], members: Mapping[str, int]
) -> Iterator[Finding]:
    """Sources that close no seconds, or fall behind. Where a worker is absent, its group says so."""
    earlier = {one.source: one.age_s for one in before}
    for one in now:
        if not one.problem or not members.get(one.worker):
            continue
        age_s, earlier_s = one.age_s, earlier.get(one.source)
        falling = age_s is not None and earlier_s is not None and age_s > earlier_s
        yield Finding(
            severity="error",
            code="other_settings" if "other content settings" in one.problem else "source_silent",
            where=one.source,
            what=one.problem + (", and it falls further behind" if falling else ""),
            remedy=SAME_SETTINGS
            if "other content settings" in one.problem
            else f"see the log of `klaxon worker {one.worker}`",
        )


def lease_findings(known: Iterable[Standing], now_us: int, silent_us: int) -> Iterator[Finding]:
    """Roll-outs whose lease nobody renews."""
    for one in known:
        for obstacle in obstacles_of(one, now_us, silent_us):
            if obstacle.code in ("gate_away", "blind", "lease_over"):
                yield Finding(
                    severity="error",
                    code="lease_not_renewed",
                    where=f"roll-out {one.rollout}",
                    what=obstacle.sentence,
                    remedy=f"{obstacle.remedy}; `klaxon status` says more",
                )
                break


def settings_findings(states: Iterable[Record], ours: str, now_us: int, silent_us: int) -> Iterator[Finding]:
    """Gates that run with other settings than each other, or than this configuration's (`ours`), by what each
    wrote into its gating partition within `silent_us`."""
    hashes: dict[int, str] = {}
    for record in states:
        if not record.value or now_us - record.append_us > silent_us:
            continue
        try:
            memory = decode_state(record.value)
        except (StateError, UnknownVersionError):
            continue  # of another version of the gate, which says so itself
        if isinstance(memory, PartitionMemory) and memory.settings_hash:
            hashes[record.partition] = memory.settings_hash
    told = ", ".join(f"partition {number}: {said}" for number, said in sorted(hashes.items()))
    if len(set(hashes.values())) > 1:
        yield Finding(
            severity="error",
            code="gates_differ",
            where="group klaxon-gate",
            what=f"gates with different settings share the gating partitions ({told})",
            remedy="give all gates the same `content`, `gate` and `policy` sections, install all with the"
            " scoring kernel or all without, and restart them",
        )
    elif hashes and ours not in hashes.values():
        yield Finding(
            severity="warning",
            code="gates_differ",
            where="group klaxon-gate",
            what=f"the gate runs with other settings than this configuration's, {ours} ({told})",
            remedy="call the doctor with the gate's configuration, or restart the gate with this one",
        )


def router_findings(known: Iterable[Standing], applied: Iterable[Record]) -> Iterator[Finding]:
    """Roll-outs of which no router has said that it obeys their present generation."""
    newest: dict[str, int] = {}
    for record in applied:
        try:
            said = read_json(record.value, Applied)
        except msgspec.MsgspecError:
            continue  # somebody else's
        newest[said.rollout] = max(said.generation, newest.get(said.rollout, 0))
    for one in known:
        if not one.retired and newest.get(one.rollout, 0) < one.generation:
            heard = "none has ever" if one.rollout not in newest else f"the newest is {newest[one.rollout]}"
            yield Finding(
                severity="warning",
                code="no_router",
                where=f"roll-out {one.rollout}",
                what=f"no router reports generation {one.generation} on {Topic.APPLIED}; {heard}",
                remedy="klaxon router, or make yours publish what it applied (docs/routers.md)",
            )


def letter_findings(letters: Iterable[Record]) -> Iterator[Finding]:
    """What was refused lately, by topic, field and reason; the most frequent ones."""
    reasons: Counter[tuple[str, str, str]] = Counter()
    for record in letters:
        try:
            letter = read_json(record.value, DeadLetter)
        except msgspec.MsgspecError:
            continue
        reasons[letter.topic, letter.field, letter.reason[:100]] += 1
    for (topic, name, reason), count in reasons.most_common(3):
        yield Finding(
            severity="warning",
            code="dead_letters",
            where=topic,
            what=f"{count} refused in the last {LETTERS_US // 60_000_000} min: {name or 'record'}: {reason}",
            remedy=f"mend the producer: docs/events.md says what {topic} holds, {Topic.DEAD_LETTER} which"
            " records were refused",
        )


def _own_hash(config: Config) -> str:
    try:
        return gate.gate_settings(config).hash
    except PolicyError:
        return "unknown"  # told as a finding of the configuration


async def _members(kafka: KafkaConfig, names: Iterable[str]) -> dict[str, int]:
    """Process → members of its group."""
    found: dict[str, int] = {}
    async with admin_client(kafka) as admin:
        for name in names:
            # One at a time: aiokafka 0.14 reads the answer about several with the layout of an older version.
            (answer,) = await coordinated(partial(admin.describe_consumer_groups, [f"klaxon-{name}"]))
            for _code, _group, _state, _kind, _protocol, members, *_ in answer.groups:
                found[name] = len(members)
    return found


async def coordinated(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask, again while there is no coordinator: on a new broker, and where one moves, there is none yet."""
    for attempt in range(COORDINATOR_TRIES - 1):
        try:
            return await ask()
        except KafkaError as error:
            if not error.retriable:
                raise
        await asyncio.sleep(back_off_s(attempt))
    return await ask()


async def _lags(kafka: KafkaConfig) -> dict[str, dict[Partition, Lag]]:
    """Of the workers that commit what they have done; {} for one that never committed."""
    found: dict[str, dict[Partition, Lag]] = {}
    reader = RangeReader(kafka)
    await reader.start()
    try:
        async with admin_client(kafka) as admin:
            for name in LAGGING:
                group = f"klaxon-{name}"
                committed = await coordinated(partial(admin.list_consumer_group_offsets, group))
                places = {
                    Partition(*place): said.offset
                    for place, said in committed.items()
                    if said.offset >= 0 and place.topic in {topic.value for topic in READS[name]}
                }
                found[name] = await _lag_of(reader, places)
    finally:
        await reader.stop()
    return found


async def _lag_of(reader: RangeReader, committed: Mapping[Partition, int]) -> dict[Partition, Lag]:
    if not committed:
        return {}
    begins, ends = await reader.begin_offsets(committed), await reader.end_offsets(committed)
    found = {}
    for place, offset in committed.items():
        first = max(offset, begins[place])
        oldest_us = None
        async for record in reader.read({place: (first, min(first + 1, ends[place]))}):
            oldest_us = record.append_us
        retention_ms = RETENTION_MS.get(Topic(place.topic))
        retention_us = None if retention_ms is None else retention_ms * 1000
        standing = LagStanding(offset, begins[place], ends[place], oldest_us, retention_us)
        found[place] = lag_of(standing, time.time_ns() // 1000)
    return found


async def _letters(kafka: KafkaConfig, now_us: int) -> list[Record]:
    """Dead letters of the last while, at most TAIL of them."""
    place = Partition(Topic.DEAD_LETTER.value, 0)
    records = await tail(kafka, place, TAIL)
    return [record for record in records if record.append_us >= now_us - LETTERS_US]
