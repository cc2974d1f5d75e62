"""A fleet of thousands of nodes, and traffic that names ever new ones: records and windows stay bounded."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.core.gate import run, windows
from pipeline.core.gate.run import EVALUATIONS_TOLD, telling
from pipeline.core.gate.windows import Window
from schemas.buckets import PopulationCells
from schemas.control import Evaluation
from tests.core.gate.build import LATENESS_S, T0, Bench, canary, decisions, pair_cell

RECORD_BYTES = 900_000
LONGEST = "\u0001" * 250
"""A node name that takes six bytes a character in JSON."""


def fleet(nodes: int, pairs: int, score: float, named: str = "n") -> list[PopulationCells]:
    """One second: each node has so many pairs."""
    cells = [pair_cell([score] * (nodes * pairs))]
    cells += [pair_cell([score] * pairs, "node", f"{named}-{node:05d}") for node in range(nodes)]
    return [PopulationCells(canary(), cells)]


@pytest.mark.parametrize(
    ("nodes", "pairs", "named"), [(8_000, 120, "n"), (8_000, 1, "n"), (800, 120, LONGEST)]
)
def test_a_trip_of_a_large_fleet_fits_a_record(nodes: int, pairs: int, named: str) -> None:
    """Evaluations of every node would not: nobody could write the trip."""
    bench = Bench.started()
    bench.run(T0 - LATENESS_S, T0 + 1)
    effects = bench.run(T0 + 2, T0 + 3, lambda _second: fleet(nodes, pairs, 0.2, named))
    (trip,) = [one for one in decisions(effects) if one.kind == "trip"]
    assert len(msgspec.json.encode(trip)) < RECORD_BYTES
    told = {one.scope for one in trip.evaluations if one.rule == "G3-divergence"}
    assert "rollout" in told
    assert (trip.evaluations_left_out > 0) == (pairs > 1)
    assert {one.rule for one in trip.evaluations} >= {
        "G3-divergence",
        "G3-anytime",
        "G5-slow-share",
        "coverage",
    }


def test_without_that_bound_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "EVALUATIONS_TOLD", 10**6)
    bench = Bench.started()
    bench.run(T0 - LATENESS_S, T0 + 1)
    (trip,) = decisions(bench.run(T0 + 2, T0 + 2, lambda _second: fleet(800, 120, 0.2, LONGEST)))
    assert len(msgspec.json.encode(trip)) > RECORD_BYTES


def evaluation(scope: str, verdict: str = "pass", samples: int = 100, reason: str = "") -> Evaluation:
    return Evaluation(
        rule="r", scope=scope, verdict=verdict, metric="kl_lower", samples=samples, reason=reason  # type: ignore[arg-type]
    )  # fmt: skip


def test_what_is_told_is_the_whole_then_what_trips_then_what_is_over_then_what_has_most_samples() -> None:
    many = [evaluation(f"node={number}", samples=number) for number in range(EVALUATIONS_TOLD + 4)]
    one_of_each = [
        evaluation("node=a", "trip", 1),
        evaluation("rollout", samples=0),
        evaluation("node=b", "not_enough_data", 1, "over the limit for 3 of 30 s"),
        evaluation("node=c", "error", 1),
    ]
    told = telling([*many, *one_of_each])
    assert told == (*many[8:], *one_of_each)
    assert telling(many[:EVALUATIONS_TOLD]) == tuple(many[:EVALUATIONS_TOLD])


def test_ever_new_names_fill_a_window_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_SCOPES", 10)
    window = Window(5)
    for second in range(20):
        names = [("node", f"{second:02d}-{number}") for number in range(4)]
        window.fold(second, {scope: {0: 1} for scope in [*names, ("all", ""), ("node", "here")]})
        assert len(window.totals) <= 10
        assert window.total(("all", "")) == {0: min(second + 1, 5)}
        assert window.total(("node", "here"))[0] >= 1
    assert window.no_room > 0
    window.fold(40, {})
    assert not window.totals


def test_the_whole_finds_room_before_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_SCOPES", 3)
    window = Window(5)
    names = [("a", "a"), *(("node", str(number)) for number in range(9)), ("all", ""), ("traffic", "user")]
    window.fold(1, {scope: {0: 1} for scope in names})
    assert set(window.totals) == {("all", ""), ("traffic", "user"), ("a", "a")}
    assert window.no_room == len(names) - 3


def test_a_flood_of_names_hides_no_trip_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_SCOPES", 50)
    bench = Bench.started()
    bench.run(T0 - LATENESS_S, T0 + 1)
    flood = bench.run(T0 + 2, T0 + 4, lambda second: fleet(40, 1, 0.012, f"{second}"))
    assert "trip" not in [one.kind for one in decisions(flood)]
    assert bench.core.gauges()["scopes_left_out"] > 0
    effects = bench.run(T0 + 5, T0 + 6, lambda second: fleet(40, 5, 0.5, f"{second}"))
    assert [one.kind for one in decisions(effects)] == ["trip"]
