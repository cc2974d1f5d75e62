"""Requests and telemetry into one-second buckets: one source partition (worker "measure")."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Final, Generic, TypeVar

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.buckets import Buckets, add_together
from pipeline.core.cells import ALL
from pipeline.core.evidence import SECOND_US, Evidence
from pipeline.core.flushing import Outlet, Records, close_all, show_all
from pipeline.core.pieces import in_turns
from pipeline.core.requests import requests_of
from pipeline.core.source import (
    BYTES_AT_ONCE,
    EVENT_AHEAD_US,
    ContentSettings,
    Flush,
    LogPosition,
    RecordMeta,
    ReportMemory,
)
from pipeline.core.table import CellTable
from pipeline.core.texts import joined
from schemas.buckets import SCORE_ONE, Population
from schemas.columns import (
    ABSENT,
    I8,
    BatchHeader,
    Bool,
    Decoded,
    RequestColumns,
    TelemetryColumns,
)
from schemas.events import ARMS
from schemas.topics import Topic

EVENTS_AT_ONCE: Final = 16_384
"""Waiting events are counted when there are so many, after BYTES_AT_ONCE of the log, and at every flush.
Seconds close then, too. The more at once, the fewer times a cell is looked up and added to. Of many sources
no more are counted together, unless one has more."""
SECONDS_AT_ONCE: Final = 8
"""More seconds than that do not wait for it: so many are open, at most, besides those that must be."""
EVENTS_PER_BUCKET: Final = 1 << 20
"""Events whose keys a bucket remembers; further ones are counted as `uncounted`, not judged."""
SHARE_GAUGES: Final = frozenset({"kv_usage", "internal", "external"})
"""Gauges in 0..1, which travel in units of 2⁻³⁰; all others are whole numbers."""
GAUGE_MAX: Final = 1 << 48
REPORTED_DROPS_MAX: Final = 1 << 31

C = TypeVar("C", RequestColumns, TelemetryColumns)


@dataclass(frozen=True, slots=True)
class _Read(Generic[C]):
    """What one record said, and how far the log stood at it."""

    columns: C
    append_us: int
    log_us: int
    closed_through: int


class MeasureSource:
    """One partition of `klaxon.requests` or `klaxon.telemetry`. Not shared between threads."""

    def __init__(
        self, topic: Topic, partition: int, settings: ContentSettings, table: CellTable | None = None
    ) -> None:
        """A source that has read nothing yet; it begins with whatever record comes first.

        Sources that share a `table` can be settled together; one that is dropped gives back its cells.
        """
        self._settings = settings
        self._log = LogPosition(settings.lateness_us, memory_us=0)
        self._buckets = Buckets(settings.cells_per_bucket, table)
        self._outlet = Outlet(self._buckets, self._log, Records(topic, partition, settings))
        self._reports = ReportMemory()
        self._waiting: list[_Read[RequestColumns]] = []
        self._events_waiting = 0
        self._counted_bytes = 0
        """Bytes read when no event waited."""
        self._is_prepared = False
        """Whether all that was read is counted and taken out, for the next flush to take along."""

    @property
    def next_offset(self) -> int | None:
        """The offset expected next; None before the first record."""
        return self._log.next_offset

    def read(
        self, meta: RecordMeta, decoded: Decoded[RequestColumns] | Decoded[TelemetryColumns] | None
    ) -> None:
        """Take in one record (None: a tick). Ignored if it was read before; raises HoleError (see there)."""
        if not self._log.advance(meta.offset, meta.append_us, meta.size_bytes):
            return
        self._is_prepared = False
        if decoded is None:
            return
        columns, moment = decoded.columns, (meta.append_us, self._log.log_us, self._log.closed_through)
        if isinstance(columns, RequestColumns):
            if decoded.header is not None and decoded.header.dropped:
                self._close()
                self._buckets.add(reported_drops(decoded.header, self._reports, self._log))
            if columns.n:  # a record without an event has nothing that ever lets go of it
                self._waiting.append(_Read(columns, *moment))
                self._events_waiting += columns.n
            closable = self._log.closed_through - self._outlet.stated_through
            waited_bytes = self._log.bytes_read - self._counted_bytes
            many = self._events_waiting >= EVENTS_AT_ONCE or waited_bytes >= BYTES_AT_ONCE
            if many or closable > SECONDS_AT_ONCE:
                self._close()
        else:
            self._close()
            self._add_telemetry(_Read(columns, *moment))

    @property
    def buckets(self) -> Buckets:
        """Where it counts."""
        return self._buckets

    @property
    def whole_from(self) -> int:
        """The first second that it sees whole."""
        return self._log.whole_from

    @property
    def events_waiting(self) -> int:
        """Events that are not counted yet."""
        return self._events_waiting

    def hand_over(self) -> list[_Read[RequestColumns]]:
        """What waits: to be counted before anything further is read."""
        waiting, self._waiting, self._events_waiting = self._waiting, [], 0
        return waiting

    def settled(self) -> Outlet:
        """Nothing waits any more: closed seconds can be taken out."""
        self._counted_bytes = self._log.bytes_read
        return self._outlet

    def prepared(self) -> Outlet:
        """Until something is read, its next flush takes what leaves here now."""
        self._is_prepared = True
        return self._outlet

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        """Everything new since the last flush; counts and closes what waits. `waiting`: as of PairSource."""
        if not self._is_prepared:
            prepare_together([self], waiting)
        self._is_prepared = False
        finals, fresh = self._outlet.take()
        return Flush(finals=finals, fresh=fresh, commit=self._log.commit())

    def give_back(self) -> None:
        """Give back what it holds of the shared table; nothing must be read any more."""
        self._buckets.give_back()

    def gauges(self) -> dict[str, int]:
        """What is held, by name."""
        return {
            "events_waiting": self._events_waiting,
            "open_seconds": self._buckets.open_seconds,
            "cells": self._buckets.cells_held,
            "capped": self._buckets.capped,
            "event_keys": self._buckets.keys_held,
            "reports": len(self._reports),
            "index_entries": self._log.index_entries,
            "finals_waiting": self._outlet.finals_waiting,
            "holes": self._log.holes,
        }

    @property
    def counted(self) -> Mapping[str, int]:
        """Events ever counted here, by what they counted as."""
        return self._buckets.counted

    def _close(self) -> None:
        """Count what waits, and take out the seconds that are closed: what comes later is of open ones."""
        settle_together([self])

    def _add_telemetry(self, read: _Read[TelemetryColumns]) -> None:
        columns = read.columns
        rows = _Rows(columns.ts_us.astype(np.int64), [read], np.full(columns.n, self._log.whole_from))
        nodes = [columns.node.get(at) for at in range(columns.n)]
        self.mark_duplicates(rows, list(zip(nodes, columns.ts_us.tolist(), strict=True)), 0, columns.n)
        kept = rows.kept()
        if len(kept) == 0:
            return
        full = rows.full[kept]
        self._buckets.add(
            Evidence(
                second=rows.second[kept],
                populations=(None,),
                population=np.zeros(len(kept), dtype=np.int64),
                dimensions=(
                    ev.members(ev.constant(ALL, "", len(kept)), ~full),
                    ev.members(ev.texts("node", joined([columns.node])[kept]), full),
                ),
                counters={"events": full.astype(np.int64), **rows.totals(kept, ("cut",))},
                totals=rows.totals(kept, ("late", "duplicate", "uncounted")),
                measures={
                    name: (_gauge(name, values[kept]), full & (values[kept] != ABSENT))
                    for name, values in columns.gauges.items()
                },
            )
        )

    def mark_duplicates(self, rows: _Rows, keys: Sequence[Hashable], first: int, last: int) -> None:
        """Drop duplicates inside open buckets, in log order; its own are the rows first..last (exclusive)."""
        own = slice(first, last)
        live = rows.full[own] & (rows.second[own] >= self._log.whole_from)
        for second in np.unique(rows.second[own][live]).tolist():
            at = (np.flatnonzero(live & (rows.second[own] == second)) + first).tolist()
            seen = self._buckets.bucket(second).seen
            came = [keys[row] for row in at]
            distinct = set(came)
            has_room = len(seen) + len(came) <= EVENTS_PER_BUCKET
            if has_room and len(distinct) == len(came) and seen.isdisjoint(distinct):
                seen |= distinct
                continue
            for row, key in zip(at, came, strict=True):
                if key in seen:
                    rows.mark("duplicate", row)
                elif len(seen) >= EVENTS_PER_BUCKET:
                    rows.mark("uncounted", row)
                else:
                    seen.add(key)


def settle_together(sources: Sequence[MeasureSource]) -> None:
    """Count what waits in some sources, in log order, and take out closed seconds.

    Whether an event is late, and where it counts, was decided by how far the log stood when it was read.
    Sources that are settled together, which share a table of cells, cost less than one by one, and say the
    same.
    """
    for some in in_turns(sources, lambda source: source.events_waiting, EVENTS_AT_ONCE):
        _count(some)
    close_all([source.settled() for source in sources])


def prepare_together(sources: Sequence[MeasureSource], waiting: float = 0.0) -> None:
    """Settle, and take out what changed: what the next flush of each takes. `waiting`: as of PairSource."""
    settle_together(sources)
    show_all([source.prepared() for source in sources], waiting)


def _count(sources: Sequence[MeasureSource]) -> None:
    """Add what waits in these to their buckets."""
    held = [source.hand_over() for source in sources]
    sizes = [sum(read.columns.n for read in reads) for reads in held]
    reads = list(chain.from_iterable(held))
    requests = requests_of([read.columns for read in reads])
    whole_from = np.repeat([source.whole_from for source in sources], sizes)
    rows = _Rows(requests.ts_us + requests.duration_us, reads, whole_from)
    keys, ends = requests.keys(), list(accumulate(sizes, initial=0))
    for source, (first, last) in zip(sources, pairwise(ends), strict=True):
        source.mark_duplicates(rows, keys, first, last)
    kept = rows.kept()
    if len(kept) == 0:
        return
    requests, full = requests.only(kept), rows.full[kept]
    populations, codes = requests.populations()
    shares = np.diff(np.searchsorted(kept, ends)).tolist()
    add_together(
        list(zip([source.buckets for source in sources], shares, strict=True)),
        Evidence(
            second=rows.second[kept],
            populations=populations,
            population=codes,
            dimensions=requests.dimensions(full),
            counters={
                "requests": full.astype(np.int64),
                "errors": (full & requests.failed).astype(np.int64),
                "no_token": (full & (requests.ttft_us == ABSENT)).astype(np.int64),
            },
            totals=rows.totals(kept, ("late", "duplicate", "uncounted", "cut")),
            measures={
                "ttft_us": (requests.ttft_us, full & (requests.ttft_us != ABSENT)),
                "itl_us": (requests.itl_us, full & (requests.itl_us != ABSENT)),
                "duration_us": (requests.duration_us, full),
                "input_tokens": (requests.input_tokens, full),
                "output_tokens": (requests.output_tokens, full),
            },
        ),
    )


class _Rows:
    """The events of some records: second, and whether they count in full or only as late, duplicate, ….

    A late event is counted in the second of log time; every other one in its own second.
    """

    def __init__(self, event_us: I8, reads: Sequence[_Read[Any]], whole_from: I8) -> None:
        moments = np.array([(read.append_us, read.log_us, read.closed_through) for read in reads])
        append_us, log_us, closed_through = np.repeat(moments, [read.columns.n for read in reads], axis=0).T
        limit = append_us + EVENT_AHEAD_US
        cut = event_us > limit
        own = ev.seconds_of(np.minimum(event_us, limit))
        late = own <= closed_through
        self._whole_from = whole_from
        self.second: I8 = np.where(late, log_us // SECOND_US, own)
        self.full: Bool = ~late
        self._marks: dict[str, Bool] = {"late": late, "cut": cut & ~late}

    def mark(self, name: str, at: int) -> None:
        """Event `at` does not count in full; it counts under this name."""
        if name not in self._marks:
            self._marks[name] = np.zeros(len(self.second), dtype=np.bool_)
        self._marks[name][at] = True
        self._marks["cut"][at] = False
        self.full[at] = False

    def kept(self) -> I8:
        """Indices of events of seconds that will be published."""
        return np.flatnonzero(self.second >= self._whole_from)

    def totals(self, kept: I8, names: tuple[str, ...]) -> dict[str, I8]:
        """Counts under these names, of the kept events."""
        return {name: self._marks[name][kept].astype(np.int64) for name in names if name in self._marks}


def reported_drops(header: BatchHeader, reports: ReportMemory, log: LogPosition) -> Evidence:
    """What a producer says it dropped, in the second of log time; nothing if it was said before."""
    populations: list[Population | None] = []
    dropped: list[int] = []
    second = log.log_us // SECOND_US
    if header.dropped and reports.is_new(header.producer_id, header.sequence, log.log_us):
        for name, count in header.dropped.items():
            rollout, _, arm = name.rpartition("/")
            if second >= log.whole_from and rollout and arm in ARMS and count > 0:
                populations.append(Population(rollout, None, ARMS[ARMS.index(arm)], None))
                dropped.append(min(count, REPORTED_DROPS_MAX))
    n = len(dropped)
    return Evidence(
        second=np.full(n, second, dtype=np.int64),
        populations=populations,
        population=np.arange(n, dtype=np.int64),
        dimensions=(ev.constant(ALL, "", n),),
        totals={"dropped": np.array(dropped, dtype=np.int64)},
    )


def _gauge(name: str, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> I8:
    scaled = np.rint(values * SCORE_ONE) if name in SHARE_GAUGES else np.rint(values)
    return np.clip(scaled, -1, GAUGE_MAX).astype(np.int64)
