"""All betting processes of one sequential rule, one a scope, and how they stand in `klaxon.state`. Pure.

Bits matter here: what is restored goes on exactly as what was never interrupted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pipeline.core.gate.windows import Scope
from pipeline.core.statistics.betting import CEILING, GRID, Bets, Growth, unspent
from pipeline.core.statistics.scopes import Weights, by_bytes, largest, weighted

SCOPES_KEPT: Final = 4_096
NAMES_KEPT_BYTES: Final = 300_000
"""Of all scopes, as JSON: a record of `klaxon.state` stays under 900 kB."""
_STAKES: Final = struct.Struct(f"<{len(GRID)}d")


@dataclass(slots=True)
class Processes:
    """Stakes per scope, with the scope's weight in the sum. They live as long as the generation."""

    weights: Weights
    bets: dict[Scope, Bets] = field(default_factory=dict)
    samples: dict[Scope, int] = field(default_factory=dict)
    """Values that were folded, per scope."""
    evidence: dict[Scope, float] = field(default_factory=dict)
    """E of each, as its stakes say."""
    silent: Callable[[Scope], bool] | None = None
    """Of what the canary gets no more: what was bet there counts no more, either. Set by `silence`."""
    left_out: int = 0
    """Buckets of scopes that found no room: they are judged as part of greater ones only."""
    _names_bytes: int = 0
    _silent: set[Scope] = field(default_factory=set)

    @classmethod
    def of(cls, levels: Sequence[str]) -> Processes:
        """None yet. `levels`: dimensions of the scopes."""
        return cls(Weights(tuple(levels)))

    def fold(self, buckets: Mapping[Scope, tuple[Growth, int]]) -> None:
        """One complete second: growth and number of values of each scope that has any."""
        self._appear(buckets)
        for scope, (growth, samples) in buckets.items():
            held = self.bets.get(scope)
            if held is None:
                self.left_out += 1
                continue
            held.fold(growth)
            self.samples[scope] += samples
            self.evidence[scope] = held.evidence

    def _appear(self, scopes: Iterable[Scope]) -> None:
        new = sorted((one for one in scopes if one not in self.bets), key=by_bytes)
        for scope in new:
            size = len(msgspec.json.encode(scope))
            if len(self.bets) >= SCOPES_KEPT or self._names_bytes + size > NAMES_KEPT_BYTES:
                continue
            self._take(scope, size)

    def _take(self, scope: Scope, size: int) -> None:
        self._names_bytes += size
        self.weights.appear((scope,))
        self.bets[scope] = Bets()
        self.samples[scope] = 0
        self.evidence[scope] = 0.0
        if self.silent is not None and self.silent(scope):
            self._silent.add(scope)

    def silence(self, silent: Callable[[Scope], bool] | None) -> None:
        """What the canary gets no more, from now on."""
        self.silent = silent
        self._silent = set() if silent is None else {scope for scope in self.bets if silent(scope)}

    @property
    def counting(self) -> Mapping[Scope, float]:
        """E of the scopes that are in the sum."""
        silent = self._silent
        if not silent:
            return self.evidence
        return {scope: held for scope, held in self.evidence.items() if scope not in silent}

    @property
    def total(self) -> float:
        """Σ weight · E: the evidence of the rule."""
        return weighted(self.weights.of, self.counting)

    @property
    def capital(self) -> float:
        """The evidence, and what is still to be staked: a supermartingale from 1 on (statistics.md §0.1)."""
        of = self.weights.of
        held = (
            of[scope] * (evidence + unspent(self.bets[scope].buckets))
            for scope, evidence in self.counting.items()
        )
        return math.fsum((self.weights.unspent, *held))

    def carrying(self, most: int) -> list[Scope]:
        """Scopes with the largest terms, the largest first."""
        return largest(self.weights.of, self.counting, most)

    def pack(self) -> tuple[tuple[Scope, ...], bytes, tuple[int, ...], tuple[int, ...]]:
        """Scopes in order of appearance; their stakes as little-endian float64; buckets; samples."""
        return (
            tuple(self.bets),
            b"".join(_STAKES.pack(*held.stakes) for held in self.bets.values()),
            tuple(held.buckets for held in self.bets.values()),
            tuple(self.samples.values()),
        )

    def unpack(
        self, scopes: Sequence[Scope], stakes: bytes, buckets: Sequence[int], samples: Sequence[int]
    ) -> None:
        """Go on with what `pack` told, into empty ones. Raises ValueError where it contradicts itself."""
        if not (len(stakes) == _STAKES.size * len(scopes) and len(buckets) == len(samples) == len(scopes)):
            raise ValueError("scopes, stakes, buckets and samples differ in number")
        for at, scope in enumerate(scopes):
            if scope[0] not in self.weights.levels or scope in self.bets:
                raise ValueError(f"{scope[0]} is no level of the rule, or stands twice")
            held = Bets(list(_STAKES.unpack_from(stakes, at * _STAKES.size)), buckets[at])
            if held.buckets < 0 or samples[at] < 0 or not all(0 <= stake <= CEILING for stake in held.stakes):
                raise ValueError("a stake or a count that no betting leads to")
            self._take(scope, len(msgspec.json.encode(scope)))
            self.bets[scope] = held
            self.samples[scope] = samples[at]
            self.evidence[scope] = self.bets[scope].evidence
