"""Events of the shared generator as records of ours: a backlog that a worker is to read.

Records carry the time at which they would have been appended: 50 ms after their newest event completed. The
topics of the bench keep producers' times, so a minute of traffic is written in seconds and is for the worker
a minute all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace as replaced

from schemas.codec import encode_logits, encode_requests, logit_columns, request_columns
from schemas.columns import BatchHeader, LabelColumn, LogitColumns, RequestColumns
from schemas.events import LogitEvent, RequestEvent
from schemas.topics import COLUMNS, JSON, TICK, Topic, partition_of

APPENDED_AFTER_US = 50_000
"""How old a batch gets before our publisher sends it."""
CLOSES_AFTER_US = 2_000_000
"""The closing tick stands so long after lateness: every second of the backlog is then closed."""

Columns: TypeAlias = LogitColumns | RequestColumns


@dataclass(frozen=True, slots=True)
class Out:
    """One record to be written."""

    partition: int
    value: bytes
    content_type: str
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one record, with the times of the generator's file."""

    partition: int
    columns: Columns
    newest_us: int
    """Completion of the newest event."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Columnar records, in the order in which they are appended."""

    topic: Topic
    partitions: int
    batches: Sequence[Batch]
    events: int
    first_us: int
    last_us: int
    """Oldest and newest completion."""

    def records(self, start_us: int, rollouts: int = 1) -> Iterator[Out]:
        """All records, moved so that the oldest event completes at `start_us`, spread over roll-outs."""
        shift_us = start_us - self.first_us
        encode: Callable[..., bytes] = encode_logits if self.topic is Topic.LOGITS else encode_requests
        for sequence, batch in enumerate(self.batches):
            columns = _changed(batch.columns, shift_us, rollouts)
            value = encode(columns, BatchHeader("bench", sequence, {}))
            yield Out(batch.partition, value, COLUMNS, _appended_ms(batch.newest_us + shift_us))

    def paced(self, speed: float) -> Backlog:
        """The same events, so many times as many of them a second."""

        def at(time_us: Any) -> Any:
            return self.first_us + (time_us - self.first_us) / speed

        batches = []
        for batch in self.batches:
            columns = batch.columns
            done = at(columns.ts_us + columns.duration_us).astype(np.int64)
            moved = _with(columns, ts_us=done - columns.duration_us)
            batches.append(Batch(batch.partition, moved, int(at(batch.newest_us))))
        return replace(self, batches=batches, last_us=int(at(self.last_us)))

    def repeated(self, times: int) -> Backlog:
        """The same traffic so many times one after the other, of other prompts each time."""
        lasts_us = self.last_us - self.first_us
        batches = [
            _again(batch, number, number * lasts_us) for number in range(times) for batch in self.batches
        ]
        last_us = self.first_us + times * lasts_us
        return replace(self, batches=batches, events=times * self.events, last_us=last_us)

    def ticks(self, start_us: int, lateness_us: int) -> Iterator[Out]:
        """The record of every partition that closes all its seconds."""
        return _ticks(self.partitions, self.last_us - self.first_us + start_us + lateness_us)


@dataclass(frozen=True, slots=True)
class SingleEvents:
    """One JSON event a record: what a foreign producer sends."""

    topic: Topic
    partitions: int
    lines: Sequence[RequestEvent]
    first_us: int
    last_us: int

    @property
    def events(self) -> int:
        """One a record."""
        return len(self.lines)

    def records(self, start_us: int, rollouts: int = 1) -> Iterator[Out]:
        """As of a Backlog; one roll-out only."""
        if rollouts != 1:
            raise ValueError("single events are of one roll-out")
        for event in self.lines:
            ts_us = event.ts_us - self.first_us + start_us
            value = msgspec.json.encode(replaced(event, ts_us=ts_us))
            partition = partition_of(event.signature.encode(), self.partitions)
            yield Out(partition, value, JSON, _appended_ms(ts_us + event.duration_us))

    def ticks(self, start_us: int, lateness_us: int) -> Iterator[Out]:
        """As of a Backlog."""
        return _ticks(self.partitions, self.last_us - self.first_us + start_us + lateness_us)


def read_backlog(path: Path, topic: Topic, *, partitions: int, per_record: int, most: int) -> Backlog:
    """The first `most` events of a generator's file, cut as its own loader cuts: per arm and partition."""
    kind: type[Any] = LogitEvent if topic is Topic.LOGITS else RequestEvent
    tabulate: Callable[[Any], Columns] = logit_columns if topic is Topic.LOGITS else request_columns
    decoder = msgspec.json.Decoder(kind)
    waiting: dict[tuple[str, int], list[Any]] = {}
    batches: list[Batch] = []
    events = 0
    with path.open("rb") as lines:
        for line in islice(lines, most):
            event = decoder.decode(line)
            key = (event.arm, partition_of(event.signature.encode(), partitions))
            held = waiting.setdefault(key, [])
            held.append(event)
            events += 1
            if len(held) == per_record:
                batches.append(_batch(key[1], waiting.pop(key), tabulate))
    batches += (_batch(partition, held, tabulate) for (_, partition), held in waiting.items())
    batches.sort(key=lambda batch: batch.newest_us)
    completions = [batch.columns.ts_us + batch.columns.duration_us for batch in batches]
    return Backlog(
        topic,
        partitions,
        batches,
        events,
        min(int(times.min()) for times in completions),
        max(int(times.max()) for times in completions),
    )


def read_single(path: Path, *, partitions: int, most: int) -> SingleEvents:
    """The first `most` request events of a generator's file."""
    decoder = msgspec.json.Decoder(RequestEvent)
    with path.open("rb") as lines:
        events = [decoder.decode(line) for line in islice(lines, most)]
    events.sort(key=lambda event: event.ts_us + event.duration_us)
    ends = [event.ts_us + event.duration_us for event in events]
    return SingleEvents(Topic.REQUESTS, partitions, events, ends[0], ends[-1])


def _batch(partition: int, events: Sequence[Any], tabulate: Callable[[Any], Columns]) -> Batch:
    newest_us = max(event.ts_us + event.duration_us for event in events)
    return Batch(partition, tabulate(events), newest_us)


def _again(batch: Batch, number: int, later_us: int) -> Batch:
    columns, newest_us = batch.columns, batch.newest_us + later_us
    # Not the first byte, which decides the roll-out.
    signature = columns.signature.copy()
    signature[:, 1] ^= number
    return Batch(
        batch.partition, _with(columns, ts_us=columns.ts_us + later_us, signature=signature), newest_us
    )


def _ticks(partitions: int, closed_us: int) -> Iterator[Out]:
    for partition in range(partitions):
        yield Out(partition, b"", TICK, (closed_us + CLOSES_AFTER_US) // 1000)


def _appended_ms(newest_us: int) -> int:
    return (newest_us + APPENDED_AFTER_US) // 1000


def _changed(columns: Columns, shift_us: int, rollouts: int) -> Columns:
    """The same events at another time, each of the roll-out that its prompt decides: halves stay together."""
    names = tuple(f"bench-{number}" for number in range(rollouts))
    codes = (columns.signature[:, 0] % rollouts).astype(np.uint16)
    labels = {**columns.labels, "rollout": LabelColumn(names, codes)}
    return _with(columns, ts_us=columns.ts_us + shift_us, labels=labels)


def _with(columns: Columns, **changes: Any) -> Columns:
    """Columns with some of them replaced. Not by `dataclasses.replace`, whose type is that of one kind."""
    fields = {name: getattr(columns, name) for name in columns.__dataclass_fields__}
    return type(columns)(**{**fields, **changes})
