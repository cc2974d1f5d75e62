"""What an operator sees of roll-outs and of unknown seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.gate.intake import UNKNOWN_OF_S, Intake
from schemas.buckets import PopulationCells
from schemas.topics import Topic
from tests.core.gate.build import (
    HASH,
    LOGITS,
    REQUESTS,
    T0,
    Bench,
    canary,
    command,
    final,
    pair_cell,
    start_command,
    us,
)
from tests.core.gate.test_left_out import NARROW, prompts


def test_a_rollout_shows_its_state_share_and_coverage() -> None:
    bench = Bench.started()
    assert bench.core.rollout_gauges(9) == {
        "chat": {"tripped": 0, "paused": 0, "left_out": 0, "blind": 0, "canary_millionths": 10_000}
    }
    cells = [PopulationCells(canary(), [pair_cell([0.01] * 8, unmatched__late=2)])]
    bench.run(T0, T0 + 20, lambda _: cells)
    said = bench.core.rollout_gauges(9)["chat"]
    assert (said["coverage_millionths"], said["expected_pairs"]) == (800_000, 21 * 10)
    bench.command(command("pause", "p"), us(T0 + 37))
    assert bench.core.rollout_gauges(9)["chat"]["paused"] == 1
    bench.run(T0 + 21, T0 + 40, lambda _: [PopulationCells(canary(), [pair_cell([0.4] * 50)])])
    said = bench.core.rollout_gauges(9)["chat"]
    assert (said["tripped"], said["canary_millionths"]) == (1, 0)
    assert "coverage_millionths" not in said, "it would stay low, and its alert with it, until it is retired"
    assert "expected_pairs" not in said
    bench.write(bench.core.renew(us(T0 + 41)))
    assert bench.core.rollout_gauges(9)["chat"]["blind"] == 0, "a final state needs no sight"


def test_a_narrowed_rollout_waits_for_an_operator_and_counts_what_is_left_out() -> None:
    bench = Bench.started(NARROW)
    bench.run(T0, T0 + 8, prompts(0.3))
    said = bench.core.rollout_gauges(9)["chat"]
    assert (said["tripped"], said["paused"], said["left_out"]) == (0, 1, 1)


def test_a_gate_that_does_not_see_says_so() -> None:
    bench = Bench.started()
    bench.write(bench.core.renew(us(T0 + 100)))
    assert bench.core.rollout_gauges(9)["chat"]["blind"] == 1


def test_so_many_rollouts_are_shown_and_no_more() -> None:
    bench = Bench.new()
    for number in range(5):
        name = f"r{number}"
        start = start_command(ident=name, rollout=name)
        bench.command(command("start", name, rollout=name, arguments=start.arguments), us(T0))
    assert sorted(bench.core.rollout_gauges(3)) == ["r0", "r1", "r2"]
    bench.command(command("abort", "a", rollout="r1"), us(T0 + 1))
    bench.command(command("retire", "b", rollout="r1"), us(T0 + 2))
    assert sorted(bench.core.rollout_gauges(3)) == ["r0", "r2", "r3"], "a retired one makes room"
    late = start_command(ident="z", rollout="z-today")
    bench.command(command("start", "z", rollout="z-today", arguments=late.arguments), us(T0 + 3))
    # Known-bad: by name alone its trip would be seen by no alert, once enough others are never retired.
    assert sorted(bench.core.rollout_gauges(3)) == ["r0", "r2", "z-today"]
    bench.command(command("new_generation", "n", rollout="r4"), us(T0 + 4))
    assert sorted(bench.core.rollout_gauges(3)) == ["r0", "r4", "z-today"]


def unknown(intake: Intake) -> int:
    return intake.gauges()["unknown_seconds"]


def taken(intake: Intake, first: int, last: int) -> None:
    """Fold these seconds."""
    if intake.cursor is None:
        intake.begin(first)
    for second in range(first, last + 1):
        intake.take(second)


def test_a_second_that_one_source_did_not_state_is_unknown() -> None:
    intake = Intake(0, {REQUESTS: 1, LOGITS: 1}, HASH)
    intake.final(final(REQUESTS, T0, T0 + 9))
    intake.final(final(LOGITS, T0, T0 + 3))
    intake.final(final(LOGITS, T0 + 6, T0 + 9, whole_from=T0 + 6))  # 4 and 5 were not seen whole
    taken(intake, T0, T0 + 9)
    assert unknown(intake) == 2
    intake.final(final(LOGITS, T0 + 4, T0 + 4, offset=9_000))
    assert unknown(intake) == 1, "somebody who saw it whole states it after all"


def test_unknown_seconds_age_out() -> None:
    intake = Intake(0, {LOGITS: 1}, HASH)
    intake.final(final(LOGITS, T0, T0))
    intake.final(final(LOGITS, T0 + 2, T0 + 1_000, whole_from=T0 + 2))
    taken(intake, T0, T0 + UNKNOWN_OF_S)
    assert unknown(intake) == 1
    taken(intake, T0 + UNKNOWN_OF_S + 1, T0 + UNKNOWN_OF_S + 1)
    assert unknown(intake) == 0


def test_before_its_first_statement_a_source_owes_nothing() -> None:
    intake = Intake(0, {LOGITS: 1, Topic.TELEMETRY.value: 1}, HASH)
    assert unknown(intake) == 0
    intake.final(final(LOGITS, T0 + 5, T0 + 9))
    taken(intake, T0 + 5, T0 + 9)
    assert unknown(intake) == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12))
@pytest.mark.parametrize("topics", [(LOGITS,), (LOGITS, REQUESTS)])
def test_unknown_are_those_that_no_statement_covers(
    topics: tuple[str, ...], statements: list[tuple[int, int]]
) -> None:
    intake = Intake(0, dict.fromkeys(topics, 1), HASH)
    stated: dict[str, set[int]] = {topic: {0} for topic in topics}
    for topic in topics:
        intake.final(final(topic, T0, T0, offset=0))
    for at, (first, length) in enumerate(statements):
        topic = topics[at % len(topics)]
        intake.final(final(topic, T0 + first, T0 + first + length, whole_from=T0 + first, offset=at + 1))
        stated[topic] |= set(range(first, first + length + 1))
    taken(intake, T0, T0 + 70)
    missing = {second for held in stated.values() for second in range(71) if second not in held}
    assert unknown(intake) == len(missing)
