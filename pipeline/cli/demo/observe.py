"""What the demo sees of the gate: the router's lines, and which event made it decide."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord
from msgspec import Struct

from pipeline.cli.demo.fleet import CANARY_VERSION, ROLLOUT
from pipeline.cli.demo.play import Sent
from pipeline.workers.broker import started
from schemas.codec import decode_logits
from schemas.columns import BASELINE, CANARY
from schemas.control import Decision, Directive, Located
from schemas.topics import CONTENT_TYPE, GATING_PARTITIONS, Topic

LOOK_BACK_RECORDS = 64
READ_TIMEOUT_S = 10.0


class _Effective(Struct, frozen=True):
    weights: dict[str, float]


class RouterLine(Struct, frozen=True):
    """One line of `klaxon router --json`."""

    rollout: str
    generation: int
    epoch: int
    reason: str
    changed_us: int
    effective: _Effective
    directive: Directive

    @property
    def canary_percent(self) -> float:
        """The router's weight of the canary's version."""
        return self.effective.weights.get(CANARY_VERSION, 0.0)

    @property
    def tripped(self) -> bool:
        """Whether the canary was taken out of rotation for good."""
        return self.directive.state == "tripped" and self.canary_percent == 0.0


class RouterView:
    """Everything the router has said of the demo's roll-out, and a way to wait for more."""

    def __init__(self) -> None:
        self.lines: list[RouterLine] = []
        self._news = asyncio.Event()

    async def follow(self, output: asyncio.StreamReader) -> None:
        """Read the router's output until it ends."""
        while line := await output.readline():
            told = msgspec.json.decode(line, type=RouterLine)
            # Of another one, that somebody started beside it, the versions are others too.
            if told.rollout == ROLLOUT:
                self.lines.append(told)
                self._news.set()

    @property
    def latest(self) -> RouterLine | None:
        """What the router does now."""
        return self.lines[-1] if self.lines else None

    @property
    def trip(self) -> RouterLine | None:
        """The line with which the router took the canary out."""
        return next((line for line in self.lines if line.tripped), None)

    @property
    def steps(self) -> list[float]:
        """The canary's weights in order, without repetitions."""
        weights: list[float] = []
        for line in self.lines:
            if not weights or weights[-1] != line.canary_percent:
                weights.append(line.canary_percent)
        return weights

    @property
    def promoted_a_step(self) -> bool:
        """Whether the canary was ever given more than before, by a pass of the gate."""
        first = next((weight for weight in self.steps if weight > 0), None)
        return first is not None and max(self.steps) > first

    async def more(self, timeout_s: float) -> bool:
        """Wait for another line; False when none came in time."""
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        return True


def in_cell(sent: Sent, located: Located | None) -> bool:
    """Whether a pair belongs to the located cell; every pair does where nothing was located."""
    if located is None:
        return True
    node, _, context = located.value.rpartition("|")
    if located.dimension == "node":
        node, context = located.value, ""
    elif located.dimension == "context":
        node = ""
    elif located.dimension != "node_context":
        return True
    over = int(context.removeprefix(">")) if context.startswith(">") else -1
    return node in ("", sent.node) and sent.input_tokens > over


async def find_decision(bootstrap: str, tripped: Directive) -> Decision | None:
    """The decision on `klaxon.decisions` that took this generation out; None when it cannot be found.

    The router may have met the trip by a renewal, which has a greater epoch and no decision of its own."""
    async with started(
        AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    ) as consumer:
        for place in (TopicPartition(Topic.DECISIONS, number) for number in range(GATING_PARTITIONS)):
            for record in await _range(consumer, place, 0, (await consumer.end_offsets([place]))[place]):
                decision = msgspec.json.decode(record.value, type=Decision)
                held = decision.directive
                if decision.kind == "trip" and held is not None and _same_trip(held, tripped):
                    return decision
        return None


def _same_trip(decided: Directive, tripped: Directive) -> bool:
    return (decided.rollout, decided.generation, decided.cause) == (
        tripped.rollout,
        tripped.generation,
        tripped.cause,
    )


async def deciding_publish_us(
    bootstrap: str, decision: Decision, sent: Mapping[str, Sent], located: Located | None
) -> int | None:
    """When the newest pair of the located cell that the decision had read was handed to the publisher.

    A pair counts from its later half. The decision's input vector says how far each partition of
    `klaxon.logits` was read; the records just before that are looked at. None when none is found."""
    ends: dict[int, int] = {}
    for source, offset in decision.inputs.offsets.items():
        topic, _, number = source.removeprefix("~").rpartition("/")
        if topic == Topic.LOGITS:
            ends[int(number)] = max(offset, ends.get(int(number), -1))
    newest: int | None = None
    async with started(
        AIOKafkaConsumer(bootstrap_servers=bootstrap, max_partition_fetch_bytes=8 << 20)
    ) as consumer:
        for partition, offset in ends.items():
            place = TopicPartition(Topic.LOGITS, partition)
            first = max(0, offset + 1 - LOOK_BACK_RECORDS)
            for record in await _range(consumer, place, first, offset + 1):
                for pair_id, arm in halves(record):
                    one = sent.get(pair_id)
                    if one is None or not in_cell(one, located) or one.later_half != arm:
                        continue
                    newest = max(newest or 0, one.complete_us)
    return newest


def halves(record: ConsumerRecord) -> list[tuple[str, str]]:
    """(pair id, `baseline` or `canary`) of every such event of a record of `klaxon.logits`."""
    headers = dict(record.headers)
    content_type = headers.get(CONTENT_TYPE)
    columns = decode_logits(record.value, content_type.decode() if content_type else None).columns
    names = {BASELINE: "baseline", CANARY: "canary"}
    return [
        (bytes(columns.pair_id[i]).hex(), names[int(columns.arm[i])])
        for i in range(columns.n)
        if int(columns.arm[i]) in names
    ]


async def sources_closed(bootstrap: str, sources: Collection[str], timeout_s: float) -> set[str]:
    """Wait until every source has published a final bucket; returns the sources that have not in time."""
    missing = set(sources)
    async with started(
        AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    ) as consumer:
        consumer.assign([TopicPartition(Topic.BUCKETS, number) for number in range(GATING_PARTITIONS)])
        await consumer.seek_to_beginning()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while missing and asyncio.get_running_loop().time() < deadline:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                missing -= {record.key.decode() for record in records if record.key}
        return missing


async def _range(
    consumer: AIOKafkaConsumer, place: TopicPartition, first: int, end: int
) -> list[ConsumerRecord]:
    """Records first…end−1 of a partition, as far as they come within READ_TIMEOUT_S."""
    if first >= end:
        return []
    consumer.assign([place])
    consumer.seek(place, first)
    found: list[ConsumerRecord] = []
    deadline = asyncio.get_running_loop().time() + READ_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline:
        for records in (await consumer.getmany(place, timeout_ms=500)).values():
            found.extend(record for record in records if record.offset < end)
        if await consumer.position(place) >= end:
            break
    return found
