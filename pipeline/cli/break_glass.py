"""Writing routers' directive files: an abort that needs neither broker nor gate."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agents.router.directive_file import DirectiveFileError, read_directive_file
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.files import replace_file
from schemas.control import Aborted, DirectiveFile


def break_glass(paths: Iterable[Path], rollout: str, order: Aborted) -> tuple[list[str], dict[str, str]]:
    """Abort the roll-out in every file that can be written; returns those, and file → problem of the others.

    What a file said of other roll-outs stays. Raises CommandError for a name that no router could read.
    """
    try:
        msgspec.convert({"v": 1, "aborted": {rollout: msgspec.to_builtins(order)}}, DirectiveFile)
    except msgspec.ValidationError as error:
        raise CommandError(f"abort {rollout[:60]!r}: {error}", Exit.USAGE) from None
    written: list[str] = []
    failed: dict[str, str] = {}
    for path in paths:
        try:
            with _only_writer(path):
                before = read_directive_file(path)
                aborted = {} if before is None else before.aborted
                content = DirectiveFile(v=1, aborted={**aborted, rollout: order})
                replace_file(path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        except DirectiveFileError as error:
            failed[str(path)] = str(error)
        except OSError as error:
            failed[str(path)] = f"{path}: cannot be written: {error.strerror}; name another file"
        else:
            written.append(str(path))
    return written, failed


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Two aborts at once must not lose one: the folder is locked while a file in it is rewritten."""
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
