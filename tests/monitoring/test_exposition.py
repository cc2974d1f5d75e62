"""From gauges to Prometheus's text, by the declarations alone."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import MonitoringConfig
from pipeline.monitoring.exposition import Snapshot, UnknownThingError, exposition, thing_of
from pipeline.monitoring.metrics import ALL, CLOSED, LABELS, LOG_ONLY, METRICS, Thing, metrics_of
from pipeline.monitoring.timing import EDGES_S, Timing
from tests.monitoring.scraping import families_of, samples_of

NOW_US = 1_800_000_000_000_000


def exposed(process: str, gauges: dict[str, dict[str, int]], timings: dict[str, Timing] | None = None) -> str:
    return exposition(process, Snapshot(gauges, timings or {}), NOW_US).decode()


def test_a_name_says_type_and_unit() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"klaxon_[a-z]+(_[a-z]+)*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        base = metric.name.removesuffix("_total")
        for unit in ("seconds", "bytes", "records", "ratio"):
            if metric.unit == unit:
                assert base.endswith(f"_{unit}"), metric.name
        assert metric.meaning.endswith("."), metric.name
        assert metric.processes, metric.name
        assert set(metric.processes) <= set(ALL), metric.name


def test_every_process_has_a_port_of_its_own() -> None:
    ports = [MonitoringConfig().port_of(process) for process in ALL]
    assert None not in ports
    assert len(set(ports)) == len(ALL)
    assert MonitoringConfig().host == "127.0.0.1"


def test_a_gauge_is_declared_once_per_process() -> None:
    for process in ALL:
        read = [(metric.thing, metric.gauge, metric.kind == "histogram") for metric in metrics_of(process)]
        assert len(set(read)) == len(read), process
    assert not [metric.name for metric in METRICS if metric.gauge in LOG_ONLY.get(metric.thing, frozenset())]


@pytest.mark.parametrize("process", ALL)
def test_everything_declared_stands_there_before_there_is_anything_to_say(process: str) -> None:
    found = families_of(exposed(process, {}))
    assert {name: family.type for name, family in found.items()} == {
        metric.name: metric.kind for metric in metrics_of(process)
    }


def test_units_and_labels() -> None:
    text = exposed(
        "measure",
        {
            "process": {"rss_bytes": 5, "started_us": 1_500_000},
            "klaxon.requests/3": {"evidence_age_us": 2_500_000, "cells": 7},
        },
    )
    assert list(samples_of(text, "klaxon_resident_bytes")) == [({}, 5.0)]
    assert list(samples_of(text, "klaxon_start_time_seconds")) == [({}, 1.5)]
    where = {"topic": "klaxon.requests", "partition": "3"}
    assert list(samples_of(text, "klaxon_evidence_age_seconds")) == [(where, 2.5)]
    assert list(samples_of(text, "klaxon_held_cells")) == [(where, 7.0)]


def test_the_age_of_a_second_counts_from_its_end_and_is_absent_before_the_first() -> None:
    second = NOW_US // 1_000_000 - 11
    text = exposed("gate", {"gating/0": {"complete_through": second}, "gating/1": {"complete_through": -1}})
    assert list(samples_of(text, "klaxon_complete_age_seconds")) == [({"gating_partition": "0"}, 10.0)]


def test_a_closed_label_has_all_its_values_from_the_start_and_no_other() -> None:
    text = exposed("pair", {"dead_letters/klaxon.logits": {"value": 2, "what a stranger wrote": 3}})
    said = {labels["reason"]: value for labels, value in samples_of(text, "klaxon_dead_letters_total")}
    assert set(said) == {*CLOSED[Thing.DEAD_LETTERS], "other"}
    assert (said["value"], said["other"], said["missing_field"]) == (2, 3, 0)
    assert "stranger" not in text


def test_a_rollout_is_named_whatever_its_name() -> None:
    name = 'a/b "c"\n\\d'
    text = exposed("gate", {f"rollout/{name}": {"tripped": 1}})
    assert list(samples_of(text, "klaxon_rollout_tripped")) == [({"rollout": name}, 1.0)]


def test_a_timing_is_a_histogram() -> None:
    timing = Timing()
    for took_s in (0.0005, 0.001, 0.3, 99.0, -1.0):
        timing.took(took_s)
    text = exposed("pair", {}, {"flush": timing})
    buckets = {labels["le"]: value for labels, value in samples_of(text, "klaxon_flush_seconds_bucket")}
    assert (buckets["0.001"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (3, 3, 4, 5)
    assert list(samples_of(text, "klaxon_flush_seconds_count")) == [({}, 5.0)]
    assert list(samples_of(text, "klaxon_flush_seconds_sum")) == [({}, pytest.approx(99.3015))]


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_every_duration_is_in_one_step(durations: list[float]) -> None:
    timing = Timing()
    for took_s in durations:
        timing.took(took_s)
    assert sum(timing.counts) == len(durations)
    for edge, reached in zip(
        EDGES_S, (sum(timing.counts[: i + 1]) for i in range(len(EDGES_S))), strict=True
    ):
        assert reached == sum(took_s <= edge for took_s in durations)


def test_known_bad_gauges_of_an_unknown_thing_are_no_metrics_by_accident() -> None:
    for key in ("surprise", "klaxon.logits", "gating", "klaxon.logits/x"):
        with pytest.raises(UnknownThingError):
            thing_of(key)
    assert set(LABELS) == set(Thing)
    assert "surprise" not in exposed("gate", {"surprise": {"x": 1}, "gating/0": {"surprise": 1}})
