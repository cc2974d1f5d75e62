"""The schedule is a function of the seed and leaves nothing out; the last line counts what was found."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from tests.faults import __main__ as kills
from tests.faults import brokers
from tests.faults.__main__ import ROUNDS
from tests.faults.crew import Outcome
from tests.faults.report import ACTIONS, WIDTH, Report
from tests.faults.rounds import Plan, Round
from tests.faults.schedule import POINTS, WORKERS, schedule
from tests.system.findings import Finding


def test_the_long_form_breaks_every_worker_at_every_point_in_every_way() -> None:
    for seed in (1, 20260717):
        faults = [fault for number in range(ROUNDS) for fault in schedule(seed, number)]
        assert len(faults) >= 200
        assert {(fault.worker, fault.action, fault.point) for fault in faults} == {
            (worker, action, point) for worker in WORKERS for action in ACTIONS for point in POINTS[worker]
        }


def test_a_round_can_be_repeated_alone() -> None:
    assert schedule(7, 3) == schedule(7, 3) != schedule(8, 3)
    assert {fault.round for fault in schedule(7, 3)} == {3}


def test_what_needs_silence_comes_after_everything_else() -> None:
    for number in range(ROUNDS):
        for worker in WORKERS:
            silent = [each.point.when == "silent" for each in schedule(7, number) if each.worker == worker]
            assert silent == sorted(silent)


@pytest.fixture
def played() -> Round:
    plan = Plan(7, 0, schedule(7, 0))
    return Round(plan, [Outcome(fault, fired=True, back_s=1.0) for fault in plan.faults])


def test_a_clean_run_passes_with_the_line_that_is_promised(played: Round) -> None:
    report = Report([played, played])
    assert report.passed
    assert report.last_line == "faults fired 32/32 lost 0 doubled 0 false_trips 0 missed_trips 0"


def test_a_fault_that_did_not_fire_fails_and_is_named(played: Round) -> None:
    played.outcomes[3].fired = False
    report = Report([played])
    assert not report.passed
    assert report.last_line.startswith("faults fired 15/16 ")
    assert f"not fired: {played.outcomes[3].fault}" in _shown(report)
    assert "repeat it: python -m tests.faults --seed 7 --first-round 0 --rounds 1" in _shown(report)


def test_a_fault_that_was_dropped_fails(played: Round) -> None:
    played.outcomes.pop()
    assert not Report([played]).passed


def test_everything_found_is_counted_and_fails(played: Round) -> None:
    played.findings += [
        Finding("lost", "a", 3),
        Finding("lost", "b"),
        Finding("doubled", "c", 2),
        Finding("false_trip", "d"),
        Finding("missed_trip", "e"),
    ]
    report = Report([played])
    assert not report.passed
    assert report.last_line == "faults fired 16/16 lost 4 doubled 2 false_trips 1 missed_trips 1"
    assert "missed_trip: e" in _shown(report)


def test_a_run_without_faults_proves_nothing() -> None:
    assert not Report([Round(Plan(7, 0, []))]).passed


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (kills.main, ["--only", "pair,nobody"]),
        (kills.main, ["--only", ""]),
        (kills.main, ["--defect", "pair"]),
        (kills.main, ["--defect", "pair=none_such"]),
        (kills.main, ["--defect", "nobody=read_uncommitted"]),
        (brokers.main, ["--only", "kill,none_such"]),
        (brokers.main, ["--only", ""]),
    ],
)
def test_a_name_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[], int], arguments: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["x", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def test_what_is_otherwise_wrong_fails_too(played: Round) -> None:
    played.findings.append(Finding("wrong", "f"))
    assert not Report([played]).passed


def _shown(report: Report) -> str:
    said = io.StringIO()
    report.show(Console(file=said, width=WIDTH))
    return said.getvalue()
