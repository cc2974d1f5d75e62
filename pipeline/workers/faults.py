"""Named places where a test may kill, freeze or stop the process; unless one is armed they do nothing.

`KLAXON_FAULT=name` dies at the first passage of that point, `name:3` at the third; `name:3:freeze` stops
there until somebody continues the process, `name:3:stop` tells it to leave, as SIGTERM does. The name is
printed first, so that a test can prove that the fault fired and not some other death.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, get_args

from pipeline.errors import PipelineError

FaultPoint = Literal[
    "on_assigned",
    "on_revoked",
    "after_read",
    "during_warm_up",
    "half_waiting",
    "before_flush",
    "finals_sent_before_fresh",
    "flush_sent_before_acknowledged",
    "flush_acked_before_commit",
    "after_commit",
    "tick_sent",
    "gate_fenced_before_memory",
    "gate_memory_before_log",
    "gate_before_transaction",
    "gate_in_transaction",
    "gate_after_transaction",
    "before_checkpoint",
    "after_open",
    "before_insert",
    "inside_insert",
    "after_insert_before_commit",
    "after_insert_commit",
    "notify_sent_before_commit",
]
"""Every point there is; the tests break the process at each of them."""

VARIABLE: Final = "KLAXON_FAULT"
EXIT_CODE: Final = 137
"""As if killed with SIGKILL."""
SOON_S: Final = 0.02


class FaultError(PipelineError):
    """`KLAXON_FAULT` names no fault point, passage or action."""


class _Armed:
    """The point that is to fire, how often it is still passed before, and what happens then."""

    def __init__(self, text: str) -> None:
        name, *rest = text.split(":")
        nth = rest[0] if rest else "1"
        action = rest[1] if len(rest) > 1 else "kill"
        if name not in get_args(FaultPoint) or not nth.isdecimal() or action not in _ACTIONS or rest[2:]:
            known = ", ".join(get_args(FaultPoint))
            actions = ", ".join(_ACTIONS)
            raise FaultError(
                f"{VARIABLE}={text}: expected name, name:nth or name:nth:action with a name of {known} "
                f"and an action of {actions}"
            )
        self.point: Final = name
        self._act: Final = _ACTIONS[action]
        self._left = int(nth)
        self._lock: Final = threading.Lock()

    def pass_by(self, soon: bool) -> None:
        with self._lock:
            self._left -= 1
            fires = self._left == 0
        if not fires:
            return
        if soon:
            threading.Thread(target=self._fire_soon, daemon=True).start()
        else:
            self._fire()

    def _fire_soon(self) -> None:
        time.sleep(random.uniform(0, SOON_S))  # noqa: S311 (no secret)
        self._fire()

    def _fire(self) -> None:
        # These can be the last words of a process.
        print(f"fault {self.point} fired", file=sys.stderr, flush=True)  # noqa: T201
        self._act()


def _kill() -> None:
    os._exit(EXIT_CODE)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_ACTIONS: Final[dict[str, Callable[[], None]]] = {"kill": _kill, "freeze": _freeze, "stop": _stop}
_armed: _Armed | None = None


def arm(text: str) -> None:
    """Make this fault (as `KLAXON_FAULT` would name it) the one that fires. Raises FaultError."""
    global _armed
    _armed = _Armed(text)


if _text := os.environ.get(VARIABLE):
    arm(_text)


def is_armed(point: FaultPoint) -> bool:
    """Whether this point is armed: for points whose condition costs something to find out."""
    return _armed is not None and _armed.point == point


def fault(point: FaultPoint, *, soon: bool = False) -> None:
    """Kill, freeze or stop here if this passage is the one that was asked for; a kill is at once, without
    clean-up.

    `soon`: at a random moment of the next SOON_S seconds instead, inside whatever the caller does then.
    """
    if _armed is not None and _armed.point == point:
        _armed.pass_by(soon)
