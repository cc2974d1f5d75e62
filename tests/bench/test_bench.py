"""The bench as a program: its rows, its file, its exit codes. No speed is asserted here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.errors import BenchError
from tests.bench.kernel_rows import kernel
from tests.bench.measurements import MEASUREMENTS, Local, Measurement
from tests.bench.profile import shares
from tests.bench.rows import Row, row

KEYS = ["name", "value", "unit", "floor", "ceiling", "ok"]


def bench(
    out: Path, measurements: dict[str, Measurement], *arguments: str
) -> tuple[int, list[dict[str, object]]]:
    """Exit code, and what is in the file."""
    code = main([*arguments, "--out", str(out)], measurements)
    return code, json.loads(out.read_bytes())


def fixed(*rows: Row) -> Local:
    return Local(lambda _quick: list(rows))


@pytest.mark.slow
def test_a_measurement_leaves_rows_of_the_agreed_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = bench(tmp_path / "new" / "bench.json", {"kernel": Local(kernel)}, "--quick")
    assert [list(each) for each in rows] == [KEYS] * 10
    for each in rows:
        assert isinstance(each["value"], float)
        assert each["value"] > 0
        low = each["floor"] is None or each["value"] >= each["floor"]  # type: ignore[operator]
        high = each["ceiling"] is None or each["value"] <= each["ceiling"]  # type: ignore[operator]
        assert each["ok"] is (low and high), each
    assert code == (0 if all(each["ok"] for each in rows) else 1)
    printed = capsys.readouterr().out
    for said in ("machine: ", "load average: ", "Python: ", "Kafka: ", "ClickHouse: ", "kernel.score_pairs"):
        assert said in printed


@pytest.mark.parametrize(
    ("limited", "code"),
    [
        (row("fast", 2.0, "ratio", floor=2.0), 0),
        (row("fast", 1.99, "ratio", floor=2.0), 1),
        (row("late", 300.0, "ms", ceiling=300.0), 0),
        (row("late", 300.1, "ms", ceiling=300.0), 1),
        (row("free", 1.0, "bytes"), 0),
    ],
)
def test_a_missed_limit_is_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limited: Row, code: int
) -> None:
    found = bench(tmp_path / "bench.json", {"one": fixed(row("kept", 1.0, "ratio", floor=0.5), limited)})
    assert found[0] == code
    assert [each["ok"] for each in found[1]] == [True, code == 0]
    assert (f"missed: {limited.name}" in capsys.readouterr().out) == (code == 1)


def test_a_measurement_that_fails_is_not_ok_and_stops_no_other(tmp_path: Path) -> None:
    def fails(_quick: bool) -> list[Row]:
        raise BenchError("the worker ended")

    code, rows = bench(
        tmp_path / "bench.json", {"fails": Local(fails), "other": fixed(row("kept", 1.0, "ratio"))}
    )
    assert code == 1
    assert [(each["name"], each["value"], each["ok"]) for each in rows] == [
        ("fails", None, False),
        ("kept", 1.0, True),
    ]


def test_only_what_was_asked_for_is_measured(tmp_path: Path) -> None:
    known: dict[str, Measurement] = {name: fixed(row(name, 1.0, "ratio")) for name in ("a", "b", "c")}
    _, rows = bench(tmp_path / "bench.json", known, "--only", "c", "a")
    assert [each["name"] for each in rows] == ["a", "c"]


def test_an_unknown_measurement_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "speed"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in MEASUREMENTS)


@pytest.mark.parametrize(
    ("variable", "said"), [("KLAXON_SHARED", "set KLAXON_SHARED"), ("PATH", "is not installed")]
)
def test_what_is_absent_is_exit_3_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    said: str,
) -> None:
    for program in ("java", "mvn"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    assert main(["--only", "pair", "--out", str(tmp_path / "bench.json")]) == 3
    assert said in capsys.readouterr().err
    assert not (tmp_path / "bench.json").exists()


def test_a_sample_is_charged_to_our_innermost_file_or_to_the_package_below_it() -> None:
    ours = "run (asyncio/events.py:80);read (pipeline/core/buckets.py:9);argsort (numpy/core.py:1)"
    package = "run (asyncio/events.py:80);read (pipeline/workers/source.py:1);send (aiokafka/producer.py:3)"
    waits = "run (asyncio/events.py:80);select (selectors.py:468)"
    folded = f"{ours} 6\n{package} 3\n{waits} 9\n<module> (<string>:1) 1\n"
    assert shares(folded) == [("pipeline/core/buckets.py", 0.6), ("aiokafka", 0.3), ("other", 0.1)]
