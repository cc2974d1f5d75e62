"""Text for people: as wide as the terminal, and whole where it goes to a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Final

from rich.console import Console

FILE_COLUMNS: Final = 100_000


def printed(render: Callable[[Console], None]) -> None:
    """Print on standard output what `render` prints on the console that it is given.

    A terminal wraps between words. A file has no width: there nothing is wrapped, cut or padded.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        render(console)
        return
    text = io.StringIO()
    render(Console(file=text, width=FILE_COLUMNS, highlight=False))
    for line in text.getvalue().splitlines():
        sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 event`, `2 events`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
