"""The router's rules with a clock moved by hand: only greater, lease, dead man. Never more than allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.router import runner
from agents.router.core import Outcome, RouterState, without_canary
from agents.router.runner import Change, Router, RouterSettings
from pipeline.cli.router import human_line, json_line
from schemas.control import Aborted, Directive, Segment
from schemas.topics import gating_partition

SECOND = 1_000_000
PROMOTED = {"v1": 100.0, "v2": 0.0}


def directive(epoch: int, canary: float, at_s: float = 0.0, generation: int = 1, **changes: Any) -> Directive:
    ts_us = int(at_s * SECOND)
    made = Directive(
        rollout="chat",
        generation=generation,
        epoch=epoch,
        ts_us=ts_us,
        lease_until_us=ts_us + 15 * SECOND,
        dead_man_us=60 * SECOND,
        state="observing",
        weights={"v1": 100.0 - canary, "v2": canary},
        last_promoted=PROMOTED,
        fallback="v1",
    )
    return msgspec.structs.replace(made, **changes)


def canary_weight(state: RouterState, at_s: float) -> float:
    return state.effective_weights(int(at_s * SECOND)).get("v2", 0.0)


def test_nothing_holds_before_the_first_directive() -> None:
    state = RouterState()
    assert state.effective(0) is None
    assert state.effective_weights(0) == {}


def test_only_a_greater_generation_and_epoch_is_applied() -> None:
    state = RouterState()
    assert state.apply(directive(5, 10.0), 0) is Outcome.APPLIED
    assert state.apply(directive(4, 25.0), 0) is Outcome.STALE
    assert state.apply(directive(5, 25.0), 0) is Outcome.STALE  # the same key and lease: the same record
    assert canary_weight(state, 0) == 10.0
    assert state.apply(directive(1, 5.0, generation=2), 0) is Outcome.APPLIED
    assert state.apply(directive(99, 50.0, generation=1), 0) is Outcome.STALE
    assert canary_weight(state, 0) == 5.0


def test_a_renewal_extends_the_lease_and_changes_nothing() -> None:
    state = RouterState()
    state.apply(directive(1, 10.0), 0)
    assert state.apply(directive(2, 10.0, at_s=10), 10 * SECOND) is Outcome.RENEWED
    held = state.effective(25 * SECOND)
    assert held is not None
    assert held.lease_valid
    held = state.effective(25 * SECOND + 1)
    assert held is not None
    assert not held.lease_valid


def test_the_same_numbers_again_move_neither_weights_nor_lease() -> None:
    """The gate numbers every renewal: whoever repeats numbers is not the gate."""
    state = RouterState()
    state.apply(directive(5, 10.0), 0)
    assert state.apply(directive(5, 10.0, at_s=10), 10 * SECOND) is Outcome.STALE
    assert state.apply(directive(5, 50.0, at_s=10), 10 * SECOND) is Outcome.STALE
    held = state.effective(15 * SECOND + 1)
    assert held is not None
    assert (held.weights["v2"], held.lease_valid) == (10.0, False)


def test_an_expired_lease_forbids_an_increase_and_allows_a_decrease() -> None:
    state = RouterState()
    state.apply(directive(1, 10.0), 0)
    late = 40 * SECOND
    assert state.apply(directive(2, 25.0, at_s=10), late) is Outcome.EXPIRED
    assert canary_weight(state, 40) == 10.0
    assert state.apply(directive(3, 0.0, at_s=11, state="tripped"), late) is Outcome.APPLIED
    assert canary_weight(state, 40) == 0.0
    # The refused increase does not come back by an older record.
    assert state.apply(directive(2, 25.0, at_s=39), late) is Outcome.STALE


def test_a_refused_increase_is_applied_when_its_lease_is_renewed() -> None:
    state = RouterState()
    state.apply(directive(1, 10.0), 0)
    assert state.apply(directive(2, 25.0, at_s=10), 26 * SECOND) is Outcome.EXPIRED
    assert state.apply(directive(3, 25.0, at_s=27), 27 * SECOND) is Outcome.APPLIED
    assert canary_weight(state, 27) == 25.0


def test_a_router_that_starts_on_an_expired_directive_serves_the_promoted_split() -> None:
    state = RouterState()
    assert state.apply(directive(7, 50.0), 100 * SECOND) is Outcome.EXPIRED
    assert state.effective_weights(100 * SECOND) == PROMOTED


def test_a_promotion_is_an_increase_too() -> None:
    """Its own `last_promoted` says 100 %: what may hold without a lease is what was promoted before."""
    state = RouterState()
    state.apply(directive(1, 50.0), 0)
    everything = {"v1": 0.0, "v2": 100.0}
    promotion = directive(2, 100.0, at_s=10, state="promoted", last_promoted=everything)
    assert state.apply(promotion, 26 * SECOND) is Outcome.EXPIRED
    assert canary_weight(state, 26) == 50.0
    renewed = directive(3, 100.0, at_s=27, state="promoted", last_promoted=everything)
    assert state.apply(renewed, 27 * SECOND) is Outcome.APPLIED
    assert canary_weight(state, 27) == 100.0
    # A router that starts on it has no split of its own to keep.
    assert RouterState().apply(promotion, 26 * SECOND) is Outcome.APPLIED


@pytest.fixture
def router() -> Router:
    return Router(RouterSettings("nowhere:1", "r"), lambda _: None)


def take(router: Router, record: Directive | bytes | None, at_s: float = 0, **place: Any) -> None:
    value = msgspec.json.encode(record) if isinstance(record, Directive) else record
    partition, key = place.get("partition", gating_partition("chat")), place.get("key", b"chat")
    router._take(partition, key, value, int(at_s * SECOND))


def test_a_tombstone_says_nothing_whatever_the_lease(router: Router) -> None:
    take(router, directive(6, 0.0, state="tripped"))
    for at_s in (2, 17, 3600):
        take(router, None, at_s)
        take(router, directive(5, 25.0, at_s=at_s), at_s)
        assert canary_weight(router._states["chat"], at_s) == 0.0
    assert router.malformed == 3


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (directive(9, 50.0), {"key": b"other"}),
        (directive(9, 50.0), {"key": None}),
        (directive(9, 50.0), {"partition": (gating_partition("chat") + 1) % 4}),
        (directive(9, 50.0, weights={"v1": 95.0, "v2": 50.0}), {}),
        (directive(9, 50.0, weights={}), {}),
        (directive(9, 50.0, last_promoted={"v2": 99.0}), {}),
        (directive(9, 50.0, weights={"v1": 150.0, "v2": -50.0}), {}),
        (directive(2**53, 50.0), {}),
        (directive(9, 50.0, generation=2**31), {}),
        (b"", {}),
        (b"{not a directive", {}),
    ],
)
def test_what_no_gate_writes_is_no_directive(
    router: Router, record: Directive | bytes, place: dict[str, Any]
) -> None:
    take(router, directive(6, 5.0))
    take(router, record, **place)
    assert canary_weight(router._states["chat"], 0) == 5.0
    assert router.malformed == 1


def test_when_it_is_full_the_longest_expired_goes(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_ROLLOUTS", 2)

    def named(rollout: str, at_s: float) -> None:
        record = directive(1, 5.0, at_s=at_s, rollout=rollout)
        take(router, record, at_s, key=rollout.encode(), partition=gating_partition(rollout))

    for rollout, at_s in (("a", 1), ("b", 0), ("c", 2)):
        named(rollout, at_s)
    assert sorted(router._states) == ["a", "b"], "every lease is valid: nobody is pushed out"
    named("c", 15.5)
    assert sorted(router._states) == ["a", "c"]


def test_dead_man_at_just_under_and_just_over_its_limit() -> None:
    state = RouterState()
    state.apply(directive(1, 25.0), 0)
    assert canary_weight(state, 60) == 25.0
    assert state.effective_weights(60 * SECOND + 1) == PROMOTED
    state.apply(directive(2, 25.0, at_s=70), 70 * SECOND)
    assert canary_weight(state, 70) == 25.0


def test_a_clock_that_steps_back_renews_no_lease() -> None:
    state = RouterState()
    state.apply(directive(1, 25.0), 0)
    assert state.effective_weights(60 * SECOND + 1) == PROMOTED
    for at_s in (60, 20, 15, 0):
        held = state.effective(at_s * SECOND)
        assert held is not None
        assert (held.weights, held.lease_valid, held.dead_man) == (PROMOTED, False, True)
    # The gate does, by the new time.
    assert state.apply(directive(2, 25.0, at_s=5), 5 * SECOND) is Outcome.RENEWED
    assert canary_weight(state, 20) == 25.0
    held = state.effective(20 * SECOND)
    assert held is not None
    assert held.lease_valid


def test_a_trip_outlives_the_dead_man() -> None:
    state = RouterState()
    promoted = {"v1": 90.0, "v2": 10.0}
    state.apply(directive(1, 10.0, last_promoted=promoted), 0)
    state.apply(directive(2, 0.0, state="tripped", last_promoted=promoted), 0)
    assert canary_weight(state, 3600) == 0.0


records = st.builds(
    directive,
    epoch=st.integers(0, 6),
    generation=st.integers(1, 3),
    canary=st.sampled_from([0.0, 1.0, 5.0, 25.0, 100.0]),
    at_s=st.integers(0, 200),
)


@given(st.lists(st.tuples(records, st.integers(0, 30)), max_size=20))
def test_the_key_obeyed_never_falls_and_an_expired_lease_never_raises(
    steps: list[tuple[Directive, int]],
) -> None:
    state = RouterState()
    now_us = 0
    greatest = (0, 0)
    for record, pause_s in steps:
        now_us += pause_s * SECOND
        before = canary_weight(state, now_us / SECOND)
        state.apply(record, now_us)
        held = state.directive
        assert held is not None
        assert (held.generation, held.epoch) >= greatest
        greatest = (held.generation, held.epoch)
        after = state.effective_weights(now_us)
        assert sum(after.values()) == 100.0
        if after["v2"] > before:
            assert now_us <= held.lease_until_us
            assert after == held.weights


@given(st.lists(records, min_size=1, max_size=12))
def test_while_leases_hold_the_greatest_record_alone_decides(log: list[Directive]) -> None:
    """Reading the whole log and reading only the greatest record end at the same weights."""
    state, direct = RouterState(), RouterState()
    first: dict[tuple[int, int], Directive] = {}
    for record in log:
        lasting = msgspec.structs.replace(record, lease_until_us=10**15)
        first.setdefault((record.generation, record.epoch), lasting)
        state.apply(lasting, 0)
    direct.apply(first[max(first)], 0)
    assert state.effective_weights(0) == direct.effective_weights(0)


ORDERS = st.builds(Aborted, by=st.just("op"), ts_us=st.just(0), fallback=st.sampled_from([None, "v1", "v2"]))


@given(st.lists(st.tuples(records, st.integers(0, 30)), max_size=12), ORDERS)
def test_an_abort_on_this_machine_only_lowers(steps: list[tuple[Directive, int]], order: Aborted) -> None:
    """Whatever the control topic says before and after, and whatever version the file names."""
    state = RouterState()
    now_us = 0
    for record, pause_s in steps:
        now_us += pause_s * SECOND
        state.apply(record, now_us)
        assert state.directive is not None
        held = without_canary(state.effective(now_us), state.directive, order)
        assert held.weights == {"v1": 100.0, "v2": 0.0}
        assert held.aborted


def test_an_abort_without_any_directive() -> None:
    assert without_canary(None, None, Aborted(by="op", ts_us=0)).weights == {}
    assert without_canary(None, None, Aborted(by="op", ts_us=0, fallback="v1")).weights == {"v1": 100.0}


def test_an_unreadable_file_lets_nothing_be_above_the_promoted_split() -> None:
    state = RouterState()
    state.apply(directive(1, 25.0), 0)
    held = state.effective(0, unsure=True)
    assert held is not None
    assert held.weights == PROMOTED
    state.apply(directive(2, 0.0, state="tripped", last_promoted={"v1": 90.0, "v2": 10.0}), 0)
    held = state.effective(0, unsure=True)
    assert held is not None
    assert held.weights["v2"] == 0.0


OUT = {"ejected_nodes": ("gpu-3",), "excluded_segments": (Segment(dimension="context", value=">2048"),)}


@pytest.mark.parametrize("name", ["ejected_nodes", "excluded_segments"])
def test_an_ejection_alone_is_applied_not_a_renewal(name: str) -> None:
    state = RouterState()
    state.apply(directive(1, 10.0), 0)
    assert state.apply(directive(2, 10.0, **{name: OUT[name]}), 0) is Outcome.APPLIED
    assert state.apply(directive(3, 10.0, **{name: OUT[name]}), 0) is Outcome.RENEWED
    held = state.effective(0)
    assert held is not None
    assert getattr(held, name) == OUT[name]
    assert state.apply(directive(4, 10.0), 0) is Outcome.APPLIED


def test_what_is_left_out_stays_out_without_a_lease_and_after_the_dead_mans_time() -> None:
    state = RouterState()
    state.apply(directive(1, 10.0, **OUT), 0)
    for at_s in (14, 16, 90):
        held = state.effective(at_s * SECOND)
        assert held is not None
        assert (held.ejected_nodes, held.excluded_segments) == tuple(OUT.values())
    aborted = without_canary(held, state.directive, Aborted(by="op", ts_us=0))
    assert (aborted.ejected_nodes, aborted.aborted) == (("gpu-3",), True)


def test_a_person_and_a_machine_are_told_what_is_left_out() -> None:
    one = directive(1, 10.0, **OUT)
    state = RouterState()
    state.apply(one, 0)
    held = state.effective(0)
    assert held is not None
    change = Change("chat", 1, 1, "applied", held, one, 0)
    assert "without gpu-3 · not for context=>2048" in human_line(change)
    effective = msgspec.json.decode(json_line(change))["effective"]
    assert effective["ejected_nodes"] == ["gpu-3"]
    assert effective["excluded_segments"] == [{"dimension": "context", "value": ">2048"}]
