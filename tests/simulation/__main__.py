"""`make simulation`: the shipped policy on the real pair scores; tables, plots, and a verdict on alpha.

Last line: `aa_rollouts N false_trips K alpha A`. Exit code 0; 1: K of N is significantly over A; 2: wrong
usage; 3: no shared data.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from pipeline.policy_file import parse_policy, shipped_policy_text
from tests.conftest import REPOSITORY
from tests.simulation import drill
from tests.simulation.docs import write_docs
from tests.simulation.rows import Outcome, Row, Setting, long_rows, run
from tests.simulation.tables import Results, false_trips, is_over, markdown

OUT: Final = REPOSITORY / "build" / "simulation.json"


class Kept(msgspec.Struct, frozen=True):
    """The file of outcomes."""

    seed: int
    outcomes: dict[str, list[Outcome]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate what was asked for; see the module."""
    parser = _parser()
    given = parser.parse_args(arguments)
    shared = Path(os.environ.get("KLAXON_SHARED", REPOSITORY.parent / "shared"))
    if not (shared / "data").is_dir():
        print(f"no shared data at {shared}; set KLAXON_SHARED to the folder that holds data/")
        return 3
    if given.rollouts < 1 or given.processes < 1 or not 0 < given.share <= 100:
        parser.error("--rollouts and --processes count from 1, --share is above 0")
    policy = parse_policy(shipped_policy_text())
    setting = Setting(given.seed, shared, policy, frozenset(given.rules) or None)
    rows = long_rows(given.rollouts, given.share)
    wanted = [row for row in rows if not given.only or row.name.startswith(tuple(given.only))]
    print(f"seed {given.seed}, {given.rollouts} A/A roll-outs, {given.processes} processes", flush=True)
    found = _simulate(wanted, setting, given.processes)
    for path in given.beside:
        _add(found, path, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_bytes(msgspec.json.encode(Kept(given.seed, found)))
    results = Results(policy, rows, found)
    for name, table in markdown(results).items():
        print(f"\n{name}\n{table}")
    if given.write == "docs":
        played = drill.play(1, shared, drill.policies())
        write_docs(results, drill.table(played), REPOSITORY / "docs")
    runs, trips = false_trips(results)
    alpha = float(policy.alpha)
    print(f"aa_rollouts {runs} false_trips {trips} alpha {alpha:g}")
    return 1 if is_over(trips, runs, alpha) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=2000, help="A/A roll-outs (default 2000)")
    parser.add_argument("--share", type=float, default=1.0, help="of everything else (default 1.0)")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name begins with one of these")
    parser.add_argument("--rules", nargs="*", default=[], help="judge these rules only")
    parser.add_argument(
        "--with", dest="beside", type=Path, nargs="*", default=[], metavar="FILE",
        help="add these outcomes of further rows or rules",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=OUT, help="where outcomes go")
    parser.add_argument("--write", choices=("docs",), help="put tables and plots into docs/statistics.md")
    return parser


def _simulate(rows: Sequence[Row], setting: Setting, processes: int) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {row.name: [] for row in rows}
    tasks = [(row, index, setting) for row in rows for index in range(row.runs)]
    began = time.monotonic()
    with ExitStack() as stack:
        # One process is this one: whoever else has threads in it, as a test has, is not forked.
        outcomes = map(_run, tasks)
        if processes > 1:
            fork = multiprocessing.get_context("fork")
            pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=fork))
            outcomes = pool.map(_run, tasks, chunksize=2)
        for at, outcome in enumerate(outcomes):
            if not found[outcome.row]:
                said = f"{time.monotonic() - began:6.0f} s, {at} of {len(tasks)} runs: {outcome.row}"
                print(said, file=sys.stderr, flush=True)
            found[outcome.row].append(outcome)
    return found


def _run(task: tuple[Row, int, Setting]) -> Outcome:
    return run(*task)


def _add(found: dict[str, list[Outcome]], path: Path, seed: int) -> None:
    """Outcomes of further rows, or of the same runs judged by further rules, of another simulation."""
    kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    if kept.seed != seed:
        raise SystemExit(f"{path}: simulated with seed {kept.seed}, not {seed}; give --seed {kept.seed}")
    for name, others in kept.outcomes.items():
        if name not in found:
            found[name] = list(others)
        elif len(found[name]) == len(others):
            pairs = zip(found[name], others, strict=True)
            found[name] = [
                Outcome(name, (*one.trips, *other.trips), one.most | other.most) for one, other in pairs
            ]


if __name__ == "__main__":
    sys.exit(main())
