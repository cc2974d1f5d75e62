"""Words that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 event`, `2 events`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
