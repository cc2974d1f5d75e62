"""The router against the embedded broker: reads from the beginning, follows, survives rubbish, reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from agents.router.runner import Change, Router, RouterSettings
from pipeline.cli.demo.embedded_broker import embedded_broker
from pipeline.cli.router import human_line, json_line
from schemas.control import Applied, Cause, Directive
from schemas.topics import Topic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with embedded_broker(start_timeout_s=120.0) as address:
        yield address


def directive(rollout: str, epoch: int, canary: float, **changes: object) -> Directive:
    now_us = time.time_ns() // 1000
    made = Directive(
        rollout=rollout,
        generation=1,
        epoch=epoch,
        ts_us=now_us,
        lease_until_us=now_us + 3_600_000_000,
        dead_man_us=7_200_000_000,
        state="observing",
        weights={"v1": 100.0 - canary, "v2": canary},
        last_promoted={"v1": 100.0, "v2": 0.0},
        fallback="v1",
    )
    return msgspec.structs.replace(made, **changes)


@asynccontextmanager
async def running(bootstrap: str) -> AsyncIterator[asyncio.Queue[Change]]:
    changes: asyncio.Queue[Change] = asyncio.Queue()
    stop = asyncio.Event()
    settings = RouterSettings(bootstrap, "r1", retry_max_s=0.5)
    task = asyncio.create_task(Router(settings, changes.put_nowait).run(stop))
    try:
        yield changes
    finally:
        stop.set()
        await asyncio.wait_for(task, 120)


async def test_a_router_catches_up_follows_and_says_what_it_applied(
    bootstrap: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "agents")
    async with running(bootstrap) as changes:
        # No topic yet: the router waits for it, and says so.
        async with asyncio.timeout(120):
            while "does not exist yet; next try in" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        await admin.create_topics([NewTopic(Topic.CONTROL, 4, 1), NewTopic(Topic.APPLIED, 1, 1)])
        await admin.close()
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
        await producer.start()

        async def write(value: bytes) -> None:
            await producer.send_and_wait(Topic.CONTROL, value, key=b"chat")

        await write(msgspec.json.encode(directive("chat", 1, 5.0)))
        change = await asyncio.wait_for(changes.get(), 120)
        assert (change.epoch, change.effective.weights["v2"]) == (1, 5.0)
        assert "klaxon.control is followed again" in caplog.text
        await write(b"{not a directive")
        cause = Cause(rule="mean-kl", capability="G5")
        await write(msgspec.json.encode(directive("chat", 2, 0.0, state="tripped", cause=cause)))
        await write(msgspec.json.encode(directive("chat", 1, 50.0)))
        change = await asyncio.wait_for(changes.get(), 120)
        assert (change.epoch, change.effective.weights["v2"]) == (2, 0.0)
        assert "because of mean-kl" in human_line(change)
        assert change.reason == "applied"
        assert msgspec.json.decode(json_line(change))["effective"]["weights"] == {"v1": 100.0, "v2": 0.0}
        # A renewed lease is published as applied, and is no change.
        await write(msgspec.json.encode(directive("chat", 3, 0.0, state="tripped", cause=cause)))
        await applied_through(bootstrap, 3)
        assert changes.empty()
        await producer.stop()

    # A router that starts later reads one record and is right; the older ones are no news.
    async with running(bootstrap) as changes:
        change = await asyncio.wait_for(changes.get(), 120)
        assert (change.epoch, change.effective.weights["v2"]) == (3, 0.0)
        assert changes.empty()
        applied = await applied_through(
            bootstrap, 3, times=2
        )  # what it has not told when it ends it never will
    assert {one.router for one in applied} == {"r1"}
    assert [one.epoch for one in applied if one.epoch in (1, 3)] == [1, 3, 3]


async def applied_through(bootstrap: str, epoch: int, times: int = 1) -> list[Applied]:
    """What `klaxon.applied` holds, once it has this epoch so many times."""
    consumer = AIOKafkaConsumer(
        Topic.APPLIED, bootstrap_servers=bootstrap, auto_offset_reset="earliest", group_id=None
    )
    await consumer.start()
    try:
        applied: list[Applied] = []
        async with asyncio.timeout(120):
            while sum(one.epoch == epoch for one in applied) < times:
                applied.append(msgspec.json.decode((await consumer.getone()).value, type=Applied))
        return applied
    finally:
        await consumer.stop()
