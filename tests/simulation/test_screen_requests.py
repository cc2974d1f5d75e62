"""What the screen of requests leaves out would not have tripped: its numbers are the gate's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.gate.policy import Policy
from pipeline.policy_file import parse_policy, shipped_policy_text
from schemas.events import Arm
from tests.simulation import screen_requests as screen
from tests.simulation.cells import node_names, request_cells
from tests.simulation.judged import Generation
from tests.simulation.traffic import Requests, requests, seed

pytestmark = [pytest.mark.slow, pytest.mark.shared]

NODES = 3
LENGTH_S = 420


def eager() -> Policy:
    """The shipped policy with so few samples that its rulers judge 12 requests/s, and cry wolf."""
    text = shipped_policy_text().replace("min_samples: 1000", "min_samples: 60")
    return parse_policy(text.replace("hold: 30s", "hold: 5s"))


def answered(shared: Path, number: int) -> dict[Arm, Requests]:
    draw, load = seed(8, number), (None, 0.5, None, 0.9)[number % 4]
    return {
        "baseline": requests(draw, shared, LENGTH_S, 12.0, nodes=NODES, load=load),
        "canary": requests(
            draw, shared, LENGTH_S, 12.0, nodes=NODES, load=load, ratio=1 + 0.4 * (number > 1)
        ),
    }


def judged(made: dict[Arm, Requests], policy: Policy) -> tuple[set[str], dict[str, float]]:
    """Which rules tripped, and the most that evidence came to, second by second in the gate's own rules."""
    generation = Generation(policy, frozenset(rule.id for rule in policy.rules if is_of_requests(rule)))
    cells = {
        arm: request_cells(one, node_names(arm, NODES), screen.TRAFFIC[arm]) for arm, one in made.items()
    }
    tripped: set[str] = set()
    most = dict.fromkeys((one.rule.id for one in generation.evidence.sequential), 0.0)
    for second in range(LENGTH_S):
        tripped |= {trip.rule for trip in generation.fold(second, {}, cells)}
        for one in generation.evidence.sequential:
            most[one.rule.id] = max(most[one.rule.id], one.evidence)
    return tripped, most


def is_of_requests(rule: object) -> bool:
    return rule.metric.family == "requests"  # type: ignore[attr-defined,no-any-return]


def test_rulers_shares_quantiles_and_blocks_are_the_gates(shared_dir: Path) -> None:
    policy, seen = eager(), set()
    for number in range(4):
        made = answered(shared_dir, number)
        tripped, most = judged(made, policy)
        for rule in filter(is_of_requests, policy.rules):
            if rule.sequential:
                found = screen.greatest(made, NODES, rule, LENGTH_S)
                assert found == pytest.approx(most[rule.id], rel=1e-9)
                assert found > 0
            else:
                assert screen.is_held(made, NODES, rule, LENGTH_S) is (rule.id in tripped), rule.id
                seen.add((rule.id, rule.id in tripped))
        ids = frozenset(rule.id for rule in policy.rules if is_of_requests(rule))
        assert tripped <= screen.may_trip(made, NODES, policy, ids, LENGTH_S)
    # Some of this trips and some does not, or the test would show little.
    assert {rule for rule, trips in seen if trips} >= {"G2-ttft-stratum", "G5-slow-share", "B1-p99"}
    assert {rule for rule, trips in seen if not trips} >= {"G5-slow-share", "B1-p50"}


def test_too_few_samples_neither_confirm_nor_break() -> None:
    """Over at 0 and 9, nothing in between: a run of ten seconds; what says no in between ends it."""
    enough, over = (np.zeros(12, dtype=bool) for _ in range(2))
    enough[[0, 9]] = over[[0, 9]] = True
    assert screen._runs(enough, over, 10)
    assert not screen._runs(enough, over, 11)
    enough[4] = True
    assert not screen._runs(enough, over, 10)
    assert screen._runs(enough, over, 1)
