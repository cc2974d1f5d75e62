"""What is held of requests at once is bounded, and given back whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.admission import COMING_PER_ANSWERED, Admission, Place


def test_bodies_that_never_come_take_no_place_of_those_that_are_answered() -> None:
    by = Admission(answered=2, bodies_bytes=1_000)
    slow = [by.come(10) for _ in range(COMING_PER_ANSWERED * 2 - 1)]
    quick = by.come(10)
    assert None not in slow
    assert quick is not None
    assert by.come(10) is None, "one too many"
    assert by.answer(quick, 5)
    assert by.gauges() == {"under_way": 1, "bodies_coming": 7, "bodies_bytes": 75}


def test_each_bound_at_it_and_just_over() -> None:
    by = Admission(answered=1, bodies_bytes=100)
    first, second = by.come(60), by.come(40)
    assert first is not None
    assert second is not None
    assert by.come(1) is None
    assert by.answer(first, 20), "shorter than it might have been"
    assert by.come(41) is None
    third = by.come(40)
    assert third is not None
    assert not by.answer(second, 40), "one is being answered"
    by.leave(first)
    assert by.answer(second, 40)


@given(st.lists(st.tuples(st.sampled_from(["come", "answer", "leave"]), st.integers(0, 60)), max_size=60))
def test_whatever_happens_bounds_hold_and_nothing_is_kept(steps: list[tuple[str, int]]) -> None:
    by = Admission(answered=3, bodies_bytes=100)
    held: list[Place] = []
    for step, number in steps:
        place = held[number % len(held)] if held else None
        if step == "come" and (new := by.come(number)) is not None:
            held.append(new)
        elif step == "answer" and place is not None and place.coming:
            by.answer(place, min(number, place.length))
        elif step == "leave" and place is not None:
            by.leave(place)
            held.remove(place)
        gauges = by.gauges()
        assert gauges["bodies_bytes"] == sum(one.length for one in held) <= 100
        assert gauges["under_way"] == sum(not one.coming for one in held) <= 3
        assert gauges["bodies_coming"] == sum(one.coming for one in held) <= 3 * COMING_PER_ANSWERED
    for place in held:
        by.leave(place)
    assert set(by.gauges().values()) == {0}
