"""What the screen leaves out would not have tripped: its numbers are the gate's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.policy_file import parse_policy, shipped_policy_text
from tests.simulation import screen
from tests.simulation.cells import node_names, pair_cells
from tests.simulation.judged import Generation
from tests.simulation.scores import LIMIT
from tests.simulation.traffic import Fault, pairs, seed

pytestmark = [pytest.mark.slow, pytest.mark.shared]

NODES = 7


@pytest.mark.parametrize("number", range(6))
def test_evidence_and_windows_are_the_gates(shared_dir: Path, number: int) -> None:
    mean = (0.012, 0.04, LIMIT)[number % 3]
    fault = Fault(0.14, 700, nodes=1, over_tokens=2048) if number > 2 else None
    made = pairs(seed(8, number), shared_dir, 1_500, 3.0, mean=mean, nodes=NODES, fault=fault, trace="code")
    policy = parse_policy(shipped_policy_text())
    generation = Generation(policy)
    cells = pair_cells(made, node_names("canary", NODES))
    most, tripped = dict.fromkeys((one.rule.id for one in generation.evidence.sequential), 0.0), set()
    for second in range(int(made.second[-1]) + 1):
        tripped |= {trip.rule for trip in generation.fold(second, cells)}
        for judged in generation.evidence.sequential:
            most[judged.rule.id] = max(most[judged.rule.id], judged.evidence)
    rules = [rule for rule in policy.rules if rule.metric.measure == "kl_lower"]
    assert {rule.sequential for rule in rules} == {True, False}
    for rule in rules:
        if rule.sequential:
            assert screen.greatest(made, NODES, rule) == pytest.approx(most[rule.id], rel=1e-9)
        else:
            assert screen.is_over(made, NODES, rule) is (rule.id in tripped)
    assert tripped <= screen.may_trip(made, NODES, policy, frozenset(rule.id for rule in rules))


def test_the_cases_differ(shared_dir: Path) -> None:
    """Some of the traffic above trips, some does not: else the test above would show little."""
    policy = parse_policy(shipped_policy_text())
    (rule,) = [rule for rule in policy.rules if rule.id == "G3-divergence"]
    found = set()
    for mean in (0.012, 0.06):
        made = pairs(seed(8), shared_dir, 600, 3.0, mean=mean, nodes=NODES)
        found.add(screen.is_over(made, NODES, rule))
    assert found == {True, False}
