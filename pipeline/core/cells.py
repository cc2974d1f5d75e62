"""Names of cells and context classes, and which rows a cell keeps as its worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from schemas.buckets import WORST_KEPT

ALL: Final = "all"
OTHER: Final = "other"
UNKNOWN: Final = "unknown"
OVERFLOW: Final = "overflow"
"""Counter of the cell `other`: memberships of cells that found no room in the bucket."""

CONTEXT_LIMITS: Final = (512, 2048, 4096, 8192)
"""Nested context classes: input tokens over the limit."""


def worst_of(entries: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The WORST_KEPT greatest (score, id), greatest first, ties by greater id."""
    return sorted(entries, reverse=True)[:WORST_KEPT]


def context_class(input_tokens: int) -> str:
    """The exclusive context class: `<=512` … `<=8192`, `>8192`."""
    for limit in CONTEXT_LIMITS:
        if input_tokens <= limit:
            return f"<={limit}"
    return f">{CONTEXT_LIMITS[-1]}"


def node_and_context(value: str) -> tuple[str, str]:
    """Node and nested context class of a `node_context` cell's value; a node's name may hold a |."""
    node, _, nested = value.rpartition("|")
    return node, nested


CONTEXT_VALUES: Final[Sequence[str]] = tuple(f">{limit}" for limit in CONTEXT_LIMITS)
