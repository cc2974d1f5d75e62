"""Which engines are tried last, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.unreached import Unreached

S5 = 5_000_000


def test_an_engine_is_avoided_for_five_seconds() -> None:
    known = Unreached()
    assert known.avoided(0) == frozenset()
    known.failed("a", 100)
    assert known.avoided(100) == known.avoided(100 + S5 - 1) == {"a"}
    assert known.avoided(100 + S5) == frozenset()
    assert known.gauges(100) == {"engines_avoided": 1}


def test_one_request_tries_it_then() -> None:
    known = Unreached()
    known.failed("a", 0)
    known.tries("a", S5)
    assert known.avoided(S5) == known.avoided(2 * S5 - 1) == {"a"}
    known.reached("a")
    assert known.avoided(S5) == frozenset()
    known.tries("a", S5)  # of one that is well nothing is remembered
    assert known.avoided(S5) == frozenset()


steps = st.lists(
    st.tuples(
        st.sampled_from(["failed", "tries", "reached"]), st.sampled_from("abc"), st.integers(0, 20_000_000)
    )
)


@given(steps, st.integers(0, 40_000_000))
def test_it_is_what_the_last_words_of_each_engine_say(told: list[tuple[str, str, int]], now_us: int) -> None:
    known = Unreached()
    for what, node, at_us in told:
        known.reached(node) if what == "reached" else getattr(known, what)(node, at_us)
    expected = set()
    for node in "abc":
        own = [(what, at_us) for what, one, at_us in told if one == node]
        since = max((at for at, (what, _) in enumerate(own) if what == "reached"), default=-1)
        after = own[since + 1 :]
        first = next((at for at, (what, _) in enumerate(after) if what == "failed"), None)
        if first is not None and now_us < after[-1][1] + S5:
            expected.add(node)
    assert known.avoided(now_us) == expected
