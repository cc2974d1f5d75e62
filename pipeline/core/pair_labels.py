"""What pairs say of themselves, for many pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.evidence import Dimension
from pipeline.core.formed import Pair
from pipeline.core.groups import Halves
from pipeline.core.texts import Texts, joined
from schemas.buckets import Population
from schemas.columns import ABSENT, F8, I8, Bool
from schemas.events import ARMS

_VERSIONS = ("model_version", "prompt_version", "data_version", "system_version")


class PairLabels:
    """n pairs; arrays and Texts have length n. The compared half speaks for both, unless said otherwise."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """Of these pairs, in order."""
        begins: dict[Halves, int] = {}
        rows = 0
        for pair in pairs:
            for record, _ in (pair.baseline, pair.other):
                if record not in begins:
                    begins[record] = rows
                    rows += record.columns.n
        self._records = list(begins)
        baseline = np.array([begins[record] + at for record, at in [pair.baseline for pair in pairs]])
        other = np.array([begins[record] + at for record, at in [pair.other for pair in pairs]])
        versions = {name: self._texts(name) for name in _VERSIONS}
        nodes, generations = self._texts("node"), self._column("generation").astype(np.int64)
        self.arm: I8 = np.array([pair.arm for pair in pairs], dtype=np.int64)
        self.rollout = self._texts("rollout")[other]
        self.generation: I8 = np.where(
            generations[other] == ABSENT, generations[baseline], generations[other]
        )
        """The baseline's where the other half says none; ABSENT if neither does."""
        self.differs: I8 = np.zeros(len(pairs), dtype=np.int64)
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
        self.populations, self.population = self._populations()
        self.first_offset, self.first_position = self._first(baseline, other)
        """Where the half stands that came first."""

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
