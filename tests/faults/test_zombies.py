"""Owners that were frozen and wake up beside their successors: they decide nothing, and are never wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest

from schemas.topics import CONTENT_TYPE, JSON, Topic
from tests.faults.routing import router, tell
from tests.kafka.broker import Broker
from tests.kafka.processes import GAUGES_EVERY_SECOND, Worker
from tests.kafka.records import dump, now_us, producer
from tests.kafka.waiting import eventually
from tests.system.judge import decode_final
from tests.workers.events import answer, encoded
from tests.workers.fleet import QUICK, SEAT, decisions, directives, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

SESSION: Final = {"KLAXON_KAFKA_SESSION_TIMEOUT_MS": "4000"}


async def test_a_frozen_owner_that_wakes_up_inside_its_transaction_is_fenced(
    kafka: Broker, log_folder: Path
) -> None:
    """It stops with its directive on the log, not committed; its successor decides; then it goes on."""
    # Without renewals the first transaction is the start, and the second one the pause.
    environment = {**QUICK, **SESSION, "KLAXON_GATE_RENEW_S": "3600"}
    fault = "gate_in_transaction:2:freeze"
    async with Worker("gate", kafka, log_folder, environment=environment, fault=fault) as gate:
        await gate.until_log(f"gating partition {SEAT}: taken")
        await start_rollout(kafka)
        async with router(kafka, "watching") as seen:
            await tell(kafka, "pause")
            await gate.until_log("fault gate_in_transaction fired")
            zombies = (await dump(kafka, Topic.CONTROL, committed_only=False))[-1].value
            assert json.loads(zombies)["state"] == "paused", "its directive is on the log"
            async with Worker("gate", kafka, log_folder, environment={**QUICK, **SESSION}) as successor:
                await successor.until_log(f"gating partition {SEAT}: taken")
                await tell(kafka, "abort")
                await seen.until(lambda line: line["directive"]["state"] == "tripped", "the abort")
                before = len(await dump(kafka, Topic.CONTROL, committed_only=False))
                # It ends because it was fenced, or sees first that the group went on without it.
                await woken(gate)
                assert await gate.stop() == 0 or "another gate process has taken over" in gate.log
                count = len(await directives(kafka))

                async def renewed() -> bool:
                    return len(await directives(kafka)) > count + 1

                await eventually(renewed)
            raw = [record.value for record in await dump(kafka, Topic.CONTROL, committed_only=False)]
            committed = [record.value for record in await dump(kafka, Topic.CONTROL)]
    assert zombies in raw
    assert zombies not in committed
    # Their group changes when it wakes up, which may break off a renewal: that is not the zombie's doing.
    assert {json.loads(value)["state"] for value in raw[before:]} == {"tripped"}
    times_us = [line["directive"]["ts_us"] for line in seen.lines]
    assert json.loads(zombies)["ts_us"] not in times_us
    assert len([one for one in await decisions(kafka) if one["directive"]["state"] == "tripped"]) == 1


async def woken(worker: Worker) -> None:
    """Thaw it, and wait until it has ended, or is back in its group: who is joining cannot leave at once."""
    told = worker.log.count(f"{worker.kind}: assigned")
    worker.thaw()

    async def done() -> bool:
        return not worker.running or worker.log.count(f"{worker.kind}: assigned") > told

    await eventually(done)


Key = tuple[str, int, int, int]
"""Source topic and partition, gating partition, second."""


def statements(values: list[bytes]) -> dict[Key, list[Any]]:
    """What finals said of each second, as often as they said it."""
    said: dict[Key, list[Any]] = defaultdict(list)
    for final in map(decode_final, values):
        assert final.parts == 1
        content = {one.second: one.contents for one in final.seconds}
        for second in range(
            max(final.closed_from, final.whole_from, final.closed_through - 60), final.closed_through + 1
        ):
            cells = {
                (one.population, cell.dimension, cell.value): (cell.counters, cell.measures, cell.worst)
                for one in content.get(second, ())
                for cell in one.cells
            }
            said[final.topic, final.partition, final.gating_partition, second].append(cells)
    return said


async def test_a_frozen_pair_worker_that_wakes_up_is_ignored_or_right(
    kafka: Broker, log_folder: Path
) -> None:
    """It stops with finals and fresh cells in its hands, and sends them when its successor is past them."""
    environment = {**QUICK, **SESSION}
    armable = (sys.executable, "-m", "tests.faults.armed", "pair", str(log_folder))
    async with (
        Worker("measure", kafka, log_folder, environment=environment),
        Worker("gate", kafka, log_folder, environment={**environment, **GAUGES_EVERY_SECOND}) as gate,
        Worker("pair", kafka, log_folder, environment=environment, command=armable) as pair,
    ):
        await start_rollout(kafka)
        sending = asyncio.create_task(keep_sending(kafka))
        try:
            await eventually(lambda: both_have_content(kafka))
            (log_folder / f"{pair.pid}.armed").write_text("finals_sent_before_fresh:3:freeze")
            pair.send(signal.SIGUSR1)
            await pair.until_log("fault finals_sent_before_fresh fired")
            frozen_us = now_us()
            async with Worker("pair", kafka, log_folder, environment=environment) as successor:
                await successor.until_log("pair: assigned klaxon.logits/0, klaxon.logits/1")

                async def past() -> bool:
                    finals = [decode_final(one.value) for one in await dump(kafka, Topic.BUCKETS)]
                    return {0, 1} == {
                        one.partition
                        for one in finals
                        if (one.topic, one.gating_partition) == (Topic.LOGITS, SEAT)
                        and one.closed_through > frozen_us // 1_000_000 + 1
                    }

                await eventually(past)
                await woken(pair)

                async def ignored() -> bool:
                    return gate.gauges().get(f"gating/{SEAT}", {}).get("stale_cells", 0) > 0

                await eventually(ignored)
                assert await pair.stop() == 0, pair.log
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        assert gate.gauges()[f"gating/{SEAT}"]["conflicting_finals"] == 0
        finals = [record.value for record in await dump(kafka, Topic.BUCKETS)]
    twice = {
        key: said for key, said in statements(finals).items() if key[0] == Topic.LOGITS and len(said) > 1
    }
    assert any(said[0] for said in twice.values()), "no second with content was stated by both"
    assert all(each == said[0] for said in twice.values() for each in said)
    assert await decisions(kafka, "trip") == []
    print(f"{len(twice)} seconds stated by both")


async def both_have_content(broker: Broker) -> bool:
    """Whether a second with pairs in it was closed in either partition: the seconds before hold nothing."""
    finals = [decode_final(record.value) for record in await dump(broker, Topic.BUCKETS)]
    return {0, 1} == {
        final.partition
        for final in finals
        if final.topic == Topic.LOGITS and any(second.contents for second in final.seconds)
    }


async def keep_sending(broker: Broker) -> None:
    """Good pairs in both partitions, until cancelled."""
    headers = [(CONTENT_TYPE, JSON.encode())]
    async with producer(broker) as client:
        for number in range(10_000):
            halves = [answer(now_us(), arm, f"p{number}") for arm in ("baseline", "canary")]
            for half in halves:
                for partition in (0, 1):
                    await client.send_and_wait(
                        Topic.LOGITS, encoded(half), partition=partition, headers=headers
                    )
            await asyncio.sleep(0.1)
