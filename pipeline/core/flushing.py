"""From closed and changed seconds to records: per gating partition, split to what a broker takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pipeline.core.source import ContentSettings
from schemas.buckets import FinalBuckets, FreshCells, PopulationCells, Second
from schemas.topics import MAX_RECORD_BYTES, Topic, gating_partition

VERSION: Final = 1
_ENVELOPE_BYTES: Final = 2_000
"""More than everything around the seconds of a record takes."""
_ENTRY_BYTES: Final = 32
"""More than the array heads and numbers that one more second, population or cell adds around itself."""


class Records:
    """Makes the records of one source partition."""

    def __init__(
        self, topic: Topic, partition: int, settings: ContentSettings, limit_bytes: int = MAX_RECORD_BYTES
    ) -> None:
        """`limit_bytes` bounds every record made here."""
        self._topic = topic.value
        self._partition = partition
        self._gating_partitions = settings.gating_partitions
        self._settings_hash = settings.hash
        self._limit_bytes = limit_bytes - _ENVELOPE_BYTES
        self._encoder = msgspec.msgpack.Encoder()

    def finals(
        self, seconds: Sequence[Second], closed: tuple[int, int], whole_from: int, offset: int
    ) -> list[FinalBuckets]:
        """The statement that `closed` (first, last second) are closed, for every gating partition."""
        records = []
        for gating, held in enumerate(self._by_gating_partition(seconds)):
            parts = self._split(held)
            for part, piece in enumerate(parts):
                records.append(
                    FinalBuckets(
                        v=VERSION,
                        topic=self._topic,
                        partition=self._partition,
                        gating_partition=gating,
                        closed_from=closed[0],
                        closed_through=closed[1],
                        whole_from=whole_from,
                        offset=offset,
                        settings_hash=self._settings_hash,
                        part=part,
                        parts=len(parts),
                        seconds=piece,
                    )
                )
        return records

    def fresh(self, seconds: Sequence[Second], whole_from: int, offset: int) -> list[FreshCells]:
        """Changed cells of open seconds; nothing for a gating partition without any."""
        return [
            FreshCells(
                v=VERSION,
                topic=self._topic,
                partition=self._partition,
                gating_partition=gating,
                offset=offset,
                whole_from=whole_from,
                settings_hash=self._settings_hash,
                seconds=piece,
            )
            for gating, held in enumerate(self._by_gating_partition(seconds))
            if held
            for piece in self._split(held)
        ]

    def _by_gating_partition(self, seconds: Sequence[Second]) -> list[list[Second]]:
        """Populations go to their roll-out's gating partition, telemetry (no population) to every one."""
        spread: list[list[Second]] = [[] for _ in range(self._gating_partitions)]
        for second in seconds:
            contents: list[list[PopulationCells]] = [[] for _ in range(self._gating_partitions)]
            for cells in second.contents:
                if cells.population is None:
                    for held in contents:
                        held.append(cells)
                else:
                    owner = gating_partition(cells.population.rollout, self._gating_partitions)
                    contents[owner].append(cells)
            for gating, held in enumerate(contents):
                if held:
                    spread[gating].append(Second(second.second, held))
        return spread

    def _split(self, seconds: list[Second]) -> list[list[Second]]:
        """Pieces that fit a record each; at least one, in order, cut between cells."""
        if len(self._encoder.encode(seconds)) <= self._limit_bytes:
            return [seconds]
        pieces: list[list[Second]] = [[]]
        used = 0
        for second in seconds:
            for cells in second.contents:
                head = len(self._encoder.encode(cells.population)) + 2 * _ENTRY_BYTES
                for cell in cells.cells:
                    size = len(self._encoder.encode(cell)) + _ENTRY_BYTES + head
                    if used and used + size > self._limit_bytes:
                        pieces.append([])
                        used = 0
                    piece = pieces[-1]
                    if not piece or piece[-1].second != second.second:
                        piece.append(Second(second.second, []))
                    contents = piece[-1].contents
                    if not contents or contents[-1].population != cells.population:
                        contents.append(PopulationCells(cells.population, []))
                    contents[-1].cells.append(cell)
                    used += size
        return pieces
