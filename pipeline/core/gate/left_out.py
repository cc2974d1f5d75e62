"""What a canary gets no more: ejected nodes and excluded segments, and the evidence left without them.

A cell of what is left out judges nothing from then on, and is taken out of the cells that hold it: exactly
for nodes, contexts and nodes' contexts, which lie inside each other cell by cell. Of requests the strata say
exactly what segments of their kinds (request type, sampling, hardware, context) have in common: it is taken
out of the cells of these kinds, and of the whole and the contexts as long as no node and no region is left
out beside them. Pairs have no strata: segments of one other kind, which exclude each other, are taken out of
the whole, and of nothing where two kinds are left out. What no cell says (how much of a segment a node or
region had) stays in until routers keep the traffic away. Evidence that stays can hold or trip, never promote.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from msgspec import Struct

from pipeline.core.cells import ALL, CONTEXT_LIMITS, CONTEXT_VALUES, context_class, node_and_context
from pipeline.core.gate.windows import Scope
from schemas.buckets import Cell

Part: TypeAlias = tuple[Cell, int]
"""A cell, and whether it is added (1) or taken out (−1)."""
_EVERYTHING: Final = -1
"""A context limit that every length is over."""
_FLOORS: Final = {context_class(limit + 1): limit for limit in (_EVERYTHING, *CONTEXT_LIMITS)}
"""Exclusive context class → the limit that all of it is over."""
_NODES: Final = frozenset({"node", "node_context"})
_NODES_AND_CONTEXTS: Final = frozenset({"node", "context", "node_context"})
_STRATUM: Final = ("request_type", "context_class", "sampling", "cache_hit", "hardware")
"""Parts of a stratum's value, in order."""
_TOLD_BY_STRATA: Final = frozenset({"request_type", "sampling", "hardware"})
_TOLD_OF_ALL_ARMS: Final = _TOLD_BY_STRATA | {ALL, "context", "stratum"}


class Exclusion(Struct, frozen=True):
    """One node or segment, left out from second `since` on."""

    dimension: str
    value: str
    since: int


@dataclass(frozen=True, slots=True)
class _Index:
    """Exclusions as a scope looks them up: thousands of scopes ask every second, of dozens of exclusions."""

    over: dict[str | None, int]
    """Node (None: every one) → the least context limit over which its traffic is left out."""
    others: frozenset[Scope]
    """Segments of other kinds."""
    kind: str | None
    """The dimension of all exclusions, where it is one whose values exclude each other."""
    strata_tell: bool
    """Whether strata say all that the whole and the contexts lose; else the cells of nodes do."""

    @classmethod
    def of(cls, exclusions: Sequence[Exclusion]) -> _Index:
        over: dict[str | None, int] = {}
        others: set[Scope] = set()
        for one in exclusions:
            place = place_of((one.dimension, one.value))
            if place is None:
                others.add((one.dimension, one.value))
            else:
                over[place.node] = min(place.limit, over.get(place.node, place.limit))
        kinds = {dimension for dimension, _ in others}
        kind = next(iter(kinds)) if len(kinds) == 1 and not over else None
        told = bool(others) and kinds <= _TOLD_BY_STRATA and not over.keys() - {None}
        return cls(over, frozenset(others), kind, told)

    def covers(self, scope: Scope) -> bool:
        """Whether a scope lies wholly inside what is left out."""
        dimension, value = scope
        if dimension == "stratum":
            return self.covers_stratum(value)
        held = place_of(scope)
        if held is None:
            return scope in self.others
        widest = self.widest(held.node)
        return widest is not None and held.limit >= widest

    def tells_all_arms(self, dimension: str) -> bool:
        """Whether cells of requests say exactly what those of this dimension lose, no node being left out."""
        if not self.over and not self.others:
            return True
        if self.kind is not None and not self.strata_tell:
            return dimension in (ALL, self.kind)
        return (self.strata_tell or not self.others) and dimension in _TOLD_OF_ALL_ARMS

    def widest(self, node: str | None) -> int | None:
        """The least context limit over which this node's traffic is left out; None: none of it is."""
        everywhere = self.over.get(None)
        own = everywhere if node is None else self.over.get(node)
        if own is None or everywhere is None:
            return everywhere if own is None else own
        return min(own, everywhere)

    def covers_stratum(self, value: str) -> bool:
        """The same of a stratum."""
        parts = value.split("|")
        if len(parts) != len(_STRATUM):
            return False
        if not self.others.isdisjoint(zip(_STRATUM, parts, strict=True)):
            return True
        widest = self.over.get(None)
        return widest is not None and _FLOORS.get(parts[1], _EVERYTHING) >= widest


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Everything that is left out of a generation, in the order in which it was."""

    exclusions: tuple[Exclusion, ...] = ()
    _indexes: dict[int, _Index] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By how many of the exclusions hold, the earliest first; as far as asked for."""
    _sinces: tuple[int, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sinces", tuple(sorted(one.since for one in self.exclusions)))

    def covers(self, scope: Scope) -> bool:
        """Whether nothing of this scope is left."""
        return bool(self.exclusions) and self._index(len(self.exclusions)).covers(scope)

    def of_any_node(self) -> LeftOut:
        """Without what is left out of single nodes: classes of traffic, which all arms have."""
        return LeftOut(tuple(one for one in self.exclusions if one.dimension not in _NODES))

    def parts(self, cell: Cell, second: int, *, strata: bool = False) -> Iterator[Part]:
        """What a cell of an arm in this second adds to, and what it is taken out of.

        `strata`: its family has them (requests).
        """
        active = self._index(bisect_right(self._sinces, second))
        scope = (cell.dimension, cell.value)
        if not active.covers(scope):
            yield cell, 1
        for dimension, value in _taken_from(scope, active, strata):
            if not active.covers((dimension, value)):
                yield Cell(dimension, value, cell.counters, cell.measures, []), -1

    def tells_all_arms(self, dimension: str, second: int) -> bool:
        """Whether `parts` leaves nothing that is left out in a second's cells of requests of a dimension.
        Of an arm that nobody keeps the traffic away from, the rest would stay for good."""
        return self._index(bisect_right(self._sinces, second)).tells_all_arms(dimension)

    def begins(self, apart_from: str | None) -> int:
        """The second from which the last of them is left out, those of one dimension aside; −1: none is."""
        return max((one.since for one in self.exclusions if one.dimension != apart_from), default=-1)

    def needed(self, *, strata: bool = False) -> frozenset[str]:
        """Dimensions whose cells say what has to be taken out. `strata` as above."""
        found = {one.dimension for one in self.exclusions}
        if found & _NODES_AND_CONTEXTS:
            found |= {"node", "node_context"}
        if found and strata:
            found.add("stratum")
        return frozenset(found)

    def _index(self, active: int) -> _Index:
        found = self._indexes.get(active)
        if found is None:
            earliest = sorted(self.exclusions, key=lambda one: one.since)[:active]
            found = self._indexes[active] = _Index.of(earliest)
        return found


NOTHING: Final = LeftOut()


def _taken_from(scope: Scope, active: _Index, strata: bool) -> Iterator[Scope]:
    """The scopes that a cell is to be taken out of."""
    dimension, value = scope
    if dimension == "stratum":
        if strata and active.covers_stratum(value):
            yield from _around(value, whole=active.strata_tell)
        return
    held = place_of(scope)
    if held is None:
        told = strata and dimension in _TOLD_BY_STRATA
        if dimension == active.kind and scope in active.others and not told:
            yield ALL, ""
    elif held.node is not None:
        yield from _around_node(held.node, held.limit, active, whole=not (strata and active.strata_tell))


def _around(stratum: str, *, whole: bool) -> Iterator[Scope]:
    """The scopes that hold all of a stratum; `whole`: the roll-out and the contexts, too."""
    parts = dict(zip(_STRATUM, stratum.split("|"), strict=True))
    for dimension in sorted(_TOLD_BY_STRATA):
        yield dimension, parts[dimension]
    if whole:
        yield ALL, ""
        floor = _FLOORS.get(parts["context_class"], _EVERYTHING)
        for limit in CONTEXT_LIMITS:
            if floor >= limit:
                yield "context", f">{limit}"


def _around_node(node: str, held: int, active: _Index, *, whole: bool) -> Iterator[Scope]:
    """The same of the cell of a node's prompts over `held` tokens.

    Of every node what is left out is a nested context class, the widest that is excluded there: its cell is
    exactly what the scopes around it lose; what narrower ones lose is the cell of the narrower class.
    """
    widest = active.widest(node)
    if widest is None or held < widest:
        return
    if held == widest:
        if whole:
            yield ALL, ""
        yield "node", node
    for limit in CONTEXT_LIMITS:
        if max(widest, limit) == held:
            if whole:
                yield "context", f">{limit}"
            yield "node_context", f"{node}|>{limit}"


@dataclass(frozen=True, slots=True)
class Place:
    """A node (None: every one) and the context limit over which it is meant."""

    node: str | None
    limit: int


def place_of(scope: Scope) -> Place | None:
    """Of a scope of nodes and contexts; None of any other, and of a value that no worker writes."""
    dimension, value = scope
    if dimension == "node":
        return Place(value, _EVERYTHING)
    node, nested = node_and_context(value) if dimension == "node_context" else ("", value)
    if dimension not in ("context", "node_context") or nested not in CONTEXT_VALUES:
        return None
    return Place(node if dimension == "node_context" else None, int(nested[1:]))
