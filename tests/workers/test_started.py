"""Clients of aiokafka are closed however their use ends."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError

from agents.publish.kafka import KafkaRecordProducer
from pipeline.workers.broker import admin_client, started
from tests.kafka.broker import Broker
from tests.listening import listening

KINDS = [AIOKafkaConsumer, AIOKafkaProducer]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_refused(kind: type, nowhere: str) -> None:
    made = kind(bootstrap_servers=nowhere)
    with pytest.raises(KafkaConnectionError):
        async with started(made):
            pytest.fail("it cannot be connected")
    assert made._closed


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_cancelled_while_it_connects(kind: type) -> None:
    came = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()

    async with listening(silent) as port:
        made = kind(bootstrap_servers=f"127.0.0.1:{port}")

        async def use() -> None:
            async with started(made):
                pytest.fail("it cannot be connected")

        using = asyncio.create_task(use())
        await came.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
    assert made._closed


async def _left_open(use: Callable[[], Awaitable[None]]) -> tuple[int, list[str]]:
    """The turns of the loop that a use takes, and what is open after one that is cancelled in any of them."""
    found: list[str] = []
    for turn in range(1000):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ResourceWarning)
            using = asyncio.ensure_future(use())
            for _ in range(turn):
                # The later ones wait for the broker, which may be slow.
                await asyncio.sleep(0 if turn < 60 else 0.0005 if turn < 500 else 0.02)
            ended = using.done()
            using.cancel()
            await asyncio.wait([using])
            del using
            gc.collect()
            found += [f"turn {turn}: {str(one.message)[:60]}" for one in said]
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        found += [f"turn {turn}: {task.get_coro()}" for task in tasks]
        if ended:
            return turn, found
    raise AssertionError("it never ended")


@pytest.mark.slow
async def test_one_that_is_cancelled_at_any_moment_leaves_nothing_open(embedded: Broker) -> None:
    at = embedded.bootstrap

    async def use(kind: type) -> None:
        async with started(kind(bootstrap_servers=at)):
            pass

    async def administer() -> None:
        async with admin_client(embedded.config) as admin:
            await admin.list_topics()

    async def carelessly() -> None:
        made = AIOKafkaProducer(bootstrap_servers=at)
        await made.start()
        await made.stop()

    async def publish() -> None:
        producer = KafkaRecordProducer(at)
        await producer.start()
        await producer.stop()

    for each in (lambda: use(AIOKafkaProducer), lambda: use(AIOKafkaConsumer), administer, publish):
        turns, found = await _left_open(each)
        assert turns > 5, "it was never under way"
        assert found == []
    _, found = await _left_open(carelessly)
    assert found, "aiokafka closes by itself what is cancelled: `started` need not"
