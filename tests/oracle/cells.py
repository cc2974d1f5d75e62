"""Cells of one-second buckets: rows are added one by one, in log order, and claim their cells in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.oracle.bins import KINDS, bin_of

Population = tuple[str, Any, str, Any, int] | None
Cell = dict[str, Any]
Contents = dict[int, dict[Population, dict[tuple[str, str], Cell]]]

LIMITS = (512, 2048, 4096, 8192)


class Seconds:
    """All seconds of one source, with the cap on cells."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.contents: Contents = {}
        self.used: dict[int, int] = {}
        self.known: dict[int, set[Population]] = {}

    def row(
        self,
        second: int,
        population: Population,
        cells: Sequence[tuple[str, str]],
        counters: dict[str, int] | None = None,
        totals: dict[str, int] | None = None,
        measures: dict[str, int] | None = None,
        worst: tuple[int, bytes] | None = None,
    ) -> None:
        """One event, pair or count. `totals` go to the first cell only."""
        lost = 0
        for at, name in enumerate(cells):
            cell = self._cell(second, population, name)
            if cell is None:
                lost += 1
            else:
                _add(cell, counters or {}, measures or {}, worst)
                if at == 0:
                    _add(cell, totals or {}, {}, None)
        if lost:
            known = self.known.setdefault(second, set())
            if population is not None and population not in known:
                population = ("", None, population[2], None, 0)
            held = self.contents.setdefault(second, {}).setdefault(population, {})
            other = held.setdefault(("other", ""), _empty())
            _add(other, {**(counters or {}), "overflow": lost}, measures or {}, worst)
            if lost == len(cells):
                _add(other, totals or {}, {}, None)

    def _cell(self, second: int, population: Population, name: tuple[str, str]) -> Cell | None:
        held = self.contents.get(second, {}).get(population, {})
        if name in held:
            return held[name]
        known = self.known.setdefault(second, set())
        is_new = population is not None and population not in known
        cost = 2 if is_new else 1
        if self.used.get(second, 0) + cost > self.capacity:
            return None
        if is_new:
            known.add(population)
        self.used[second] = self.used.get(second, 0) + cost
        return self.contents.setdefault(second, {}).setdefault(population, {}).setdefault(name, _empty())


def _empty() -> Cell:
    return {"counters": {}, "measures": {}, "worst": []}


def _add(
    cell: Cell, counters: dict[str, int], measures: dict[str, int], worst: tuple[int, bytes] | None
) -> None:
    for name, n in counters.items():
        if n:
            cell["counters"][name] = cell["counters"].get(name, 0) + n
    for name, value in measures.items():
        m = cell["measures"].setdefault(name, {"count": 0, "sum": 0, "min": value, "max": value, "bins": {}})
        m["count"] += 1
        m["sum"] += value
        m["min"] = min(m["min"], value)
        m["max"] = max(m["max"], value)
        if name in KINDS:
            k = bin_of(KINDS[name], value)
            m["bins"][k] = m["bins"].get(k, 0) + 1
    if worst is not None:
        cell["worst"] = sorted([*cell["worst"], worst])[::-1][:3]


def sampling_class(event: dict[str, Any]) -> str:
    """greedy is temperature 0."""
    temperature = event.get("temperature")
    if temperature is None:
        return "unknown"
    return "greedy" if temperature == 0 else "sampled"


def over_limits(event: dict[str, Any]) -> list[str]:
    """Nested context classes of an event."""
    return [f">{limit}" for limit in LIMITS if event["input_tokens"] > limit]


def marginals(event: dict[str, Any]) -> list[tuple[str, str]]:
    """The cells that requests and pairs have in common, before and after the requests' own ones."""
    return [
        ("all", ""),
        ("node", event["node"]),
        *(("context", value) for value in over_limits(event)),
        ("request_type", event.get("request_type") or "unknown"),
        ("hardware", event.get("hardware") or "unknown"),
        ("sampling", sampling_class(event)),
        ("region", event.get("region") or "unknown"),
    ]


def node_contexts(event: dict[str, Any]) -> list[tuple[str, str]]:
    """node × nested context class."""
    return [("node_context", f"{event['node']}|{value}") for value in over_limits(event)]
