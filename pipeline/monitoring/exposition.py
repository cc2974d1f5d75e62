"""A process's gauges as Prometheus's text, by the declarations in `metrics.py`. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from pipeline.monitoring import metrics
from pipeline.monitoring.metrics import CLOSED, OTHER, Gauges, Thing, metrics_of
from pipeline.monitoring.timing import EDGES_S, Timing

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_PREFIXES: Final = {
    f"{thing.value}/": thing
    for thing in (Thing.GATING, Thing.ROLLOUT, Thing.COUNTED, Thing.DEAD_LETTERS, Thing.REFUSED)
}
_PLAIN: Final = {
    thing.value: thing for thing in Thing if thing is not Thing.SOURCE and thing not in _PREFIXES.values()
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a process says of itself at one moment."""

    gauges: Gauges
    timings: Mapping[str, Timing] = field(default_factory=dict)


class UnknownThingError(Exception):
    """Gauges stand under a key that means nothing: `metrics.Thing` has to know it."""


def thing_of(key: str) -> tuple[Thing, tuple[str, ...]]:
    """What gauges belong to, and the labels that their key says. Raises UnknownThingError."""
    if key in _PLAIN:
        return _PLAIN[key], ()
    for prefix, thing in _PREFIXES.items():
        if key.startswith(prefix):
            return thing, (key.removeprefix(prefix),)
    topic, slash, partition = key.rpartition("/")
    if slash and topic.startswith("klaxon.") and partition.isdecimal():
        return Thing.SOURCE, (topic, partition)
    raise UnknownThingError(key)


def families(process: str, snapshot: Snapshot, now_us: int) -> Iterator[Metric]:
    """Every metric declared for this kind of process, with what the snapshot says; many have no sample.

    Gauges of a thing that is not declared are left out: a scrape is no place to find that.
    """
    found: dict[Thing, list[tuple[tuple[str, ...], Mapping[str, int]]]] = {thing: [] for thing in Thing}
    for key, gauges in snapshot.gauges.items():
        with suppress(UnknownThingError):
            thing, labels = thing_of(key)
            found[thing].append((labels, gauges))
    for metric in metrics_of(process):
        if metric.kind == "histogram":
            yield _histogram(metric, snapshot.timings.get(metric.gauge))
            continue
        family = (GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily)(
            metric.name, metric.meaning, labels=metric.labels
        )
        for labels, value in _values(metric, found[metric.thing]):
            if (converted := metric.convert(value, now_us)) is not None:
                family.add_metric(labels, converted)
        yield family


def _values(
    metric: metrics.Metric, found: Iterable[tuple[tuple[str, ...], Mapping[str, int]]]
) -> Iterator[tuple[tuple[str, ...], int]]:
    for labels, gauges in found:
        if metric.gauge:
            if metric.gauge in gauges:
                yield labels, gauges[metric.gauge]
            continue
        # The names are a label: each of the closed list has a value from the start, so that it can rise.
        closed = CLOSED[metric.thing]
        said = dict.fromkeys(closed, 0)
        for name, value in gauges.items():
            name = name if name in closed else OTHER
            said[name] = said.get(name, 0) + value
        for name, value in said.items():
            yield (*labels, name), value


def _histogram(metric: metrics.Metric, timing: Timing | None) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.meaning)
    if timing is not None:
        counts = list(accumulate(timing.counts))
        edges = [*(repr(edge) for edge in EDGES_S), "+Inf"]
        family.add_metric((), list(zip(edges, counts, strict=True)), timing.sum_s)
    return family


class _Declared(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def exposition(process: str, snapshot: Snapshot, now_us: int) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Declared(list(families(process, snapshot, now_us))))
    return generate_latest(registry)
