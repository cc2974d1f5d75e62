"""What a roll-out has and lacks, and the sentence that says why nothing is decided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.gate.answer import Obstacle, Told, obstacles, span
from pipeline.core.gate.progress import Progress, RuleProgress, time_to_samples
from pipeline.core.gate.sources import Source
from pipeline.core.gate.state import RolloutMemory
from schemas.buckets import PopulationCells
from tests.core.gate.build import (
    HASH,
    LOGITS,
    REQUESTS,
    T0,
    Bench,
    canary,
    command,
    final,
    healthy_pairs,
    pair_cell,
    quick_requests,
    us,
)

POLICY = """
version: 1
rules:
  - {id: G3, metric: kl_lower, statistic: mean, window: 60s, limit: 0.05, min_samples: 100,
     scope: [rollout, node], action: rollback_l1, mode: enforce}
  - {id: B1, metric: ttft_us, statistic: p99, window: 60s, limit: 300ms, min_samples: 100, hold: 20s,
     scope: rollout, action: rollback_l1, mode: enforce}
  - {id: seen, metric: kl_floor, window: 60s, limit: 9, min_samples: 1, action: advise, mode: observe,
     scope: rollout}
coverage: {limit: 0.9, window: 60s, min_samples: 50, action: hold}
progression: {mode: auto, min_pairs: 900}
"""
LAST = T0 + 9


def renewed(bench: Bench, second: int) -> RolloutMemory:
    """The memory as the gate writes it when it renews, this second being the newest complete one."""
    bench.write(bench.core.renew(us(second + 17)))
    return bench.core._runs["chat"].memory


def told(memory: RolloutMemory, second: int, *, silent_s: int = 0, lease_s: int | None = 15) -> Told:
    now_s = second + 17
    return Told(
        rollout=memory.rollout,
        generation=memory.generation,
        state=memory.state,
        retired=memory.retired,
        paused_by=None if memory.cause is None else memory.cause.rule,
        blind=memory.blind,
        evidence_from=memory.evidence_from,
        progress=memory.progress,
        told_us=us(now_s - silent_s),
        lease_until_us=None if lease_s is None else us(now_s + lease_s),
        silent_after_us=us(20),
    )


def found(bench: Bench, second: int, **outside: int) -> list[Obstacle]:
    memory = renewed(bench, second)
    return list(obstacles(told(memory, second, **outside), us(second + 17)))


def codes(some: list[Obstacle]) -> list[str]:
    return [one.code for one in some]


def progress(bench: Bench, second: int) -> Progress:
    said = renewed(bench, second).progress
    assert said is not None
    return said


def rule(said: Progress, name: str) -> RuleProgress:
    return next(one for one in said.rules if one.rule == name)


def test_samples_rate_and_time_to_go_per_rule() -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, LAST, healthy_pairs(5), quick_requests(20))
    said = progress(bench, LAST)
    g3, b1 = rule(said, "G3"), rule(said, "B1")
    assert (g3.samples, g3.missing, g3.per_s, g3.ready_in_s) == (50, 50, 5.0, 10)
    assert (b1.samples, b1.missing, b1.verdict, b1.ready_in_s) == (200, 0, "pass", 0)
    assert (said.coverage.samples, said.coverage.ready_in_s) == (50, 0)
    assert (said.percent, said.next_percent, said.pairs, said.pairs_needed) == (1, 5, 50, 900)
    # 850 pairs at 5/s take longest; the step itself lasts join timeout + window = 120 s.
    assert (said.lasting_s, said.ready_in_s) == (111, 170)


def test_the_forecast_comes_true() -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, LAST, healthy_pairs(10), quick_requests(20))
    due = progress(bench, LAST).ready_in_s
    assert due is not None
    bench.run(LAST + 1, LAST + due - 1, healthy_pairs(10), quick_requests(20))
    assert bench.core._runs["chat"].memory.step == 0
    bench.run(LAST + due, LAST + due, healthy_pairs(10), quick_requests(20))
    assert bench.core._runs["chat"].memory.step == 1


def test_at_too_low_a_rate_waiting_does_not_help() -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, LAST, healthy_pairs(1), quick_requests(20))
    g3 = rule(progress(bench, LAST), "G3")
    assert (g3.samples, g3.per_s, g3.ready_in_s) == (10, 1.0, None)
    assert progress(bench, LAST).ready_in_s is None
    first = found(bench, LAST)[0]
    assert (
        first.sentence
        == "G3: 10 of 100 samples in 1 min, 90 missing; never at 1/s, which is 60 in its window"
    )
    assert "min_samples" in first.remedy


def lost(second: int) -> list[PopulationCells]:
    """Six pairs, and four halves whose canary never answered."""
    return [
        PopulationCells(canary(), [pair_cell([0.012] * 6)]),
        PopulationCells(canary(version=None, differs=0), [pair_cell([], unmatched__no_canary=4, dropped=1)]),
    ]


def unwarm(bench: Bench) -> None:
    """The worker of klaxon.logits starts anew and sees seconds whole from T0 + 8 on."""
    bench.run(T0, T0 + 4, healthy_pairs(20), quick_requests(20))
    for topic in bench.sources:
        whole_from = T0 + 8 if topic == LOGITS else 0
        cells = healthy_pairs(20) if topic == LOGITS else quick_requests(20) if topic == REQUESTS else None
        contents = {at: cells(at) for at in range(T0 + 8, LAST + 1)} if callable(cells) else {}
        bench.read(final(topic, T0 + 5, LAST, contents, whole_from=whole_from))
    bench.judge(LAST)


def otherwise(bench: Bench) -> None:
    """The worker of klaxon.logits has other settings from T0 + 5 on: something else scores."""
    bench.run(T0, T0 + 4, healthy_pairs(20), quick_requests(20))
    for topic in bench.sources:
        hashes = {"settings_hash": "other"} if topic == LOGITS else {}
        cells = healthy_pairs(20) if topic == LOGITS else quick_requests(20) if topic == REQUESTS else None
        contents = {at: cells(at) for at in range(T0 + 5, LAST + 1)} if callable(cells) else {}
        bench.read(final(topic, T0 + 5, LAST, contents, **hashes))
    bench.judge(LAST)


def silence(bench: Bench) -> None:
    """Requests alone go on."""
    bench.run(T0, LAST, healthy_pairs(20), quick_requests(20))
    bench.read(final(REQUESTS, LAST + 1, LAST + 59))


CASES: list[tuple[str, Callable[[Bench], object], str, str, str]] = [
    (
        "no canary traffic",
        lambda bench: bench.run(T0, LAST),
        "no_canary_traffic",
        "no canary traffic: not one sample for G3, B1 in the last 1 min",
        "mirror",
    ),
    (
        "too few samples of one rule",
        lambda bench: bench.run(T0, LAST, healthy_pairs(20), quick_requests(5)),
        "too_few_samples",
        "B1: 50 of 100 samples in 1 min, 50 missing; about 10 s at 5/s",
        "wait",
    ),
    (
        "none comes any more",
        lambda bench: (
            bench.run(T0, T0 + 1, healthy_pairs(20), quick_requests(20)),
            bench.run(T0 + 2, T0 + 80),
        ),
        "no_canary_traffic",
        "no canary traffic: not one sample",
        "dead-letter",
    ),
    (
        "a worker that warms up",
        unwarm,
        "unknown_seconds",
        "G3: 3 s of klaxon.logits/0 are unknown (its worker began too late to see them whole); they leave its"
        " window in 58 s",
        "wait",
    ),
    (
        "a worker that scores with something else",
        otherwise,
        "blind",
        f"second {LAST} of klaxon.logits/0 is unknown (closed with other content settings than the gate's)",
        "all of them the scoring kernel or none",
    ),
    (
        "over the limit, not yet for long enough",
        lambda bench: bench.run(T0, LAST, healthy_pairs(20), quick_requests(20, 400_000)),
        "over_limit",
        "B1: rollout: over the limit for 6 of 20 s",
        "canary",
    ),
    (
        "canaries that do not answer",
        lambda bench: bench.run(T0, T0 + 19, lost, quick_requests(20)),
        "coverage",
        "coverage 0.545 is below 0.9: of 220 mirrored requests not scored: 80 no_canary, 20 dropped",
        "canary's answers do not arrive",
    ),
    (
        "paused by an operator",
        lambda bench: (
            bench.run(T0, LAST, healthy_pairs(20), quick_requests(20)),
            bench.command(command("pause", "p"), us(LAST + 16)),
        ),
        "paused",
        "it is paused: the weight holds until an operator resumes it",
        "klaxon rollout resume chat",
    ),
    (
        "it only has to last",
        lambda bench: bench.run(T0, T0 + 89, healthy_pairs(20), quick_requests(20)),
        "settling",
        "the weight step at 1 % has 31 s to last",
        "wait",
    ),
    (
        "a silent source",
        silence,
        "blind",
        "the newest complete second is 66 s old; waiting for klaxon.logits/0, klaxon.telemetry/0",
        "klaxon worker pair",
    ),
    (
        "tripped",
        lambda bench: bench.run(T0, LAST, healthy_pairs(20, 0.3), quick_requests(20)),
        "final",
        "tripped is final until a new generation",
        "klaxon rollout new-generation chat",
    ),
    (
        "nothing judged yet",
        lambda bench: bench.run(T0 - 30, T0 - 17),
        "not_judged",
        "no complete second of this generation has been judged yet",
        "every source",
    ),
]


@pytest.mark.parametrize(
    ("happened", "code", "sentence", "remedy"), [one[1:] for one in CASES], ids=[one[0] for one in CASES]
)
def test_the_first_obstacle_says_exactly_why(
    happened: Callable[[Bench], object], code: str, sentence: str, remedy: str
) -> None:
    bench = Bench.started(POLICY)
    happened(bench)
    newest = bench.core._intake.done
    at = LAST + 50 if "s old" in sentence else newest
    first = found(bench, at)[0]
    assert (first.code, first.sentence[: len(sentence)]) == (code, sentence)
    assert remedy in first.remedy


def test_a_gate_that_is_away_and_a_lease_that_ran_out() -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, LAST, healthy_pairs(20), quick_requests(20))
    away = found(bench, LAST, silent_s=21, lease_s=-6)
    assert codes(away) == ["gate_away", "lease_over"]
    assert away[0].sentence == "no gate has written for 21 s"
    assert away[1].sentence == "the lease ran out 6 s ago: routers raise no weight"
    late = found(bench, LAST, silent_s=19, lease_s=-4)
    assert codes(late)[0] == "lease_over", "not away yet, but nothing may rise"
    assert "klaxon worker gate" in late[0].remedy


def test_nothing_enforces_and_manual_steps() -> None:
    bench = Bench.started(POLICY.replace("mode: enforce", "mode: observe"))
    bench.run(T0, LAST, healthy_pairs(20), quick_requests(20))
    assert codes(found(bench, LAST)) == ["nothing_enforces", "settling", "too_few_pairs"]
    assert progress(bench, LAST).ready_in_s is None
    manual = Bench.started(POLICY.replace("auto", "manual").replace("900", "10"))
    manual.run(T0, T0 + 130, healthy_pairs(20), quick_requests(20))
    (one,) = found(manual, T0 + 130)
    assert (one.code, one.remedy) == ("manual", "`klaxon rollout step chat`, once everything passes")


def test_a_new_generation_is_not_answered_with_the_old_ones_progress() -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, LAST, healthy_pairs(20), quick_requests(20))
    memory = renewed(bench, LAST)
    bench.command(command("abort", "a"), us(LAST + 17))
    bench.command(command("new_generation", "n"), us(LAST + 18))
    fresh = bench.core._runs["chat"].memory
    assert (memory.progress is None, fresh.progress) == (False, None)


def test_why_seconds_are_unknown() -> None:
    source = Source(LOGITS, 0, HASH)
    source.state_final(final(LOGITS, T0, T0 + 9), T0 - 1)
    source.state_final(final(LOGITS, T0 + 10, T0 + 14, whole_from=T0 + 13), T0 - 1)
    source.state_final(final(LOGITS, T0 + 15, T0 + 16, settings_hash="other"), T0 - 1)
    source.state_final(final(LOGITS, T0 + 17, T0 + 17, settings_hash="other"), T0 - 1)
    source.state_final(final(LOGITS, T0 + 20, T0 + 20), T0 - 1)
    source.state_final(final(LOGITS, T0 + 30, T0 + 30, whole_from=T0 + 25), T0 - 1)
    assert source.unknown_parts(T0 - 2, T0 + 33) == [
        (T0 - 2, T0 - 1, "unheard"),
        (T0 + 10, T0 + 12, "warming_up"),
        (T0 + 15, T0 + 17, "other_settings"),
        (T0 + 18, T0 + 19, "not_retained"),
        (T0 + 21, T0 + 29, "warming_up"),
        (T0 + 31, T0 + 33, "not_closed"),
    ]
    assert source.unknown_parts(T0, T0 + 9) == []
    source.forget(T0 + 18)
    assert [why for _, _, why in source.lacks] == ["not_retained", "warming_up"], "what nobody asks for goes"


@given(
    st.lists(st.tuples(st.integers(-5, 40), st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
    st.integers(-5, 45),
)
def test_what_is_unknown_is_what_is_not_known(statements: list[tuple[int, int, bool]], first: int) -> None:
    source = Source(LOGITS, 0, HASH)
    for closed_from, length, whole in statements:
        low = T0 + closed_from
        settings_hash = HASH if whole else "other"
        source.state_final(final(LOGITS, low, low + length - 1, settings_hash=settings_hash), T0 - 100)
    low, high = T0 + first, T0 + first + 20
    unknown = {second for one in source.unknown_parts(low, high) for second in range(one[0], one[1] + 1)}
    known = {second for one in source.known for second in range(one[0], one[1] + 1)}
    assert unknown == set(range(low, high + 1)) - known


@given(
    st.dictionaries(st.integers(81, 100), st.integers(1, 9), max_size=20),
    st.integers(1, 80),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 7.0]),
)
def test_time_to_samples_is_the_first_moment(held: dict[int, int], needed: int, rate: float) -> None:
    """A window of 20 s that ends at 100, against counting second by second."""

    def count(after: int) -> float:
        return rate * after + sum(n for second, n in held.items() if second > 100 + after - 20)

    slow = next((after for after in range(21) if count(after) >= needed), None)
    assert time_to_samples(held, 100, 20, needed, rate) == slow


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (301, "5 min 1 s"), (3600, "1 h"), (7500, "2 h 5 min")],
)
def test_spans(seconds: int, words: str) -> None:
    assert span(seconds) == words
