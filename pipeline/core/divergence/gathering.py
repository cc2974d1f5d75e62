"""Answers out of the records they came in, laid side by side.

Everything here stands for both arms at once: what is (2, n) has the baselines' answers in row 0 and those
compared with them in row 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.lists import ALIGNED, rooms
from pipeline.core.divergence.reading import Sent
from schemas.columns import F8, I4, I8, NOT_LISTED, LogitColumns

_CODES: Final = ("definition", "kind", "identity", "k", "source", "ended")


@dataclass(frozen=True, slots=True)
class Half:
    """One arm's answer: event `index` of a record's columns."""

    columns: LogitColumns
    index: int


@dataclass(frozen=True, slots=True)
class Matched:
    """n pairs of answers: `record`, `event` (2, n) say which event of which of the records each half is."""

    records: Sequence[LogitColumns]
    record: I8
    event: I8

    @staticmethod
    def of(pairs: Sequence[tuple[Half, Half]]) -> Matched:
        """These pairs."""
        number: dict[int, int] = {}
        records: list[LogitColumns] = []
        record: list[int] = []
        event: list[int] = []
        for arm in zip(*pairs, strict=True):
            for half in arm:
                columns = half.columns
                at = number.setdefault(id(columns), len(records))
                if at == len(records):
                    records.append(columns)
                record.append(at)
                event.append(half.index)
        return Matched(records, np.array(record).reshape(2, -1), np.array(event).reshape(2, -1))

    @property
    def n(self) -> int:
        """Number of pairs."""
        return int(self.record.shape[1])


@dataclass(frozen=True, slots=True)
class Answers:
    """Both arms of n pairs, every column (2, n): what scoring reads of an answer beside lists and tokens."""

    records: Sequence[LogitColumns]
    record: I8
    """Which of the records holds the answer."""
    start: I8
    """First position, in its record."""
    length: I8
    first_entry: I8
    k: I8
    terms: NDArray[Any]
    """(3, 2, n): definition, kind, identity. Answers are comparable if all three are equal."""
    source: NDArray[Any]
    ended: NDArray[Any]
    eta: F8


@dataclass(frozen=True, slots=True)
class Tokens:
    """The first tokens that both arms of some of n pairs emitted, one pair after the other.

    `of` (2, …): the tokens. `first` (n,): where each pair's begin.
    """

    of: I4 | I8
    first: I8


def answers(matched: Matched) -> Answers:
    """Gathered from all records at once: halves mostly come many from one."""
    records, event = matched.records, matched.event
    if len(records) > 1:
        sizes = np.array([columns.n for columns in records], dtype=np.int64)
        event = event + (np.cumsum(sizes) - sizes).take(matched.record)

    def gathered(*columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """(columns, 2, n): each given record by record."""
        flat = np.concatenate(list(chain.from_iterable(columns)))
        return flat.reshape(len(columns), -1).take(event, axis=1)

    start, end, first_entry = gathered(
        [columns.offsets[:-1] for columns in records],
        [columns.offsets[1:] for columns in records],
        [columns.entry_offsets[:-1] for columns in records],
    )
    codes = gathered(*([getattr(columns, name) for columns in records] for name in _CODES))
    return Answers(
        records=records,
        record=matched.record,
        start=start,
        length=end - start,
        first_entry=first_entry,
        k=codes[3].astype(np.int64),
        terms=codes[:3],
        source=codes[4],
        ended=codes[5],
        eta=gathered([columns.eta for columns in records])[0],
    )


def tokens(of: Answers, rows: I8, lengths: I8) -> Tokens:
    """The first `lengths` emitted tokens of these pairs."""
    parts: list[NDArray[Any]] = [
        columns.tokens[part]
        for arm in _pieces(of, rows, of.start.take(rows, axis=1), lengths)
        for columns, part in arm
    ]
    first = np.zeros(of.start.shape[1], dtype=np.int64)
    first[rows] = np.cumsum(lengths) - lengths
    of_arms: I4 | I8 = np.concatenate(parts).reshape(2, -1)
    return Tokens(of_arms, first)


def sent(of: Answers, emitted: Tokens, rows: I8, stretches: I8) -> Sent:
    """The first positions of several pairs side by side; shorter lists padded with entries not listed.

    More positions follow, up to a multiple of ALIGNED: the same in both arms, and nobody's.
    """
    starts = np.cumsum(stretches) - stretches

    def emitted_at(arms: I8, positions: I8) -> I4 | I8:
        row = np.searchsorted(starts, positions, side="right") - 1
        return emitted.of[arms, emitted.first.take(rows.take(row)) + (positions - starts.take(row))]

    widths = of.k.take(rows, axis=1)
    # One row at least, so that an answer that lists nothing has something to be invalid for.
    widest = max(1, int(widths.max()))
    pieces = _pieces(of, rows, of.first_entry.take(rows, axis=1), stretches * widths)
    kind = np.result_type(*{columns.top_ids.dtype for arm in pieces for columns, _ in arm})
    size = int(starts[-1] + stretches[-1])
    shape = (2, widest, -(-size // ALIGNED) * ALIGNED)
    ids, (logprobs, room) = np.empty(shape, dtype=kind), rooms(shape)
    for arm in (0, 1):
        some_ids = [columns.top_ids[part] for columns, part in pieces[arm]]
        _lay(some_ids, widths[arm], stretches, ids[arm, :, :size], NOT_LISTED)
        some_logprobs = [columns.top_logprobs[part] for columns, part in pieces[arm]]
        _lay(some_logprobs, widths[arm], stretches, logprobs[arm, :, :size], -np.inf)
    if size < shape[2]:
        # What fills up the last columns is as good as any list.
        ids[:, :, size:] = np.arange(widest)[:, None]
        logprobs[:, :, size:] = -0.5 - np.arange(widest)[:, None]
    return Sent(ids, logprobs, room, emitted_at)


def _lay(parts: Sequence[NDArray[Any]], widths: I8, stretches: I8, to: NDArray[Any], none: float) -> None:
    """Flat lists of these widths into a matrix (k, T), padded with `none`."""
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    k = int(widths[0])
    if (widths == k).all():
        to[:k] = flat.reshape(-1, k).T if k else 0
        if k < len(to):
            to[k:] = none
        return
    to[:] = none
    column = entry = 0
    for k, stretch in zip(widths.tolist(), stretches.tolist(), strict=True):
        to[:k, column : column + stretch] = flat[entry : entry + k * stretch].reshape(stretch, k).T
        column, entry = column + stretch, entry + k * stretch


def _pieces(of: Answers, rows: I8, first: I8, sizes: I8) -> list[list[tuple[LogitColumns, slice]]]:
    """What these rows of each arm hold from `first` (2, rows) on, record by record.

    One piece where answers stand side by side.
    """
    record, ends = of.record.take(rows, axis=1), first + sizes
    last = (record[:, 1:] != record[:, :-1]) | (first[:, 1:] != ends[:, :-1])
    if not last.any():
        bounds = zip(record[:, 0].tolist(), first[:, 0].tolist(), ends[:, -1].tolist(), strict=True)
        return [[(of.records[which], slice(begin, end))] for which, begin, end in bounds]
    found = []
    for in_record, begins, finishes, row in zip(record, first, ends, last, strict=True):
        breaks = row.nonzero()[0]
        starts = np.concatenate(([0], breaks + 1))
        finish = finishes.take(np.concatenate((breaks, [len(rows) - 1])))
        parts = zip(
            in_record.take(starts).tolist(), begins.take(starts).tolist(), finish.tolist(), strict=True
        )
        found.append([(of.records[which], slice(begin, end)) for which, begin, end in parts])
    return found
