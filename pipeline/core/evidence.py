"""Evidence: rows of events or pairs, as columns, each with the second, population and cells it belongs to.

A row is either full (it belongs to every cell that its labels name) or a mere count (late, duplicate,
unmatched, …), which belongs to the cell `all` of its population only. Rows stand in log order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from pipeline.core.cells import CONTEXT_LIMITS, UNKNOWN
from pipeline.core.texts import Texts
from schemas.buckets import Population
from schemas.columns import ABSENT, I8, Bool

SECOND_US: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Dimension:
    """One way to divide rows: row i has the value `values[codes[i]]`; code −1 is no member."""

    name: str
    values: Sequence[str]
    codes: I8


@dataclass(frozen=True, slots=True)
class Evidence:
    """n rows. Everything is an integer; arrays have length n."""

    second: I8
    populations: Sequence[Population | None]
    population: I8
    """Index into `populations`."""
    dimensions: Sequence[Dimension]
    """Cells of full rows, in the order in which a row claims them; the first carries the totals."""
    counters: Mapping[str, I8] = field(default_factory=dict)
    """Added to every cell of a row."""
    totals: Mapping[str, I8] = field(default_factory=dict)
    """Added to the cell `all` only."""
    measures: Mapping[str, tuple[I8, Bool]] = field(default_factory=dict)
    """Values, and which rows have one."""
    ids: Sequence[bytes] | None = None
    """With `worst`: what a row is called."""
    worst: tuple[I8, Bool] | None = None
    """Score by which a cell keeps its worst rows, and which rows have one."""

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.second)

    def only(self, rows: Bool) -> Evidence:
        """Some of the rows."""
        if rows.all():
            return self
        ids = None if self.ids is None else list(compress(self.ids, rows.tolist()))
        return Evidence(
            second=self.second[rows],
            populations=self.populations,
            population=self.population[rows],
            dimensions=[Dimension(each.name, each.values, each.codes[rows]) for each in self.dimensions],
            counters={name: counts[rows] for name, counts in self.counters.items()},
            totals={name: counts[rows] for name, counts in self.totals.items()},
            measures={name: (values[rows], has[rows]) for name, (values, has) in self.measures.items()},
            ids=ids,
            worst=None if self.worst is None else (self.worst[0][rows], self.worst[1][rows]),
        )


def constant(name: str, value: str, n: int) -> Dimension:
    """A dimension with one value, whose members are all n rows."""
    return Dimension(name, (value,), np.zeros(n, dtype=np.int64))


def texts(name: str, labels: Texts) -> Dimension:
    """A dimension of labels; absent and empty ones have the value `unknown`."""
    values, codes = labels.values, labels.codes
    silent = codes == ABSENT
    if "" in values:
        silent |= codes == values.index("")
    if not silent.any():
        return Dimension(name, values, codes)
    if UNKNOWN not in values:
        values = (*values, UNKNOWN)
    return Dimension(name, values, np.where(silent, values.index(UNKNOWN), codes))


def crossed(name: str, parts: Sequence[Dimension]) -> Dimension:
    """The product of dimensions that have every row as a member; values joined by |."""
    combined = np.zeros(len(parts[0].codes), dtype=np.int64)
    for part in parts:
        combined = combined * len(part.values) + part.codes
    _, first, codes = np.unique(combined, return_index=True, return_inverse=True)
    values = tuple("|".join(part.values[int(part.codes[row])] for part in parts) for row in first.tolist())
    return Dimension(name, values, codes.astype(np.int64))


def members(dimension: Dimension, rows: Bool) -> Dimension:
    """The same dimension with only these rows as members."""
    if rows.all():
        return dimension
    return Dimension(dimension.name, dimension.values, np.where(rows, dimension.codes, -1))


def contexts(input_tokens: I8, node: Dimension) -> tuple[list[Dimension], list[Dimension]]:
    """Nested context classes, and node × nested context class."""
    nested, crossed_with_node = [], []
    for limit in CONTEXT_LIMITS:
        over = input_tokens > limit
        if not over.any():
            break
        nested.append(members(constant("context", f">{limit}", len(over)), over))
        values = tuple(f"{name}|>{limit}" for name in node.values)
        crossed_with_node.append(members(Dimension("node_context", values, node.codes), over))
    return nested, crossed_with_node


def sampling(temperature: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Dimension:
    """greedy = temperature 0; sampled; unknown where the temperature is absent (below 0)."""
    codes = np.where(temperature < 0, 2, np.where(temperature == 0, 0, 1)).astype(np.int64)
    return Dimension("sampling", ("greedy", "sampled", UNKNOWN), codes)


def seconds_of(event_us: I8) -> I8:
    """The one-second bucket of each time."""
    return event_us // SECOND_US


def or_none(number: int) -> int | None:
    """A number that may be ABSENT."""
    return None if number == ABSENT else number
