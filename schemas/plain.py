"""Text that may stand in a log. A bare `str` may not: somebody may have sent it.

`make check` refuses one as the argument of a `Log`; what slips through is withheld (monitoring/lines.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeAlias


class Plain(str):
    """Text of our own making, or an operator's: names of roll-outs, routers, files and addresses.

    Never a value of an event, a key or a header, and nothing that quotes one.
    """

    __slots__ = ()


class PlainJson(Plain):
    """The same as JSON text; a JSON log holds it as it is."""

    __slots__ = ()


class Place(Protocol):
    """A partition."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...


Loggable: TypeAlias = int | float | Enum | Plain | BaseException | Place | None
"""What may stand in a log. Of errors only those that may speak do: others are named."""


class Log(Protocol):
    """A logger whose arguments are of those types: a bare `str` is an error of the type checker."""

    def info(self, msg: str, /, *args: Loggable) -> None: ...
    def warning(self, msg: str, /, *args: Loggable) -> None: ...
    def error(self, msg: str, /, *args: Loggable, exc_info: BaseException | None = None) -> None: ...
