"""Requests and telemetry into one-second buckets: one source partition (worker "measure")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.buckets import Bucket, Buckets, content
from pipeline.core.cells import ALL, CONTEXT_LIMITS, UNKNOWN, context_class
from pipeline.core.evidence import SECOND_US, Dimension, Evidence
from pipeline.core.flushing import Records
from pipeline.core.source import (
    EVENT_AHEAD_US,
    ContentSettings,
    Flush,
    LogPosition,
    RecordMeta,
    ReportMemory,
)
from schemas.buckets import SCORE_ONE, FinalBuckets, Population
from schemas.columns import (
    ABSENT,
    I8,
    NO_LABEL,
    BatchHeader,
    Bool,
    Decoded,
    LabelsColumns,
    RequestColumns,
    TelemetryColumns,
)
from schemas.events import ARMS
from schemas.topics import Topic

EVENTS_PER_BUCKET: Final = 1 << 20
"""Events whose keys a bucket remembers; further ones are counted as `uncounted`, not judged."""
SHARE_GAUGES: Final = frozenset({"kv_usage", "internal", "external"})
"""Gauges in 0..1, which travel in units of 2⁻³⁰; all others are whole numbers."""
GAUGE_MAX: Final = 1 << 48
SERVER_ERROR: Final = 500
REPORTED_DROPS_MAX: Final = 1 << 31


class MeasureSource:
    """One partition of `klaxon.requests` or `klaxon.telemetry`. Not shared between threads."""

    def __init__(self, topic: Topic, partition: int, settings: ContentSettings) -> None:
        """A source that has read nothing yet; it begins with whatever record comes first."""
        self._settings = settings
        self._log = LogPosition(settings.lateness_us, memory_us=0)
        self._buckets = Buckets(settings.cells_per_bucket)
        self._records = Records(topic, partition, settings)
        self._reports = ReportMemory()
        self._finals: list[FinalBuckets] = []
        self._last_offset = -1

    @property
    def next_offset(self) -> int | None:
        """The offset expected next; None before the first record."""
        return self._log.next_offset

    def read(
        self, meta: RecordMeta, decoded: Decoded[RequestColumns] | Decoded[TelemetryColumns] | None
    ) -> None:
        """Take in one record (None: a tick). Ignored if it was read before; raises HoleError (see there)."""
        before = self._log.closed_through
        if not self._log.advance(meta.offset, meta.append_us, meta.size_bytes):
            return
        self._last_offset = meta.offset
        self._close(before)
        if decoded is None:
            return
        if isinstance(decoded.columns, RequestColumns):
            if decoded.header is not None:
                self._buckets.add(reported_drops(decoded.header, self._reports, self._log))
            self._add_requests(decoded.columns, meta.append_us)
        else:
            self._add_telemetry(decoded.columns, meta.append_us)

    def take_flush(self) -> Flush:
        """Everything new since the last flush."""
        finals, self._finals = self._finals, []
        fresh = self._records.fresh(self._buckets.changed(), self._log.whole_from, self._last_offset)
        return Flush(finals=finals, fresh=fresh, commit=self._log.commit())

    def gauges(self) -> dict[str, int]:
        """What is held, by name."""
        return {
            "open_seconds": self._buckets.open_seconds,
            "cells": self._buckets.cells_held,
            "event_keys": self._buckets.keys_held,
            "reports": len(self._reports),
            "index_entries": self._log.index_entries,
            "finals_waiting": len(self._finals),
            "holes": self._log.holes,
        }

    def _close(self, before: int) -> None:
        first, last = max(before + 1, self._log.whole_from), self._log.closed_through
        if last <= before:
            return
        closed = self._buckets.close(last)
        if last < first:
            return
        seconds = [content(second, bucket.cells) for second, bucket in closed]
        self._finals += self._records.finals(seconds, (first, last), self._log.whole_from, self._last_offset)

    def _add_requests(self, columns: RequestColumns, append_us: int) -> None:
        rows = _Rows(columns.ts_us + columns.duration_us, append_us, self._log)
        keys = _request_keys(columns)
        self._mark_duplicates(rows, keys)
        kept = rows.kept()
        if len(kept) == 0:
            return
        full = rows.full[kept]
        populations, codes = populations_of(columns, kept)
        ttft, itl, duration = columns.ttft_us[kept], columns.itl_us[kept], columns.duration_us[kept]
        failed = (columns.status[kept] >= SERVER_ERROR) | (columns.labels["error"].codes[kept] != NO_LABEL)
        self._buckets.add(
            Evidence(
                second=rows.second[kept],
                populations=populations,
                population=codes,
                dimensions=_request_dimensions(columns, kept, full),
                counters={
                    "requests": full.astype(np.int64),
                    "errors": (full & failed).astype(np.int64),
                    "no_token": (full & (ttft == ABSENT)).astype(np.int64),
                },
                totals=rows.totals(kept, ("late", "duplicate", "uncounted", "cut")),
                measures={
                    "ttft_us": (ttft, full & (ttft != ABSENT)),
                    "itl_us": (itl, full & (itl != ABSENT)),
                    "duration_us": (duration, full),
                    "input_tokens": (columns.input_tokens[kept].astype(np.int64), full),
                    "output_tokens": (columns.output_tokens[kept].astype(np.int64), full),
                },
            )
        )

    def _add_telemetry(self, columns: TelemetryColumns, append_us: int) -> None:
        rows = _Rows(columns.ts_us.astype(np.int64), append_us, self._log)
        nodes = [columns.node.get(at) for at in range(columns.n)]
        self._mark_duplicates(rows, zip(nodes, columns.ts_us.tolist(), strict=True))
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
                    ev.members(ev.label("node", columns.node, kept), full),
                ),
                counters={"events": full.astype(np.int64), **rows.totals(kept, ("cut",))},
                totals=rows.totals(kept, ("late", "duplicate", "uncounted")),
                measures={
                    name: (_gauge(name, values[kept]), full & (values[kept] != ABSENT))
                    for name, values in columns.gauges.items()
                },
            )
        )

    def _mark_duplicates(self, rows: _Rows, keys: Iterable[object]) -> None:
        """Drop duplicates inside open buckets, in log order."""
        buckets: dict[int, Bucket] = {}
        live = (rows.full & (rows.second >= self._log.whole_from)).tolist()
        for at, (key, second, is_live) in enumerate(zip(keys, rows.second.tolist(), live, strict=True)):
            if not is_live:
                continue
            bucket = buckets.get(second)
            if bucket is None:
                bucket = buckets[second] = self._buckets.bucket(second)
            if key in bucket.seen:
                rows.mark("duplicate", at)
            elif len(bucket.seen) >= EVENTS_PER_BUCKET:
                rows.mark("uncounted", at)
            else:
                bucket.seen.add(key)


class _Rows:
    """The events of one record: second, and whether they count in full or only as late, duplicate, ….

    A late event is counted in the second of log time; every other one in its own second.
    """

    def __init__(self, event_us: I8, append_us: int, log: LogPosition) -> None:
        limit = append_us + EVENT_AHEAD_US
        cut = event_us > limit
        own = ev.seconds_of(np.minimum(event_us, limit))
        late = own <= log.closed_through
        self._whole_from = log.whole_from
        self.second: I8 = np.where(late, log.log_us // SECOND_US, own)
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


def populations_of(columns: LabelsColumns, rows: I8) -> tuple[list[Population | None], I8]:
    """Populations of these events by what they say themselves, and each event's index into them."""
    rollouts, versions = columns.labels["rollout"], columns.labels["model_version"]
    index: dict[tuple[int, int, int, int], int] = {}
    codes = [
        index.setdefault(key, len(index))
        for key in zip(
            rollouts.codes[rows].tolist(),
            columns.generation[rows].tolist(),
            columns.arm[rows].tolist(),
            versions.codes[rows].tolist(),
            strict=True,
        )
    ]
    populations: list[Population | None] = [
        Population(
            rollouts.values[rollout],
            None if generation == ABSENT else generation,
            ARMS[arm],
            None if version == NO_LABEL else versions.values[version],
        )
        for rollout, generation, arm, version in index
    ]
    return populations, np.array(codes, dtype=np.int64)


def _request_keys(columns: RequestColumns) -> list[object]:
    """What makes two events the same: (pair id, arm), else (signature, arm, node, time); per roll-out."""
    rollouts, nodes = columns.labels["rollout"], columns.labels["node"]
    pair_ids, signatures = columns.pair_id.tobytes(), columns.signature.tobytes()
    keys: list[object] = []
    for at, (has, arm, ts_us) in enumerate(
        zip(columns.has_pair_id.tolist(), columns.arm.tolist(), columns.ts_us.tolist(), strict=True)
    ):
        here = slice(16 * at, 16 * at + 16)
        if has:
            keys.append((rollouts.get(at), arm, pair_ids[here]))
        else:
            keys.append((rollouts.get(at), arm, signatures[here], nodes.get(at), ts_us))
    return keys


def _request_dimensions(columns: RequestColumns, rows: I8, full: Bool) -> list[Dimension]:
    """Cells of requests, in the order in which one request claims them."""
    n = len(rows)
    tokens = columns.input_tokens[rows].astype(np.int64)
    node = ev.label("node", columns.labels["node"], rows)
    request_type = ev.label("request_type", columns.labels["request_type"], rows)
    hardware = ev.label("hardware", columns.labels["hardware"], rows)
    sampling = ev.sampling(columns.temperature[rows])
    region = ev.label("region", columns.labels["region"], rows)
    traffic = Dimension("traffic", ("user", "shadow"), columns.shadow[rows].astype(np.int64))
    contexts = ev.contexts(tokens, node)
    nested, crossed = contexts[: len(contexts) // 2], contexts[len(contexts) // 2 :]
    context = Dimension(
        "context_class",
        tuple(context_class(limit) for limit in (*CONTEXT_LIMITS, CONTEXT_LIMITS[-1] + 1)),
        np.searchsorted(np.array(CONTEXT_LIMITS), tokens, side="left").astype(np.int64),
    )
    cache = _cache_hit(columns.cached_tokens[rows].astype(np.int64), tokens)
    stratum = _crossed("stratum", (request_type, context, sampling, cache, hardware))
    parts = (node, *nested, request_type, hardware, sampling, region, traffic, *crossed, stratum)
    return [ev.constant(ALL, "", n), *(ev.members(part, full) for part in parts)]


def _cache_hit(cached_tokens: I8, input_tokens: I8) -> Dimension:
    """Cached share of the input: none 0, part < ½, most, unknown where nothing is said."""
    codes = np.where(2 * cached_tokens < input_tokens, 1, 2)
    codes = np.where(cached_tokens == 0, 0, codes)
    codes = np.where(cached_tokens == ABSENT, 3, codes)
    return Dimension("cache_hit", ("none", "part", "most", UNKNOWN), codes.astype(np.int64))


def _crossed(name: str, parts: tuple[Dimension, ...]) -> Dimension:
    """The product of dimensions that have every row as a member; values joined by |."""
    combined = np.zeros(len(parts[0].codes), dtype=np.int64)
    for part in parts:
        # Renumbering after each factor keeps the product small however many values a label has.
        _, combined = np.unique(combined * len(part.values) + part.codes, return_inverse=True)
        combined = combined.astype(np.int64)
    _, first, codes = np.unique(combined, return_index=True, return_inverse=True)
    values = tuple("|".join(part.values[int(part.codes[row])] for part in parts) for row in first.tolist())
    return Dimension(name, values, codes.astype(np.int64))


def _gauge(name: str, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> I8:
    scaled = np.rint(values * SCORE_ONE) if name in SHARE_GAUGES else np.rint(values)
    return np.clip(scaled, -1, GAUGE_MAX).astype(np.int64)
