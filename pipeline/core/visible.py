"""Text of strangers as it may be shown: names of nodes and versions are theirs to choose."""

from __future__ import annotations


def visible(text: str, keep: str = "") -> str:
    """The same, with every character escaped that steers a terminal, ends a line or turns its direction.

    `keep`: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text
    )
