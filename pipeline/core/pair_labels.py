"""What pairs say of themselves, for many pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.divergence import Matched
from pipeline.core.evidence import Dimension
from pipeline.core.formed import Pair, Pairs
from pipeline.core.groups import Arrival, Halves
from pipeline.core.texts import Texts, joined
from schemas.buckets import Population
from schemas.columns import ABSENT, F8, I8, U1, Bool
from schemas.events import ARMS

_VERSIONS = ("model_version", "prompt_version", "data_version", "system_version")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the halves of n pairs stand: `record`, `at` (2, n), the baselines' in row 0."""

    records: list[Halves]
    record: I8
    at: I8

    @staticmethod
    def of(pairs: Sequence[Pairs | Pair]) -> Places:
        """Of these pairs, in order."""
        arrivals: list[Arrival] = []
        for each in pairs:
            arrivals += each.baselines if isinstance(each, Pairs) else (each.baseline,)
        for each in pairs:
            arrivals += each.others if isinstance(each, Pairs) else (each.other,)
        records = [record for record, _ in arrivals]
        number = {record: at for at, record in enumerate(dict.fromkeys(records))}
        return Places(
            list(number),
            np.array(list(map(number.__getitem__, records)), dtype=np.int64).reshape(2, -1),
            np.array([at for _, at in arrivals], dtype=np.int64).reshape(2, -1),
        )

    @property
    def matched(self) -> Matched:
        """For scoring."""
        return Matched([record.columns for record in self.records], self.record, self.at)


class PairLabels:
    """n pairs; arrays and Texts have length n. The compared half speaks for both, unless said otherwise."""

    def __init__(self, places: Places) -> None:
        """Of the pairs that stand there; at least one."""
        self._records = places.records
        sizes = np.array([record.columns.n for record in places.records], dtype=np.int64)
        baseline, other = (np.cumsum(sizes) - sizes).take(places.record) + places.at
        versions = {name: self._texts(name) for name in _VERSIONS}
        nodes, generations = self._texts("node"), self._column("generation").astype(np.int64)
        self.arm: I8 = self._column("arm")[other].astype(np.int64)
        self.rollout = self._texts("rollout")[other]
        self.generation: I8 = np.where(
            generations[other] == ABSENT, generations[baseline], generations[other]
        )
        """The baseline's where the other half says none; ABSENT if neither does."""
        self.differs: I8 = np.zeros(len(other), dtype=np.int64)
        """Bit mask of the version dimensions in which the halves differ."""
        for bit, name in enumerate(_VERSIONS):
            codes = versions[name].codes
            self.differs |= (codes[baseline] != codes[other]).astype(np.int64) << bit
        self.model_version = versions["model_version"][other]
        self.baseline_version = versions["model_version"][baseline]
        self.node, self.baseline_node = nodes[other], nodes[baseline]
        self.request_type = self._texts("request_type")[other]
        self.hardware = self._texts("hardware")[other]
        self.region = self._texts("region")[other]
        self.temperature: F8 = self._column("temperature")[other]
        self.input_tokens: I8 = self._column("input_tokens")[other].astype(np.int64)
        self.signature: U1 = self._column("signature")[other]
        self.pair_id: U1 = self._column("pair_id")[other]
        self.has_pair_id: Bool = self._column("has_pair_id")[other]
        event_us = np.concatenate([record.event_us for record in self._records])
        self.event_us: I8 = np.maximum(event_us[baseline], event_us[other])
        """Later of the two completions."""
        self.populations, self.population = self._populations()
        self.first_offset, self.first_position = self._first(baseline, other)
        """Where the half stands that came first."""

    def names(self, rows: I8) -> list[bytes]:
        """What these pairs are called: by their pair id, else by their signature."""
        named = self.has_pair_id[rows, None]
        return sixteen_bytes(np.where(named, self.pair_id[rows], self.signature[rows]))

    def _texts(self, name: str) -> Texts:
        return joined([record.columns.labels[name] for record in self._records])

    def _column(self, name: str) -> Any:
        return np.concatenate([getattr(record.columns, name) for record in self._records])

    def _first(self, baseline: I8, other: I8) -> tuple[I8, I8]:
        sizes = [record.columns.n for record in self._records]
        offset = np.repeat([record.offset for record in self._records], sizes)
        position = np.concatenate([record.positions for record in self._records])
        same = offset[baseline] == offset[other]
        is_first = np.where(same, position[baseline] < position[other], offset[baseline] < offset[other])
        first = np.where(is_first, baseline, other)
        return offset[first], position[first]

    def _populations(self) -> tuple[list[Population], I8]:
        """The distinct populations, and each pair's index into them."""
        generations, generation = np.unique(self.generation, return_inverse=True)
        combined = self.rollout.codes * (len(self.model_version.values) + 1) + self.model_version.codes
        combined = ((combined * len(ARMS) + self.arm) << len(_VERSIONS)) + self.differs
        combined = combined * len(generations) + generation
        _, first, codes = np.unique(combined, return_index=True, return_inverse=True)
        described = zip(
            self.rollout[first].tolist(),
            self.generation[first].tolist(),
            self.arm[first].tolist(),
            self.model_version[first].tolist(),
            self.differs[first].tolist(),
            strict=True,
        )
        populations = [
            Population(rollout or "", ev.or_none(generation), ARMS[arm], version, differs)
            for rollout, generation, arm, version, differs in described
        ]
        return populations, codes

    def dimensions(self, rows: I8, full: Bool) -> list[Dimension]:
        """Cells, in the order in which one pair claims them: row i is pair `rows[i]` where `full`."""

        def texts(name: str, labels: Texts) -> Dimension:
            return ev.texts(name, labels[rows])

        node = texts("node", self.node)
        nested, node_nested = ev.contexts(self.input_tokens[rows], node)
        parts = (
            node,
            *nested,
            texts("request_type", self.request_type),
            texts("hardware", self.hardware),
            ev.sampling(self.temperature[rows]),
            texts("region", self.region),
            *node_nested,
        )
        return [ev.members(part, full) for part in parts]


def sixteen_bytes(rows: U1) -> list[bytes]:
    """The rows of an array (n, 16)."""
    found: list[bytes] = np.ascontiguousarray(rows).view("V16").ravel().tolist()
    return found
