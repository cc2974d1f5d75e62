"""A patient clock: what a machine that stops costs, and what silence costs."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.listening import listening
from tests.patience import patient


async def exchanges(times: int) -> None:
    """So many bytes there and back; this machine stops in the middle of each."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1):
            writer.write(data)

    async with listening(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for _ in range(times):
                writer.write(b"x")
                time.sleep(0.2)  # noqa: ASYNC251  (it is to stop)
                assert await reader.read(1) == b"x"
        finally:
            writer.close()


async def test_a_machine_that_stops_lets_no_time_out_pass() -> None:
    patient()
    async with asyncio.timeout(0.3):
        await exchanges(3)


async def test_known_bad_by_the_machines_clock_it_does() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await exchanges(3)


async def test_silence_costs_what_was_agreed() -> None:
    loop = patient()
    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await asyncio.Event().wait()
    assert loop.time() - began_s >= 0.3
    assert patient() is loop, "made so once"
