"""Old and new workers side by side: what one cannot read stops it, what was made otherwise is unknown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import TopicPartition

from pipeline.core.gate.answer import SAME_SETTINGS
from pipeline.core.gate.sources import OTHERWISE
from pipeline.core.gate.state import encode_state
from pipeline.core.source import ContentSettings
from schemas import codec
from schemas.buckets import FinalBuckets
from schemas.columns import BatchHeader
from schemas.topics import COLUMNS, CONTENT_TYPE, JSON, Topic
from tests.conftest import REPOSITORY
from tests.faults.crew import held_by
from tests.faults.test_upgrade import later_memory
from tests.faults.upgrade import command, of_version_2
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import Written, committed_offsets, dump, now_us, produce, producer
from tests.kafka.waiting import eventually
from tests.store.folder import migrated
from tests.store.records import final, packed, pair_batch
from tests.workers.events import answer, encoded, request, soon_us, start_command
from tests.workers.fleet import QUICK, SEAT, decisions

pytestmark = [
    pytest.mark.faults,
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


async def test_a_record_of_a_later_version_stops_its_worker_and_the_upgraded_one_goes_on(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    environment = {**QUICK, **migrated(tmp_path)}
    kinds = ("measure", "pair", "gate", "archive")
    async with contextlib.AsyncExitStack() as exits:
        old = {
            kind: await exits.enter_async_context(Worker(kind, kafka, log_folder, environment=environment))
            for kind in kinds
        }
        for kind, worker in old.items():
            await worker.until_log(
                f"{kind}: assigned" if kind != "gate" else f"gating partition {SEAT}: taken"
            )
        await _stopped_at(kafka, old["archive"], Written(Topic.PAIRS, packed(pair_batch(v=2)), partition=1))
        written = packed(final(v=2, gating_partition=SEAT))
        await _stopped_at(kafka, old["gate"], Written(Topic.BUCKETS, written, partition=SEAT))
        requests = (_request("a"), _request("b"))
        await _stopped_at(kafka, old["measure"], _envelope(Topic.REQUESTS), among=requests)
        await _stopped_at(kafka, old["pair"], _envelope(Topic.LOGITS), among=_halves("c"))
    assert await dump(kafka, Topic.DEAD_LETTER) == []
    # An old one that is started again stops at the same place and says the same.
    async with Worker("measure", kafka, log_folder, environment=environment) as again:
        assert await again.until_ended() == 1
    assert _complaints(again) == _complaints(old["measure"])
    async with contextlib.AsyncExitStack() as exits:
        for kind in ("measure", "pair", "archive"):
            worker = Worker(kind, kafka, log_folder, environment=environment, command=command("later", kind))
            await exits.enter_async_context(worker)

        async def all_counted() -> bool:
            return await _counted(kafka, "requests") == 5 and await _counted(kafka, "pairs") == 2

        await eventually(all_counted)
        pairs = TopicPartition(Topic.PAIRS, 1)

        async def archived() -> bool:
            committed = await committed_offsets(kafka, "klaxon-archive", [pairs])
            return committed.get(f"{Topic.PAIRS}/1", 0) > 0

        await eventually(archived)
    assert await dump(kafka, Topic.DEAD_LETTER) == []


async def test_a_record_of_a_later_version_in_its_state_stops_a_gate_that_takes_over(
    kafka: Broker, log_folder: Path
) -> None:
    (offset,) = await produce(
        kafka, [Written(Topic.STATE, encode_state(later_memory(v=2)), key=b"r1/", partition=SEAT)]
    )
    async with Worker("gate", kafka, log_folder, environment=QUICK) as gate:
        assert await gate.until_ended() == 1
    _says_where(gate, Topic.STATE, SEAT, offset)


async def _stopped_at(
    broker: Broker, worker: Worker, record: Written, *, among: tuple[Written, Written] | None = None
) -> None:
    """Write the record, `among` two others of its partition; the worker must end at it, with one line."""
    written = [record] if among is None else [among[0], record, among[1]]
    offset = (await produce(broker, written))[written.index(record)]
    assert await worker.until_ended() == 1
    assert record.partition is not None
    _says_where(worker, Topic(record.topic), record.partition, offset)


def _says_where(worker: Worker, topic: Topic, partition: int, offset: int) -> None:
    (line,) = _complaints(worker)
    assert f"{worker.kind}: {topic.value}/{partition}: offset {offset} is of record version 2" in line
    assert "run the Klaxon that writes there, or a later one" in line
    assert "Traceback" not in worker.log


def _complaints(worker: Worker) -> list[str]:
    """Our lines at level ERROR, without their times."""
    return [line.partition(" ERROR ")[2] for line in worker.log.splitlines() if " ERROR klaxon." in line]


def _request(pair_id: str) -> Written:
    return Written(Topic.REQUESTS, encoded(request(soon_us(), pair_id=pair_id)), partition=0)


def _halves(pair_id: str) -> tuple[Written, Written]:
    baseline, canary = (encoded(answer(soon_us(), arm, pair_id)) for arm in ("baseline", "canary"))
    return Written(Topic.LOGITS, baseline, partition=0), Written(Topic.LOGITS, canary, partition=0)


def _envelope(topic: Topic) -> Written:
    """Three requests, or one pair, as a later release's gateway sends them."""
    header = BatchHeader("gateway", 0, {})
    if topic is Topic.REQUESTS:
        events = [request(soon_us(), pair_id=f"e{number}") for number in range(3)]
        value = codec.encode_requests(codec.decode_requests(encoded(events), JSON).columns, header)
    else:
        halves = [answer(soon_us(), arm, "e") for arm in ("baseline", "canary")]
        value = codec.encode_logits(codec.decode_logits(encoded(halves), JSON).columns, header)
    return Written(topic, of_version_2(value), partition=0, content_type=COLUMNS)


async def _counted(broker: Broker, counter: str) -> int:
    """Sum of a counter over the cells `all` of all finals, every second once."""
    counted: dict[Any, int] = {}
    for record in await dump(broker, Topic.BUCKETS):
        if msgspec.msgpack.decode(record.value)[0] != 1:
            continue
        closed = msgspec.msgpack.decode(record.value, type=FinalBuckets)
        for second in closed.seconds:
            place = (closed.topic, closed.partition, closed.gating_partition, second.second)
            counted[place] = sum(
                cell.counters.get(counter, 0)
                for held in second.contents
                for cell in held.cells
                if cell.dimension == "all"
            )
    return sum(counted.values())


SETTINGS = {
    "KLAXON_CONTENT_LATENESS_S": "1",
    "KLAXON_CONTENT_JOIN_TIMEOUT_S": "1",
    "KLAXON_GATE_RENEW_S": "1",
    "KLAXON_GATE_BLIND_AFTER_S": "3600",
    **GAUGES_EVERY_SECOND,
}
OTHER = {**SETTINGS, "KLAXON_CONTENT_LATENESS_S": "2"}
POLICY = """
version: 1
rules:
  - id: G3-divergence
    capability: G3
    metric: kl_lower
    statistic: mean
    window: 2s
    limit: 0.05
    min_samples: 4
    scope: rollout
    action: rollback_l1
    mode: enforce
coverage: {limit: 0.5, window: 2s, min_samples: 4, action: hold}
progression: {mode: auto, min_pairs: 4}
"""
LONG_ENOUGH_S = 10
"""A step needs join timeout + window + lateness: 4 seconds."""


async def test_a_worker_with_other_settings_makes_its_seconds_unknown_until_it_is_replaced(
    kafka: Broker, log_folder: Path
) -> None:
    async with _mixed(kafka, log_folder, None) as (gate, other, foreign):
        await _folded_long_enough(kafka, gate)
        assert await _kinds(kafka) == {"command"}, "nothing but the start may be decided"
        why = await _why(kafka)
        assert f"of {foreign} is unknown" in why, why
        problems = await _problems(kafka)
        assert f"{foreign}: closed with other content settings" in gate.log
        assert problems == {foreign: f"{OTHERWISE}: {SAME_SETTINGS}"}
        assert await other.stop() == 0, other.log
        await eventually(lambda: _stepped(kafka))
        assert "trip" not in await _kinds(kafka)
        assert await _problems(kafka) == {}


@pytest.mark.long
async def test_a_worker_with_other_settings_is_found_out_where_a_gate_trusts_it(
    kafka: Broker, log_folder: Path
) -> None:
    async with _mixed(kafka, log_folder, command("trusting", "gate")):
        await eventually(lambda: _stepped(kafka))  # which the test above would have seen


@contextlib.asynccontextmanager
async def _mixed(
    broker: Broker, log_folder: Path, gate_command: tuple[str, ...] | None
) -> AsyncIterator[tuple[Worker, Worker, str]]:
    """Two pair workers, one with other settings; a roll-out under healthy traffic in both partitions."""
    async with (
        Worker("measure", broker, log_folder, environment=SETTINGS),
        Worker("pair", broker, log_folder, environment=SETTINGS) as pair,
        Worker("gate", broker, log_folder, environment=SETTINGS, command=gate_command) as gate,
    ):
        await pair.until_log("pair: assigned klaxon.logits/0, klaxon.logits/1")
        async with Worker("pair", broker, log_folder, environment=OTHER) as other:
            (_, (foreign,)) = await eventually(lambda: _one_each([pair, other]))
            await gate.until_log(f"gating partition {SEAT}: taken")
            enough = asyncio.Event()
            traffic = asyncio.create_task(_healthy(broker, enough))
            try:
                await _closed_by_the_other(broker, foreign)
                await produce(broker, [_start()])
                yield gate, other, foreign
            finally:
                enough.set()
                await traffic


async def _one_each(workers: list[Worker]) -> list[list[str]]:
    """What each holds, once it is one partition."""
    held = [sorted(held_by(worker)) for worker in workers]
    return held if sorted(held) == [["klaxon.logits/0"], ["klaxon.logits/1"]] else []


def _start() -> Written:
    command = encoded(start_command(policy=POLICY))
    return Written(Topic.COMMANDS, command, key=b"r1", partition=SEAT)


async def _healthy(broker: Broker, enough: asyncio.Event) -> None:
    """Ten pairs a second and partition."""
    async with producer(broker) as client:
        number = 0
        while not enough.is_set():
            ts_us = now_us()
            for at in range(2):
                pair = [answer(ts_us, arm, f"p{number}-{at}") for arm in ("baseline", "canary")]
                headers = [(CONTENT_TYPE, JSON.encode())]
                await client.send_and_wait(Topic.LOGITS, encoded(pair), partition=at, headers=headers)
            number += 1
            await asyncio.sleep(0.1)


async def _closed_by_the_other(broker: Broker, foreign: str) -> None:
    """Wait until the other worker has closed a second."""

    ours = ContentSettings(lateness_us=1_000_000, join_timeout_us=1_000_000).hash

    async def closed() -> bool:
        finals = [
            msgspec.msgpack.decode(r.value, type=FinalBuckets) for r in await dump(broker, Topic.BUCKETS)
        ]
        return any(f"{f.topic}/{f.partition}" == foreign and f.settings_hash != ours for f in finals)

    await eventually(closed)


async def _folded_long_enough(broker: Broker, gate: Worker) -> None:
    """Wait until the gate has folded so much since the start that it would have stepped."""

    async def started() -> list[dict[str, Any]]:
        return await decisions(broker, "command")

    since_s = (await eventually(started))[0]["directive"]["ts_us"] // 1_000_000

    async def done() -> bool:
        return gate.gauges().get(f"gating/{SEAT}", {}).get("folded_through", 0) >= since_s + LONG_ENOUGH_S

    await eventually(done)


async def _stepped(broker: Broker) -> bool:
    return "step" in await _kinds(broker)


async def _kinds(broker: Broker) -> set[str]:
    return {decision["kind"] for decision in await decisions(broker)}


async def _why(broker: Broker) -> str:
    """What the gate's newest state says it waits for."""
    states = [json.loads(record.value) for record in await dump(broker, Topic.STATE) if record.key == b"r1/"]
    return f"{states[-1].get('waiting', '')} {states[-1].get('blind', '')}"


async def _problems(broker: Broker) -> dict[str, str]:
    """What `klaxon status` says is wrong with logits."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from pipeline.cli.main import main; main()", "status", "--json",
        cwd=REPOSITORY, env={**broker.environment, **SETTINGS}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    sources = json.loads(out)["sources"]
    return {
        s["source"]: s["problem"]
        for s in sources
        if s["problem"] and s["source"].startswith(Topic.LOGITS.value)
    }
