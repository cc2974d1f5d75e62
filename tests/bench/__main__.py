"""`python -m tests.bench [--only NAME …] [--quick] [--out FILE]`: a table on the screen, rows in a file."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tests.bench import machine
from tests.bench.context import BROKER, Context, end_on_sigterm, started_broker
from tests.bench.errors import BenchError, BrokerAbsentError
from tests.bench.measurements import MEASUREMENTS, Local, Measurement, OnKafka
from tests.bench.rows import Row, row, show, write
from tests.conftest import REPOSITORY

OK, MISSED, ABSENT, INTERRUPTED = 0, 1, 3, 130
"""Exit codes, besides 2 for wrong usage."""
OUT = REPOSITORY / "build" / "bench.json"


def main(
    arguments: Sequence[str] | None = None, measurements: Mapping[str, Measurement] = MEASUREMENTS
) -> int:
    """Measure, print, write; returns the exit code."""
    options = _options(arguments, measurements)
    chosen = {name: one for name, one in measurements.items() if not options.only or name in options.only}
    shared = shared_folder()
    missing = absent(list(chosen.values()), shared)
    if missing is not None:
        print(f"bench: {missing}", file=sys.stderr)
        return ABSENT
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    before = machine.describe()
    started_s = time.monotonic()
    rows: list[Row] = []
    interrupted = False
    try:
        asyncio.run(_run(chosen, shared, rows, quick=options.quick))
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    except BrokerAbsentError as error:
        print(f"bench: {error}", file=sys.stderr)
        return ABSENT
    for name, text in before.items():
        console.print(f"[bold]{name}[/]: {text}")
    console.print()
    show(console, rows)
    write(rows, options.out)
    missed = [one.name for one in rows if not one.ok]
    if interrupted:
        console.print(
            f"\ninterrupted after {time.monotonic() - started_s:.0f} s; rows so far in {options.out}"
        )
        return INTERRUPTED
    verdict = f"missed: {', '.join(missed)}" if missed else "every floor and ceiling is kept"
    console.print(f"\n{verdict} ({time.monotonic() - started_s:.0f} s); rows in {options.out}")
    return MISSED if missed else OK


def shared_folder() -> Path:
    """The folder of shared programs and data, there or not."""
    return Path(os.environ.get("KLAXON_SHARED", REPOSITORY.parent / "shared"))


def _options(arguments: Sequence[str] | None, measurements: Mapping[str, Measurement]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measure what the pipeline costs; see docs/performance.md.",
        epilog="exit code: 0 all kept, 1 a floor or ceiling missed, 2 wrong usage, 3 something is absent",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=tuple(measurements), help=", ".join(measurements)
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about six minutes")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: build/bench.json")
    return parser.parse_args(arguments)


def absent(chosen: Sequence[Measurement], shared: Path) -> str | None:
    """What is not there but needed, with the remedy; None if all is."""
    on_kafka = [one for one in chosen if isinstance(one, OnKafka)]
    for program in ("java", "mvn"):
        if on_kafka and shutil.which(program) is None:
            return f"{program} is not installed: Apache Kafka's jars need Java 17 and Maven 3.8"
    bare = shared / "tools" / "peers" / "bare.py"
    if any(one.shared for one in on_kafka) and not bare.is_file():
        return f"no {bare}: set KLAXON_SHARED to the folder that holds tools/peers"
    return None


async def _run(chosen: Mapping[str, Measurement], shared: Path, rows: list[Row], *, quick: bool) -> None:
    """All of them, one after the other, into `rows`. SIGTERM ends what was started, too."""
    end_on_sigterm()
    on_kafka = {name: one for name, one in chosen.items() if isinstance(one, OnKafka)}
    if on_kafka:
        with tempfile.TemporaryDirectory(prefix="klaxon-bench-") as made:
            folder = Path(made)
            with started_broker(folder / BROKER) as broker:
                context = Context(broker, folder, OUT.parent / "bench", shared, quick)
                for name, one in on_kafka.items():
                    rows += await _measured(name, partial(one.run, context))
    for name, local in chosen.items():
        if isinstance(local, Local):
            rows += await _measured(name, partial(asyncio.to_thread, local.run, quick))


async def _measured(name: str, measure: Callable[[], Awaitable[list[Row]]]) -> list[Row]:
    """Its rows. One that fails says why, leaves a row that is not ok, and stops no other."""
    print(name, file=sys.stderr, flush=True)
    try:
        return await measure()
    except (BenchError, AssertionError) as error:
        print(f"  {error}", file=sys.stderr, flush=True)
        return [row(name, None, "failed")]


if __name__ == "__main__":
    sys.exit(main())
