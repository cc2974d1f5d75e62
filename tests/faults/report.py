"""The table at the end of the fault suite, and its last line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from tests.faults.crew import Outcome
from tests.faults.rounds import Round
from tests.faults.schedule import POINTS, WORKERS
from tests.system.findings import totals

ACTIONS: Final = ("kill", "freeze", "restart")
WIDTH: Final = 110


@dataclass(frozen=True)
class Report:
    """What came of all rounds."""

    rounds: Sequence[Round]

    @property
    def planned(self) -> int:
        return sum(len(round_.plan.faults) for round_ in self.rounds)

    @property
    def fired(self) -> int:
        return sum(outcome.fired for round_ in self.rounds for outcome in round_.outcomes)

    @property
    def passed(self) -> bool:
        """Faults were planned, every one fired, and the judge found nothing."""
        return self.fired == self.planned > 0 and not any(round_.findings for round_ in self.rounds)

    @property
    def last_line(self) -> str:
        found = totals(finding for round_ in self.rounds for finding in round_.findings)
        return (
            f"faults fired {self.fired}/{self.planned} lost {found['lost']} doubled {found['doubled']} "
            f"false_trips {found['false_trip']} missed_trips {found['missed_trip']}"
        )

    @property
    def said_in_short(self) -> str:
        """For one round, as soon as it is played: its seconds and totals, and all that differs."""
        seconds = sum(round_.seconds for round_ in self.rounds)
        return "\n  ".join([f"{seconds:.0f} s, {self.last_line}", *self._differences()])

    def show(self, console: Console) -> None:
        """Tables, then what differs and how to repeat it; the last line is the caller's."""
        console.print(self._points())
        console.print(self._rounds())
        for line in self._differences():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _differences(self) -> Iterator[str]:
        for round_ in self.rounds:
            plan = round_.plan
            wrong = [f"not fired: {each.fault}: {each.why}" for each in round_.outcomes if not each.fired]
            wrong += [f"{finding.kind}: {finding}" for finding in round_.findings]
            if wrong:
                again = f"--seed {plan.seed} --first-round {plan.number} --rounds 1"
                wrong.append(f"repeat it: python -m tests.faults {again}")
            yield from (f"round {plan.number}: {line}" for line in wrong)

    def _points(self) -> Table:
        table = Table(
            title="Faults fired / planned, and seconds until the worker's partitions were worked on again",
            caption="measure and pair: until the fault's second was closed, which takes 1 s and 4 s anyway",
            box=box.SIMPLE_HEAD,
        )
        for name in ("worker", "point"):
            table.add_column(name)
        for name in (*ACTIONS, "back p50", "p99", "longest"):
            table.add_column(name, justify="right")
        outcomes = [outcome for round_ in self.rounds for outcome in round_.outcomes]
        for worker in WORKERS:
            mine = [outcome for outcome in outcomes if outcome.fault.worker == worker]
            for point in POINTS[worker]:
                here = [outcome for outcome in mine if outcome.fault.point == point]
                if here:
                    table.add_row(worker, point.name, *_row(here))
            if mine:
                table.add_row(worker, "all", *_row(mine), style="bold", end_section=True)
        return table

    def _rounds(self) -> Table:
        table = Table(title="Rounds, each on fresh topics", box=box.SIMPLE_HEAD)
        names = ("round", "seconds", "faults", "roll-outs", "records", "trips")
        for name in (*names, "lost", "doubled", "false trips", "missed trips", "wrong"):
            table.add_column(name, justify="right")
        for round_ in self.rounds:
            found = totals(round_.findings)
            cells = (
                round_.plan.number,
                round(round_.seconds),
                f"{sum(each.fired for each in round_.outcomes)}/{len(round_.plan.faults)}",
                round_.rollouts,
                round_.records,
                round_.decisions["trip"],
                *(found[kind] for kind in ("lost", "doubled", "false_trip", "missed_trip", "wrong")),
            )
            table.add_row(*map(str, cells))
        return table


def _row(outcomes: Sequence[Outcome]) -> list[str]:
    cells = []
    for action in ACTIONS:
        these = [outcome for outcome in outcomes if outcome.fault.action == action]
        cells.append(f"{sum(each.fired for each in these)}/{len(these)}" if these else "-")
    seconds = [outcome.back_s for outcome in outcomes if outcome.back_s is not None]
    return [*cells, *(f"{value:.1f}" if value is not None else "-" for value in _quantiles(seconds))]


def _quantiles(values: Iterable[float]) -> tuple[float | None, ...]:
    """p50, p99 and the longest, each a value that was seen (nearest rank)."""
    found = sorted(values)
    if not found:
        return (None, None, None)
    return tuple(found[max(math.ceil(share * len(found)) - 1, 0)] for share in (0.5, 0.99, 1.0))
