"""The hand-written loops that are measured against, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.bench.errors import BenchError
from tests.conftest import REPOSITORY

TIMEOUT_S = 400.0


class Said(Struct, frozen=True):
    """The line that a loop prints at its end, as far as it is used."""

    events: int
    events_per_cpu_s: float
    pairs: int | None = None
    mean_kl: float | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A program with the commands of `bare.py`."""

    program: Path

    async def run(self, *arguments: str | Path) -> bytes:
        """Run it to its end; returns what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.program),
            *map(str, arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        except TimeoutError:
            raise BenchError(f"{self.program.name} {arguments[0]}: no end in {TIMEOUT_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise BenchError(f"{self.program.name} {arguments[0]}: {err.decode(errors='replace')[-2000:]}")
        return out

    async def measured(self, *arguments: str | Path, events: int) -> Said:
        """Run a measuring command; it must have seen all the events."""
        said = msgspec.json.decode(await self.run(*arguments), type=Said)
        if said.events != events:
            raise BenchError(f"{self.program.name} {arguments[0]} read {said.events} of {events} events")
        return said
