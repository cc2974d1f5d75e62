"""Text that may stand in a log. A bare `str` may not: somebody may have sent it (monitoring/lines.py)."""

from __future__ import annotations


class Plain(str):
    """Text of our own making, or an operator's: names of roll-outs, routers, files and addresses.

    Never a value of an event, a key or a header, and nothing that quotes one.
    """

    __slots__ = ()


class PlainJson(Plain):
    """The same as JSON text; a JSON log holds it as it is."""

    __slots__ = ()
