"""Answers out of the records they came in, laid side by side.

Everything here stands for both arms at once: what is (2, n) has the baselines' answers in row 0 and those
compared with them in row 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.divergence.reading import Sent
from schemas.columns import F8, I4, I8, NOT_LISTED, LogitColumns


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
        halves = [half for arm in zip(*pairs, strict=True) for half in arm]
        columns = [half.columns for half in halves]
        own = list(map(id, columns))
        by_id = dict(zip(own, columns, strict=True))
        number = {each: at for at, each in enumerate(by_id)}
        record = np.array([number[each] for each in own], dtype=np.int64)
        event = np.array([half.index for half in halves], dtype=np.int64)
        return Matched(list(by_id.values()), record.reshape(2, -1), event.reshape(2, -1))

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
    terms: I8
    """(3, 2, n): definition, kind, identity. Answers are comparable if all three are equal."""
    source: I8
    ended: I8
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

    def column(name: str, part: slice = slice(None)) -> NDArray[Any]:
        parts = [getattr(columns, name)[part] for columns in records]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).take(event)

    start = column("offsets", slice(-1))
    return Answers(
        records=records,
        record=matched.record,
        start=start,
        length=column("offsets", slice(1, None)) - start,
        first_entry=column("entry_offsets", slice(-1)),
        k=column("k").astype(np.int64),
        terms=np.array([column(name) for name in ("definition", "kind", "identity")], dtype=np.int64),
        source=column("source"),
        ended=column("ended"),
        eta=column("eta"),
    )


def tokens(of: Answers, rows: I8, lengths: I8) -> Tokens:
    """The first `lengths` emitted tokens of these pairs."""
    parts: list[NDArray[Any]] = [
        columns.tokens[part]
        for arm in (0, 1)
        for columns, part in _pieces(of, arm, rows, of.start[arm].take(rows), lengths)
    ]
    first = np.zeros(of.start.shape[1], dtype=np.int64)
    first[rows] = np.cumsum(lengths) - lengths
    of_arms: I4 | I8 = np.concatenate(parts).reshape(2, -1)
    return Tokens(of_arms, first)


def sent(of: Answers, emitted: Tokens, rows: I8, stretches: I8) -> Sent:
    """The first positions of several pairs side by side; shorter lists padded with entries not listed."""
    starts = np.cumsum(stretches) - stretches

    def emitted_at(arms: I8, positions: I8) -> I4 | I8:
        row = np.searchsorted(starts, positions, side="right") - 1
        return emitted.of[arms, emitted.first.take(rows.take(row)) + (positions - starts.take(row))]

    widths = of.k.take(rows, axis=1)
    # One row at least, so that an answer that lists nothing has something to be invalid for.
    widest = max(1, int(widths.max()))
    pieces = [
        _pieces(of, arm, rows, of.first_entry[arm].take(rows), stretches * widths[arm]) for arm in (0, 1)
    ]
    kind = np.result_type(*{columns.top_ids.dtype for arm in pieces for columns, _ in arm})
    ids = np.empty((2, widest, int(starts[-1] + stretches[-1])), dtype=kind)
    logprobs = np.empty(ids.shape)
    for arm in (0, 1):
        some_ids = [columns.top_ids[part] for columns, part in pieces[arm]]
        _lay(some_ids, widths[arm], stretches, ids[arm], NOT_LISTED)
        some_logprobs = [columns.top_logprobs[part] for columns, part in pieces[arm]]
        _lay(some_logprobs, widths[arm], stretches, logprobs[arm], -np.inf)
    return Sent(ids, logprobs, emitted_at)


def _lay(parts: Sequence[NDArray[Any]], widths: I8, stretches: I8, to: NDArray[Any], none: float) -> None:
    """Flat lists of these widths into a matrix (k, T), padded with `none`."""
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    k = int(widths[0])
    if (widths == k).all():
        to[:k] = flat.reshape(-1, k).T if k else 0
        to[k:] = none
        return
    to[:] = none
    column = entry = 0
    for k, stretch in zip(widths.tolist(), stretches.tolist(), strict=True):
        to[:k, column : column + stretch] = flat[entry : entry + k * stretch].reshape(stretch, k).T
        column, entry = column + stretch, entry + k * stretch


def _pieces(of: Answers, arm: int, rows: I8, first: I8, sizes: I8) -> list[tuple[LogitColumns, slice]]:
    """What these rows hold from `first` on, record by record: one piece where answers stand side by side."""
    record, ends = of.record[arm].take(rows), first + sizes
    breaks = ((record[1:] != record[:-1]) | (first[1:] != ends[:-1])).nonzero()[0].tolist()
    begins, finishes = [0, *(each + 1 for each in breaks)], [*breaks, len(rows) - 1]
    return [
        (of.records[which], slice(begin, end))
        for which, begin, end in zip(
            record[begins].tolist(), first[begins].tolist(), ends[finishes].tolist(), strict=True
        )
    ]
