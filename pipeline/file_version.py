"""Whether a file that is read while a process runs has become another one."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeAlias

LOOK_EVERY_S: Final = 1.0
"""How often a running process looks."""

FileVersion: TypeAlias = tuple[int, int, int]


def file_version(path: Path) -> FileVersion | None:
    """Differs when the file was replaced or rewritten; None: there is none. One `stat`.

    Follows links: a mounted secret is replaced by pointing its link elsewhere.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
