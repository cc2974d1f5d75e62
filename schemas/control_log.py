"""What stands on the control topic, for whoever reads it from its beginning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from schemas.control import Directive

MOST_PENDING: Final = 4096
"""Directives kept until one of their roll-out is believed."""
MOST_PENDING_BYTES: Final = 16 << 20
"""And their size: records of strangers may be large."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A directive as a record states it. The key is its roll-out's name."""

    directive: Directive
    value: bytes
    header: bytes | None
    """Of its signature; None: unsigned."""


def numbers(directive: Directive) -> tuple[int, int]:
    """Generation and epoch: routers obey only a greater pair."""
    return (directive.generation, directive.epoch)


class GreatestBelieved:
    """Of every roll-out the believed directive with the greatest numbers, the first one among equals.

    A log holds thousands of renewals of which one counts, and verifying one costs ten times what reading it
    does. So they are kept, and verified from the greatest down until one is believed: nearly always the
    first. What claims a key that never signed it costs a verification, as it would anyway.
    """

    def __init__(self, believes: Callable[[Stated], bool]) -> None:
        self._believes = believes
        self._greatest: dict[str, Directive] = {}
        self._pending: dict[str, list[Stated]] = {}
        self._count = 0
        self._bytes = 0

    def offer(self, stated: Stated) -> None:
        """The next record, in log order."""
        directive = stated.directive
        known = self._greatest.get(directive.rollout)
        if known is not None and numbers(directive) <= numbers(known):
            return
        self._pending.setdefault(directive.rollout, []).append(stated)
        self._count += 1
        self._bytes += len(stated.value)
        if self._count >= MOST_PENDING or self._bytes >= MOST_PENDING_BYTES:
            self.settle()

    def settle(self) -> dict[str, Directive]:
        """By roll-out, of all that was offered so far."""
        for name, pending in self._pending.items():
            pending.sort(key=lambda stated: numbers(stated.directive), reverse=True)
            for stated in pending:
                if self._believes(stated):
                    self._greatest[name] = stated.directive
                    break
        self._pending.clear()
        self._count = self._bytes = 0
        return dict(self._greatest)
