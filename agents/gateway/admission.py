"""Which requests are taken in: bounds on what is held of them at once. Pure; what does not fit is refused.

A request whose body is still coming holds no place among those that are being answered: users who send theirs
slowly, or never, take nothing from the others but what is kept for bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COMING_PER_ANSWERED: Final = 4
"""Requests whose bodies may be on their way, for each that may be answered."""


@dataclass(slots=True, eq=False)
class Place:
    """One request's. `length` is what it holds of the bytes kept for bodies."""

    length: int
    coming: bool = True


class Admission:
    """Counts requests and the bytes of their bodies."""

    def __init__(self, *, answered: int, bodies_bytes: int) -> None:
        """`answered`: requests that may be answered at once; `bodies_bytes`: of all bodies together."""
        self._answered_most = answered
        self._bodies_most = bodies_bytes
        self._coming = 0
        self._answered = 0
        self._bodies_bytes = 0

    def come(self, length: int) -> Place | None:
        """A request whose body will have at most this length begins. None: it is one too many."""
        if (
            self._coming >= COMING_PER_ANSWERED * self._answered_most
            or self._bodies_bytes + length > self._bodies_most
        ):
            return None
        self._coming += 1
        self._bodies_bytes += length
        return Place(length)

    def answer(self, place: Place, length: int) -> bool:
        """Its body is here, of this length. False: as many as may be are being answered already."""
        if self._answered >= self._answered_most:
            return False
        self._coming -= 1
        self._answered += 1
        place.coming = False
        self._bodies_bytes += length - place.length
        place.length = length
        return True

    def leave(self, place: Place) -> None:
        """It is over, answered or not."""
        if place.coming:
            self._coming -= 1
        else:
            self._answered -= 1
        self._bodies_bytes -= place.length

    def gauges(self) -> dict[str, int]:
        """What is held now."""
        return {
            "under_way": self._answered,
            "bodies_coming": self._coming,
            "bodies_bytes": self._bodies_bytes,
        }
