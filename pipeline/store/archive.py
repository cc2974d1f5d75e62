"""The archive: records of one source partition become blocks, blocks become rows, exactly once.

The table is the checkpoint (docs/archive.md). What the worker shell does:

    store.warm_up()                                         # before consuming: the first insert costs seconds
    archive = Archive(store, BlockLimits(...), boot_id)
    part = archive.open_partition(topic, partition)         # BLOCKING, in a thread, on assignment
        # seek the consumer to part.read_from if its next record lies beyond it (the table decides, the
        # Kafka commit is a hint); if records there are gone, go on with the first one there is
    refused = part.add(record, now_us)                      # never blocks; skips offsets < part.read_from
        # in offset order; settle a hole in the offsets before, what lies in it is skipped afterwards
        # refused: what this worker must dead-letter itself (topics of which it is the only reader)
    block = part.take(now_us)                               # a due block or None; one in flight per partition
    ok = archive.store_block(block, stop)                   # BLOCKING, in a thread: retries until stored;
                                                            # False only if `stop` (threading.Event) was set
    part.stored(block)                                      # -> offset to commit (next to read)
    part.full                                               # back-pressure: store a block before adding more
    part.gauges()                                           # name → int

On revoke: set `stop`, forget the object and what it holds; on assignment open a new one.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

import numpy as np

from pipeline.store.blocks import Block, BlockCutter, BlockLimits, Range
from pipeline.store.client import UNKNOWN_TABLE, Store
from pipeline.store.columns import Columns, constant, listed, taken
from pipeline.store.derived_rows import bucket_rows, decision_rows, pair_rows
from pipeline.store.errors import QueryError, StoreError, StoreUnavailableError
from pipeline.store.rows import Rows, held_time_us, logit_rows, request_rows, telemetry_rows
from schemas.codec import decode_logits, decode_requests, decode_telemetry
from schemas.columns import Decoded, LogitColumns, Rejected, RequestColumns, TelemetryColumns
from schemas.plain import Log, Plain
from schemas.records import UnknownVersionError
from schemas.topics import TICK, Topic

log: Log = logging.getLogger("klaxon.archive")

TABLES: Final[Mapping[Topic, str]] = {
    Topic.REQUESTS: "inference_log",
    Topic.LOGITS: "logit_summaries",
    Topic.TELEMETRY: "node_telemetry",
    Topic.PAIRS: "pair_scores",
    Topic.BUCKETS: "final_buckets",
    Topic.DECISIONS: "decisions",
}
"""What is archived, and where to."""

DEAD_LETTERED_HERE: Final = frozenset({Topic.PAIRS, Topic.DECISIONS})
"""Topics of which the archive is the only reader; the others' readers dead-letter what cannot be read."""

REPLACED_BY_CONTENT: Final = frozenset({"pair_scores", "final_buckets"})
"""Tables whose key is the content's own: a merge may replace a block's rows by later ones of equal key."""

MARK_EVERY_OFFSETS: Final = 512
"""A run of records that leave no row is noted in `archive_progress` this often."""

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 10.0

Step = Literal["before_insert", "after_insert"]


class ArchiveRecord(Protocol):
    """One Kafka record, as the worker has it."""

    @property
    def offset(self) -> int: ...
    @property
    def append_us(self) -> int: ...
    @property
    def content_type(self) -> str | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a table stands for one source partition."""

    next_offset: int
    """First offset that is not stored, or the first of a block that is not whole."""
    completing: Range | None
    """The block that is not whole."""


class ArchivePartition:
    """One assigned source partition: records in, blocks out. Pure state; never blocks."""

    def __init__(
        self, topic: Topic, partition: int, limits: BlockLimits, boot_id: str, checkpoint: Checkpoint
    ) -> None:
        self.topic: Final = topic
        self.partition: Final = partition
        self.read_from: Final = checkpoint.next_offset
        """The first record to read: what lies before it is stored."""
        self._next = checkpoint.next_offset
        self._cutter = BlockCutter(
            TABLES[topic], topic.value, partition, limits, boot_id, checkpoint.completing
        )
        self._in_flight: Block | None = None
        self._counts = dict.fromkeys(
            ("read", "skipped", "ticks", "events", "rejected", "stored_rows", "stored_blocks"), 0
        )

    def add(self, record: ArchiveRecord, now_us: int) -> tuple[Rejected, ...]:
        """Take in the next record. Offsets that are stored or were added are skipped and counted.

        Returns what this worker must dead-letter; what other workers dead-letter is only counted.
        """
        if record.offset < self._next:
            self._counts["skipped"] += 1
            return ()
        self._next = record.offset + 1
        self._counts["read"] += 1
        rows, rejected = (None, ()) if record.content_type == TICK else read_record(self.topic, record)
        self._counts["ticks"] += record.content_type == TICK
        self._counts["events"] += rows.n if rows is not None else 0
        self._counts["rejected"] += len(rejected)
        self._cutter.add(record.offset, held_time_us(record.append_us), rows, now_us)
        return rejected if self.topic in DEAD_LETTERED_HERE else ()

    def take(self, now_us: int, *, force: bool = False, end_offset: int = 0) -> Block | None:
        """The next block to store, or None: none is due, or one is in flight. `force`: due or not.

        `end_offset`: as far as it is known where the partition ends.
        """
        if self._in_flight is not None:
            return None
        self._in_flight = self._cutter.take(now_us, force=force, more_wait=self._next < end_offset)
        return self._in_flight

    @property
    def due_us(self) -> int | None:
        """When there may be a block to take; None: nothing is held."""
        return self._cutter.due_us

    def stored(self, block: Block) -> int:
        """Note that the block in flight is stored; returns the offset to commit (next to read)."""
        if block is not self._in_flight:
            raise ValueError(f"block {block.token} is not in flight")
        self._in_flight = None
        self._counts["stored_rows"] += block.rows
        self._counts["stored_blocks"] += block.rows > 0
        return block.last + 1

    @property
    def full(self) -> bool:
        """Whether memory's bound is reached: a block is in flight and the next one waits already."""
        return self._cutter.sealed >= (1 if self._in_flight is not None else 2)

    @property
    def idle(self) -> bool:
        """Whether everything that was added is stored."""
        return self._in_flight is None and self._cutter.sealed == 0 and not self._cutter.holds_records

    @property
    def oldest(self) -> tuple[int, int | None]:
        """Offset of the first record that is not stored, and its append time unless it is not read yet."""
        if self._in_flight is not None:
            return self._in_flight.first, self._in_flight.append_us
        return self._cutter.oldest or (self._next, None)

    def gauges(self) -> dict[str, int]:
        """Counts since assignment, and rows that wait."""
        return {**self._counts, "open_rows": self._cutter.open_rows, "sealed_blocks": self._cutter.sealed}


class Archive:
    """Stores blocks. One per process; its methods block and may be called from several threads."""

    def __init__(
        self,
        store: Store,
        limits: BlockLimits,
        boot_id: str,
        *,
        passing: Callable[[Step], None] = lambda _step: None,
    ) -> None:
        """`boot_id` differs between any two processes. `passing` is told of each step (tests die there)."""
        self._store = store
        self._limits = limits
        self._boot_id = boot_id
        self._passing = passing
        self._marked: dict[tuple[str, int], int] = {}
        self._counts = {"retries": 0, "repaired_rows": 0}

    def open_partition(self, topic: Topic, partition: int) -> ArchivePartition:
        """Where to go on, from the table. Raises StoreUnavailableError; QueryError if it is not migrated."""
        checkpoint = self.checkpoint(topic, partition)
        self._marked[topic.value, partition] = checkpoint.next_offset
        if checkpoint.completing is not None:
            log.warning(
                "%s/%d: block %d-%d is stored in part; completing it first",
                topic,
                partition,
                checkpoint.completing.first,
                checkpoint.completing.last,
            )
        return ArchivePartition(topic, partition, self._limits, self._boot_id, checkpoint)

    def checkpoint(self, topic: Topic, partition: int) -> Checkpoint:
        """The newest block by `blk_last`, and whether it is whole. Blocks.

        Never `max(off) + 1`: it would hide the lost part of a block that is not whole.
        """
        table = TABLES[topic]
        where = {"topic": topic.value, "part": partition}
        newest = self._store.row(
            f"""
            SELECT count(), max(blk_last), argMax(blk_first, blk_last), argMax(blk_rows, blk_last)
            FROM {table} WHERE topic = {{topic:String}} AND part = {{part:UInt32}}
            """,  # noqa: S608 (names of ours)
            where,
        )
        count, last, first, expected = map(int, newest)
        read = self._store.row(
            "SELECT max(upto) FROM archive_progress WHERE topic = {topic:String} AND part = {part:UInt32}",
            where,
        )
        read_through = int(read[0])
        if count == 0:
            return Checkpoint(read_through + 1 if read_through else 0, None)
        (found,) = self._store.row(
            f"""
            SELECT uniqExact(off, pos) FROM {table}
            WHERE topic = {{topic:String}} AND part = {{part:UInt32}}
                AND off BETWEEN {{first:UInt64}} AND {{last:UInt64}}
            """,  # noqa: S608 (names of ours)
            {**where, "first": first, "last": last},
        )
        if int(found) < expected:
            return Checkpoint(first, Range(first, last))
        return Checkpoint(max(last, read_through) + 1, None)

    def store_block(self, block: Block, stop: threading.Event) -> bool:
        """Insert a block; returns True once it is stored whole. Blocks as long as ClickHouse is away.

        Every attempt sends the same rows under the same token. A success that needed more than one attempt,
        or whose answer does not prove it, is verified by counting (a crash of the server can make it swallow
        a retry), and what is missing is inserted under a token of its own. False: `stop` was set before the
        block was stored.
        Raises RowError where rows do not fit the table: a defect, no retry can help.
        """
        columns, table = block.columns, block.table
        if block.rows == 0:
            if block.last - self._marked.get((block.topic, block.partition), -1) < MARK_EVERY_OFFSETS:
                return True
            columns = {
                "topic": constant(block.topic, 1),
                "part": constant(block.partition, 1),
                "upto": constant(block.last, 1),
            }
            table = "archive_progress"
        if not self._insert_until_stored(block, table, columns, stop):
            return False
        self._marked[block.topic, block.partition] = block.last
        return True

    def surplus(self, topic: Topic) -> int:
        """Rows stored more than once: 0, but for a time after a process that had lost its partition."""
        count, unique = self._store.row(
            f"SELECT count(), uniqExact(topic, part, off, pos) FROM {TABLES[topic]}"  # noqa: S608
        )
        return int(count) - int(unique)

    def gauges(self) -> dict[str, int]:
        """Retried inserts, and rows that a verification found missing."""
        return dict(self._counts)

    def _insert_until_stored(self, block: Block, table: str, columns: Columns, stop: threading.Event) -> bool:
        token, verify, repairs, delay_s = block.token, block.completes, 0, FIRST_DELAY_S
        attempt = not block.completes
        while not stop.is_set():
            try:
                if attempt:
                    self._passing("before_insert")
                    sure = self._store.insert(table, columns, token)
                    verify = verify or not sure
                    self._passing("after_insert")
                if not verify or table != block.table:
                    return True
                missing = self._missing(block)
                if missing is None or (repairs > 0 and table in REPLACED_BY_CONTENT):
                    return True
                repairs += 1
                columns, token, attempt = missing, f"{block.token}:r{repairs}", True
                self._counts["repaired_rows"] += len(missing["off"])
                log.warning(
                    "%s: %d rows were missing; inserting them", Plain(block.token), len(missing["off"])
                )
            except (StoreUnavailableError, QueryError) as error:
                verify = True
                self._counts["retries"] += 1
                log.warning(
                    "%s into %s: %s; trying again", Plain(block.token), Plain(table), Plain(_remedied(error))
                )
            # Jitter: after an outage the partitions do not all come back at once.
            stop.wait(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return False

    def _missing(self, block: Block) -> Columns | None:
        """The block's rows that the table lacks; None if it has them all."""
        there = self._stored_places(block.table, block.topic, block.partition, block.first, block.last)
        places = zip(listed(block.columns["off"]), listed(block.columns["pos"]), strict=True)
        lacking = np.array([row for row, at in enumerate(places) if at not in there], dtype=np.int64)
        if len(lacking) == 0:
            return None
        return {name: taken(column, lacking) for name, column in block.columns.items()}

    def _stored_places(
        self, table: str, topic: str, partition: int, first: int, last: int
    ) -> set[tuple[int, int]]:
        # One row, or the answer was cut on its way: rows that are only missing in it are not inserted again.
        (places,) = self._store.row(
            f"""
            SELECT groupUniqArray((off, pos)) FROM {table}
            WHERE topic = {{topic:String}} AND part = {{part:UInt32}}
                AND off BETWEEN {{first:UInt64}} AND {{last:UInt64}}
            """,  # noqa: S608 (names of ours)
            {"topic": topic, "part": partition, "first": first, "last": last},
        )
        return {(int(off), int(pos)) for off, pos in places}

    def cut(self) -> None:
        """Make calls that wait for a server's answer fail at once. Does not block; from any thread."""
        self._store.cut()


def read_record(topic: Topic, record: ArchiveRecord) -> tuple[Rows, tuple[Rejected, ...]]:
    """One record of an archived topic as rows of its table, and what of it cannot be read.

    Raises UnknownVersionError for a record of a version that is not read here.
    """
    value, offset, append_us = record.value, record.offset, record.append_us
    if topic is Topic.REQUESTS:
        requests = _read_here(decode_requests(value, record.content_type))
        return request_rows(requests, offset, append_us), requests.rejected
    if topic is Topic.LOGITS:
        logits = _read_here(decode_logits(value, record.content_type))
        return logit_rows(logits, offset, append_us), logits.rejected
    if topic is Topic.TELEMETRY:
        telemetry = _read_here(decode_telemetry(value, record.content_type))
        return telemetry_rows(telemetry, offset, append_us), telemetry.rejected
    if topic is Topic.PAIRS:
        rows = pair_rows(value, offset, append_us)
    elif topic is Topic.BUCKETS:
        rows = bucket_rows(value, offset, append_us)
    elif topic is Topic.DECISIONS:
        rows = decision_rows(value, record.key, offset, append_us)
    else:
        raise ValueError(f"{topic.value} is not archived")
    if isinstance(rows, Rejected):
        return Rows(0, {}, 0), (rows,)
    return rows, ()


C = TypeVar("C", RequestColumns, LogitColumns, TelemetryColumns)


def _read_here(decoded: Decoded[C]) -> Decoded[C]:
    if decoded.unknown_version is not None:
        raise UnknownVersionError(decoded.unknown_version)
    return decoded


def _remedied(error: StoreError) -> str:
    if isinstance(error, QueryError) and error.code == UNKNOWN_TABLE:
        return f"{error} (run `klaxon migrate`)"
    return str(error)
