"""Named places where a test may kill the process; without `KLAXON_FAULT` they do nothing.

`KLAXON_FAULT=name` dies at the first passage of that point, `KLAXON_FAULT=name:3` at the third. The name is
printed first, so that a test can prove that the fault fired and not some other death.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Final, Literal, get_args

from pipeline.errors import PipelineError

FaultPoint = Literal[
    "after_read",
    "before_flush",
    "flush_sent_before_acknowledged",
    "flush_acked_before_commit",
    "after_commit",
    "during_warm_up",
    "half_waiting",
    "on_assigned",
    "on_revoked",
    "gate_before_transaction",
    "gate_in_transaction",
    "gate_after_transaction",
    "before_insert",
    "after_insert_before_commit",
    "after_insert_commit",
]
"""Every point there is; the tests kill at each of them."""

VARIABLE: Final = "KLAXON_FAULT"
EXIT_CODE: Final = 137
"""As if killed with SIGKILL."""


class FaultError(PipelineError):
    """`KLAXON_FAULT` names no fault point."""


def _armed() -> tuple[str, int] | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    name, _, nth = text.partition(":")
    if name not in get_args(FaultPoint) or (nth and not nth.isdecimal()):
        known = ", ".join(get_args(FaultPoint))
        raise FaultError(f"{VARIABLE}={text}: expected name or name:nth with one of {known}")
    return name, int(nth or 1)


_ARMED: Final = _armed()
_passed: Counter[str] = Counter()


def is_armed(point: FaultPoint) -> bool:
    """Whether `KLAXON_FAULT` names this point: for points whose condition costs something to find out."""
    return _ARMED is not None and _ARMED[0] == point


def fault(point: FaultPoint) -> None:
    """Die here, at once and without clean-up, if this passage is the one that `KLAXON_FAULT` asks for."""
    if _ARMED is None or _ARMED[0] != point:
        return
    _passed[point] += 1
    if _passed[point] == _ARMED[1]:
        print(f"fault {point} fired", file=sys.stderr, flush=True)  # noqa: T201 (the last words of a process)
        os._exit(EXIT_CODE)
