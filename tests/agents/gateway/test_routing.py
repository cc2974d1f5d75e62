"""Who answers: by weights, sticky, spread over engines, and by the baseline whenever in doubt."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.gateway.routing import NoRoute, Route, Routing, Why
from agents.gateway.segments import Traffic
from agents.gateway.settings import EngineSettings, PoolSettings
from agents.router.core import Effective, RouterState, without_canary
from schemas.control import Aborted, Directive, RolloutState, Segment
from schemas.events import Arm

ASKED = Traffic("chat", "greedy", "m", 400, 100)
GOLDEN = (71.25972583199643, 19.380813168605428)
"""Percent of session-0 and of no bytes at all."""
KEYS = [b"session-%d" % at for at in range(4_000)]


def pool(arm: Arm, version: str, nodes: Iterable[str], **labels: str) -> PoolSettings:
    engines = tuple(EngineSettings(node=node, url=f"http://{node}") for node in nodes)
    return PoolSettings(arm=arm, kind="vllm", model_version=version, engines=engines, **labels)


BASELINE = pool("baseline", "v1", [f"b{at}" for at in range(4)])
CANARY = pool("canary", "v2", [f"c{at}" for at in range(3)])
CONTROL = pool("control", "v1", ["k0", "k1"])
POOLS = [BASELINE, CANARY, CONTROL]


def split(canary: float, **more: object) -> Effective:
    held = Effective({"v1": 100 - canary, "v2": canary}, (), lease_valid=True, dead_man=False)
    return replace(held, **more)  # type: ignore[arg-type]  # as the callers name them


def routing(
    effective: Effective | None, pools: Sequence[PoolSettings] = POOLS, rollout: str = "chat"
) -> Routing:
    made = Routing(pools, rollout)
    made.obey(effective, None if effective is None else 7)
    return made


def idle(_: str) -> int:
    return 0


def answered(by: Routing, key: bytes, traffic: Traffic | None = ASKED) -> Route:
    route = by.route(key, traffic, idle)
    assert isinstance(route, Route)
    return route


def canary_keys(by: Routing, keys: Iterable[bytes] = KEYS) -> set[bytes]:
    return {key for key in keys if answered(by, key).arm == "canary"}


def point(rollout: str, key: bytes) -> float:
    """Percent: the first eight bytes of SHA-256 over both, each behind its length, as a fraction."""
    name = rollout.encode()
    framed = len(name).to_bytes(4, "big") + name + len(key).to_bytes(4, "big") + key
    return int(hashlib.sha256(framed).hexdigest()[:16], 16) / 2**64 * 100


@pytest.mark.parametrize("weight", [0.0, 1e-9, 1.0, 10.0, 33.3, 50.0, 99.999, 100.0])
def test_the_canary_has_the_points_below_its_weight(weight: float) -> None:
    assert canary_keys(routing(split(weight))) == {key for key in KEYS if point("chat", key) < weight}


def test_golden_places() -> None:
    """Every gateway of every version of ours puts a session at the same place."""
    assert point("chat", b"session-0") == pytest.approx(GOLDEN[0], abs=1e-9)
    assert point("chat", b"") == pytest.approx(GOLDEN[1], abs=1e-9)
    for key, place in zip((b"session-0", b""), GOLDEN, strict=True):
        for weight, arm in ((place - 1e-6, "baseline"), (place + 1e-6, "canary")):
            assert answered(routing(split(weight)), key).arm == arm


@pytest.mark.parametrize("weight", [1.0, 5.0, 10.0, 25.0, 50.0])
def test_shares_are_the_weights(weight: float) -> None:
    """Within five standard deviations of a binomial count; seeded by the keys' names."""
    found, share = len(canary_keys(routing(split(weight)))), weight / 100
    assert abs(found - len(KEYS) * share) < 5 * math.sqrt(len(KEYS) * share * (1 - share))


def test_another_rollout_has_another_share_of_the_sessions() -> None:
    one, other = canary_keys(routing(split(50))), canary_keys(routing(split(50), rollout="code"))
    assert abs(len(one & other) - len(KEYS) / 4) < 5 * math.sqrt(len(KEYS) * 3 / 16)


@given(st.floats(0, 100), st.floats(0, 100), st.binary(max_size=40))
def test_a_growing_weight_drives_nobody_away_and_a_shrinking_one_brings_nobody(
    one: float, other: float, key: bytes
) -> None:
    less, more = routing(split(min(one, other))), routing(split(max(one, other)))
    if answered(less, key).arm == "canary":
        assert answered(more, key).arm == "canary"


@given(st.lists(st.tuples(st.floats(0, 100), st.binary(max_size=4)), max_size=12))
def test_a_route_is_of_the_present_directive_alone(steps: list[tuple[float, bytes]]) -> None:
    """Whatever was obeyed before, and whoever asked."""
    by = Routing(POOLS, "chat")
    for weight, key in steps:
        by.obey(split(weight), 7)
        assert answered(by, key) == answered(routing(split(weight)), key)


def test_without_a_directive_the_fallback_answers_and_nothing_is_copied() -> None:
    silent = routing(None)
    route = answered(silent, KEYS[0])
    assert (route.arm, route.generation, route.why) == ("baseline", None, Why.NO_DIRECTIVE)
    assert canary_keys(silent) == set()
    assert silent.shadows(route, KEYS[0], ASKED, idle) == ()
    promoted = Routing(POOLS, "chat", fallback="v2")
    assert canary_keys(promoted) == set(KEYS)
    assert promoted.shadows(answered(promoted, KEYS[0]), KEYS[0], ASKED, idle) == ()
    promoted.obey(split(0), 8)
    assert canary_keys(promoted) == set(), "a directive is all that counts once there is one"


def test_the_generation_is_stamped() -> None:
    by = routing(split(50))
    assert {answered(by, key).generation for key in KEYS[:50]} == {7}
    by.obey(split(50), 8)
    assert answered(by, KEYS[0]).generation == 8


def test_an_abort_on_this_machine_ends_canary_and_copies() -> None:
    for held in (without_canary(None, None, Aborted(by="me", ts_us=1)),
                 without_canary(None, None, Aborted(by="me", ts_us=1, fallback="v1")),
                 split(0, aborted=True)):  # fmt: skip
        by = Routing(POOLS, "chat", fallback="v2")
        by.obey(held, None)
        assert canary_keys(by) == set()
        assert by.shadows(answered(by, KEYS[0]), KEYS[0], ASKED, idle) == ()


def directive(state: RolloutState = "observing", canary: float = 30.0) -> Directive:
    return Directive(
        rollout="chat", generation=7, epoch=1, ts_us=1_000, lease_until_us=16_000, dead_man_us=60_000,
        state=state, weights={"v1": 100 - canary, "v2": canary}, last_promoted={"v1": 95.0, "v2": 5.0},
        fallback="v1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "now_us", "weight"),
    [
        ("observing", 16_000, 30), ("observing", 16_001, 30), ("observing", 61_000, 30),
        ("observing", 61_001, 5), ("tripped", 16_001, 0), ("tripped", 61_001, 0),
    ],
)  # fmt: skip
def test_a_silent_gate(state: RolloutState, now_us: int, weight: float) -> None:
    """Lease and dead man as the router judges them; a trip outlives both."""
    known = RouterState()
    known.apply(directive(state, 0.0 if state == "tripped" else 30.0), 1_000)
    by = routing(known.effective(now_us))
    assert canary_keys(by) == {key for key in KEYS if point("chat", key) < weight}
    assert by.shadows(answered(by, KEYS[0]), KEYS[0], ASKED, idle), "copies go on: their evidence is wanted"


def test_weight_of_a_version_without_a_pool_goes_to_the_baseline_and_is_counted() -> None:
    by = routing(Effective({"v1": 20.0, "v2": 10.0, "v3": 70.0, "v4": 0.0}, (), True, False))
    assert by.unknown_versions == ("v3",)
    assert canary_keys(by) == {key for key in KEYS if point("chat", key) < 10}
    whys = Counter(answered(by, key).why for key in KEYS)
    assert whys[Why.UNKNOWN_VERSION] == sum(10 <= point("chat", key) < 80 for key in KEYS)
    assert by.gauges()["routed_unknown_version"] == 2 * whys[Why.UNKNOWN_VERSION]
    assert by.gauges()["unknown_versions"] == 1


def test_without_a_pool_of_the_canary_the_baseline_answers() -> None:
    by = routing(split(100), [BASELINE])
    assert canary_keys(by) == set()
    assert by.unknown_versions == ("v2",)
    assert by.shadows(answered(by, KEYS[0]), KEYS[0], ASKED, idle) == ()


def test_a_control_of_the_baseline_s_version_answers_nobody() -> None:
    assert {answered(routing(split(30)), key).arm for key in KEYS} == {"baseline", "canary"}


def test_versions_carry_every_dimension_in_which_pools_differ() -> None:
    pools = [
        pool("baseline", "v1", ["b"], prompt_version="p1"), pool("canary", "v1", ["c"], prompt_version="p2"),
        pool("control", "v1", ["k"], prompt_version="p1"),
    ]  # fmt: skip
    by = routing(Effective({"v1/p1": 0.0, "v1/p2": 100.0}, (), True, False), pools)
    assert canary_keys(by) == set(KEYS)
    assert by.unknown_versions == ()


def test_an_ejected_engine_gets_nothing_and_no_copies() -> None:
    by = routing(split(50, ejected_nodes=("c1", "b0", "k0", "elsewhere")))
    routes = {key: answered(by, key) for key in KEYS}
    assert {route.engine.node for route in routes.values()} == {"b1", "b2", "b3", "c0", "c2"}
    copies = {one.engine.node for key in KEYS for one in by.shadows(routes[key], key, ASKED, idle)}
    assert copies == {"b1", "b2", "b3", "c0", "c2", "k1"}
    assert not by.ejections_ignored


def test_a_canary_without_engines_gives_way_to_the_baseline() -> None:
    by = routing(split(50, ejected_nodes=("c0", "c1", "c2")))
    for key in KEYS[:200]:
        route = answered(by, key)
        assert route.arm == "baseline"
        assert route.why == (Why.NO_NODE if point("chat", key) < 50 else Why.WEIGHTS)
        assert [one.arm for one in by.shadows(route, key, ASKED, idle)] == ["control"]


def test_the_baseline_is_never_without_an_engine() -> None:
    by = routing(split(50, ejected_nodes=("b0", "b1", "b2")))
    assert {answered(by, key).engine.node for key in KEYS if point("chat", key) >= 50} == {"b3"}
    assert not by.ejections_ignored
    by = routing(split(50, ejected_nodes=("b0", "b1", "b2", "b3", "c0")))
    assert {answered(by, key).engine.node for key in KEYS} == {"b0", "b1", "b2", "b3", "c1", "c2"}
    assert by.gauges()["ejections_ignored"] == 1


def excluding(dimension: str, value: str) -> Effective:
    return split(100, excluded_segments=(Segment(dimension=dimension, value=value),))


@pytest.mark.parametrize(("tokens", "arm"), [(2_048, "canary"), (2_049, "baseline")])
def test_an_excluded_segment_goes_to_the_baseline_without_a_copy(tokens: int, arm: Arm) -> None:
    by = routing(excluding("context", ">2048"))
    asked = Traffic("chat", "greedy", "m", 400, tokens)
    for key in KEYS[:20]:
        route = answered(by, key, asked)
        copies = [one.arm for one in by.shadows(route, key, asked, idle)]
        assert (route.arm, copies) == (arm, ["baseline", "control"] if arm == "canary" else ["control"])
        assert route.why == (Why.WEIGHTS if arm == "canary" else Why.EXCLUDED)


def test_a_request_of_which_nothing_is_known_counts_as_inside() -> None:
    assert answered(routing(excluding("context", ">8192")), KEYS[0], None).why == Why.EXCLUDED
    assert answered(routing(excluding("request_type", "chat")), KEYS[0], None).why == Why.EXCLUDED
    assert answered(routing(split(100)), KEYS[0], None).arm == "canary", "where nothing is excluded"


def test_a_segment_that_nobody_understands_keeps_the_canary_from_everything() -> None:
    by = routing(excluding("mood", "bad"))
    assert canary_keys(by) == set()
    assert by.gauges()["excluded_segments_not_understood"] == 1


def test_an_engine_s_own_segment_leaves_the_others_to_the_canary() -> None:
    by = routing(excluding("node_context", "c1|>512"))
    short, long = (Traffic("chat", "greedy", "m", 400, tokens) for tokens in (512, 513))
    assert {answered(by, key, short).engine.node for key in KEYS} == {"c0", "c1", "c2"}
    assert {answered(by, key, long).engine.node for key in KEYS} == {"c0", "c2"}
    weighted = routing(split(0, excluded_segments=(Segment(dimension="node", value="c1"),)))
    copies = [by.shadows(answered(weighted, key), key, long, idle) for by in (weighted,) for key in KEYS]
    assert {one.engine.node for found in copies for one in found} == {"c0", "c2", "k0", "k1"}
    alone = routing(excluding("node", "c0"), [BASELINE, pool("canary", "v2", ["c0"])])
    assert answered(alone, KEYS[0]).why == Why.NO_NODE


def test_exclusions_are_nothing_to_the_baseline() -> None:
    by = routing(split(0, excluded_segments=(Segment(dimension="node", value="b0"),)))
    assert {answered(by, key).engine.node for key in KEYS} == {"b0", "b1", "b2", "b3"}


def test_a_copy_goes_to_every_other_arm_once() -> None:
    by = routing(split(50))
    for key in KEYS[:200]:
        route = answered(by, key)
        copies = by.shadows(route, key, ASKED, idle)
        other: Arm = "canary" if route.arm == "baseline" else "baseline"
        assert {one.arm for one in copies} == {other, "control"}
        assert all(one.generation == 7 for one in copies)


def test_what_was_tried_in_vain_is_left_out() -> None:
    by = routing(split(100))
    tried: set[str] = set()
    order: list[tuple[Arm, Why]] = []
    while isinstance(route := by.route(b"key", ASKED, idle, tried), Route):
        assert route.engine.node not in tried
        tried.add(route.engine.node)
        order.append((route.arm, route.why))
    assert order == [("canary", Why.WEIGHTS)] + [("baseline", Why.NO_NODE)] * 4, "no second one of the canary"
    assert by.route(b"key", ASKED, idle, tried) == NoRoute()
    assert isinstance(routing(split(0)).route(b"key", ASKED, idle, {"b0", "b1", "b2", "b3"}), NoRoute), (
        "a version under test does not stand in for the baseline"
    )


def test_a_session_keeps_its_engine_and_sessions_are_spread() -> None:
    by = routing(split(0))
    first = {key: answered(by, key).engine.node for key in KEYS}
    assert first == {key: answered(by, key).engine.node for key in KEYS}
    assert all(
        abs(count - 1_000) < 5 * math.sqrt(4_000 * 3 / 16) for count in Counter(first.values()).values()
    )


def test_an_engine_that_goes_takes_nobody_else_s_place() -> None:
    """Rendezvous hashing: only its own sessions move, and they spread; its return brings them back."""
    whole, less = routing(split(0)), routing(split(0, ejected_nodes=("b2",)))
    before = {key: answered(whole, key).engine.node for key in KEYS}
    after = {key: answered(less, key).engine.node for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == "b2"}
    moved = Counter(after[key] for key in KEYS if before[key] == "b2")
    third = moved.total() / 3
    assert all(abs(count - third) < 5 * math.sqrt(third) for count in moved.values())
    assert len(moved) == 3


def test_the_engine_is_independent_of_the_place_among_weights() -> None:
    """Else a canary of 25 % would find all its sessions on one of its engines."""
    counts = Counter(answered(routing(split(25)), key).engine.node for key in KEYS)
    canaries = [counts[node] for node in ("c0", "c1", "c2")]
    assert all(abs(count - sum(canaries) / 3) < 5 * math.sqrt(sum(canaries) * 2 / 9) for count in canaries)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.sampled_from([1.0, 1.25, 2.0, 100.0]),
    st.binary(max_size=8),
)
def test_no_engine_is_chosen_over_its_bound(loads: list[int], factor: float, key: bytes) -> None:
    """The bound is ⌈factor × mean with this request⌉, but 4 at least; the choice is the first under it in the
    key's order."""
    nodes = [f"b{at}" for at in range(len(loads))]
    by = Routing([pool("baseline", "v1", nodes)], "chat", load_factor=factor)
    load = dict(zip(nodes, loads, strict=True))
    bound = max(4, math.ceil(factor * (sum(loads) + 1) / len(loads)))
    order: list[str] = []
    while isinstance(route := by.route(key, ASKED, idle, frozenset(order)), Route):
        order.append(route.engine.node)
    assert sorted(order) == sorted(nodes)
    chosen = by.route(key, ASKED, load.__getitem__)
    assert isinstance(chosen, Route)
    if len(nodes) > 1:
        assert chosen.engine.node == next(node for node in order if load[node] < bound)


@pytest.mark.parametrize(
    ("load", "others", "keeps"),
    [(4, 4, True), (5, 4, False), (6, 4, False), (1, 0, True), (3, 0, True), (4, 0, False)],
)
def test_the_bound_at_just_under_and_just_over(load: int, others: int, keeps: bool) -> None:
    """Two engines, factor 1, four requests on the other: the bound is 5, for a load of 6 it is 6. Where the
    other is idle a session stays with three of its requests in flight, and leaves with the fifth."""
    by = Routing([pool("baseline", "v1", ["b0", "b1"])], "chat", load_factor=1.0)
    own = answered(by, b"key").engine.node
    chosen = by.route(b"key", ASKED, lambda node: load if node == own else others)
    assert isinstance(chosen, Route)
    assert (chosen.engine.node == own) == keeps


def test_under_load_every_engine_stays_within_the_bound() -> None:
    """One hot session: without the bound all of it would stand on one engine (the control)."""
    for factor, most in ((1.25, 126), (100.0, 400)):
        by = Routing([BASELINE], "chat", load_factor=factor)
        load: Counter[str] = Counter()
        for _ in range(400):
            route = by.route(b"hot", ASKED, load.__getitem__)
            assert isinstance(route, Route)
            load[route.engine.node] += 1
        assert max(load.values()) <= most
        assert (max(load.values()) == 400) == (factor == 100.0)


@given(st.sets(st.sampled_from([f"{arm}{at}" for arm in "bck" for at in range(4)])), st.binary(max_size=8))
def test_engines_that_were_not_reached_lately_come_last(avoided: set[str], key: bytes) -> None:
    for weight in (0.0, 100.0):
        by = routing(split(weight))
        left = {f"b{at}" for at in range(4)} - avoided
        order: list[str] = []
        while isinstance(route := by.route(key, ASKED, idle, frozenset(order), avoided), Route):
            order.append(route.engine.node)
            if route.arm == "canary":
                assert route.engine.node not in avoided
        canaries = order[:1] if order[0].startswith("c") else []
        assert len(canaries) == (weight == 100.0 and not avoided >= {"c0", "c1", "c2"})
        answering = order[len(canaries) :]
        assert set(answering[: len(left)]) == left
        assert sorted(answering) == ["b0", "b1", "b2", "b3"]


def test_a_copy_goes_to_an_engine_that_was_not_reached_only_where_there_is_no_other() -> None:
    by = routing(split(0))
    primary = answered(by, b"key")
    for avoided, nodes in (({"c0", "c1"}, {"c2"}), ({"c0", "c1", "c2"}, {"c0", "c1", "c2"})):
        to = {by.shadows(primary, key, ASKED, idle, avoided)[0].engine.node for key in KEYS[:100]}
        assert to == nodes


def test_decisions_are_counted_by_what_decided() -> None:
    by = routing(split(50))
    for key in KEYS[:10]:
        answered(by, key)
    assert by.gauges()["routed_weights"] == 10
    assert sum(value for name, value in by.gauges().items() if name.startswith("routed_")) == 10
