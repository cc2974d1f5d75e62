"""How far the archive is behind, at and around every limit."""

from __future__ import annotations

import pytest

from pipeline.store.lag import Lag, Standing, lag_of, risk_line

S = 1_000_000


def standing(**changes: int | None) -> Standing:
    values: dict[str, int | None] = {
        "next_offset": 100,
        "begin_offset": 40,
        "end_offset": 130,
        "oldest_append_us": 1_000 * S,
        "retention_us": 60 * S,
    }
    return Standing(**{**values, **changes})  # type: ignore[arg-type]


def test_a_lag_is_the_age_of_the_oldest_record_not_stored() -> None:
    lag = lag_of(standing(), 1_010 * S)
    assert lag == Lag(30, 10 * S, 50 * S, 0, at_risk=False)
    assert lag.gauges() == {
        "lag_records": 30,
        "behind_us": 10 * S,
        "deleted_records": 0,
        "retention_at_risk": 0,
        "retention_left_us": 50 * S,
    }


@pytest.mark.parametrize(
    ("behind_us", "at_risk"), [(30 * S, False), (30 * S + 1, True), (60 * S, True), (90 * S, True)]
)
def test_less_than_half_of_the_retention_left_is_a_risk(behind_us: int, at_risk: bool) -> None:
    lag = lag_of(standing(), 1_000 * S + behind_us)
    assert lag.at_risk is at_risk
    assert lag.retention_left_us == max(0, 60 * S - behind_us)


def test_nothing_to_store_is_no_lag_however_old_the_log() -> None:
    lag = lag_of(standing(oldest_append_us=None), 10**9 * S)
    assert lag == Lag(0, 0, 60 * S, 0, at_risk=False)


def test_a_topic_that_keeps_everything_is_never_at_risk() -> None:
    lag = lag_of(standing(retention_us=None), 10**6 * S)
    assert lag.retention_left_us is None
    assert not lag.at_risk
    assert "retention_left_us" not in lag.gauges()


def test_records_deleted_unstored_are_counted_even_if_none_is_left() -> None:
    assert lag_of(standing(begin_offset=112), 1_001 * S).deleted_records == 12
    gone = lag_of(standing(begin_offset=130, oldest_append_us=None), 1_001 * S)
    assert (gone.deleted_records, gone.at_risk) == (30, True)


def test_a_record_from_the_future_is_new() -> None:
    assert lag_of(standing(), 999 * S).behind_us == 0


def test_the_line_names_place_age_time_left_and_remedy() -> None:
    line = risk_line("klaxon.requests/3", lag_of(standing(), 1_040 * S), 2)
    assert line.startswith("klaxon.requests/3 (and 2 partitions more): 30 records are not archived")
    assert "the oldest for 40 s; the topic deletes it in 20 s: bring ClickHouse back" in line
    gone = risk_line("klaxon.requests/3", lag_of(standing(begin_offset=112), 1_040 * S), 0)
    assert gone.startswith("klaxon.requests/3: 12 offsets were deleted before they were archived")
