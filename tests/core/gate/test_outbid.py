"""Foreign records on the control topic: the gate's own stands above them, and says what it said."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agents.router.core import RouterState
from pipeline.core.gate.outbid import LAST, above, next_epoch
from schemas.buckets import PopulationCells
from schemas.control import MAX_EPOCH, MAX_GENERATION, Directive, Expects
from schemas.control_log import numbers
from tests.core.gate.build import (
    LOGITS,
    SOURCES,
    T0,
    Bench,
    canary,
    command,
    decisions,
    final,
    fresh,
    healthy_pairs,
    kinds,
    pair_cell,
    us,
)

CLOSED_S = T0 + 5
SEEN_US = us(T0 + 22)
"""When its sources have closed CLOSED_S."""


def foreign(generation: int, epoch: int, percent: float = 90.0, **changes: object) -> Directive:
    made = Directive(
        rollout="chat", generation=generation, epoch=epoch, ts_us=SEEN_US, lease_until_us=us(T0 + 10**7),
        dead_man_us=86_400_000_000, state="observing", weights={"v1": 100.0 - percent, "v2": percent},
        last_promoted={"v1": 100.0 - percent, "v2": percent}, fallback="v1",
    )  # fmt: skip
    return replace(made, **changes)


def seeing(pairs: object = healthy_pairs()) -> Bench:
    bench = Bench.started()
    bench.run(T0, CLOSED_S, pairs)
    bench.write(bench.core.renew(SEEN_US))
    return bench


def tripped() -> Bench:
    bench = seeing()
    bench.run(CLOSED_S + 1, CLOSED_S + 12, healthy_pairs(score=0.3, count=60))
    assert bench.control["chat"].state == "tripped"
    return bench


def said(bench: Bench, *directives: Directive | None, at_us: int = SEEN_US) -> Directive:
    (effect,) = bench.write(bench.core.on_foreign("chat", directives, at_us))
    assert effect.directive is not None
    return effect.directive


def content(directive: Directive) -> tuple[object, ...]:
    return (directive.state, directive.weights, directive.last_promoted, directive.level, directive.fallback)


@pytest.mark.parametrize("make", [seeing, tripped])
@pytest.mark.parametrize(
    "record",
    [
        foreign(1, 1),
        foreign(1, 0),
        foreign(0, 99),
        foreign(1, 500),
        foreign(9, 0),
        foreign(9, 3),
        foreign(1, MAX_EPOCH),
        foreign(MAX_GENERATION, 7),
        foreign(MAX_GENERATION - 1, MAX_EPOCH),
        None,
    ],
)
def test_every_foreign_record_is_answered_at_once_and_changes_nothing(
    make: object, record: Directive | None
) -> None:
    bench = make()  # type: ignore[operator]
    before = bench.control["chat"]
    after = said(bench, record)
    assert numbers(after) > numbers(before)
    assert record is None or numbers(after) > numbers(record)
    assert content(after) == content(before)
    assert bench.core.gauges()["foreign_directives"] == 1


def test_nothing_can_be_written_above_the_last_numbers() -> None:
    """Routers that start later obey the gate's record all the same, because it is the newest."""
    bench = tripped()
    for _ in range(2):
        assert numbers(said(bench, foreign(*LAST))) == LAST
    assert bench.control["chat"].weights["v2"] == 0.0


def test_a_blind_gate_answers_without_a_lease_and_is_no_sign_of_life() -> None:
    bench = seeing()
    vouched = bench.control["chat"]
    deadline_us = vouched.ts_us + vouched.dead_man_us
    for at_us in (SEEN_US + 50_000_000, SEEN_US + 58_000_000, SEEN_US + 300_000_000):
        assert bench.core.blind("chat", at_us)
        answer = said(bench, foreign(bench.control["chat"].generation, 10**6), at_us=at_us)
        assert answer.lease_until_us == at_us
        assert answer.ts_us + answer.dead_man_us == max(deadline_us, at_us)


def test_a_foreign_generation_is_recorded_and_stays_the_same_run() -> None:
    bench = seeing()
    bench.run(CLOSED_S + 1, CLOSED_S + 2, healthy_pairs())
    before = bench.core._runs["chat"].memory
    (effect,) = bench.write(bench.core.on_foreign("chat", [foreign(7, 3)], us(T0 + 25)))
    (decision,) = decisions([effect])
    assert (decision.kind, decision.directive) == ("reassert", effect.directive)
    assert "the run of generation 1 goes on as generation 7" in decision.reason
    after = bench.core._runs["chat"].memory
    assert (after.step, after.step_pairs, after.folded) == (before.step, before.step_pairs, before.folded)
    assert list(after.generations) == [1, 2, 3, 4, 5, 6, 7]
    # A greater epoch begins no number: nothing to record.
    (effect,) = bench.write(bench.core.on_foreign("chat", [foreign(7, 30)], us(T0 + 26)))
    assert effect.decision is None
    assert kinds(
        bench.command(command("abort", "a", expects=Expects(generation=7, epoch=31)), us(T0 + 27))
    ) == ["command"]
    (begun,) = bench.command(command("new_generation", "g"), us(T0 + 28))
    assert begun.directive is not None
    assert (begun.directive.generation, list(bench.core._runs["chat"].memory.generations)) == (8, [8])


@pytest.mark.parametrize("restart", [False, True])
def test_evidence_under_used_up_numbers_still_trips(restart: bool) -> None:
    """Gateways stamp events with the number they routed by: a foreign one must not hide a bad canary."""
    bench = seeing(pairs=None)

    def cells(generation: int) -> list[PopulationCells]:
        return [PopulationCells(canary(generation=generation), [pair_cell([0.3] * 60)])]

    bench.core.on_fresh(fresh(LOGITS, {CLOSED_S + 1: [*cells(1), *cells(7)]}, 7))
    assert bench.core.judge_fresh(us(T0 + 22)) == [], "60 pairs of its own are too few"
    said(bench, foreign(7, 3))
    if restart:
        bench = bench.crash()
        assert bench.core.reassert(us(T0 + 22)) == []
        bench.core.on_fresh(fresh(LOGITS, {CLOSED_S + 1: [*cells(1), *cells(7)]}, 7))
    trip = bench.core.judge_fresh(us(T0 + 22.2))
    assert kinds(trip) == ["trip"]
    assert trip[0].directive is not None
    assert trip[0].directive.generation == 7
    # Patched out and in again: the final of that second replaces exactly what was known of it.
    for topic in SOURCES:
        contents = {CLOSED_S + 1: cells(7)} if topic == LOGITS else {}
        bench.read(final(topic, CLOSED_S + 1, CLOSED_S + 1, contents))
    assert bench.core.judge_complete(us(T0 + 23)) == []


def test_renumbering_takes_open_cells_out_and_in_again() -> None:
    bench = seeing(pairs=None)
    cells = [PopulationCells(canary(generation=number), [pair_cell([0.3] * 40)]) for number in (1, 7)]
    bench.core.on_fresh(fresh(LOGITS, {CLOSED_S + 1: cells}, 7))
    said(bench, foreign(7, 3))
    bench.core.on_fresh(
        fresh(LOGITS, {CLOSED_S + 1: [PopulationCells(canary(generation=7), [pair_cell([0.3] * 45)])]}, 8)
    )
    assert bench.core.judge_fresh(us(T0 + 22)) == [], "85 pairs, not 125"


def test_a_new_owner_answers_what_came_while_nobody_did() -> None:
    for newest in (foreign(3, 1), foreign(1, 1), foreign(1, 10**6)):
        bench = tripped()
        bench.control["chat"] = newest
        (effect,) = bench.crash().core.reassert(us(T0 + 60))
        assert effect.directive is not None
        assert numbers(effect.directive) > numbers(newest)
        assert effect.directive.weights == {"v1": 100.0, "v2": 0.0}
    bench = tripped()
    assert bench.crash().core.reassert(us(T0 + 60)) == [], "the topic says what the gate remembers"
    bench.control.clear()
    assert len(bench.crash().core.reassert(us(T0 + 60))) == 1, "a tombstone"


def test_a_tombstone_strikes_only_a_retired_rollout() -> None:
    bench = tripped()
    bench.command(command("retire", "r"), us(T0 + 60))
    assert bench.core.on_foreign("chat", [None], us(T0 + 61)) == []
    assert said(bench, foreign(9, 9), at_us=us(T0 + 61)).weights["v2"] == 0.0
    bench.control.clear()
    assert bench.crash().core.reassert(us(T0 + 62)) == []


def test_what_the_key_before_signed_is_said_anew_and_is_nobody_elses() -> None:
    """Known-bad: counted as foreign, which wakes somebody; and a retired one left as it is, so that routers
    and gates which start after the old key's end refuse it."""
    for retired in (False, True):
        bench = tripped()
        if retired:
            bench.command(command("retire", "r"), us(T0 + 60))
        before = bench.control["chat"]
        heir = bench.crash(restated=["chat"])
        (effect,) = heir.core.reassert(us(T0 + 62))
        assert effect.directive is not None
        assert numbers(effect.directive) > numbers(before)
        assert (effect.directive.state, effect.directive.weights) == (before.state, before.weights)
        assert effect.decision is None
        assert heir.core.gauges()["foreign_directives"] == 0


def test_records_of_unknown_rollouts_are_counted() -> None:
    bench = seeing()
    assert bench.core.on_foreign("ghost", [foreign(9, 9, rollout="ghost"), None], SEEN_US) == []
    assert bench.core.gauges()["foreign_directives"] == 2


NUMBERS = st.tuples(st.integers(0, MAX_GENERATION), st.integers(0, MAX_EPOCH)) | st.tuples(
    st.integers(0, 5), st.integers(0, 60)
)


MEMORY = Bench.started().core._runs["chat"].memory


@given(NUMBERS, st.lists(NUMBERS, max_size=6))
@example((1, 1), [LAST])
def test_the_next_numbers_pass_all_foreign_ones(own: tuple[int, int], theirs: list[tuple[int, int]]) -> None:
    assume(own[0] > 0 and own[1] < MAX_EPOCH)
    memory = replace(MEMORY, generation=own[0], epoch=own[1])
    for pair in theirs:
        memory = above(memory, foreign(*pair))
    following = next_epoch(memory)
    assert (following.generation, following.epoch) >= max([own, *theirs])
    if LAST not in theirs:
        assert (following.generation, following.epoch) > max([own, *theirs])
    assert own[0] in following.generations


@dataclass
class Topic:
    """A log with compaction, and a router that has run all along."""

    bench: Bench
    now_us: int = us(T0 + 60)
    newest: dict[str, Directive] = field(default_factory=dict)
    running: RouterState = field(default_factory=RouterState)

    def append(self, directive: Directive | None) -> None:
        if directive is None:
            self.newest.pop("chat", None)
            return
        self.newest["chat"] = directive
        self.running.apply(directive, self.now_us)

    def starting(self) -> RouterState:
        """A router that reads the compacted topic now."""
        state = RouterState()
        for directive in self.newest.values():
            state.apply(directive, self.now_us)
        return state


FOREIGN = st.none() | st.builds(
    lambda pair, percent, lease_s, state: foreign(
        *pair, percent, state=state, lease_until_us=us(T0 + 60) + lease_s * 1_000_000
    ),
    NUMBERS,
    st.sampled_from([0.0, 5.0, 100.0]),
    st.integers(-100, 10**6),
    st.sampled_from(["observing", "promoted", "tripped"]),
)


ROUND = st.tuples(st.lists(FOREIGN, min_size=1, max_size=4), st.integers(0, 70), st.booleans())


@settings(max_examples=40)
@given(st.booleans(), st.lists(ROUND, max_size=5))
def test_no_sequence_of_foreign_records_outlives_the_gates_answer(
    trip: bool, rounds: list[tuple[list[Directive | None], int, bool]]
) -> None:
    """After each answer no router, running or new, gives the canary more than the gate's latest directive."""
    topic = Topic(tripped() if trip else seeing())
    topic.append(topic.bench.control["chat"])
    for records, pause_s, restart in rounds:
        assume(all(record is None or numbers(record) < LAST for record in records))
        topic.now_us += pause_s * 1_000_000
        written = [*topic.newest.values(), *records]
        for record in records:
            topic.append(record)
        if restart:
            topic.bench = topic.bench.crash([("chat", record) for record in written])
            effects = topic.bench.write(topic.bench.core.reassert(topic.now_us))
        else:
            effects = topic.bench.write(topic.bench.core.on_foreign("chat", records, topic.now_us))
        for effect in effects:
            topic.append(effect.directive)
        allowed = topic.bench.control["chat"].weights["v2"]
        for state in (topic.running, topic.starting()):
            assert state.effective_weights(topic.now_us)["v2"] <= allowed
