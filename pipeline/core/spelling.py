"""Proposals for names that nobody knows: one message for policies, configuration and commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

LEAST_LIKENESS: Final = 0.5
"""Of an unknown name to a known one (0 to 1) for that one to be proposed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known ones, equally near, or all of them."""
    names = tuple(known)
    near = {one: difflib.SequenceMatcher(None, one, name).ratio() for one in names}
    best = max(near.values(), default=0.0)
    if best < LEAST_LIKENESS:
        return f"; known: {', '.join(names)}"
    return f"; did you mean {' or '.join(repr(one) for one in names if near[one] == best)}?"
