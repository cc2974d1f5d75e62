"""Puts a partition's records in order without gaps, whatever Faust delivers.

Faust can leave records out (of a paused partition, of an old generation) and offsets have holes of their own
(transaction markers, aborted records). So a gap is never guessed about, not even one of a single offset: it
is read once, outside the group. What is found there is handed over in place; nothing there: the hole is the
log's, and counted.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from pipeline.config import KafkaConfig
from pipeline.errors import PipelineError
from pipeline.workers.broker import RangeReader
from pipeline.workers.records import Partition, Record
from pipeline.workers.transport import Link
from schemas.plain import Log, Plain

log: Log = logging.getLogger("klaxon.intake")


class RetentionError(PipelineError):
    """Records were deleted before they were read: what is in memory is no longer a function of the log."""


class Intake:
    """Next expected offset per partition. Not re-entrant: the worker calls it under one lock."""

    def __init__(self, link: Link, kafka: KafkaConfig, *, skips_deleted: bool = False) -> None:
        """`skips_deleted`: go on after records that retention deleted unread, instead of RetentionError."""
        self._skips_deleted = skips_deleted
        self._link = link
        self._kafka = kafka
        self._reader: RangeReader | None = None
        self._expected: dict[Partition, int] = {}
        self._stood: dict[Partition, tuple[int, int]] = {}
        """Expected offset and fetch position at the last look for what was left behind."""
        self.holes = 0
        """Gaps that held no record."""
        self.recovered = 0
        """Records that Faust left out and that were read here."""

    def expect(self, place: Partition, offset: int) -> None:
        """Records of this partition go on at `offset`: earlier ones are skipped, missing ones are read."""
        self._expected[place] = offset
        self._stood.pop(place, None)

    async def begin(self, place: Partition, committed: int | None) -> None:
        """Go on where the group's commit stands, or where the partition begins; may block on the broker.

        Never with whatever is delivered first: after a rebalance that can be a later record.
        """
        reader = await self._started_reader()
        first = (await reader.begin_offsets([place]))[place]
        self.expect(place, first if committed is None else max(first, committed))

    def expected(self, place: Partition) -> int | None:
        """The next offset to hand over; None before the first record."""
        return self._expected.get(place)

    async def take(self, record: Record) -> AsyncIterator[Record]:
        """What to process now: nothing (read before), or the record after whatever is missing before it."""
        place = record.place
        expected = self._expected.get(place)
        if expected is not None and record.offset < expected:
            return
        if expected is not None and record.offset > expected:
            async for missing in self._missing(place, expected, record.offset):
                yield missing
        self._expected[place] = record.offset + 1
        yield record

    async def left_behind(self, place: Partition) -> AsyncIterator[Record]:
        """Records before the fetch position that were not delivered; call it now and then.

        They count as left out when position and expectation stood like this at the call before, too. While
        the position moves, what was fetched is still being delivered, and a record after a gap finds it.
        """
        expected, position = self._expected.get(place), self._link.position(place)
        if expected is None or position is None or position.next_offset <= expected:
            self._stood.pop(place, None)
            return
        end = position.next_offset
        if self._stood.get(place) != (expected, end):
            self._stood[place] = expected, end
            return
        async for missing in self._missing(place, expected, end):
            yield missing
        self._expected[place] = end

    async def stop(self) -> None:
        """Close the reader, if one was needed."""
        if self._reader is not None:
            await self._reader.stop()

    async def _started_reader(self) -> RangeReader:
        if self._reader is None:
            reader = RangeReader(self._kafka)
            await reader.start()
            self._reader = reader
        return self._reader

    async def _missing(self, place: Partition, first: int, end: int) -> AsyncIterator[Record]:
        reader = await self._started_reader()
        if (begin := (await reader.begin_offsets([place]))[place]) > first:
            deleted = (
                f"{place}: offsets {first} to {min(begin, end) - 1} were deleted unread; lengthen the "
                "topic's retention or add workers"
            )
            if not self._skips_deleted:
                raise RetentionError(f"{deleted}; the next process starts anew after them")
            log.error("%s", Plain(deleted))
        found = 0
        async for record in reader.read({place: (first, end)}):
            found += 1
            self._expected[place] = record.offset + 1
            yield record
        self.recovered += found
        if found:
            log.warning("%s: %d records of offsets %d to %d read again", place, found, first, end - 1)
        else:
            self.holes += 1
