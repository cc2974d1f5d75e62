"""Answers out of the records they came in, laid side by side."""

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
class Answers:
    """One arm of n pairs, every column (n,): what scoring reads of an answer beside lists and tokens."""

    records: Sequence[LogitColumns]
    record: I8
    """Which of the records holds the answer."""
    start: I8
    """First position, in its record."""
    length: I8
    first_entry: I8
    k: I8
    terms: I8
    """(3, n): definition, kind, identity. Answers are comparable if all three are equal."""
    source: I8
    ended: I8
    eta: F8


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of n pairs, with the first emitted tokens of its answers, one answer after the other.

    `first` (n,): where each answer's tokens begin.
    """

    of: Answers
    tokens: I4 | I8
    first: I8


def answers(halves: Sequence[Half]) -> Answers:
    """Gathered from all records at once: halves mostly come many from one."""
    of_half = [half.columns for half in halves]
    records = list({id(columns): columns for columns in of_half}.values())
    record = np.zeros(len(halves), dtype=np.int64)
    event = np.array([half.index for half in halves], dtype=np.int64)
    if len(records) > 1:
        number = {id(columns): at for at, columns in enumerate(records)}
        record = np.array([number[id(columns)] for columns in of_half], dtype=np.int64)
        sizes = np.array([columns.n for columns in records], dtype=np.int64)
        event += (np.cumsum(sizes) - sizes)[record]

    def column(name: str, part: slice = slice(None)) -> NDArray[Any]:
        parts = [getattr(columns, name)[part] for columns in records]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).take(event)

    start = column("offsets", slice(-1))
    return Answers(
        records=records,
        record=record,
        start=start,
        length=column("offsets", slice(1, None)) - start,
        first_entry=column("entry_offsets", slice(-1)),
        k=column("k").astype(np.int64),
        terms=np.array([column(name) for name in ("definition", "kind", "identity")], dtype=np.int64),
        source=column("source"),
        ended=column("ended"),
        eta=column("eta"),
    )


def arm(of: Answers, rows: I8, lengths: I8) -> Arm:
    """With the first `lengths` emitted tokens of these rows' answers."""
    parts: list[NDArray[Any]] = [
        columns.tokens[part] for columns, part in _pieces(of, rows, of.start[rows], lengths)
    ]
    first = np.zeros(len(of.start), dtype=np.int64)
    first[rows] = np.cumsum(lengths) - lengths
    return Arm(of, parts[0] if len(parts) == 1 else np.concatenate(parts), first)


def sent(arms: tuple[Arm, Arm], rows: I8, stretches: I8) -> Sent:
    """The first positions of several pairs side by side; shorter lists padded with entries not listed."""
    starts = np.cumsum(stretches) - stretches

    def emitted(of_arms: I8, positions: I8) -> I4 | I8:
        row = np.searchsorted(starts, positions, side="right") - 1
        at = arms[0].first.take(rows.take(row)) + (positions - starts.take(row))
        return np.where(of_arms == 0, arms[0].tokens.take(at), arms[1].tokens.take(at))

    widths = [arm.of.k.take(rows) for arm in arms]
    # One row at least, so that an answer that lists nothing has something to be invalid for.
    widest = max(1, *(int(width.max()) for width in widths))
    parts = [_lists(arm.of, rows, stretches, width) for arm, width in zip(arms, widths, strict=True)]
    kinds = [np.result_type(*(part[which][0] for part in parts)) for which in (0, 1)]
    ids = np.empty((2, widest, int(starts[-1] + stretches[-1])), dtype=kinds[0])
    logprobs = np.empty(ids.shape, dtype=kinds[1])
    for arm, (some_ids, some_logprobs) in enumerate(parts):
        _lay(some_ids, widths[arm], stretches, ids[arm], NOT_LISTED)
        _lay(some_logprobs, widths[arm], stretches, logprobs[arm], -np.inf)
    return Sent(ids, logprobs, emitted)


def _lists(of: Answers, rows: I8, stretches: I8, widths: I8) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """The lists of these rows' first positions, flat: ids and log-probabilities, in pieces."""
    pieces = _pieces(of, rows, of.first_entry.take(rows), stretches * widths)
    return (
        [columns.top_ids[part] for columns, part in pieces],
        [columns.top_logprobs[part] for columns, part in pieces],
    )


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


def _pieces(of: Answers, rows: I8, first: I8, sizes: I8) -> list[tuple[LogitColumns, slice]]:
    """What these rows hold from `first` on, record by record: one piece where answers stand side by side."""
    record, ends = of.record[rows], first + sizes
    breaks = ((record[1:] != record[:-1]) | (first[1:] != ends[:-1])).nonzero()[0]
    begins = np.concatenate([[0], breaks + 1])
    finishes = np.concatenate([breaks, [len(rows) - 1]])
    return [
        (of.records[which], slice(begin, end))
        for which, begin, end in zip(
            record[begins].tolist(), first[begins].tolist(), ends[finishes].tolist(), strict=True
        )
    ]
