"""What `measure` and `pair` bring to their common shell: a decoder and a core object for each topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.core.source import Flush, RecordMeta
from schemas.columns import Decoded
from schemas.topics import Topic


class Source(Protocol):
    """The core object of one partition (`MeasureSource`, `PairSource`)."""

    @property
    def next_offset(self) -> int | None:
        """Offset expected next; None before the first record."""

    def read(self, meta: RecordMeta, decoded: Any) -> None:
        """Fold one record; None: a tick."""

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        """What there is to publish since the last call, and the offset that may be committed after it.

        `waiting`: records that wait, over those read since the last call. Without fresh cells of seconds
        that these will close.
        """

    def give_back(self) -> None:
        """Called when another takes its place: gives back what it holds in common with other sources."""

    def gauges(self) -> dict[str, int]:
        """Sizes and ages, by name."""

    @property
    def counted(self) -> Mapping[str, int]:
        """Events ever counted, by what they counted as."""


Decode = Callable[[bytes, str | None], Decoded[Any]]


@dataclass(frozen=True, slots=True)
class SourceKind:
    """What differs between the workers: how a topic is decoded and which core object reads it."""

    decode: Decode
    make: Callable[[Topic, int], Source]
    observe: Callable[[Source], None] = lambda _: None
    """Called after every record."""
    prepare: Callable[[Sequence[Source], float], None] = lambda *_: None
    """Called before sources are flushed, with all of them and with what `take_flush` is given as `waiting`:
    what they can do together costs less."""
