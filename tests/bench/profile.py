"""Where the time goes: `python -m tests.bench.profile pair | measure | archive | gate`, by py-spy.

A worker process is sampled while it reads a backlog (gate: a process that judges and nothing else). A sample
of a thread that runs is charged to its innermost frame that is a file of ours, or else to the package it is
in. py-spy is no dependency of the project: `pip install py-spy`, or name it with `--py-spy`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench.__main__ import ABSENT, INTERRUPTED, MISSED, OK, OUT, absent, shared_folder
from tests.bench.archive import archiving
from tests.bench.context import BROKER, Context, end_on_sigterm, started_broker
from tests.bench.drain import draining
from tests.bench.errors import BenchError, BrokerAbsentError
from tests.bench.measurements import MEASUREMENTS
from tests.conftest import REPOSITORY

RATE_HZ: Final = 200
PARTITIONS: Final = 4
SHOWN: Final = 16
ON_KAFKA: Final = ("pair", "measure", "archive")
PACKAGES: Final = ("aiokafka", "faust", "mode", "asyncio", "clickhouse_connect", "chdb")
OURS: Final = ("pipeline/", "schemas/", "agents/")
IDLE: Final = "selectors.py:"


def stage_of(stack: str) -> str:
    """What a sample is charged to. `stack`: `function (path:line)` from the outermost frame, joined by ;."""
    for frame in reversed(stack.split(";")):
        where = frame.rpartition("(")[2].partition(":")[0]
        for package in PACKAGES:
            if f"{package}/" in f"/{where}":
                return package
        for folder in OURS:
            if folder in where:
                return where[where.rindex(folder) :]
    return "other"


def shares(folded: str) -> list[tuple[str, float]]:
    """py-spy's folded stacks as (stage, share of the samples that ran), greatest first."""
    counts: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        if IDLE not in stack.rpartition(";")[2]:
            counts[stage_of(stack)] += int(count)
    total = max(counts.total(), 1)
    return [(stage, count / total) for stage, count in counts.most_common()]


class Sampler:
    """py-spy on one process."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._out = folder / "folded"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, pid: int) -> None:
        """Begin; returns once samples are taken."""
        arguments = ("--pid", str(pid), "--rate", str(RATE_HZ), "--format", "raw", "--output", str(self._out))
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            "record",
            *arguments,
            "--nonblocking",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        await asyncio.sleep(1)

    async def stop(self) -> str:
        """End; returns the folded stacks. Raises BenchError where py-spy took none."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)
        _, said = await self._process.communicate()
        if not self._out.exists():
            raise BenchError(f"py-spy: {said.decode(errors='replace')[-500:]}")
        return await asyncio.to_thread(self._out.read_text)


async def _on_kafka(kind: str, sampler: Sampler, folder: Path) -> str:
    """A worker on one backlog; the first warms it up."""
    end_on_sigterm()
    with started_broker(folder / BROKER) as broker:
        context = Context(broker, folder, OUT.parent / "bench", shared_folder(), quick=True)
        if kind == "archive":
            backlog = await context.requests(partitions=PARTITIONS)
            async with archiving(context, PARTITIONS) as archive:
                await archive.cost(list(backlog.records(time.time_ns() // 1000)))
                await sampler.start(archive.worker.pid)
                await archive.cost(list(backlog.records(time.time_ns() // 1000)))
                return await sampler.stop()
        read = context.pairs if kind == "pair" else context.requests
        backlog = await read(partitions=PARTITIONS)
        own = await context.with_partitions(PARTITIONS)
        async with draining(kind, own, folder) as drain:
            await drain.cost(backlog)
            await sampler.start(drain.worker.pid)
            await drain.cost(backlog)
            return await sampler.stop()


async def _gate(sampler: Sampler, folder: Path) -> str:
    """The gate's measurement in a process of its own."""
    out = folder / "bench.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench", "--only", "gate", "--out", str(out)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await asyncio.sleep(2)
    await sampler.start(process.pid)
    await process.wait()
    return await sampler.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample, print; returns the exit code (as of the bench)."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description="Where the time goes.")
    parser.add_argument("kind", choices=(*ON_KAFKA, "gate"))
    parser.add_argument("--py-spy", default="py-spy", metavar="PROGRAM")
    options = parser.parse_args(arguments)
    beside = Path(sys.executable).with_name("py-spy")
    program = shutil.which(options.py_spy) or (str(beside) if beside.exists() else None)
    missing = absent([MEASUREMENTS[options.kind]], shared_folder())
    if program is None:
        missing = f"no {options.py_spy}: pip install py-spy, or name it with --py-spy"
    if missing is not None or program is None:
        print(f"profile: {missing}", file=sys.stderr)
        return ABSENT
    with tempfile.TemporaryDirectory(prefix="klaxon-profile-") as made:
        folder = Path(made)
        sampler = Sampler(program, folder)
        sampled = (
            _gate(sampler, folder) if options.kind == "gate" else _on_kafka(options.kind, sampler, folder)
        )
        try:
            found = shares(asyncio.run(sampled))
        except (KeyboardInterrupt, asyncio.CancelledError):
            return INTERRUPTED
        except BrokerAbsentError as error:
            print(f"profile: {error}", file=sys.stderr)
            return ABSENT
        except (BenchError, AssertionError) as error:
            print(f"profile: {error}", file=sys.stderr)
            return MISSED
    for stage, share in found[:SHOWN]:
        print(f"{share:6.1%}  {stage}")
    print(f"{1 - sum(share for _, share in found[:SHOWN]):6.1%}  all others")
    return OK


if __name__ == "__main__":
    sys.exit(main())
