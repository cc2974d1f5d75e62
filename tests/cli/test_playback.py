"""Recorded events onto today's clock."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.playback import Due, Recorded, late, moved, records, schedule, value_of
from schemas.topics import Topic

NOW = 1_800_000_000_000_000
lines = st.lists(
    st.builds(Recorded, key=st.just("k"), time_us=st.integers(0, 10**15), text=st.binary(max_size=3)),
    min_size=1,
    max_size=20,
)


@given(lines)
def test_one_constant_moves_the_last_event_to_now(recorded: list[Recorded]) -> None:
    due = schedule(recorded, NOW, shift=True, speed=None)
    assert len({d.shift_us for d in due}) == 1
    assert max(d.line.time_us + d.shift_us for d in due) == NOW
    assert {d.after_us for d in due} == {0}


@given(lines, st.floats(0.1, 1000))
def test_with_a_speed_every_event_happens_when_it_is_sent(recorded: list[Recorded], speed: float) -> None:
    due = schedule(recorded, NOW, shift=True, speed=speed)
    assert due[0].after_us == 0
    assert [d.after_us for d in due] == sorted(d.after_us for d in due)
    assert all(d.line.time_us + d.shift_us == NOW + d.after_us for d in due)
    span = max(r.time_us for r in recorded) - min(r.time_us for r in recorded)
    assert due[-1].after_us == round(span / speed)
    assert late(due, NOW, 0) == 0


@given(lines, st.none() | st.floats(0.1, 1000))
def test_without_a_shift_nothing_moves(recorded: list[Recorded], speed: float | None) -> None:
    due = schedule(recorded, NOW, shift=False, speed=speed)
    assert {d.shift_us for d in due} == {0}
    assert [moved(d) for d in due] == [d.line.text for d in due]
    assert sorted(d.line.time_us for d in due) == sorted(r.time_us for r in recorded)


def test_moving_changes_the_time_and_nothing_else() -> None:
    event = {"ts_us": 10, "x": {"ü": [1.5, 10**30, None]}, "duration_us": 7}
    text = json.dumps(event).encode()
    assert json.loads(moved(Due(0, 32, Recorded("k", 17, text)))) == {**event, "ts_us": 42}


def test_numbers_beyond_every_type_stay_as_they_are() -> None:
    """An unknown field is ignored by every reader, whatever its number; the mover must not choke on it."""
    for number in ("1e400", "9" * 5000, "1.0000000000000000000001"):
        text = f'{{"ts_us":10,"x":[{number}]}}'
        moved_text = f'{{"ts_us":42,"x":[{number}]}}'
        assert moved(Due(0, 32, Recorded("k", 17, text.encode()))) == moved_text.encode()


def test_late_is_older_than_the_lateness_when_sent() -> None:
    due = [Due(0, 0, Recorded("k", NOW - age, b"")) for age in (0, 15_000_000, 15_000_001)]
    assert late(due, NOW, 15_000_000) == 1


@given(st.lists(st.binary(min_size=1, max_size=50_000), max_size=12), st.sampled_from(list(Topic)))
def test_records_keep_every_event_in_order_within_limits(texts: list[bytes], topic: Topic) -> None:
    cut = records(topic, texts)
    assert [text for part in cut for text in part] == texts
    for part in cut:
        assert len(part) == 1 or len(value_of(part)) <= (330_000 if topic is Topic.LOGITS else 128_000)
        assert len(part) <= {Topic.LOGITS: 64, Topic.COMMANDS: 1}.get(topic, 500)
