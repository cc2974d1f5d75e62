"""What is to be done whole ends, or is broken off, before its caller's cancellation goes on."""

from __future__ import annotations

import asyncio

import pytest

from schemas.whole import whole
from tests.patience import patient


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_what_outlasts_its_time_is_broken_off_however_often_its_caller_is_cancelled(times: int) -> None:
    """A time-out can be the first cancellation, and a stop that comes meanwhile the second."""
    patient()
    broken_off: list[asyncio.Task[None] | None] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            broken_off.append(asyncio.current_task())

    calling = asyncio.create_task(whole(endless()))
    for _ in range(times):
        await asyncio.sleep(0.01)
        calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert len(broken_off) == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}
