"""Which rows of evidence belong to which cells: sorted once, for everything that is added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pipeline.core.evidence import Evidence
from schemas.columns import I8, Bool

_SHORT: Final = 1 << 31
"""Integers below it take 32 bits."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of n rows: row `rows[i]` is the i-th, and the `places[rows[i]]` is i."""

    rows: I8
    places: I8

    @staticmethod
    def of_log(n: int) -> Order:
        """The order in which rows stand."""
        as_they_stand = np.arange(n)
        return Order(as_they_stand, as_they_stand)

    @staticmethod
    def by(rows: I8) -> Order:
        """These rows, in this order."""
        places = np.empty_like(rows)
        places[rows] = np.arange(len(rows))
        return Order(rows, places)


@dataclass(frozen=True, slots=True)
class Members:
    """Rows by group: `rows[starts[i] : starts[i + 1]]` belong to group i, in some order of rows."""

    rows: I8
    starts: I8

    @property
    def sizes(self) -> I8:
        """Number of rows of each group."""
        return np.diff(self.starts, append=len(self.rows))

    def only(self, groups: Bool) -> Members:
        """Those of some of the groups."""
        sizes = self.sizes
        kept = sizes[groups]
        return Members(self.rows[np.repeat(groups, sizes)], np.cumsum(kept) - kept)


@dataclass(frozen=True, slots=True)
class Claims:
    """Cells that rows claim, by bucket, population and label; `members` has a group for each."""

    members: Members
    bucket: I8
    population: I8
    label: I8
    """Which of all dimensions' values, one dimension after the other."""
    widths: tuple[int, ...]
    """Number of values of each dimension."""

    @property
    def is_first(self) -> Bool:
        """Whether a cell is one of the first dimension, which carries the totals."""
        return self.label < self.widths[0]

    def in_log_order(self, cells: I8) -> I8:
        """These cells by first row, within a row by dimension: the order in which they are claimed."""
        rows, starts = self.members.rows, self.members.starts
        first = np.minimum.reduceat(rows, starts)[cells]
        return cells[np.lexsort((self.label[cells], first))]

    def only(self, cells: Bool) -> Claims:
        """Those of some of the cells."""
        return Claims(
            self.members.only(cells),
            self.bucket[cells],
            self.population[cells],
            self.label[cells],
            self.widths,
        )

    def homes(self, slots: I8, n: int, none: int) -> I8:
        """(n,) each row's slot in the first dimension, where its totals count; `none` for none."""
        homes = np.full(n, none, dtype=np.int64)
        sizes = self.members.sizes
        first = np.repeat(self.is_first, sizes)
        homes[self.members.rows[first]] = np.repeat(slots, sizes)[first]
        return homes


def claims_of(evidence: Evidence, bucket: I8, order: Order) -> Claims:
    """Who claims what in which bucket (n,), numbered from 0; the rows of a cell stand in this order."""
    widths = np.array([len(dimension.values) for dimension in evidence.dimensions], dtype=np.int64)
    per_population = int(widths.sum())
    per_bucket = per_population * len(evidence.populations)
    codes = np.array([dimension.codes for dimension in evidence.dimensions])
    keys = codes + (np.cumsum(widths) - widths)[:, None]
    keys += bucket * per_bucket + evidence.population * per_population
    places = np.broadcast_to(order.places, keys.shape)
    if int(codes.min()) < 0:
        member = codes >= 0
        keys, places = keys[member], places[member]
    domain = (int(bucket.max()) + 1) * per_bucket
    members, keys = grouped(keys.ravel(), domain, places.ravel(), order)
    number, rest = np.divmod(keys, per_bucket)
    population, label = np.divmod(rest, per_population)
    return Claims(members, number, population, label, tuple(widths.tolist()))


def grouped(keys: I8, domain: int, places: I8, order: Order) -> tuple[Members, I8]:
    """Rows at these places by key, 0 ≤ key < domain, and the distinct keys, ascending."""
    bits = len(order.rows).bit_length()
    both = sorted_integers((keys << bits) | places, domain << bits)
    keys = both >> bits
    starts = starts_of_runs(keys)
    return Members(order.rows[both & ((1 << bits) - 1)], starts), keys[starts]


def sorted_integers(values: I8, end: int) -> I8:
    """Ascending; 0 ≤ value < end. Short ones are sorted in half of the time."""
    if end <= _SHORT:
        return np.sort(values.astype(np.int32)).astype(np.int64)
    return np.sort(values)


def starts_of_runs(values: I8) -> I8:
    """Where every run of equal values starts."""
    starts = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=starts[1:])
    return np.flatnonzero(starts)
