"""Connecting and disconnecting clients of aiokafka, which are to be done whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

WHOLE_S: Final = 0.5
"""What a client has, whose user is cancelled, to connect or to disconnect as it had begun."""


async def whole(work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end, where its caller is cancelled meanwhile, too: that has WHOLE_S more.

    aiokafka, broken off while it connects or disconnects, leaves connections and tasks behind.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task], timeout=WHOLE_S)
        finally:  # cancelled once more, too: no more time then
            task.cancel()
            await asyncio.wait([task], timeout=WHOLE_S)
            if task.done() and not task.cancelled():
                task.exception()  # seen: nobody waits for it any more
        raise
