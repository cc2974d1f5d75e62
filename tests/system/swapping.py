"""A pair worker whose partitions can be swapped with another one's: `python -m tests.system.swapping FILE`.

FILE holds 0 or 1: whichever worker leads the group gives partition 0 to the first or to the second of two
members. SIGUSR1 makes the worker ask for a new assignment, as any change of the group does. Nothing else
differs from `klaxon worker pair`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from aiokafka.consumer.group_coordinator import GroupCoordinator
from faust.assignor.partition_assignor import PartitionAssignor

from schemas.topics import Topic

_protocol_assignments = PartitionAssignor._protocol_assignments
_start = GroupCoordinator.__init__


def main() -> None:
    """Install both hooks, then be the worker."""
    turn = Path(sys.argv[1])
    coordinators: list[tuple[asyncio.AbstractEventLoop, GroupCoordinator]] = []

    def assign(self: PartitionAssignor, assignments: dict[str, Any], *rest: Any) -> Any:
        members = sorted(assignments)
        if len(members) == 2:
            held = sorted(assignments.values(), key=lambda each: each.actives.get(Topic.LOGITS.value, []))
            at = int(turn.read_text())
            assignments.update(zip(members, held[at:] + held[:at], strict=True))
        return _protocol_assignments(self, assignments, *rest)

    def started(self: GroupCoordinator, *arguments: Any, **named: Any) -> None:
        _start(self, *arguments, **named)
        coordinators.append((asyncio.get_running_loop(), self))

    def rejoin(*_: object) -> None:
        for loop, coordinator in coordinators:
            loop.call_soon_threadsafe(coordinator.request_rejoin)

    PartitionAssignor._protocol_assignments = assign
    GroupCoordinator.__init__ = started
    signal.signal(signal.SIGUSR1, rejoin)
    sys.argv = ["klaxon", "worker", "pair"]
    from pipeline.cli.main import main as klaxon

    klaxon()


if __name__ == "__main__":
    main()
