"""Sliding windows equal a plain recount, whatever came and went."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.gate.metrics import add_into
from pipeline.core.gate.windows import Window

SCOPES = (("all", ""), ("node", "a"), ("node", "b"))
contents = st.dictionaries(
    st.sampled_from(SCOPES), st.dictionaries(st.integers(0, 3), st.integers(1, 5), min_size=1), max_size=3
)


def recount(seconds: dict[int, dict], scope: object, first: int, last: int) -> dict[int, int]:
    total: dict[int, int] = {}
    for second, content in seconds.items():
        if first <= second <= last:
            add_into(total, content.get(scope, {}))
    return total


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), contents), min_size=1, max_size=25),
    st.lists(st.tuples(st.integers(1, 6), contents), max_size=5),
    st.integers(1, 7),
)
def test_folded_and_open_seconds_against_a_recount(
    folded: list[tuple[int, dict]], opened: list[tuple[int, dict]], length_s: int
) -> None:
    window = Window(length_s)
    seconds: dict[int, dict] = {}
    at = 100
    for skip, content in folded:
        at += skip
        seconds[at] = content
        window.fold(at, content)
        for scope in SCOPES:
            assert window.total(scope) == recount(seconds, scope, at - length_s + 1, at)
        assert set(window.totals) == {s for s in SCOPES if recount(seconds, s, at - length_s + 1, at)}
    end = at
    for ahead, content in opened:
        end = max(end, at + ahead)
        for scope, vec in content.items():
            window.patch(at + ahead, scope, vec, 1)
            add_into(seconds.setdefault(at + ahead, {}).setdefault(scope, {}), vec)
    for scope in SCOPES:
        assert window.ahead(scope, end) == recount(seconds, scope, end - length_s + 1, end)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("patch", "take back", "fold", "ask")), st.integers(1, 6), contents),
        max_size=40,
    ),
    st.integers(1, 7),
)
def test_what_is_asked_for_again_and_again_follows_every_change(
    steps: list[tuple[str, int, dict]], length_s: int
) -> None:
    window = Window(length_s)
    folded: dict[int, dict] = {}
    opened: dict[int, dict] = {}
    patched: list[tuple[int, dict]] = []
    at = 100
    window.fold(at, {})
    for what, ahead, content in steps:
        if what == "fold":
            at += ahead
            window.fold(at, content)
            folded[at] = content
            patched = [(second, one) for second, one in patched if second > at]
        elif what == "patch":
            patched.append((at + ahead, content))
            for scope, vec in content.items():
                window.patch(at + ahead, scope, vec, 1)
        elif what == "take back" and patched:
            second, taken = patched.pop()
            for scope, vec in taken.items():
                window.patch(second, scope, vec, -1)
        opened = {}
        for second, one in patched:
            for scope, vec in one.items():
                add_into(opened.setdefault(second, {}).setdefault(scope, {}), vec)
        for scope in SCOPES:
            end = at + (ahead if what == "ask" else 3)
            known = {**folded, **opened}
            assert window.ahead(scope, end) == recount(known, scope, end - length_s + 1, end)


def test_patches_can_be_taken_back() -> None:
    window = Window(5)
    window.patch(7, ("all", ""), {0: 3}, 1)
    window.patch(7, ("all", ""), {0: 3}, -1)
    assert window.open == {}


def test_a_folded_second_closes_what_was_open() -> None:
    window = Window(5)
    window.patch(7, ("all", ""), {0: 3}, 1)
    window.fold(7, {("all", ""): {0: 2}})
    window.patch(7, ("all", ""), {0: 9}, 1)
    assert window.ahead(("all", ""), 7) == {0: 2}


def test_seconds_that_cancel_each_other_leave_nothing_behind() -> None:
    """Evidence that is taken out may be all that a scope has, or, in a broken bucket, more."""
    window = Window(2)
    for second, amount in ((1, 5), (2, -5), (3, 5), (4, 0), (5, 0), (6, 0)):
        window.fold(second, {("all", ""): {0: amount} if amount else {}})
    assert (window.totals, window.seconds) == ({}, {})
