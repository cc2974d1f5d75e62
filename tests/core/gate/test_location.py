"""Where a deviation sits (G7): 80 % of the excess on at most 50 % of the traffic, of several the tightest."""

from __future__ import annotations

import pytest

from pipeline.core.gate.location import locate, locate_inside
from pipeline.core.gate.metrics import COUNT, EXCESS, Vec
from pipeline.core.gate.policy import ACTIONS, ActionName
from pipeline.core.gate.relative import held_as
from pipeline.core.gate.windows import Scope
from pipeline.policy_file import parse_policy
from schemas.buckets import PopulationCells
from schemas.control import Located
from tests.core.gate.build import NAME, T0, Bench, canary, decisions, kinds, nats, pair_cell

(MEAN,) = parse_policy(
    "rules: [{id: a, metric: kl_lower, window: 5m, limit: 0.05, action: rollback_l1}]"
).rules
(RULER,) = parse_policy(
    "rules: [{id: r, metric: ttft_us, statistic: p99, relative_to: baseline, window: 60s, limit: 1.15,"
    " action: pause}]"
).rules
WHOLE: Scope = ("all", "")


def found(parts: dict[Scope, tuple[int, int]], samples: int = 1000, excess: int = 1000) -> Located | None:
    """`parts`: scope → (pairs, excess)."""
    vectors: dict[Scope, Vec] = {
        scope: {COUNT: count, EXCESS: over} for scope, (count, over) in parts.items()
    }
    vectors[WHOLE] = {COUNT: samples, EXCESS: excess}
    return locate(MEAN, vectors, WHOLE, lambda scope: vectors.get(scope, {}))


def named(parts: dict[Scope, tuple[int, int]]) -> Scope | None:
    located = found(parts)
    return None if located is None else (located.dimension, located.value)


@pytest.mark.parametrize(
    ("pairs", "excess", "is_named"),
    [
        (500, 800, True),
        (500, 801, True),
        (500, 799, False),
        (499, 800, True),
        (501, 800, False),
        (501, 1000, False),
        (1, 1000, True),
        (100, 790, False),
    ],
)
def test_80_percent_of_the_excess_on_50_percent_of_the_traffic(
    pairs: int, excess: int, is_named: bool
) -> None:
    located = found({("node", "c-1"): (pairs, excess)})
    assert (located is not None) == is_named
    if located is not None:
        assert (located.share_of_excess, located.share_of_traffic) == (excess / 1000, pairs / 1000)


@pytest.mark.parametrize(
    ("parts", "scope"),
    [
        # A fault above 4,096 tokens: the narrower class carries as much on less traffic.
        ({("context", ">2048"): (400, 1000), ("context", ">4096"): (200, 1000)}, ("context", ">4096")),
        # A fault above 2,048: the narrower class carries too little.
        ({("context", ">2048"): (400, 1000), ("context", ">4096"): (200, 500)}, ("context", ">2048")),
        # A node's long prompts are at fault: node, class and cell hold it all; the cell is least.
        (
            {
                ("node", "c-1"): (100, 950),
                ("context", ">2048"): (300, 950),
                ("node_context", "c-1|>2048"): (30, 950),
                ("node_context", "c-1|>512"): (60, 950),
            },
            ("node_context", "c-1|>2048"),
        ),
        # A node that is bad for all prompts: its cell holds less than the node.
        ({("node", "c-1"): (100, 1000), ("node_context", "c-1|>512"): (60, 600)}, ("node", "c-1")),
        # The same on both counts: in order of dimension, then of value.
        ({("region", "eu"): (100, 900), ("request_type", "chat"): (100, 900)}, ("request_type", "chat")),
        ({("node", "c-2"): (100, 900), ("node", "c-1"): (100, 900)}, ("node", "c-1")),
        ({("node_context", "c-1|>512"): (100, 900), ("node", "c-1"): (100, 900)}, ("node", "c-1")),
        # As far above its traffic on less of it.
        ({("node", "c-1"): (200, 1000), ("region", "eu"): (100, 900)}, ("region", "eu")),
        # Several faulty nodes are no single class …
        ({("node", "c-1"): (100, 500), ("node", "c-2"): (100, 500)}, None),
        # … unless they are what a class is made of.
        (
            {("node", "c-1"): (100, 500), ("node", "c-2"): (100, 500), ("hardware", "L40S"): (200, 1000)},
            ("hardware", "L40S"),
        ),
        # Everywhere alike, and a class that is nearly everything.
        ({("node", f"c-{number}"): (100, 100) for number in range(10)}, None),
        ({("request_type", "chat"): (990, 1000)}, None),
        # Other dimensions locate nothing.
        ({("stratum", "chat|<=512|greedy|none|H100"): (100, 1000), ("traffic", "user"): (100, 1000)}, None),
    ],
)
def test_of_several_classes_the_tightest(parts: dict[Scope, tuple[int, int]], scope: Scope | None) -> None:
    assert named(parts) == scope
    assert named(dict(reversed(parts.items()))) == scope, "whatever the order"


def test_without_excess_nothing_is_named() -> None:
    assert found({("node", "c-1"): (100, 0)}, excess=0) is None
    assert found({("node", "c-1"): (0, 0)}, samples=0, excess=0) is None


SLOW, QUICK = 900, 500
"""Bins of the latency histogram far apart."""


def ruled(mine: dict[Scope, Vec], baseline: dict[Scope, Vec], at: Scope = WHOLE) -> Scope | None:
    held = {**mine, **{held_as(scope): vec for scope, vec in baseline.items()}}
    located = locate(RULER, held, at, lambda scope: held.get(scope, {}))
    return None if located is None else (located.dimension, located.value)


def test_a_ruler_locates_the_excess_over_the_baselines_own_level() -> None:
    """0.5 % of the baseline's requests are slow, all of them long; so are as many of the canary's everywhere,
    and of node c-1 ten times as many, long or short."""
    baseline = {WHOLE: {QUICK: 9950, SLOW: 50}, ("context", ">2048"): {QUICK: 950, SLOW: 50}}
    mine = {
        WHOLE: {QUICK: 9500, SLOW: 500},
        ("context", ">2048"): {QUICK: 905, SLOW: 95},
        ("node", "c-0"): {QUICK: 8955, SLOW: 45},
        ("node", "c-1"): {QUICK: 545, SLOW: 455},
        ("node_context", "c-1|>2048"): {QUICK: 50, SLOW: 50},
    }
    assert ruled(mine, baseline) == ("node", "c-1")
    # Without a baseline to compare with, long prompts have no level of their own: they are left out.
    assert ruled(mine, {WHOLE: baseline[WHOLE]}) == ("node", "c-1")
    assert ruled(mine, {}) is None


def test_long_prompts_that_are_slow_on_both_arms_are_no_location() -> None:
    baseline = {WHOLE: {QUICK: 995, SLOW: 5}, ("context", ">2048"): {QUICK: 5, SLOW: 5}}
    mine = {WHOLE: {QUICK: 990, SLOW: 10}, ("context", ">2048"): {QUICK: 10, SLOW: 10}}
    assert ruled(mine, baseline) is None
    # Known bad: by counts alone they carry everything.
    counted = {scope: {COUNT: sum(vec.values()), EXCESS: vec[SLOW]} for scope, vec in mine.items()}
    located = locate(MEAN, counted, WHOLE, lambda scope: counted.get(scope, {}))
    assert located is not None
    assert located.value == ">2048"


def test_two_faulty_nodes_trip_as_one_roll_out_with_each_of_them_told() -> None:
    bench = Bench.started()

    def pairs(_second: int) -> list[PopulationCells]:
        cells = [pair_cell([0.012] * 80 + [0.3] * 20, worst=[(nats(0.3), b"p" * 16)])]
        cells += [pair_cell([0.3 if node < 2 else 0.012] * 10, "node", f"c-{node}") for node in range(10)]
        return [PopulationCells(canary(), cells)]

    effects = bench.run(T0, T0 + 12, pairs)
    assert kinds(effects) == ["trip"]
    cause = bench.control[NAME].cause
    assert cause is not None
    assert cause.located is None
    over = {one.scope for one in decisions(effects)[0].evaluations if one.verdict == "trip"}
    assert over >= {"rollout"} or over >= {"node=c-0", "node=c-1"}


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "advise"])
def test_every_action_that_moves_something_says_where_it_sits(action: ActionName) -> None:
    """Known-bad: a pause that had not looked, and was explained as "not confined to one class of traffic"."""
    scope = "node" if action == "eject_node" else "rollout"
    bench = Bench.started(
        f"rules: [{{id: r, metric: kl_lower, window: 10s, limit: 0.01, scope: {scope}, action: {action}}}]"
    )
    bad, good = [0.2] * 100, [0.001] * 900
    cells = [pair_cell(bad + good), pair_cell(bad, "node", "c-1"), pair_cell(good, "node", "c-2")]
    bench.run(T0, T0, lambda _: [PopulationCells(canary(), cells)])
    cause = bench.control[NAME].cause
    assert cause is not None
    assert cause.located == Located(dimension="node", value="c-1", share_of_excess=1.0, share_of_traffic=0.1)


@pytest.mark.parametrize(("spike", "said"), [(3.0, "pass"), (3.8, "pass"), (3.9, "trip")])
def test_one_spike_alone_is_no_verdict(spike: float, said: str) -> None:
    """One pair among 99 healthy ones, just when there are enough to judge: G3's mean bears 3.8 nats of it,
    and the more pairs, the more."""
    bench = Bench.started()
    bench.run(T0, T0, lambda _: [PopulationCells(canary(), [pair_cell([0.012] * 99 + [spike])])])
    last = bench.core._runs[NAME].last
    verdict = "trip" if "trip" in kinds(bench.effects) else last.verdicts[0].evaluations[0].verdict  # type: ignore[union-attr]
    assert verdict == said


def inside(part: Scope, parts: dict[Scope, tuple[int, int]]) -> Scope | None:
    vectors: dict[Scope, Vec] = {
        scope: {COUNT: count, EXCESS: over} for scope, (count, over) in parts.items()
    }
    vectors[WHOLE] = {COUNT: 1000, EXCESS: 1000}
    located = locate_inside(MEAN, vectors, part, lambda scope: vectors.get(scope, {}))
    return None if located is None else (located.dimension, located.value)


NODE: Scope = ("node", "c-1")
LONG: Scope = ("node_context", "c-1|>2048")


@pytest.mark.parametrize(
    ("pairs", "excess", "is_named"),
    [(50, 560, True), (50, 559, False), (51, 560, False), (51, 700, False), (49, 700, True)],
)
def test_inside_a_part_it_is_80_percent_of_the_parts_excess_on_50_percent_of_its_traffic(
    pairs: int, excess: int, is_named: bool
) -> None:
    """The part has 70 % of the roll-out's excess: of the roll-out no class is named."""
    parts = {NODE: (100, 700), LONG: (pairs, excess)}
    assert named(parts) is None
    assert inside(NODE, parts) == (LONG if is_named else None)


def test_the_shares_told_are_of_the_roll_out() -> None:
    vectors: dict[Scope, Vec] = {
        NODE: {COUNT: 100, EXCESS: 700}, LONG: {COUNT: 40, EXCESS: 650}, WHOLE: {COUNT: 1000, EXCESS: 1000}
    }  # fmt: skip
    located = locate_inside(MEAN, vectors, NODE, lambda scope: vectors.get(scope, {}))
    assert located == Located(
        dimension="node_context", value="c-1|>2048", share_of_excess=0.65, share_of_traffic=0.04
    )


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (NODE, ("node_context", "c-2|>2048")),
        (NODE, ("node_context", "c-1|c-1|>2048")),
        (NODE, ("context", ">2048")),
        (NODE, ("request_type", "chat")),
        (NODE, NODE),
        (LONG, ("node_context", "c-1|>512")),
        (LONG, ("node_context", "c-2|>4096")),
        (("context", ">2048"), ("context", ">512")),
        (("context", ">2048"), ("node_context", "c-1|>512")),
        (("request_type", "chat"), LONG),
        (("all", ""), LONG),
    ],
)
def test_what_is_not_inside_a_part_is_not_where_it_sits(part: Scope, other: Scope) -> None:
    assert inside(part, {part: (100, 700), other: (10, 700)}) is None


@pytest.mark.parametrize(
    ("part", "inner"),
    [
        (NODE, LONG),
        (LONG, ("node_context", "c-1|>4096")),
        (("context", ">512"), ("context", ">2048")),
        (("context", ">2048"), LONG),
        (("node", "a|>512"), ("node_context", "a|>512|>2048")),
    ],
)
def test_what_is_inside_a_part(part: Scope, inner: Scope) -> None:
    assert inside(part, {part: (100, 700), inner: (10, 650)}) == inner
