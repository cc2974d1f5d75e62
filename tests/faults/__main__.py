"""The fault suite in its long form: `python -m tests.faults --seed S --rounds R`, or `make faults`.

Two of each worker are killed, frozen past their session and restarted at named points under traffic, on real
Apache Kafka; the judge compares everything they wrote with the oracle. The last line says it all. Exit code
0: every planned fault fired and nothing was lost, doubled or decided wrongly; 1: otherwise; 3: no Java.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import cast

from rich.console import Console

from tests.faults.report import WIDTH, Report
from tests.faults.rounds import Plan, Round, archive_server, play
from tests.faults.schedule import ACTIONS, PER_WORKER, POINTS, WORKERS, Worker, schedule
from tests.kafka.broker import apache_kafka
from tests.system.known_bad import DEFECTS

ROUNDS = 14
NEEDS = ("java", "mvn")


def main() -> int:
    """Play the rounds; returns the exit code."""
    arguments = _arguments()
    # As Ctrl-C: whoever ends the suite ends the broker and the workers, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    missing = [program for program in NEEDS if shutil.which(program) is None]
    if missing:
        print(f"{missing[0]} is not installed: Apache Kafka needs Java 17 and Maven 3.8", file=sys.stderr)
        return 3
    report = Report(_played(_plans(arguments), arguments.keep))
    console = Console(width=WIDTH if not sys.stdout.isatty() else None)
    report.show(console)
    print(report.last_line)
    return 0 if report.passed else 1


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    only = set(itertools.chain(*arguments.only))
    defects = dict(arguments.defect)
    plans = []
    for number in range(arguments.first_round, arguments.first_round + arguments.rounds):
        faults = schedule(arguments.seed, number, arguments.per_worker)
        wanted = [each for each in faults if not only or only & {each.worker, each.action, each.point.name}]
        plans.append(Plan(arguments.seed, number, wanted, defects))
    return plans


def _played(plans: list[Plan], keep: Path | None) -> list[Round]:
    count = sum(len(plan.faults) for plan in plans)
    print(f"seed {plans[0].seed}: {count} faults in {len(plans)} rounds", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="klaxon-faults-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    rounds = []
    try:
        with apache_kafka(folder / "kafka") as broker, archive_server(folder) as address:
            for plan in plans:
                (logs := folder / f"round-{plan.number}").mkdir()
                rounds.append(asyncio.run(play(broker, logs, address, plan)))
                print(f"round {plan.number}: {Report(rounds[-1:]).said_in_short}", flush=True)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return rounds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=20260717)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}: over 200 faults")
    parser.add_argument("--first-round", type=int, default=0, help="to repeat one of a longer run")
    parser.add_argument("--per-worker", type=int, default=PER_WORKER, help="faults of each worker in a round")
    parser.add_argument(
        "--only",
        action="append",
        type=_words,
        default=[],
        metavar="WORD,…",
        help=f"of the scheduled faults only those of these workers ({', '.join(WORKERS)}), actions or points",
    )
    parser.add_argument(
        "--defect",
        action="append",
        type=_defect,
        default=[],
        metavar="WORKER=DEFECT",
        help=f"a worker with a known defect, which must be found: {', '.join(DEFECTS)}",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all logs there")
    return parser.parse_args()


def _words(text: str) -> list[str]:
    """What `--only` says; a word that nothing goes by would play no fault, and pass."""
    known = {*WORKERS, *ACTIONS, *(point.name for points in POINTS.values() for point in points)}
    for word in (words := text.split(",")):
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word!r} is no worker, action or point")
    return words


def _defect(text: str) -> tuple[Worker, str]:
    worker, _, defect = text.partition("=")
    if worker not in WORKERS or defect not in DEFECTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKER=DEFECT")
    return cast("Worker", worker), defect


if __name__ == "__main__":
    sys.exit(main())
