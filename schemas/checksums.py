"""Checksums of fetched batches by the processor's own instruction: a thirteenth of what a table costs.

A reader verifies every byte it fetches; by aiokafka's table that was a twentieth of a busy pair worker. Where
google-crc32c comes without machine code, it is slower than that, and aiokafka's own check stays.
"""

from __future__ import annotations

from typing import Final

import google_crc32c

IS_FAST: Final = google_crc32c.implementation == "c"

_MAGIC_AT: Final = 16
_SUM_AT: Final = 17
_SUMMED_FROM: Final = 21
_PIECE: Final = 1 << 16
"""Bytes copied at a time: what takes its checksum wants a `bytes` of its own."""


def is_current(data: bytes, begin: int = 0) -> bool:
    """Whether the batch that begins there is of the format that `is_intact` knows (magic 2)."""
    return len(data) > begin + _MAGIC_AT and data[begin + _MAGIC_AT] == 2


def is_intact(data: bytes, begin: int = 0, end: int | None = None) -> bool:
    """Whether the whole batch that stands there has the CRC-32C that it states, over all that follows it."""
    first, last = begin + _SUMMED_FROM, len(data) if end is None else end
    found = 0
    for at in range(first, last, _PIECE):
        found = google_crc32c.extend(found, data[at : min(at + _PIECE, last)])
    return found == int.from_bytes(data[begin + _SUM_AT : first], "big")
