"""Files that others read while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """The whole file or none of it, also for who reads at this moment or after a power cut. Mode 0644."""
    target = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        Path(name).replace(target)
    except BaseException:  # raised again: whatever ended it, no half file stays beside the real one
        Path(name).unlink(missing_ok=True)
        raise
