"""Cells of simulated traffic, as the measure and pair workers make them, many seconds at once.

The workers' own buckets cost too much for days of traffic. `test_cells` shows that these are the same cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipeline.core import evidence as ev
from pipeline.core.bins import KIND_OF_MEASURE, bin_count, bin_of
from pipeline.core.cells import ALL, CONTEXT_LIMITS, context_class
from pipeline.core.evidence import Dimension
from schemas.buckets import Cell, Distribution
from schemas.columns import I8
from tests.simulation.traffic import REQUEST_TYPES, Pairs, Requests


def node_names(arm: str, nodes: int) -> tuple[str, ...]:
    """`c-00`, `c-01`, … by the arm's first letter, as the roll-out's spec has them."""
    return tuple(f"{arm[0]}-{at:02d}" for at in range(nodes))


def pair_cells(
    pairs: Pairs, nodes: Sequence[str], wanted: frozenset[str] | None = None
) -> dict[int, list[Cell]]:
    """Second → cells of scored pairs, with `kl_lower`, and `excess` where there is any.

    `wanted`: of these dimensions; None: of all.
    """
    if pairs.n == 0:
        return {}
    node = Dimension("node", tuple(nodes), pairs.node)
    nested, node_nested = ev.contexts(pairs.input_tokens, node)
    dimensions = [
        ev.constant(ALL, "", pairs.n),
        node,
        *nested,
        Dimension("request_type", REQUEST_TYPES, pairs.request_type),
        *(ev.constant(name, "unknown", pairs.n) for name in ("hardware", "sampling", "region")),
        *node_nested,
    ]
    held = _of(dimensions, wanted)
    cells = dict(_cells(pairs.second, held, "pairs", "kl_lower", pairs.score))
    compared = np.flatnonzero(pairs.excess >= 0)
    if len(compared):
        parts = [Dimension(each.name, each.values, each.codes[compared]) for each in held]
        _add(cells, _cells(pairs.second[compared], parts, "pairs", "excess", pairs.excess[compared]))
    return cells


def request_cells(
    requests: Requests, nodes: Sequence[str], traffic: str, wanted: frozenset[str] | None = None
) -> dict[int, list[Cell]]:
    """Second → cells of requests. `traffic`: user or shadow. `wanted` as above."""
    if len(requests.second) == 0:
        return {}
    held = _of(request_dimensions(requests, nodes, traffic), wanted)
    cells = dict(_cells(requests.second, held, "requests", "ttft_us", requests.ttft_us))
    _add(cells, _cells(requests.second, held, "requests", "itl_us", requests.itl_us))
    return cells


def request_dimensions(requests: Requests, nodes: Sequence[str], traffic: str) -> list[Dimension]:
    """What requests are counted under."""
    n = len(requests.second)
    node = Dimension("node", tuple(nodes), requests.node)
    nested, node_nested = ev.contexts(requests.input_tokens, node)
    request_type = Dimension("request_type", REQUEST_TYPES, requests.request_type)
    unknown = {name: ev.constant(name, "unknown", n) for name in ("hardware", "sampling", "region")}
    values = tuple(context_class(limit) for limit in (*CONTEXT_LIMITS, CONTEXT_LIMITS[-1] + 1))
    codes = np.searchsorted(np.array(CONTEXT_LIMITS), requests.input_tokens, side="left")
    context = Dimension("context_class", values, codes.astype(np.int64))
    cache_hit = ev.constant("cache_hit", "unknown", n)
    stratum = (request_type, context, unknown["sampling"], cache_hit, unknown["hardware"])
    return [
        ev.constant(ALL, "", n),
        node,
        *nested,
        request_type,
        *unknown.values(),
        ev.constant("traffic", traffic, n),
        *node_nested,
        ev.crossed("stratum", stratum),
    ]


def _add(cells: Mapping[int, list[Cell]], others: Iterator[tuple[int, list[Cell]]]) -> None:
    """A second measure into the cells of the first, which hold all of its scopes."""
    for second, found in others:
        into = {(cell.dimension, cell.value): cell.measures for cell in cells[second]}
        for cell in found:
            into[cell.dimension, cell.value].update(cell.measures)


def _of(dimensions: Sequence[Dimension], wanted: frozenset[str] | None) -> Sequence[Dimension]:
    return dimensions if wanted is None else [each for each in dimensions if each.name in wanted]


def _cells(
    second: I8, dimensions: Sequence[Dimension], counter: str, measure: str, values: I8
) -> Iterator[tuple[int, list[Cell]]]:
    """Seconds, ascending, with their cells."""
    scopes = [(each.name, value) for each in dimensions for value in each.values]
    rows, keys, base = [], [], 0
    for each in dimensions:
        at = np.flatnonzero(each.codes >= 0)
        rows.append(at)
        keys.append(second[at] * len(scopes) + base + each.codes[at])
        base += len(each.values)
    row, key = np.concatenate(rows), np.concatenate(keys)
    kind = KIND_OF_MEASURE[measure]
    bins = bin_of(kind, values)
    order = np.argsort(key * bin_count(kind) + bins[row], kind="stable")
    key, held, value = key[order], bins[row][order], values[row][order]
    new_key = np.concatenate(([True], key[1:] != key[:-1]))
    new_bin = new_key | np.concatenate(([True], held[1:] != held[:-1]))
    starts, bin_starts = np.flatnonzero(new_key), np.flatnonzero(new_bin)
    all_bins = held[bin_starts].tolist()
    all_counts = np.diff(np.append(bin_starts, len(key))).tolist()
    bounds = np.searchsorted(bin_starts, np.append(starts, len(key))).tolist()
    counts = np.diff(np.append(starts, len(key))).tolist()
    sums = np.add.reduceat(value, starts).tolist()
    least, most = np.minimum.reduceat(value, starts).tolist(), np.maximum.reduceat(value, starts).tolist()
    whose = key[starts]
    at_second, at_scope = (whose // len(scopes)).tolist(), (whose % len(scopes)).tolist()
    cells: list[Cell] = []
    current = at_second[0]
    for at, count in enumerate(counts):
        if at_second[at] != current:
            yield current, cells
            current, cells = at_second[at], []
        first, last = bounds[at], bounds[at + 1]
        found = Distribution(
            count, sums[at], least[at], most[at], all_bins[first:last], all_counts[first:last]
        )
        cells.append(Cell(*scopes[at_scope[at]], {counter: count}, {measure: found}, []))
    yield current, cells
