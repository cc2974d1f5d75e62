"""The demo's processes, for the one moment in which they are killed without ceremony."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol


class Child(Protocol):
    """A process of `subprocess` or `asyncio`."""

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as known."""

    def kill(self) -> None:
        """SIGKILL."""


_children: list[Child] = []


def born(child: Child) -> None:
    """Remember a process until it has ended."""
    _children[:] = [one for one in _children if one.returncode is None]
    _children.append(child)


def kill_all() -> None:
    """Kill whoever still runs; does not wait."""
    for child in _children:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
