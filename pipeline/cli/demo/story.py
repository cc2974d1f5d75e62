"""What a person reads of a run while it goes on: lines, and below them a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Story:
    """Lines go to standard output, to standard error with `--json`, whose object stands alone there.

    The bar is on standard error, and only where that is a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self._lines = Console(stderr=as_json, highlight=False, markup=False)
        self._bar = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None

    def say(self, text: str, *, dim: bool = True) -> None:
        """One line, whole in a file, wrapped between words on a terminal."""
        # Both may be the same terminal: the bar makes way, and comes back below the line.
        if self._progress is not None:
            self._progress.stop()
        self._lines.print(text, style="dim" if dim else None, soft_wrap=not self._lines.is_terminal)
        if self._progress is not None:
            self._progress.start()

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """A bar of `total` steps until the end of the block; call with the steps done, and what holds now."""
        if not self._bar.is_terminal:
            yield lambda *_: None
            return
        progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=self._bar,
            expand=True,
            transient=True,
            # What others print is theirs: a file on standard output must not end up on the terminal.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        task = progress.add_task("play", total=total, state="")
        self._progress = progress
        try:
            with progress:
                yield lambda done, state: progress.update(task, completed=done, state=state)
        finally:
            self._progress = None
