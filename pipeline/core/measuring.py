"""Requests and telemetry into one-second buckets: one source partition (worker "measure")."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.buckets import Buckets
from pipeline.core.cells import ALL
from pipeline.core.evidence import SECOND_US, Evidence
from pipeline.core.flushing import Records
from pipeline.core.requests import requests_of
from pipeline.core.source import (
    BYTES_AT_ONCE,
    EVENT_AHEAD_US,
    BucketRecord,
    ContentSettings,
    Flush,
    LogPosition,
    RecordMeta,
    ReportMemory,
)
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
Seconds close then, too. The more at once, the fewer times a cell is looked up and added to."""
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

    def __init__(self, topic: Topic, partition: int, settings: ContentSettings) -> None:
        """A source that has read nothing yet; it begins with whatever record comes first."""
        self._settings = settings
        self._log = LogPosition(settings.lateness_us, memory_us=0)
        self._buckets = Buckets(settings.cells_per_bucket)
        self._records = Records(topic, partition, settings)
        self._reports = ReportMemory()
        self._waiting: list[_Read[RequestColumns]] = []
        self._events_waiting = 0
        self._counted_bytes = 0
        """Bytes read when no event waited."""
        self._finals: list[BucketRecord] = []
        self._last_offset = -1

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
        self._last_offset = meta.offset
        if decoded is None:
            return
        columns, moment = decoded.columns, (meta.append_us, self._log.log_us, self._log.closed_through)
        if isinstance(columns, RequestColumns):
            if decoded.header is not None and decoded.header.dropped:
                self._close()
                self._buckets.add(reported_drops(decoded.header, self._reports, self._log))
            self._waiting.append(_Read(columns, *moment))
            self._events_waiting += columns.n
            closable = self._log.closed_through - self._records.stated_through
            waited_bytes = self._log.bytes_read - self._counted_bytes
            many = self._events_waiting >= EVENTS_AT_ONCE or waited_bytes >= BYTES_AT_ONCE
            if many or closable > SECONDS_AT_ONCE:
                self._close()
        else:
            self._close()
            self._add_telemetry(_Read(columns, *moment))

    def _settle(self) -> None:
        """Count the events that wait, in log order: many at once cost less each.

        Whether they are late, and where they count, was decided by how far the log stood when they were read.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._events_waiting = 0
        requests = requests_of([read.columns for read in waiting])
        rows = _Rows(requests.ts_us + requests.duration_us, waiting, self._log.whole_from)
        self._mark_duplicates(rows, requests.keys())
        kept = rows.kept()
        if len(kept) == 0:
            return
        requests, full = requests.only(kept), rows.full[kept]
        populations, codes = requests.populations()
        self._buckets.add(
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
            )
        )

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        """Everything new since the last flush; counts and closes what waits. `waiting`: as of PairSource."""
        self._close()
        finals, self._finals = self._finals, []
        changed = self._buckets.changed(after=self._log.flushed(waiting))
        fresh = self._records.fresh(changed, self._log.whole_from, self._last_offset)
        return Flush(finals=finals, fresh=fresh, commit=self._log.commit())

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
            "finals_waiting": len(self._finals),
            "holes": self._log.holes,
        }

    @property
    def counted(self) -> Mapping[str, int]:
        """Events ever counted here, by what they counted as."""
        return self._buckets.counted

    def _close(self) -> None:
        """Count what waits, and take out the seconds that are closed: what comes later is of open ones."""
        self._settle()
        self._counted_bytes = self._log.bytes_read
        self._finals += self._records.close(self._buckets, self._log)

    def _add_telemetry(self, read: _Read[TelemetryColumns]) -> None:
        columns = read.columns
        rows = _Rows(columns.ts_us.astype(np.int64), [read], self._log.whole_from)
        nodes = [columns.node.get(at) for at in range(columns.n)]
        self._mark_duplicates(rows, list(zip(nodes, columns.ts_us.tolist(), strict=True)))
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

    def _mark_duplicates(self, rows: _Rows, keys: Sequence[Hashable]) -> None:
        """Drop duplicates inside open buckets, in log order."""
        live = rows.full & (rows.second >= self._log.whole_from)
        for second in np.unique(rows.second[live]).tolist():
            at = np.flatnonzero(live & (rows.second == second)).tolist()
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


class _Rows:
    """The events of some records: second, and whether they count in full or only as late, duplicate, ….

    A late event is counted in the second of log time; every other one in its own second.
    """

    def __init__(self, event_us: I8, reads: Sequence[_Read[Any]], whole_from: int) -> None:
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
