"""What runs together ends together, even where a cancellation was lost."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.workers import runner
from pipeline.workers.runner import first_end_of


async def _fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("first")


async def test_the_first_error_is_raised_and_none_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CANCEL_AGAIN_S", 0.01)
    lost = 0

    async def loses_two_cancellations() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost += 1
                if lost > 2:
                    raise

    with pytest.raises(ValueError, match="first"):
        await asyncio.wait_for(first_end_of(loses_two_cancellations(), _fails()), 60)
    assert lost == 3


async def test_a_cancellation_that_comes_with_what_was_waited_for_is_not_lost() -> None:
    """As `asyncio.wait_for` of Python 3.11 loses it: then a worker whose record failed never ended."""
    changed = asyncio.Event()

    async def waits() -> None:
        while True:
            changed.clear()
            async with asyncio.timeout(60):
                await changed.wait()

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0.01)
    changed.set()
    await asyncio.sleep(0)
    waiting.cancel()
    assert await asyncio.wait([waiting], timeout=60) == ({waiting}, set())
