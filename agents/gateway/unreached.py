"""Engines to which no connection came about lately: they are tried last, so that users do not wait for them
again and again. Pure.

Only time brings one back: after AVOIDED_US one request tries it, and it is avoided as long again unless that
one reaches it.
"""

from __future__ import annotations

from typing import Final

AVOIDED_US: Final = 5_000_000


class Unreached:
    """Of one gateway. Times are monotonic. Holds a number per engine that was not reached, no more than the
    configuration has engines."""

    def __init__(self) -> None:
        self._until_us: dict[str, int] = {}

    def failed(self, node: str, now_us: int) -> None:
        """No connection to it came about."""
        self._until_us[node] = now_us + AVOIDED_US

    def tries(self, node: str, now_us: int) -> None:
        """A request goes to it now: of one that failed before, it is the only one until that is known."""
        if node in self._until_us:
            self._until_us[node] = now_us + AVOIDED_US

    def reached(self, node: str) -> None:
        """It took a request."""
        if self._until_us:
            self._until_us.pop(node, None)

    def avoided(self, now_us: int) -> frozenset[str]:
        """Who is tried last."""
        if not self._until_us:
            return frozenset()
        return frozenset(node for node, until_us in self._until_us.items() if now_us < until_us)

    def gauges(self, now_us: int) -> dict[str, int]:
        """How many are avoided now."""
        return {"engines_avoided": len(self.avoided(now_us))}
