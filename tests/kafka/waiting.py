"""Waiting for what another process or the broker will do, where nothing announces it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(condition: Callable[[], Awaitable[T]], *, timeout_s: float = 120.0) -> T:
    """The first truthy answer of `condition`; fails with the last answer when there is none in time."""
    answer: T | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while not (answer := await condition()):  # noqa: ASYNC110 (see above)
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s; last answer: {answer!r}") from None
    return answer
