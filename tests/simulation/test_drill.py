"""G6 as a test: the drill through the real pair and measure sources and real gates, in event time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.bins import bin_lower, bin_upper
from pipeline.policy_file import parse_policy, shipped_policy_text
from tests.core.gate.build import LATENESS_S
from tests.simulation import drill
from tests.simulation.answers import SECOND_US, START_US
from tests.simulation.cells import node_names, pair_cells, request_cells
from tests.simulation.drill import CELL, Drill
from tests.simulation.judged import Generation, Trip
from tests.simulation.scores import HEALTHY, HEALTHY_MEAN, pool
from tests.simulation.traffic import TTFT_P99_US, Pairs, Requests, seed, times_between_tokens

pytestmark = [pytest.mark.slow, pytest.mark.shared]

SHIPPED, IN_THE_CELL, IN_THE_WHOLE, ANYTIME = drill.policies()


@pytest.fixture(scope="module")
def played(shared_dir: Path) -> Drill:
    return drill.play(1, shared_dir, drill.policies())


def test_about_190_affected_pairs_all_in_one_cell(played: Drill) -> None:
    assert len(played.traffic.at_us) == 100_000
    assert len(played.traffic.mirrored) == 5_000
    assert 160 < len(played.traffic.hit) < 220


def test_the_shipped_policy_cuts_the_canary_before_the_hundredth_affected_pair_has_waited_3_s(
    played: Drill,
) -> None:
    verdict = played.verdicts[SHIPPED]
    assert verdict is not None
    assert verdict.since_hundredth_s <= 3
    assert verdict.decision.directive is not None
    assert verdict.decision.directive.weights == {"v1": 100.0, "v2": 0.0}
    located = verdict.cause.located
    assert located is not None
    assert f"{located.dimension}={located.value}" == f"node_context={CELL}"


def test_judged_in_the_cell_alone_it_is_cut_as_soon_as_there_are_100_pairs(played: Drill) -> None:
    verdict = played.verdicts[IN_THE_CELL]
    assert verdict is not None
    assert verdict.since_hundredth_s <= 3
    assert verdict.cause.samples is not None
    assert verdict.cause.samples >= 100


def test_by_betting_it_takes_a_third_of_the_pairs_and_the_lateness(played: Drill) -> None:
    """The anytime rule names node × context, from complete seconds only."""
    point, anytime = played.verdicts[IN_THE_CELL], played.verdicts[ANYTIME]
    assert point is not None
    assert anytime is not None
    assert anytime.cause.rule == "G3-anytime"
    assert anytime.cause.scope == f"node_context={CELL}"
    seen_s = anytime.decision.inputs.complete_through + 1 - START_US // SECOND_US
    assert anytime.at_s - seen_s >= LATENESS_S
    in_the_evidence = np.searchsorted(played.traffic.at_us[played.traffic.hit], seen_s * SECOND_US)
    assert in_the_evidence <= point.affected / 2
    assert anytime.since_hundredth_s <= 3


def test_the_roll_outs_own_mean_hides_it(played: Drill) -> None:
    """The known-bad control: a rule that looks at the whole only."""
    assert played.verdicts[IN_THE_WHOLE] is None


def test_the_other_traffic_keeps_its_first_token_and_sees_no_error(played: Drill) -> None:
    assert played.baseline_errors == 0
    held = played.baseline_ttft
    assert sum(held.values()) == 100_000
    counts = np.cumsum([held[at] for at in sorted(held)])
    at = sorted(held)[int(np.searchsorted(counts, 0.99 * counts[-1]))]
    assert bin_lower("latency", at) * 0.98 < TTFT_P99_US < bin_upper("latency", at) * 1.02


@pytest.mark.parametrize("number", range(10))
def test_without_a_fault_nothing_trips(shared_dir: Path, number: int) -> None:
    assert fault_free(shared_dir, number) == []


def fault_free(shared: Path, number: int) -> list[Trip]:
    """The drill's traffic with healthy scores, through the same cells and the shipped policy's every rule."""
    made = drill.traffic(number, shared)
    order = np.argsort(made.at_us + made.ttft_us, kind="stable")
    mirrored = order[np.isin(order, made.mirrored)]
    second = (made.at_us + made.ttft_us) // 1_000_000
    scores = seed(7, number).choice(pool(shared, HEALTHY, HEALTHY_MEAN), len(mirrored))
    pairs = Pairs(
        second[mirrored], scores, made.node[mirrored], made.tokens[mirrored], mirrored % 2,
        np.full(len(mirrored), -1, dtype=np.int64),
    )  # fmt: skip
    itl_us = times_between_tokens(seed(6, number), shared, len(made.tokens))
    answered = {
        arm: request_cells(
            Requests(
                second[rows], made.ttft_us[rows], made.node[rows], made.tokens[rows], rows % 2, itl_us[rows]
            ),
            node_names(arm, drill.NODES),
            traffic,
        )
        for arm, traffic, rows in (("baseline", "user", order), ("canary", "shadow", mirrored))
    }
    cells = pair_cells(pairs, node_names("canary", drill.NODES))
    generation = Generation(parse_policy(shipped_policy_text()))
    return [
        trip
        for at in range(int(second.max()) + 1)
        for trip in generation.fold(at, cells, answered)  # type: ignore[arg-type]
    ]
