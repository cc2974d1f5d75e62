"""Sliding windows of one rule over one-second vectors, per scope.

Folded seconds are complete and come in order, each once: the newest is added, the oldest taken away. Over
them lies what is known of the seconds that are still open; it only ever serves fresh evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pipeline.core.cells import ALL
from pipeline.core.gate.metrics import Vec, add_into

Scope: TypeAlias = tuple[str, str]
"""(dimension, value) of a cell."""

MOST_SCOPES: Final = 16_384
"""Parts of a roll-out that the folded seconds of a window hold; a thousand nodes make five thousand. Whoever
sends ever new names of nodes fills it: what finds no room is judged as part of the greater ones only."""


@dataclass(slots=True)
class Window:
    """The last `length_s` seconds up to `end`, the newest folded second."""

    length_s: int
    end: int | None = None
    totals: dict[Scope, Vec] = field(default_factory=dict)
    seconds: dict[int, dict[Scope, Vec]] = field(default_factory=dict)
    """Folded seconds inside the window that hold anything, oldest first."""
    open: dict[int, dict[Scope, Vec]] = field(default_factory=dict)
    """Seconds after `end`, as far as they are known."""
    no_room: int = 0
    """Scopes of folded seconds that found none."""
    _ahead_end: int = -1
    _ahead: dict[Scope, Vec] = field(default_factory=dict)
    """Windows that would end at `_ahead_end`, as far as asked for; patches keep them up to date."""

    def fold(self, second: int, content: Mapping[Scope, Vec]) -> None:
        """Add the next complete second; it must be later than every one before."""
        assert self.end is None or second > self.end
        self.end = second
        self._ahead.clear()
        while self.seconds and (oldest := next(iter(self.seconds))) <= second - self.length_s:
            self._take_out(oldest)
        for at in [at for at in self.open if at <= second]:
            del self.open[at]
        held = {scope: vec for scope, vec in content.items() if vec}
        if len(held) > MOST_SCOPES - len(self.totals):
            held = self._with_room(held)
        if held:
            self.seconds[second] = held
            for scope, vec in held.items():
                add_into(self.totals.setdefault(scope, {}), vec)

    def _with_room(self, held: Mapping[Scope, Vec]) -> dict[Scope, Vec]:
        """What is known already, and of what is new the first by name; the whole stands before all parts."""
        room = MOST_SCOPES - len(self.totals)
        new = sorted((scope for scope in held if scope not in self.totals), key=_whole_first)
        self.no_room += len(new[room:])
        left = set(new[room:])
        return {scope: vec for scope, vec in held.items() if scope not in left}

    def patch(self, second: int, scope: Scope, vec: Mapping[int, int], sign: int) -> None:
        """Add to, or take out of, an open second."""
        if self.end is not None and second <= self.end:
            return
        scopes = self.open.setdefault(second, {})
        total = scopes.setdefault(scope, {})
        add_into(total, vec, sign)
        if not total:
            del scopes[scope]
            if not scopes:
                del self.open[second]
        ahead = self._ahead.get(scope)
        if ahead is not None and self._ahead_end - self.length_s < second <= self._ahead_end:
            add_into(ahead, vec, sign)

    def total(self, scope: Scope) -> Vec:
        """The window that ends at the newest folded second. Read only."""
        return self.totals.get(scope, {})

    def ahead(self, scope: Scope, end: int) -> Vec:
        """The window that would end at `end` ≥ the newest folded second, with what is open. Read only.

        Kept for the `end` asked for last: fresh evidence asks again and again for the newest open second.
        """
        if end != self._ahead_end:
            self._ahead.clear()
            self._ahead_end = end
        found = self._ahead.get(scope)
        if found is None:
            found = self._ahead[scope] = self.ending_at(scope, end)
        return found

    def ending_at(self, scope: Scope, end: int) -> Vec:
        """As `ahead`, worked out anew. A new vector."""
        total = dict(self.totals.get(scope, {}))
        for second, scopes in self.seconds.items():
            if second > end - self.length_s:
                break
            if scope in scopes:
                add_into(total, scopes[scope], -1)
        for second, scopes in self.open.items():
            if end - self.length_s < second <= end and scope in scopes:
                add_into(total, scopes[scope])
        return total

    def scopes(self) -> Iterable[Scope]:
        """Scopes with evidence in the folded window, in order."""
        return sorted(self.totals)

    def open_scopes(self) -> list[Scope]:
        """Scopes with evidence in folded or open seconds, in order."""
        known = set(self.totals)
        for scopes in self.open.values():
            known.update(scopes)
        return sorted(known)

    def _take_out(self, second: int) -> None:
        for scope, vec in self.seconds.pop(second).items():
            # What was taken out of it may have left nothing for a while.
            total = self.totals.setdefault(scope, {})
            add_into(total, vec, -1)
            if not total:
                del self.totals[scope]


def _whole_first(scope: Scope) -> tuple[bool, Scope]:
    return scope[0] not in (ALL, "traffic"), scope
