"""The same log gives the same decisions: after a crash at any instant, and however finals arrive."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pipeline.core.gate.gating import GateCore
from pipeline.core.gate.state import encode_state
from schemas.buckets import FinalBuckets, PopulationCells
from schemas.control import Decision
from tests.core.gate.build import (
    LATENESS_S,
    LOGITS,
    REQUESTS,
    SOURCES,
    T0,
    TELEMETRY,
    Bench,
    canary,
    command,
    final,
    pair_cell,
    request_cell,
    start_command,
    us,
)
from tests.core.gate.build import (
    settings as gate_settings,
)

POLICY = """
rules:
  - {id: kl, metric: kl_lower, window: 6s, limit: 0.1, min_samples: 12, scope: [rollout, node],
     action: rollback_l1}
  - {id: p50, metric: ttft_us, statistic: p50, window: 3s, limit: 180ms, min_samples: 4, hold: 4s,
     action: pause}
  - {id: slow, metric: ttft_over_share, over: 500ms, window: 6s, limit: 20%, min_samples: 8,
     action: fallback, mode: observe}
  - {id: adds-up, metric: kl_lower, evidence: anytime, window: 6s, limit: 0.1, min_samples: 12,
     scope: [rollout, node], action: rollback_l1}
  - {id: node, metric: ttft_us, statistic: p50, relative_to: baseline, window: 4s, limit: 5, min_samples: 4,
     hold: 2s, scope: [node], action: eject_node}
  - {id: part, metric: kl_lower, window: 4s, limit: 0.03, min_samples: 6, scope: [rollout, node],
     action: narrow}
ejection: {max_share: 60%}
sequential: {alpha: 0.5}
coverage: {limit: 0.8, window: 5s, min_samples: 8}
progression: {min_pairs: 20}
"""
LENGTH_S = 40


def content(rng: random.Random, calm: bool) -> tuple[list[PopulationCells], list[PopulationCells]]:
    """One second: mostly healthy, sometimes ill, sometimes missing; two generations, versions absent."""
    mood = 0.5 if calm else rng.random()
    generation = rng.choice((1, None) if calm else (1, 1, 1, 2, None))
    scores = [rng.choice((0.01, 0.02, 0.03)) for _ in range(rng.randrange(6))]
    if mood < 0.08:
        scores = [0.3] * rng.randrange(3, 9)
    elif mood < 0.3:
        scores = [0.01] * 3 + [0.08] * 3
    lost = {"unmatched__no_canary": rng.randrange(4)} if mood > 0.8 else {}
    worst = [(1000 + rng.randrange(99), bytes([rng.randrange(256)]) * 16)]
    cells = [pair_cell(scores, worst=worst, **lost)]
    if scores:
        # One node has the worst of them.
        order = sorted(scores)
        cells.append(pair_cell(order[: -(-len(order) // 2)], "node", "a"))
        cells.append(pair_cell(order[-(-len(order) // 2) :], "node", "b", worst=worst))
    pairs = [PopulationCells(canary(generation=generation), cells)]
    ttft = 100_000 if calm else rng.choice((100_000, 100_000, 200_000, 900_000))
    values = [ttft] * rng.randrange(6)
    requests = [
        PopulationCells(
            canary(generation=generation, differs=0),
            [request_cell(values), request_cell(values, "node", rng.choice("aab" if calm else "aabc"))],
        ),
        PopulationCells(canary("baseline", "v1", generation, 0), [request_cell([100_000] * 2)]),
    ]
    return pairs, requests


def script(seed: int) -> list[tuple[str, object]]:
    """What happens, second by second: finals of the sources, judgements, commands, renewals."""
    rng = random.Random(seed)
    steps: list[tuple[str, object]] = []
    for second in range(T0 - LATENESS_S - 2, T0 + LENGTH_S):
        pairs, requests = content(rng, calm=seed % 3 == 0)
        first = 0 if not steps else second
        finals = [
            final(LOGITS, first, second, {second: pairs}),
            final(REQUESTS, first, second, {second: requests}),
            final(TELEMETRY, first, second),
        ]
        if rng.random() < 0.04:
            finals[0] = final(LOGITS, second, second, {second: pairs}, whole_from=second + 1)
        rng.shuffle(finals)
        steps.append(("finals", finals))
        steps.append(("judge", second))
        if rng.random() < (0.03 if seed % 3 == 0 else 0.2):
            name = rng.choice(("resume", "pause", "step", "promote", "new_generation"))
            steps.append(("command", (command(name, f"{name}-{second}"), second)))
        if rng.random() < 0.3:
            steps.append(("renew", second))
    return steps


def comparable(decision: Decision) -> tuple[object, ...]:
    """Everything but time, lease and epoch, which renewals move."""
    directive = decision.directive
    stands = None
    if directive is not None:
        stands = (
            directive.generation, directive.state, tuple(directive.weights.items()), directive.level,
            tuple(directive.last_promoted.items()), directive.cause, directive.policy_hash,
            directive.ejected_nodes, directive.excluded_segments,
        )  # fmt: skip
    inputs: tuple[object, ...] = ()
    if decision.kind not in ("command", "refused"):
        # An answer to a command states what this process has read; a verdict, what it was judged on.
        inputs = (decision.inputs.complete_through, tuple(sorted(decision.inputs.offsets.items())))
    return (decision.kind, decision.reason, decision.command_id, stands, decision.evaluations, *inputs)


def play(seed: int, crashes: dict[int, int]) -> list[Decision]:
    """Run a script. `crashes`: step → how many of its effects are still written before everything is lost."""
    return play_on(seed, crashes)[0]


def play_on(seed: int, crashes: dict[int, int]) -> tuple[list[Decision], Bench]:
    """Decisions, and the gate as it stands at the end, everything judged that can be."""
    bench = Bench.started(POLICY, join_timeout_us=1_000_000)
    written = list(bench.effects)
    for at, (what, value) in enumerate(script(seed)):
        effects = []
        if what == "finals":
            for one in value:  # type: ignore[attr-defined]
                bench.read(one)
        elif what == "judge":
            effects = bench.core.judge_complete(us(value + 1 + LATENESS_S))  # type: ignore[operator]
        elif what == "renew":
            effects = bench.core.renew(us(value + 1 + LATENESS_S))  # type: ignore[operator]
        else:
            one, second = value  # type: ignore[misc]
            offset = len(bench.commands)
            bench.commands.append((us(second + 1.5 + LATENESS_S), one))
            effects = bench.core.on_command(one, offset, us(second + 1.5 + LATENESS_S))
        keep = crashes.get(at)
        written += bench.write(effects if keep is None else effects[:keep])
        if keep is not None:
            bench = bench.crash()
            written += bench.effects
            if what == "judge":
                written += bench.write(bench.core.judge_complete(us(value + 1 + LATENESS_S)))  # type: ignore[operator]
    decided = [effect.decision for effect in written if effect.decision is not None]
    bench.core.judge_complete(us(T0 + LENGTH_S + LATENESS_S))
    return decided, bench


def betting(bench: Bench) -> list[bytes | None]:
    """What sequential rules remember, bit for bit."""
    return [encode_state(one.memory) for run in bench.core._runs.values() for one in run.evidence.sequential]


crashing = st.dictionaries(st.integers(0, 160), st.integers(0, 2), max_size=6)
NO_SHRINKING = (Phase.explicit, Phase.generate)
"""A script is its seed: there is nothing to shrink."""


@settings(max_examples=20, deadline=None, phases=NO_SHRINKING)
@example(2692, {6: 1, 35: 1, 33: 2})  # `promote` is the first thing that happens after a crash
@given(st.integers(0, 10_000), crashing)
def test_a_crash_at_any_instant_changes_no_decision(seed: int, crashes: dict[int, int]) -> None:
    compare_with_crashes(seed, crashes)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, phases=NO_SHRINKING)
@given(st.integers(0, 1_000_000), crashing)
def test_many_crashes_change_no_decision(seed: int, crashes: dict[int, int]) -> None:
    compare_with_crashes(seed, crashes)


def compare_with_crashes(seed: int, crashes: dict[int, int]) -> None:
    whole, undisturbed = play_on(seed, {})
    broken, heir = play_on(seed, crashes)
    assert betting(heir) == betting(undisturbed)
    assert [comparable(one) for one in broken] == [comparable(one) for one in whole]
    trips = [one.directive.generation for one in broken if one.kind == "trip" and one.directive is not None]
    assert len(trips) == len(set(trips)), "exactly one trip per generation"


def test_the_scripts_reach_every_kind_of_decision() -> None:
    """The property above is worth what its scripts do."""
    seen: dict[str, int] = {}
    for seed in range(16):
        for one in play(seed, {}):
            seen[one.kind] = seen.get(one.kind, 0) + 1
    expected = {
        "trip", "step", "pause", "command", "refused", "hold", "close", "advise", "eject", "narrow",
    }  # fmt: skip
    assert expected <= set(seen), seen


def test_known_bad_a_memory_that_is_lost_is_noticed() -> None:
    """A gate that forgot what it had folded would decide again: the comparison must see it."""
    found = 0
    for seed in range(8):
        whole = play(seed, {})
        bench = Bench.started(POLICY, join_timeout_us=1_000_000)
        written = list(bench.effects)
        for what, value in script(seed):
            if what == "finals":
                for one in value:  # type: ignore[attr-defined]
                    bench.read(one)
            elif what == "judge":
                effects = bench.write(bench.core.judge_complete(us(value + 1 + LATENESS_S)))  # type: ignore[operator]
                written += effects
                if any(effect.decision and effect.decision.kind == "trip" for effect in effects):
                    bench.core = GateCore(0, SOURCES, gate_settings(join_timeout_us=1_000_000))
                    bench.core.on_command(start_command(POLICY), 0, us(T0))
                    for one in bench.finals:
                        bench.core.on_final(one)
        trips = [effect for effect in written if effect.decision and effect.decision.kind == "trip"]
        found += len(trips) > sum(one.kind == "trip" for one in whole)
    assert found > 1


@settings(max_examples=15, deadline=None, phases=NO_SHRINKING)
@given(st.integers(0, 10_000), st.integers(1, 5), st.randoms(use_true_random=False))
def test_decisions_do_not_depend_on_how_finals_come(seed: int, partitions: int, rng: random.Random) -> None:
    """Other partition counts, other order of sources, seconds judged one by one or many at once."""
    one_by_one = run_split(seed, 1, None)
    assert run_split(seed, partitions, rng) == one_by_one


def run_split(seed: int, partitions: int, rng: random.Random | None) -> list[tuple[object, ...]]:
    sources = {REQUESTS: partitions, LOGITS: partitions, TELEMETRY: 1}
    bench = Bench.started(POLICY, sources, join_timeout_us=1_000_000)
    waiting: list[FinalBuckets] = []
    source_rng = random.Random(seed)
    split_rng = random.Random(seed + 1)
    for second in range(T0 - 20, T0 + LENGTH_S):
        pairs, requests = content(source_rng, calm=seed % 3 == 0)
        first = 0 if second == T0 - 20 else second
        for topic, cells in ((LOGITS, pairs), (REQUESTS, requests)):
            shares: list[list[PopulationCells]] = [[] for _ in range(partitions)]
            for population_cells in cells:
                for cell in population_cells.cells:
                    share = shares[split_rng.randrange(partitions)]
                    share.append(PopulationCells(population_cells.population, [cell]))
            waiting += [
                final(topic, first, second, {second: share} if share else {}, partition=number)
                for number, share in enumerate(shares)
            ]
        waiting.append(final(TELEMETRY, first, second))
        last = second == T0 + LENGTH_S - 1
        if rng is None or rng.random() < 0.3 or last or second == T0 - 20:
            if rng is not None:
                by_source: dict[tuple[str, int], list[FinalBuckets]] = {}
                for one in waiting:
                    by_source.setdefault((one.topic, one.partition), []).append(one)
                order = list(by_source)
                rng.shuffle(order)
                waiting = [one for key in order for one in by_source[key]]
            for one in waiting:
                bench.read(one)
            waiting = []
            # Always the same time: what is judged late is not judged otherwise.
            bench.write(bench.core.judge_complete(us(T0 + LENGTH_S - 20)))
    found = [effect.decision for effect in bench.effects if effect.decision is not None]
    told: list[tuple[object, ...]] = [tuple(betting(bench))]
    return told + [
        (*comparable(one)[:5], one.inputs.complete_through) for one in found if one.kind != "command"
    ]


@pytest.mark.parametrize("parts", [2, 3])
def test_a_statement_in_parts_holds_when_the_last_part_is_read(parts: int) -> None:
    bench = Bench.started()
    cells = [PopulationCells(canary(), [pair_cell([0.2] * 100)])]
    whole = final(LOGITS, 0, T0, {T0: cells})
    for part in range(parts):
        held = whole.seconds if part == 0 else []
        one = FinalBuckets(1, LOGITS, 0, 0, 0, T0, 0, whole.offset, whole.settings_hash, part, parts, held)
        for topic in (REQUESTS, TELEMETRY):
            bench.read(final(topic, 0, T0))
        assert bench.judge(T0) == []
        bench.read(one)
    assert len(bench.judge(T0)) == 1


def test_of_two_statements_the_greater_offset_wins_and_an_alert_is_counted() -> None:
    for offsets, trips in (((5, 9), True), ((9, 5), False)):
        bench = Bench.started()
        for offset, score in zip(offsets, (0.01, 0.2), strict=True):
            cells = [PopulationCells(canary(), [pair_cell([score] * 100)])]
            bench.read(final(LOGITS, 0, T0, {T0: cells}, offset=offset))
        for topic in (REQUESTS, TELEMETRY):
            bench.read(final(topic, 0, T0))
        assert bool(bench.judge(T0)) == trips
        assert bench.core.gauges()["conflicting_finals"] >= 1


def test_a_worker_that_starts_over_repeats_itself_without_harm() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, lambda _: [PopulationCells(canary(), [pair_cell([0.2] * 10)])])
    for one in list(bench.finals):
        bench.read(one)
    effects = bench.run(T0 + 6, T0 + 20, lambda _: [PopulationCells(canary(), [pair_cell([0.2] * 10)])])
    assert [effect.decision.inputs.complete_through for effect in effects if effect.decision] == [T0 + 9]
    assert bench.core.gauges()["conflicting_finals"] == 0


def test_memory_is_bounded_when_a_source_stands_still() -> None:
    bench = Bench.started()
    for at in range(0, 20_000, 10):
        cells = {T0 + at: [PopulationCells(canary(), [pair_cell([0.01])])]}
        bench.core.on_final(final(LOGITS, T0 + at, T0 + at + 9, cells))
    assert bench.core.gauges()["waiting_seconds"] <= 7_200
    assert bench.core.gauges()["dropped_seconds"] > 0


def test_after_a_gap_in_retention_the_rollout_pauses() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, lambda _: [PopulationCells(canary(), [pair_cell([0.01] * 10)])])
    bench.write(bench.core.renew(us(T0 + 30)))
    bench.finals.clear()
    heir = bench.crash()
    for topic in SOURCES:
        heir.read(final(topic, T0 + 500, T0 + 500))
    (effect,) = heir.write(heir.core.judge_complete(us(T0 + 516)))
    assert effect.decision is not None
    assert effect.decision.kind == "gap"
    assert effect.directive is not None
    assert effect.directive.state == "paused"


def test_the_last_words_of_an_old_owner_behind_the_first_of_its_successor_are_no_gap() -> None:
    """Who begins to read there does not know what the old owner said before."""
    bench = Bench.started()
    bench.run(T0, T0 + 60, lambda _: [PopulationCells(canary(), [pair_cell([0.01] * 10)])])
    bench.write(bench.core.renew(us(T0 + 80)))
    bench.finals.clear()
    heir = bench.crash()
    for topic in SOURCES:
        heir.read(final(topic, 0, T0 + 20))  # of the successor, which catches up
        heir.read(final(topic, T0 + 35, T0 + 40))
        heir.read(final(topic, T0 + 21, T0 + 62))
    assert heir.write(heir.core.judge_complete(us(T0 + 78))) == []
    assert heir.control["chat"].state == "observing"


def test_a_gap_is_told_once_whatever_dies() -> None:
    bench = Bench.started()
    healthy = [PopulationCells(canary(), [pair_cell([0.01] * 10)])]
    bench.run(T0, T0 + 5, lambda _: healthy)
    bench.close(T0 + 10, healthy)
    (told,) = bench.judge(T0 + 10)
    assert told.decision is not None
    assert told.decision.kind == "gap"
    bench.command(command("resume", "r"), us(T0 + 27))
    heir = bench.crash()
    for _ in range(2):
        heir.run(T0 + 11, T0 + 14, lambda _: healthy)
        assert [effect.decision for effect in heir.effects if effect.decision] == []
        assert heir.control["chat"].state == "observing"
        heir = heir.crash()


def test_a_foreign_record_on_the_control_topic_is_overruled() -> None:
    from msgspec.structs import replace

    bench = Bench.started()
    ours = bench.control["chat"]
    bench.control["chat"] = replace(ours, epoch=40, weights={"v1": 0.0, "v2": 100.0}, state="promoted")
    heir = bench.crash()
    for topic in SOURCES:
        heir.read(final(topic, 0, T0 + 5))
    heir.write(heir.core.judge_complete(us(T0 + 20)))
    (effect,) = heir.write(heir.core.renew(us(T0 + 20)))
    assert effect.directive is not None
    assert effect.directive.epoch == 41
    assert effect.directive.weights == ours.weights


def test_without_transactions_a_trip_that_reached_routers_stays() -> None:
    bench = Bench.started()
    states = dict(bench.states)
    bench.run(T0, T0 + 20, lambda _: [PopulationCells(canary(), [pair_cell([0.2] * 10)])])
    bench.states = states
    heir = bench.crash()
    assert heir.write(heir.core.judge_complete(us(T0 + 40))) == []
    (effect,) = heir.write(heir.core.renew(us(T0 + 40)))
    assert effect.directive is not None
    assert effect.directive.state == "tripped"
    assert effect.directive.weights["v2"] == 0.0
