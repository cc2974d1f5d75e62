"""Which worker is broken how and where, in which order: a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pipeline.workers.faults import FaultPoint

Worker = Literal["measure", "pair", "gate", "archive"]
Action = Literal["kill", "freeze", "restart"]
When = Literal["running", "starting", "rebalancing", "silent"]
"""When a point is passed: all the time, on the way to the first record, when the group changes, or when
nothing is sent any more."""

WORKERS: Final[tuple[Worker, ...]] = get_args(Worker)
PER_WORKER: Final = 4
"""Faults of each worker in a round."""
ACTIONS: Final[tuple[Action, ...]] = ("kill", "freeze", "kill", "restart")
"""What comes after what, in circles."""
ANYWHERE: Final = "anywhere"


@dataclass(frozen=True, slots=True)
class Point:
    """A fault point of a worker, its passage drawn from 1..most. `anywhere`: at any moment, from outside."""

    name: FaultPoint | Literal["anywhere"]
    when: When = "running"
    most: int = 1


_SOURCE: Final = (
    Point(ANYWHERE),
    Point("on_assigned", "starting"),
    Point("during_warm_up", "starting", 8),
    Point("on_revoked", "rebalancing"),
    Point("after_read", most=40),
    Point("before_flush", most=40),
    Point("finals_sent_before_fresh", most=6),
    Point("flush_sent_before_acknowledged", most=30),
    Point("flush_acked_before_commit", most=30),
    Point("after_commit", most=4),
    Point("tick_sent", "silent", 2),
)
POINTS: Final[Mapping[Worker, tuple[Point, ...]]] = {
    "measure": _SOURCE,
    "pair": (*_SOURCE, Point("half_waiting", most=20)),
    "gate": (
        Point(ANYWHERE),
        Point("on_assigned", "starting"),
        Point("gate_fenced_before_memory", "starting", 2),
        Point("gate_memory_before_log", "starting", 2),
        Point("during_warm_up", "starting", 10),
        Point("on_revoked", "rebalancing"),
        Point("after_read", most=40),
        Point("gate_before_transaction", most=8),
        Point("gate_in_transaction", most=8),
        Point("gate_after_transaction", most=8),
        Point("after_commit", most=4),
    ),
    "archive": (
        Point(ANYWHERE),
        Point("on_assigned", "starting"),
        Point("before_checkpoint", "starting", 4),
        Point("after_open", "starting", 4),
        Point("on_revoked", "rebalancing"),
        Point("after_read", most=40),
        Point("before_insert", most=6),
        Point("inside_insert", most=6),
        Point("after_insert_before_commit", most=6),
        Point("after_insert_commit", most=6),
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault."""

    round: int
    number: int
    """Among this worker's of the round."""
    worker: Worker
    action: Action
    point: Point
    passage: int
    seat: int
    """Which of the two."""
    after_s: float
    """How long something is waited for where the point itself does not say when."""

    def __str__(self) -> str:
        passage = "" if self.point.name == ANYWHERE else f":{self.passage}"
        return f"{self.worker} {self.seat} {self.action} {self.point.name}{passage}"

    @property
    def armed(self) -> str:
        """As `KLAXON_FAULT` has it."""
        return f"{self.point.name}:{self.passage}:{'stop' if self.action == 'restart' else self.action}"


def schedule(seed: int, number: int, per_worker: int = PER_WORKER) -> list[Fault]:
    """The faults of a round, each worker's in order; those that need silence come last."""
    return [fault for worker in WORKERS for fault in _of_worker(seed, number, worker, per_worker)]


def _of_worker(seed: int, number: int, worker: Worker, per_worker: int) -> list[Fault]:
    points = {action: _dealt(seed, worker, action) for action in ("kill", "freeze", "restart")}
    rng = random.Random(f"{seed}/{worker}")
    found = []
    for at in range((number + 1) * per_worker):
        action = ACTIONS[at % len(ACTIONS)]
        point = next(points[action])
        fault = Fault(
            at // per_worker,
            at % per_worker,
            worker,
            action,
            point,
            rng.randint(1, point.most),
            rng.randrange(2),
            rng.uniform(0, 1.5),
        )
        if fault.round == number:
            found.append(fault)
    return sorted(found, key=lambda fault: fault.point.when == "silent")


def _dealt(seed: int, worker: Worker, action: str) -> Iterator[Point]:
    """All points in an order of chance, then all again: none comes a second time before each came once."""
    rng = random.Random(f"{seed}/{worker}/{action}")
    while True:
        points = list(POINTS[worker])
        rng.shuffle(points)
        yield from points
