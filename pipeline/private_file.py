"""Files that hold a key: read where nobody but owner and group may, written once, never over another."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import PipelineError


@dataclass(frozen=True, slots=True)
class PrivateFiles:
    """Files of one kind. What goes wrong is raised as `error`, naming file and remedy, never the content."""

    called: str
    """What is in them: `private key`."""
    most_bytes: int
    """More of a file is not read."""
    error: type[PipelineError]

    def read(self, path: Path, remedy: str) -> bytes:
        """Blocks. `remedy`: what makes such a file."""
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                raise self.error(f"{path}: is no regular file; name another one")
            if mode & stat.S_IRWXO:
                raise self.error(f"{path}: everybody here may read this {self.called}; chmod 600 {path}")
            with path.open("rb") as file:
                return file.read(self.most_bytes)
        except OSError as error:
            raise self.error(f"{path}: cannot be read: {error.strerror}; {remedy}") from None

    def create(self, path: Path, content: bytes) -> None:
        """Write it, mode 0600, with the folders above it, and through to the disk. Blocks."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            if error.filename != str(path):  # a file where a folder should be
                raise self.error(f"{path}: cannot be written: no folder; name another folder") from None
            remedy = "`klaxon keys rotate` makes its successor"
            raise self.error(f"{path}: exists, and no {self.called} is overwritten; {remedy}") from None
        except OSError as error:
            raise self.error(f"{path}: cannot be written: {error.strerror}; name another folder") from None
