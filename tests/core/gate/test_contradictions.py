"""Evidence and records that contradict themselves: they hold, never promote, never trip, never end a gate."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pipeline.core.gate.anytime_scopes import Processes
from pipeline.core.gate.left_out import Exclusion, LeftOut
from pipeline.core.gate.rules import RuleVerdict
from pipeline.core.gate.soundness import unsound
from pipeline.core.gate.state import RuleMemory, decode_state, encode_state
from pipeline.core.statistics.betting import CEILING, growth_of
from schemas.buckets import Cell, Distribution, PopulationCells
from tests.core.gate.build import (
    LOGITS,
    NAME,
    T0,
    Bench,
    canary,
    command,
    final,
    healthy_pairs,
    kinds,
    pair_cell,
    quick_requests,
    request_cell,
    us,
)
from tests.core.gate.test_anytime import POLICY, fleet, rule_of, said

EJECT = """  - {id: slow-node, metric: ttft_us, statistic: p99, window: 5s, limit: 150ms, min_samples: 10,
     hold: 1s, scope: node, action: eject_node}
"""
BLOCKS = """  - {id: share, metric: ttft_us, statistic: p99, relative_to: baseline, evidence: anytime,
     window: 60s, limit: 1.15, min_samples: 10, scope: [rollout, node], action: rollback_l1}
"""
POINT = """  - {id: point, metric: kl_lower, window: 5m, limit: 0.05, min_samples: 100,
     scope: [rollout, node], action: rollback_l1}
"""


# --- records of klaxon.state ----------------------------------------------------------------------------


def stakes_of(stake: float) -> Callable[[RuleMemory], dict[str, object]]:
    return lambda record: {"stakes": struct.pack("<6d", *[stake] * 6) * len(record.scopes)}


HOSTILE: dict[str, Callable[[RuleMemory], dict[str, object]]] = {
    "stakes that add up to infinity": stakes_of(1e308),
    "stakes just over their ceiling": stakes_of(math.nextafter(CEILING, math.inf)),
    "a second that was not folded": lambda record: {"folded": T0 + 31},
    "a far second": lambda record: {"folded": 10**12},
    "a second of before the generation": lambda record: {"folded": T0 - 5_000},
    "a pass that so few pairs cannot bring": lambda record: {"pass_logs": struct.pack("<2d", 50.0, 50.0)},
    "an endless pass": lambda record: {"pass_logs": struct.pack("<2d", 1e308, 1e308)},
    "a pass without pairs": lambda record: {"pass_pairs": 0},
    "pairs below none": lambda record: {"pass_pairs": -record.pass_pairs},
    "samples below none": lambda record: {"samples": -1},
    "buckets beyond counting": lambda record: {"buckets": (1 << 62,) * len(record.scopes)},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_record_that_no_betting_leads_to_neither_passes_nor_trips_nor_ends_the_gate(what: str) -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, T0 + 30, fleet(0.012), quick_requests())
    bench.write(bench.core.renew(us(T0 + 60)))
    record = decode_state(bench.states["chat/adds-up"])
    assert isinstance(record, RuleMemory)
    assert (record.folded, record.pass_pairs > 0) == (T0 + 30, True)
    bench.states["chat/adds-up"] = encode_state(replace(record, **HOSTILE[what](record)))  # type: ignore[assignment]
    heir = bench.crash()
    assert heir.run(T0 + 31, T0 + 34, fleet(0.012), quick_requests()) == []
    assert heir.core.gauges()["evidence_begun_anew"] == 1
    assert said(heir).verdict == "not_enough_data"
    assert rule_of(heir).folded == T0 + 34
    assert rule_of(heir).passing.pairs < record.pass_pairs


def test_the_control_the_record_as_it_was_goes_on() -> None:
    bench = Bench.started(POLICY)
    bench.run(T0, T0 + 30, fleet(0.012), quick_requests())
    bench.write(bench.core.renew(us(T0 + 60)))
    heir = bench.crash()
    heir.run(T0 + 31, T0 + 34, fleet(0.012), quick_requests())
    assert heir.core.gauges()["evidence_begun_anew"] == 0
    assert said(heir).verdict == "pass"


# --- less than what is left out of it -------------------------------------------------------------------


def with_ejected(policy: str) -> Bench:
    """c-0 of ten nodes is ejected at T0 + 2: evidence from T0 + 3 on is without it."""

    def requests(_: int) -> list[PopulationCells]:
        names = [f"c-{number}" for number in range(10)]
        cells = [request_cell([300_000 if name == "c-0" else 90_000] * 20, "node", name) for name in names]
        return [
            PopulationCells(canary("baseline", "v1", differs=0), [request_cell([90_000] * 200)]),
            PopulationCells(canary(differs=0), [request_cell([90_000] * 180 + [300_000] * 20), *cells]),
        ]

    bench = Bench.started(policy)
    assert kinds(bench.run(T0, T0 + 2, fleet(0.012), requests)) == ["eject"]
    return bench


def verdict(bench: Bench, rule: str) -> RuleVerdict:
    (run,) = bench.core._runs.values()
    assert run.last is not None
    return next(one for one in run.last.verdicts if one.rule.id == rule)


@pytest.mark.parametrize("rule", ["adds-up", "point"])
@pytest.mark.parametrize("score", [0.0, 9.0])
def test_a_cell_that_holds_less_than_what_is_left_out_of_it_is_no_evidence(rule: str, score: float) -> None:
    """Of an ejected node more pairs than of the whole roll-out: taken out, they would bet for the rest."""
    bench = with_ejected(POLICY + POINT + EJECT)

    def second(_: int) -> list[PopulationCells]:
        cells = [pair_cell([0.012] * 60), pair_cell([score] * 20, "node", "c-0")]
        return [PopulationCells(canary(), cells)]

    effects = bench.run(T0 + 3, T0 + 40, second, quick_requests())
    assert effects == []
    found = verdict(bench, rule)
    assert (found.verdict, found.reason.split(";")[0]) == (
        "error",
        "rollout: it holds less than what is left out of it",
    )
    whole = rule_of(bench)
    assert whole.passing.pairs == 0
    assert whole.samples == 20 * 3
    heir = bench.crash()
    heir.run(T0 + 41, T0 + 41, healthy_pairs(), quick_requests())
    bench.run(T0 + 41, T0 + 41, healthy_pairs(), quick_requests())
    assert verdict(heir, rule) == verdict(bench, rule)
    assert verdict(heir, rule).verdict == "error"


@pytest.mark.parametrize("score", [0.0, 9.0])
def test_a_class_that_found_no_room_in_the_bucket_is_not_bet_on_for_what_is_taken_out_of_it(
    score: float,
) -> None:
    """Cells are cut at 2,048 a bucket: a node's context class may be there, the context class itself not."""
    bench = with_ejected(POLICY + POINT.replace("[rollout, node]", "[rollout, context]") + EJECT)

    def second(_: int) -> list[PopulationCells]:
        own = [
            pair_cell([score] * 20, *key)
            for key in (("node", "c-0"), ("node_context", "c-0|>512"), ("node_context", "c-0|>2048"))
        ]
        return [PopulationCells(canary(), [pair_cell([0.012] * 60 + [score] * 20), *own])]

    assert bench.run(T0 + 3, T0 + 40, second, quick_requests()) == []
    assert verdict(bench, "point").verdict == "pass"
    rule = rule_of(bench)
    assert ("context", ">512") not in rule.processes.bets
    assert rule.samples == 20 * 3 + 60 * 38
    assert said(bench).verdict == "pass"


def test_blocks_that_hold_less_than_what_is_left_out_of_them_end_no_gate() -> None:
    bench = with_ejected(POLICY + BLOCKS + EJECT)

    def requests(_: int) -> list[PopulationCells]:
        return [
            PopulationCells(canary("baseline", "v1", differs=0), [request_cell([90_000] * 200)]),
            PopulationCells(
                canary(differs=0),
                [request_cell([90_000] * 200), request_cell([900_000] * 150, "node", "c-0")],
            ),
        ]

    assert bench.run(T0 + 3, T0 + 70, fleet(0.012), requests) == []
    assert verdict(bench, "share").verdict == "error"


def test_a_histogram_that_contradicts_itself_blocks_a_pass_after_a_crash_as_before() -> None:
    bench = Bench.started(POLICY)
    broken = pair_cell([0.012] * 20)
    broken.measures["kl_lower"].counts[0] -= 1
    contents = lambda at: [PopulationCells(canary(), [broken])] if at == T0 + 5 else fleet(0.012)(at)  # type: ignore[operator]  # noqa: E731
    bench.run(T0, T0 + 60, contents, quick_requests())
    bench.write(bench.core.renew(us(T0 + 90)))
    assert said(bench).verdict == "error"
    heir = bench.crash()
    for one in (bench, heir):
        one.run(T0 + 61, T0 + 62, contents, quick_requests())
    assert said(heir) == said(bench)
    assert said(heir).verdict == "error"


@pytest.mark.parametrize(
    ("bins", "counts", "total", "words"),
    [
        ([3, 5], [2, -1], 10, "less than nothing"),
        ([5, 3], [1, 1], 10, "out of order"),
        ([3, 3], [1, 1], 10, "twice"),
        ([3, 5], [1, 1], -1, "less than nothing"),
        ([3, 5], [1, 1], 0, ""),
    ],
)
def test_what_counts_less_than_nothing_is_not_taken_in(
    bins: list[int], counts: list[int], total: int, words: str
) -> None:
    cell = Cell("all", "", {}, {"kl_lower": Distribution(sum(counts), total, 0, 9, bins, counts)}, [])
    record = final(LOGITS, T0, T0, {T0: [PopulationCells(canary(), [cell])]})
    said_of = unsound(record, us(T0))
    assert (words in said_of) if words else not said_of


# --- causes ---------------------------------------------------------------------------------------------


def cause_of(bench: Bench) -> object:
    return bench.control[NAME].cause


def test_what_pauses_after_an_ejection_is_not_laid_at_the_ejections_door() -> None:
    low = "coverage: {window: 10s, min_samples: 10, action: pause}\n"
    bench = with_ejected(POLICY + EJECT + low)
    assert cause_of(bench) is not None
    lost = lambda _: [PopulationCells(canary(), [pair_cell([0.012], unmatched__late=20)])]  # noqa: E731
    assert kinds(bench.run(T0 + 3, T0 + 12, lost, quick_requests())) == ["pause"]
    assert (bench.control[NAME].state, cause_of(bench)) == ("paused", None)
    by_hand = with_ejected(POLICY + EJECT)
    by_hand.command(command("pause", "p"), us(T0 + 20))
    assert (by_hand.control[NAME].state, cause_of(by_hand)) == ("paused", None)


def test_a_gap_after_an_ejection_has_no_cause_and_one_in_a_pause_keeps_the_rules() -> None:
    from pipeline.core.gate.orders import gap

    memory = with_ejected(POLICY + EJECT).core._runs[NAME].memory
    assert memory.cause is not None
    assert gap(memory, 1, 2, "x").memory.cause is None
    paused = replace(memory, state="paused")
    assert gap(paused, 1, 2, "x").memory.cause == memory.cause


# --- a pass, and what a thousand scopes cost ------------------------------------------------------------


def test_a_scope_over_one_alpha_blocks_the_pass_though_the_trip_shares_alpha() -> None:
    """Two rules that share alpha trip at 40; no pass stands against 20 in any scope (statistics.md §0.2)."""
    second = POLICY.split("rules:\n")[1].replace("adds-up", "also").replace("0.05", "0.5")
    bench = Bench.started(POLICY + second)
    bench.run(T0, T0 + 60, fleet(0.012), quick_requests())
    assert said(bench).verdict == "pass"
    processes = rule_of(bench).processes
    for held, told in ((19.9, "pass"), (20.0, "not_enough_data"), (39.9, "not_enough_data")):
        processes.evidence["node", "n3"] = held
        one = rule_of(bench).judge("")
        assert one.verdict == told
        assert ("over 20 in node=n3 alone" in one.reason) == (told != "pass")


def test_what_is_left_out_is_looked_up_once_a_scope_and_change() -> None:
    processes = Processes.of(["node"])
    asked: list[object] = []
    left_out = LeftOut((Exclusion("node", "n-1", 0),))

    def silent(scope: tuple[str, str]) -> bool:
        asked.append(scope)
        return left_out.covers(scope)

    bucket = (growth_of((0.2,)), 1)
    processes.fold({("node", f"n-{number}"): bucket for number in range(10)})
    processes.silence(silent)
    processes.fold({("node", "n-1"): bucket, ("node", "n-11"): bucket})
    for _ in range(100):
        assert processes.total > 0
        assert ("node", "n-1") not in processes.counting
    assert len(asked) == 11
