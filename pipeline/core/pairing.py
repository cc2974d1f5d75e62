"""Halves into pairs into one-second buckets: one partition of `klaxon.logits` (worker "pair")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

from pipeline.core.buckets import Buckets, add_together
from pipeline.core.divergence import score_matched
from pipeline.core.evidence import SECOND_US, or_none
from pipeline.core.flushing import Outlet, Records, close_all, show_all
from pipeline.core.formed import Count, Excess, Formed, Pair, Pairs, rows_of
from pipeline.core.groups import Arrival, Group, GroupKey, Groups, Halves, halves_of
from pipeline.core.measuring import reported_drops
from pipeline.core.pair_rows import PairRows
from pipeline.core.pieces import in_turns
from pipeline.core.scoring import Scorer, Waiting, settle
from pipeline.core.source import (
    BYTES_AT_ONCE,
    EVENT_AHEAD_US,
    HALF_BYTES,
    RECORD_BYTES,
    WAITING_BYTES,
    ContentSettings,
    Flush,
    LogPosition,
    RecordMeta,
    ReportMemory,
)
from pipeline.core.table import CellTable
from schemas.buckets import Population
from schemas.columns import ABSENT, BASELINE, CANARY, CONTROL, BatchHeader, Decoded, LogitColumns
from schemas.events import ARMS
from schemas.pairs import PairBatch
from schemas.topics import Topic

PAIRS_AT_ONCE: Final = 2048
"""Pairs and counts wait until there are so many, for BYTES_AT_ONCE of the log, or for a flush; so do closed
seconds. What something counts as, and in which second, is decided where it stands in the log: waiting changes
nothing."""
TOGETHER: Final = 4 * PAIRS_AT_ONCE
"""Pairs and counts of many sources are settled in turns of no more, unless one source has more."""
ROWS_AT_ONCE: Final = 1024
"""Scored pairs of one source wait for no more."""
JOIN_MEMORY: Final = 3
"""What a group decides depends on at most this many join timeouts of the log."""


def held_bytes(meta: RecordMeta, decoded: Decoded[LogitColumns] | None) -> int:
    """What a record counts towards WAITING_BYTES: its value, and what it takes besides while it waits."""
    if decoded is None:
        return meta.size_bytes
    return meta.size_bytes + RECORD_BYTES + HALF_BYTES * decoded.columns.n


class PairSource:
    """One partition of `klaxon.logits`. Not shared between threads."""

    def __init__(
        self,
        topic: Topic,
        partition: int,
        settings: ContentSettings,
        score: Scorer = score_matched,
        waiting_bytes: int = WAITING_BYTES,
        rows_every_us: int = 0,
        table: CellTable | None = None,
    ) -> None:
        """A source that has read nothing yet; it begins with whatever record comes first.

        Sources that share a `table` can be settled together; one that is dropped gives back its cells.

        Scored pairs leave in a flush once so much log time has passed since they last did, or when there are
        ROWS_AT_ONCE: nobody waits for them, and a record costs the same for few and for many.
        """
        self._partition = partition
        self._join_timeout_us = settings.join_timeout_us
        self._log = LogPosition(settings.lateness_us, memory_us=JOIN_MEMORY * settings.join_timeout_us)
        self._groups = Groups(settings.join_timeout_us, waiting_bytes)
        self._buckets = Buckets(settings.cells_per_bucket, table)
        self._outlet = Outlet(self._buckets, self._log, Records(topic, partition, settings))
        self._reports = ReportMemory()
        self.score = score
        self._formed: dict[GroupKey, dict[int, Pair]] = {}
        """Pairs of open groups by arm, for the paired difference of canary and control."""
        self._pending: list[Formed] = []
        self._rows_pending = 0
        self._settled_bytes = 0
        """Bytes read when there was nothing left to settle."""
        self._rows = PairRows()
        self._rows_every_us = rows_every_us
        self._rows_left_us = -rows_every_us
        """Log time at which rows last left."""
        self._is_prepared = False
        """Whether all that was read is counted and taken out, for the next flush to take along."""
        self._last_offset = -1

    @property
    def next_offset(self) -> int | None:
        """The offset expected next; None before the first record."""
        return self._log.next_offset

    def read(self, meta: RecordMeta, decoded: Decoded[LogitColumns] | None) -> None:
        """Take in one record (None: a tick). Ignored if it was read before; raises HoleError (see there)."""
        if not self._log.advance(meta.offset, meta.append_us, held_bytes(meta, decoded)):
            return
        self._last_offset = meta.offset
        self._is_prepared = False
        now = (self._log.log_us, self._log.bytes_read)
        for group, ended_us in self._groups.expire(now):
            self._end(group, ended_us)
        if decoded is not None:
            if decoded.header is not None and decoded.header.dropped:
                self._count_drops(decoded.header)
            self._join(halves_of(decoded, meta.offset, meta.append_us + EVENT_AHEAD_US, now))
        waited_bytes = self._log.bytes_read - self._settled_bytes
        if self._rows_pending >= PAIRS_AT_ONCE or waited_bytes >= BYTES_AT_ONCE:
            settle_together([self])

    @property
    def rows_waiting(self) -> int:
        """Pairs and counts that were formed and are not settled yet."""
        return self._rows_pending

    def hand_over(self) -> Waiting:
        """What waits: to be settled and counted before anything further is read."""
        pending, self._pending, self._rows_pending = self._pending, [], 0
        return Waiting(pending, self._log.whole_from, self._rows)

    @property
    def buckets(self) -> Buckets:
        """Where it counts."""
        return self._buckets

    def settled(self) -> Outlet:
        """Nothing waits any more that counts in closed seconds: they can be taken out."""
        self._settled_bytes = self._log.bytes_read
        return self._outlet

    def prepared(self) -> Outlet:
        """Until something is read, its next flush takes what leaves here now."""
        self._is_prepared = True
        return self._outlet

    def take_flush(self, *, waiting: float = 0.0) -> Flush:
        """Everything new since the last flush; scores and closes what waits here.

        `waiting`: records that wait to be read, over those read since the last flush. Seconds that they will
        close, if log time goes on as it did, have no fresh cells: their final is there as soon.
        """
        if not self._is_prepared:
            prepare_together([self], waiting)
        self._is_prepared = False
        finals, fresh = self._outlet.take()
        pairs: list[PairBatch] = []
        due = self._log.log_us - self._rows_left_us >= self._rows_every_us
        if due or len(self._rows) >= ROWS_AT_ONCE:
            pairs = list(self._rows.batches(self._partition, self._last_offset))
            self._rows, self._rows_left_us = PairRows(), self._log.log_us
        return Flush(
            finals=finals,
            fresh=fresh,
            pairs=pairs,
            # A commit says that all that was read is said.
            commit=None if len(self._rows) else self._log.commit(),
        )

    def give_back(self) -> None:
        """Give back what it holds of the shared table; nothing must be read any more."""
        self._buckets.give_back()

    def gauges(self) -> dict[str, int]:
        """What is held, by name."""
        return {
            "open_groups": self._groups.open_groups,
            "remembered_groups": self._groups.remembered,
            "oldest_wait_us": self._groups.oldest_wait_us(self._log.log_us),
            "waiting_bytes": self._groups.waiting_bytes(self._log.bytes_read),
            "pairs_waiting": self._rows_pending,
            "pair_rows": len(self._rows),
            "open_seconds": self._buckets.open_seconds,
            "cells": self._buckets.cells_held,
            "capped": self._buckets.capped,
            "reports": len(self._reports),
            "index_entries": self._log.index_entries,
            "finals_waiting": self._outlet.finals_waiting,
            "holes": self._log.holes,
        }

    @property
    def counted(self) -> Mapping[str, int]:
        """Pairs ever counted here, and halves that became none, by what they counted as."""
        return self._buckets.counted

    def _join(self, record: Halves) -> None:
        log_us, arms = record.moment[0], record.arms
        for at, met in self._groups.meet(record):
            if isinstance(met, Group):
                self._take_in(met, (record, at[0]))
            elif self._can_matter(log_us):
                here = list(zip(repeat(record), at))
                is_baseline = [arms[each] == BASELINE for each in at]
                halves = list(zip(is_baseline, here, met, strict=True))
                baselines = [new if first else old for first, new, old in halves]
                others = [old if first else new for first, new, old in halves]
                self._put(Pairs(baselines, others, log_us, self._log.closed_through))

    def _take_in(self, group: Group, arrival: Arrival) -> None:
        record, at = arrival
        arm, now = record.arms[at], record.moment
        if not group.seen and not group.is_anonymous:
            group.begin(arrival)
        elif self._groups.came_before(group, _identity(arrival) if group.is_anonymous else arm, now):
            self._count(now[0], _population(arrival, ABSENT), "unmatched.duplicate", 1)
        elif not group.is_open:
            reason = "unmatched.ambiguous" if group.is_anonymous else "unmatched.late"
            self._count(now[0], _population(arrival, ABSENT), reason, 1)
        else:
            group.expected |= record.expected[at]
            group.halves.setdefault(arm, arrival)
            if group.is_anonymous:
                if not group.present:
                    group.generation = record.generations[at]
                group.present |= 1 << arm
                group.arrived[arm] = group.arrived.get(arm, 0) + 1
            else:
                group.present |= 1 << arm
                self._match(group, arm, now[0])

    def _match(self, group: Group, arm: int, log_us: int) -> None:
        """Score the new half with what it can be compared with; let go of a group that is complete."""
        baseline = group.halves.get(BASELINE)
        if baseline is not None:
            for other in (CANARY, CONTROL) if arm == BASELINE else (arm,):
                if other in group.halves:
                    self._compare(group, baseline, other, log_us)
        if group.is_complete():
            self._groups.close(group)
            group.halves.clear()
            self._formed.pop(group.key, None)

    def _end(self, group: Group, ended_us: int) -> None:
        """A group's time is up: resolve an anonymous one, count what stays unmatched."""
        baseline = group.halves.get(BASELINE)
        ambiguous = any(times > 1 for times in group.arrived.values())
        for arm in group.comparisons():
            other = group.halves.get(arm)
            if other is not None:
                population = _population(other, group.generation)
            else:
                rollout = _rollout(next(iter(group.halves.values())))
                population = Population(rollout, or_none(group.generation), ARMS[arm], None)
            if ambiguous:
                times = max(group.arrived.get(arm, 0), group.arrived.get(BASELINE, 0))
                self._count(ended_us, population, "unmatched.ambiguous", times)
            elif other is None:
                self._count(ended_us, population, f"unmatched.no_{ARMS[arm]}", 1)
            elif baseline is None:
                self._count(ended_us, population, "unmatched.no_baseline", 1)
            elif group.is_anonymous:
                self._compare(group, baseline, arm, ended_us)
        group.halves.clear()
        self._formed.pop(group.key, None)

    def _count_drops(self, header: BatchHeader) -> None:
        evidence = reported_drops(header, self._reports, self._log)
        for population, n in zip(evidence.populations, evidence.totals["dropped"].tolist(), strict=True):
            if population is not None:
                self._count(self._log.log_us, population, "dropped", n)

    def _count(self, log_us: int, population: Population, name: str, n: int) -> None:
        self._put(Count(log_us // SECOND_US, population, name, n))

    def _put(self, formed: Formed) -> None:
        self._pending.append(formed)
        self._rows_pending += rows_of(formed)

    def _can_matter(self, log_us: int) -> bool:
        """Whether a pair that forms now can count in a second that was seen whole.

        It can matter to seconds up to J + 5 s after it: with its control, which may come J later.
        """
        return log_us + self._join_timeout_us + EVENT_AHEAD_US >= self._log.whole_from * SECOND_US

    def _compare(self, group: Group, baseline: Arrival, arm: int, log_us: int) -> None:
        """Form a pair of a group; with the other comparison formed, too, their difference."""
        if not self._can_matter(log_us):
            return
        pair = Pair(baseline, group.halves[arm], log_us, self._log.closed_through)
        self._put(pair)
        if not group.compares_two:
            return
        formed = self._formed.setdefault(group.key, {})
        formed[arm] = pair
        if CANARY in formed and CONTROL in formed:
            canary, control = formed[CANARY], formed[CONTROL]
            if arm == CANARY:
                canary.control = control
            second = self._second(max(_event_us(canary), _event_us(control)), log_us, group)
            if second is not None:
                self._put(Excess(canary, control, second))

    def _second(self, event_us: int, formed_us: int, group: Group) -> int | None:
        """The bucket of a difference that was complete then and formed now; None if that is closed.

        An anonymous group is resolved only at its deadline: it counts in that second of log time.
        """
        if group.is_anonymous:
            return formed_us // SECOND_US
        second = event_us // SECOND_US
        return second if self._log.accepts(second) else None


def settle_together(sources: Sequence[PairSource]) -> None:
    """Score what waits in some sources, add it to their buckets in log order, take out closed seconds.

    Whatever waits later is of seconds that are open now. Sources that are settled together, which share a
    table of cells, cost less than one by one, and say the same.
    """
    for some in in_turns(sources, lambda source: source.rows_waiting, TOGETHER):
        evidence, sizes = settle([source.hand_over() for source in some], some[0].score)
        add_together([(source.buckets, n) for source, n in zip(some, sizes, strict=True)], evidence)
    close_all([source.settled() for source in sources])


def prepare_together(sources: Sequence[PairSource], waiting: float = 0.0) -> None:
    """Settle, and take out what changed: what the next flush of each takes. `waiting`: as of `take_flush`."""
    settle_together(sources)
    show_all([source.prepared() for source in sources], waiting)


def _event_us(pair: Pair) -> int:
    return max(int(record.event_us[at]) for record, at in (pair.baseline, pair.other))


def _identity(arrival: Arrival) -> object:
    """What makes two halves without a pair id the same."""
    record, at = arrival
    return record.arms[at], record.columns.labels["node"].get(at), int(record.columns.ts_us[at])


def _rollout(arrival: Arrival) -> str:
    record, at = arrival
    return record.columns.labels["rollout"].get(at) or ""


def _population(arrival: Arrival, fallback: int) -> Population:
    """Of one half: what it says itself; `fallback` is its generation where it says none."""
    record, at = arrival
    generation = record.generations[at]
    if generation == ABSENT:
        generation = fallback
    version = record.columns.labels["model_version"].get(at)
    return Population(_rollout(arrival), or_none(generation), ARMS[record.arms[at]], version)
