"""Reports of a router: each directive once, the newest only, and a broker that does not take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiokafka.errors import KafkaError, KafkaTimeoutError

from agents.router.reports import Reports
from schemas.control import Applied, Directive
from schemas.topics import Topic


def directive(rollout: str, epoch: int) -> Directive:
    return Directive(
        rollout=rollout,
        generation=1,
        epoch=epoch,
        ts_us=0,
        lease_until_us=1,
        dead_man_us=1,
        state="observing",
        weights={"v1": 100.0},
        last_promoted={"v1": 100.0},
        fallback="v1",
    )


class _Producer:
    """Takes reports once it is told to; raises `refuses` as often as it says."""

    def __init__(self, *refuses: KafkaError) -> None:
        self.taken: list[Applied] = []
        self.open = asyncio.Event()
        self._refuses = list(refuses)

    async def send(self, topic: Topic, value: bytes, *, key: bytes) -> asyncio.Future[None]:
        await self.open.wait()
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._refuses:
            acknowledged.set_exception(self._refuses.pop())
            return acknowledged
        applied = msgspec.json.decode(value, type=Applied)
        assert (topic, key) == (Topic.APPLIED, applied.rollout.encode())
        self.taken.append(applied)
        acknowledged.set_result(None)
        return acknowledged


async def explained(error: KafkaError) -> str:
    return f"because of {type(error).__name__}"


@asynccontextmanager
async def publishing(reports: Reports, producer: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(reports.publish(producer, explained))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_broker_that_takes_nothing_holds_up_nobody_and_gets_the_newest_later() -> None:
    reports, producer = Reports("r1"), _Producer()
    async with publishing(reports, producer):
        for epoch in range(1, 50):
            reports.note(directive("chat", epoch), epoch)
            reports.note(directive("chat", epoch), 1_000)
            await asyncio.sleep(0)
        assert not producer.taken
        producer.open.set()
        await settled()
    # The first was on its way when the others came; of those only the newest is of interest.
    assert [(each.epoch, each.applied_us) for each in producer.taken] == [(1, 1), (49, 49)]


async def test_what_was_not_acknowledged_is_sent_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    reports, producer = Reports("r1", retry_s=0.0), _Producer(KafkaTimeoutError())
    producer.open.set()
    async with publishing(reports, producer):
        reports.note(directive("chat", 1), 7)
        await settled()
    assert [(each.rollout, each.applied_us) for each in producer.taken] == [("chat", 7)]
    assert "klaxon.applied takes no reports: because of KafkaTimeoutError" in caplog.text


async def test_what_waited_when_a_connection_broke_leaves_on_the_next() -> None:
    reports, broken, next_one = Reports("r1"), _Producer(), _Producer()
    async with publishing(reports, broken):
        reports.note(directive("chat", 1), 1)
        await settled()
    next_one.open.set()
    async with publishing(reports, next_one):
        await settled()
    assert [each.epoch for each in next_one.taken] == [1]


async def test_a_forgotten_roll_out_is_not_reported() -> None:
    reports, producer = Reports("r1"), _Producer()
    producer.open.set()
    reports.note(directive("chat", 1), 1)
    reports.forget("chat")
    async with publishing(reports, producer):
        await settled()
        assert not producer.taken
        reports.note(directive("chat", 1), 2)
        await settled()
    assert [each.applied_us for each in producer.taken] == [2]
