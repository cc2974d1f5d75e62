"""How a long-running process ends: asked once within a stated time, asked twice at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

from pipeline.workers.watchdog import end_process

T = TypeVar("T")

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def on_stop(first: Callable[[signal.Signals], None]) -> None:
    """Call `first` in the running loop at the first SIGTERM or SIGINT; a second one ends the process at once.

    The second is not left to the loop, which may be what hangs.
    """
    loop = asyncio.get_running_loop()

    def asked(number: signal.Signals) -> None:
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, _end_at_once)
        first(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, asked, number)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None, with the work cancelled, if the stop comes first. Raises what it raises."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def leave(code: int) -> NoReturn:
    """End the process with what it printed, without waiting for threads that wait for input."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_at_once(number: int, _frame: object) -> None:
    end_process(f"second {signal.Signals(number).name}")


@contextmanager
def stopping_within(grace_s: float) -> Iterator[asyncio.Event]:
    """An event that is set when the process is asked to stop; it has then `grace_s` to leave this block, and
    the interpreter, and is ended otherwise."""
    stop = asyncio.Event()

    def first(_: signal.Signals) -> None:
        late = threading.Timer(grace_s, end_process, [f"not stopped within {grace_s:g} s"])
        late.daemon = True
        late.start()
        stop.set()

    on_stop(first)
    yield stop
