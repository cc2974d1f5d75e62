"""Long runs of rows cut into pieces that a record can hold, or that are counted at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def pieces(
    first: int, last: int, most: int, make: Callable[[int, int], T], is_too_large: Callable[[T], bool]
) -> Iterator[tuple[int, T]]:
    """What `make` makes of the rows first..last (exclusive), in order, each with how many rows it is of.

    At most `most` rows at a time; a piece of several that is too large is halved until it is not.
    """
    todo = [(begin, min(begin + most, last)) for begin in range(first, last, most)]
    todo.reverse()
    while todo:
        begin, end = todo.pop()
        made = make(begin, end)
        if end - begin > 1 and is_too_large(made):
            middle = (begin + end) // 2
            todo += ((middle, end), (begin, middle))
        else:
            yield end - begin, made


def in_turns(items: Iterable[T], rows: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in order, so many at a time as have at most `most` rows, at least one; none without rows."""
    some: list[T] = []
    held = 0
    for item in items:
        n = rows(item)
        if some and held + n > most:
            yield some
            some, held = [], 0
        if n:
            some.append(item)
            held += n
    if some:
        yield some
