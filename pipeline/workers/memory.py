"""What this process does with memory that it has freed."""

from __future__ import annotations

import ctypes
from typing import Final

KEPT_BYTES: Final = 64 << 20
"""So much freed memory stays with the process, at most."""
_MAPPED_FROM_BYTES: Final = 32 << 20
"""Larger pieces are handed back on their own; no allocator takes a higher limit."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Numbers of the parameters in glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Keep up to KEPT_BYTES of freed memory for what is allocated next; False where the C library cannot.

    Else glibc hands the arrays of every batch back to the system, which clears page after page for the next
    one, until the process has by chance let go of something larger: scoring then costs a half more.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAPPED_FROM_BYTES) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
