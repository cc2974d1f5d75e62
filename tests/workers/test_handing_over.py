"""How a record is handed from Faust's consumer to its stream: as by mode's `wait_first`, without tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipeline.config import KafkaConfig
from pipeline.workers import transport


@pytest.fixture
async def consumer() -> AsyncIterator[Any]:
    app = transport.KlaxonApp("group", KafkaConfig())
    app.finalize()
    made = app.transport.create_consumer(
        callback=lambda _: None, on_partitions_revoked=None, on_partitions_assigned=None
    )
    yield made
    made._thread.thread_loop.close()


async def test_a_record_that_is_taken_at_once_needs_no_task_and_gives_others_their_turn(
    consumer: Any,
) -> None:
    turns: list[str] = []
    tasks: list[int] = []

    async def take() -> str:
        tasks.append(len(asyncio.all_tasks()))
        return "taken"

    before = len(asyncio.all_tasks())
    asyncio.get_running_loop().call_soon(turns.append, "agent")
    waited = await consumer.wait_first(take(), asyncio.Event().wait())
    assert waited.results == ["taken"]
    assert not waited.stopped
    assert tasks == [before]
    assert turns == ["agent"]


async def test_a_record_that_has_to_wait_is_awaited_to_its_end(consumer: Any) -> None:
    full = asyncio.Event()

    async def take() -> str:
        await full.wait()
        await asyncio.sleep(0)
        return "taken"

    waiting = asyncio.create_task(consumer.wait_first(take(), asyncio.Event().wait()))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    full.set()
    assert (await waiting).results == ["taken"]


async def test_a_record_that_has_to_wait_is_given_up_when_the_flow_is_suspended(consumer: Any) -> None:
    ended: list[str] = []
    suspended = asyncio.Event()

    async def take() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    waiting = asyncio.create_task(consumer.wait_first(take(), suspended.wait()))
    await asyncio.sleep(0.01)
    suspended.set()
    assert (await waiting).results == [True]
    await asyncio.sleep(0)
    assert ended == ["cancelled"]


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_of_the_taker_is_raised(consumer: Any, waits: bool) -> None:
    async def take() -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("no callback")

    with pytest.raises(KeyError, match="no callback"):
        await consumer.wait_first(take(), asyncio.Event().wait())
