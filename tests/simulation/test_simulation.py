"""The simulation in small: the same code as `make simulation`, and what it must not let pass.

Known-bad controls: a bound that hardly bounds, scopes without weights, a ruler that reads a p99 off a hundred
requests. Each must show more false trips than alpha allows, or the simulation could not see any.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from pipeline.core.gate.policy import Policy
from pipeline.policy_file import parse_policy, shipped_policy_text
from tests.conftest import REPOSITORY
from tests.simulation.__main__ import main
from tests.simulation.betting import bets
from tests.simulation.cells import node_names, pair_cells
from tests.simulation.docs import PAGE, filled
from tests.simulation.judged import Generation, may_trip
from tests.simulation.rows import AA, Delay, Hours, Outcome, Seen, Setting, long_rows, run
from tests.simulation.scores import HEALTHY, HEALTHY_MEAN, LIMIT, pool, recorded_scores
from tests.simulation.tables import Results, false_trips, is_anytime, is_over, markdown, tail
from tests.simulation.traffic import Fault, Pairs, pairs, seed

pytestmark = [pytest.mark.slow, pytest.mark.shared]

RUNS = 50


def shipped() -> Policy:
    return parse_policy(shipped_policy_text())


def anytime_of_pairs(policy: Policy) -> str:
    """The shipped rule that bets on the mean divergence."""
    found = [rule.id for rule in policy.rules if is_anytime(rule) and rule.metric.measure == "kl_lower"]
    assert len(found) == 1
    return found[0]


def trips_of(row: AA, setting: Setting) -> int:
    """In how many of the row's roll-outs anything judged trips."""
    return sum(bool(run(row, index, setting).trips) for index in range(row.runs))


def test_the_scores_are_real_and_have_the_mean_that_is_asked_for(shared_dir: Path) -> None:
    scores = recorded_scores(shared_dir, HEALTHY)
    assert len(scores) > 1_000
    assert 0.8 < scores.std() / scores.mean() < 1.6
    for mean in (HEALTHY_MEAN, LIMIT):
        units = pool(shared_dir, HEALTHY, mean)
        assert mean * 0.9999 < units.mean() / 2**30 <= mean


@dataclass(frozen=True)
class Greatest:
    """What the evidence of one roll-out at the limit came to at most, looked at every second."""

    weighted: float
    alone: float
    """Of any scope, as if it were the only one."""


@pytest.fixture(scope="module")
def at_the_limit(shared_dir: Path) -> list[Greatest]:
    policy, found = shipped(), []
    for index in range(RUNS):
        made = pairs(seed(9, index), shared_dir, 3_000, 20.0, mean=LIMIT, nodes=10)
        generation = Generation(policy, frozenset({anytime_of_pairs(policy)}))
        cells = pair_cells(made, node_names("canary", 10), generation.wanted("pairs"))
        (judged,) = generation.evidence.sequential
        weighted = alone = 0.0
        for second in range(int(made.second[-1]) + 1):
            tripped = bool(generation.fold(second, cells))
            weighted = max(weighted, judged.evidence)
            alone = max(alone, *judged.processes.evidence.values())
            assert tripped <= (judged.evidence >= judged.share.bound)
        found.append(Greatest(weighted, alone))
    return found


def test_at_the_limit_itself_no_more_than_alpha_trips(at_the_limit: list[Greatest]) -> None:
    alpha = float(shipped().alpha)
    assert not is_over(sum(one.weighted >= 1 / alpha for one in at_the_limit), RUNS, alpha)


def test_control_a_bound_that_hardly_bounds_trips_far_more_often(at_the_limit: list[Greatest]) -> None:
    assert is_over(sum(one.weighted >= 1 / 0.9 for one in at_the_limit), RUNS, 0.05)


def test_control_scopes_without_weights_trip_far_more_often(at_the_limit: list[Greatest]) -> None:
    alpha = float(shipped().alpha)
    assert is_over(sum(one.alone >= 1 / alpha for one in at_the_limit), RUNS, alpha)


def test_control_the_plain_ruler_cries_wolf_at_a_low_rate(shared_dir: Path) -> None:
    """G2 as the reference states it, p99 of 60 s over 1.15 for 30 s, where 120 requests are all there is; the
    shipped ruler asks for 1,000."""
    row = Hours("2 requests/s", 2, 1, 2.0)
    plain = shipped_policy_text().replace("min_samples: 1000", "min_samples: 100")
    plain = plain.replace("    scope: stratum\n    action: pause", "    scope: rollout\n    action: pause")
    ruler = frozenset({"G2-ttft-stratum"})
    for text, cries in ((plain, True), (shipped_policy_text(), False)):
        setting = Setting(1, shared_dir, parse_policy(text), ruler)
        for index in range(row.runs):
            assert bool(run(row, index, setting).trips) is cries


def test_the_rule_bets_as_the_reference_says(shared_dir: Path) -> None:
    """Every scope's evidence, against statistics.md §0.1 written down a second time."""
    policy = shipped()
    made = pairs(seed(3), shared_dir, 600, 20.0, mean=0.06, nodes=3)
    cells = pair_cells(made, node_names("canary", 3))
    generation = Generation(policy, frozenset({anytime_of_pairs(policy)}))
    (judged,) = generation.evidence.sequential
    for second, expected in bets(cells):
        generation.fold(second, cells)
        held = judged.processes.evidence
        assert held.keys() <= expected.keys()
        assert len(held) >= 1 + 3
        for scope, evidence in held.items():
            assert evidence == pytest.approx(expected[scope], rel=1e-9)


def test_a_fault_is_seen_and_sooner_by_betting(shared_dir: Path) -> None:
    policy = shipped()
    row = Delay("2.8x from 2000 at 20/s", 7, 20.0, Fault(2.8 * LIMIT, 2_000), most_pairs=2_000)
    outcomes = [run(row, index, Setting(1, shared_dir, policy)) for index in range(row.runs)]
    affected = {
        rule: [seen.affected for outcome in outcomes for seen in outcome.trips if seen.rule == rule]
        for rule in ("G3-divergence", anytime_of_pairs(policy))
    }
    assert all(len(found) == row.runs for found in affected.values()), affected
    point, anytime = (median(found) for found in affected.values())
    assert anytime < point / 3


def test_a_healthy_canary_trips_nothing(shared_dir: Path) -> None:
    row = AA("healthy", 10, 200.0, pairs=3_000)
    assert trips_of(row, Setting(1, shared_dir, shipped())) == 0


def test_no_rule_trips_that_is_not_asked(shared_dir: Path) -> None:
    """What `may_trip` leaves out would have said no."""
    policy = shipped()
    made = pairs(seed(4), shared_dir, 1_500, 20.0, fault=Fault(0.14, 600), nodes=5)
    cells = pair_cells(made, node_names("canary", 5))
    generation, asked, tripped = Generation(policy), 0, 0
    for second in range(int(made.second[-1]) + 1):
        generation.fold(second, cells)
        for judged in generation.evidence.rules:
            trips = judged.judge("").verdict == "trip"
            asked += may_trip(judged)
            tripped += trips
            assert may_trip(judged) or not trips
    assert 0 < tripped <= asked


@pytest.mark.parametrize(("trips", "over"), [(0, False), (11, False), (12, True), (100, True)])
def test_significantly_over_alpha(trips: int, over: bool) -> None:
    assert is_over(trips, 100, 0.05) is over


def test_tail_is_the_binomials() -> None:
    for trips in (0, 1, 3, 9):
        exact = sum(math.comb(9, k) * 0.05**k * 0.95 ** (9 - k) for k in range(trips, 10))
        assert tail(trips, 9, 0.05) == pytest.approx(exact, rel=1e-6)


def test_false_trips_count_roll_outs_of_aa_rows_and_enforcing_anytime_rules_only() -> None:
    policy = shipped()
    rule = anytime_of_pairs(policy)
    rows = [AA("aa 2/s", 2, 2.0), AA("mean 0.04", 1, 2.0)]
    both = Outcome("aa 2/s", (Seen(rule, 1, 1, "rollout"), Seen("G3-divergence", 1, 1, "rollout")))
    point = Outcome("aa 2/s", (Seen("G3-divergence", 1, 1, "rollout"),))
    other = Outcome("mean 0.04", (Seen(rule, 1, 1, "rollout"),))
    results = Results(policy, rows, {"aa 2/s": [both, point], "mean 0.04": [other]})
    assert false_trips(results) == (2, 1)


def test_the_command_says_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_dir: Path
) -> None:
    options = ["--rollouts", "4", "--share", "0.01", "--processes", "1", "--out", str(tmp_path / "out.json")]
    assert main([*options, "--only", "aa 200", "2.8x from 0 at 20"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "aa_rollouts 3 false_trips 0 alpha 0.05"


def test_the_page_has_a_place_for_every_table_and_no_other() -> None:
    results = Results(shipped(), long_rows(20), {})
    tables = {**markdown(results), "drill": ""}
    page = (REPOSITORY / "docs" / PAGE).read_text()
    for name in tables:
        assert f"<!-- simulated: {name} -->" in page
    marked = filled(page, {name: f"table {name}" for name in tables})
    assert all(f"table {name}\n<!-- end -->" in marked for name in tables)
    with pytest.raises(KeyError):
        filled(page, {})


def test_rows_have_names_of_their_own() -> None:
    rows = long_rows(2_000)
    assert len({row.name for row in rows}) == len(rows)
    assert sum(row.runs for row in rows if row.name.startswith("aa ")) == 2_000
    assert {row.rate for row in rows if isinstance(row, Hours)} == {2.0, 20.0, 200.0}


def test_runs_depend_on_seed_and_number_alone(shared_dir: Path) -> None:
    setting = Setting(5, shared_dir, shipped())
    row = AA("mean 0.04", 3, 200.0, mean=0.04, pairs=1_000)
    assert run(row, 1, setting) == run(row, 1, setting)
    first, second = (pairs(seed(5, at), shared_dir, 100, 20.0) for at in (1, 2))
    assert isinstance(first, Pairs)
    assert (first.score != second.score).any()


def test_every_shipped_rule_carries_the_pages_trips_per_day() -> None:
    """The comment above each rule says what the table of docs/statistics.md says, at all three rates."""
    page = (REPOSITORY / "docs" / PAGE).read_text()
    block = page.split("<!-- simulated: days -->")[1].split("<!-- end -->")[0]
    table = {row.split("`")[1]: row for row in block.splitlines() if row.startswith("| `")}
    comments = shipped_policy_text().split("  - id: ")
    rules = [text.splitlines()[0].strip() for text in comments[1:]]
    assert table.keys() == set(rules)
    for rule, above in zip(rules, comments, strict=False):
        told = re.sub(r"\n\s*#\s*", " ", above.rpartition("\n\n")[2])
        found = re.search(r"A/A trips per day at 2, 20, 200 requests/s[^:]*: (.*)", told)
        assert found, rule
        if found[1].startswith("none, for it cannot be judged at any of them"):
            said = ["0", "0", "0"]
        else:
            said = found[1].replace("cannot be judged", "0").split(", ")[:3]
        wanted = [cell.strip() for cell in table[rule].split("|")[2:5]]
        assert [re.match(r"[\d.]+", one)[0] for one in said] == wanted, rule  # type: ignore[index]
