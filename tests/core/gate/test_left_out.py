"""What is left of the evidence without ejected nodes and excluded segments: a plain recount of the rest."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.gate.left_out import Exclusion, LeftOut
from pipeline.core.gate.windows import Scope
from schemas.buckets import Cell, PopulationCells
from tests.core.gate.build import (
    LATENESS_S,
    LOGITS,
    NAME,
    SPEC,
    T0,
    Bench,
    canary,
    command,
    decisions,
    fresh,
    healthy_pairs,
    kinds,
    pair_cell,
    request_cell,
    us,
)

LIMITS = (512, 2048, 4096, 8192)
NODES = ("c-0", "c|1", "c-2")
Event = tuple[str, int, str, str]
"""Node, input tokens, request type, hardware."""


def scopes_of(event: Event) -> Iterator[Scope]:
    node, tokens, request_type, hardware = event
    yield "all", ""
    yield "node", node
    yield "request_type", request_type
    yield "hardware", hardware
    yield "sampling", "greedy"
    yield "region", region_of(event)
    for limit in LIMITS:
        if tokens > limit:
            yield "context", f">{limit}"
            yield "node_context", f"{node}|>{limit}"
    length = next((f"<={limit}" for limit in LIMITS if tokens <= limit), ">8192")
    yield "stratum", f"{request_type}|{length}|greedy|none|{hardware}"


def region_of(event: Event) -> str:
    """No stratum names it."""
    return "eu" if event[0] == NODES[0] else "us"


def is_out(event: Event, one: Exclusion) -> bool:
    """By the meaning of a segment, not by its cells."""
    node, tokens, request_type, hardware = event
    if one.dimension == "node":
        return node == one.value
    if one.dimension == "request_type":
        return request_type == one.value
    if one.dimension == "hardware":
        return hardware == one.value
    if one.dimension == "region":
        return region_of(event) == one.value
    of, _, limit = one.value.rpartition(">")
    return tokens > int(limit) and of in ("", f"{node}|")


def counted(left_out: LeftOut, events: list[Event], second: int, *, strata: bool = False) -> dict[Scope, int]:
    """What windows would hold: every cell's parts added up. Of pairs; with `strata` of requests."""
    cells: dict[Scope, int] = {}
    for event in events:
        for scope in scopes_of(event):
            cells[scope] = cells.get(scope, 0) + 1
    total: dict[Scope, int] = {}
    for (dimension, value), count in cells.items():
        if dimension == "stratum" and not strata:
            continue
        cell = Cell(dimension, value, {"pairs": count}, {}, [])
        for part, sign in left_out.parts(cell, second, strata=strata):
            scope = (part.dimension, part.value)
            total[scope] = total.get(scope, 0) + sign * part.counters["pairs"]
    return {scope: count for scope, count in total.items() if count}


events_ = st.lists(
    st.tuples(
        st.sampled_from(NODES),
        st.sampled_from((1, 512, 513, 2049, 4097, 8193, 99_999)),
        st.sampled_from(("chat", "code", "batch")),
        st.sampled_from(("H100", "L4")),
    ),
    max_size=40,
)
crossing = st.one_of(
    st.sampled_from(("chat", "code")).map(lambda value: ("request_type", value)),
    st.sampled_from(("H100", "L4")).map(lambda value: ("hardware", value)),
)
"""Segments of two kinds, which have events in common."""
regions = st.sampled_from(("eu", "us")).map(lambda value: ("region", value))
contexts_ = st.sampled_from(LIMITS).map(lambda limit: ("context", f">{limit}"))
nested = st.one_of(
    st.sampled_from(NODES).map(lambda node: ("node", node)),
    contexts_,
    st.tuples(st.sampled_from(NODES), st.sampled_from(LIMITS)).map(
        lambda one: ("node_context", f"{one[0]}|>{one[1]}")
    ),
)


@settings(max_examples=150, deadline=None)
@given(events_, st.lists(st.tuples(nested, st.sampled_from((5, 11))), max_size=5))
def test_nodes_and_contexts_are_taken_out_exactly(events: list[Event], out: list[tuple[Scope, int]]) -> None:
    """Whatever overlaps. Seconds before an exclusion hold everything."""
    left_out = LeftOut(tuple(Exclusion(*scope, since) for scope, since in out))
    active = [one for one in left_out.exclusions if one.since <= 10]
    found = counted(left_out, events, 10)
    for scope in {scope for event in events for scope in scopes_of(event)}:
        if scope[0] not in ("all", "node", "context", "node_context"):
            continue
        here = [event for event in events if scope in scopes_of(event)]
        kept = sum(not any(is_out(event, one) for one in active) for event in here)
        assert found.get(scope, 0) == kept
        if LeftOut(tuple(active)).covers(scope):
            assert kept == 0
    assert min(found.values(), default=0) >= 0


@settings(max_examples=50, deadline=None)
@given(events_, st.sets(st.sampled_from(("code", "batch")), min_size=1), st.booleans())
def test_segments_of_another_kind_are_taken_out_of_the_roll_out(
    events: list[Event], types: set[str], strata: bool
) -> None:
    """They exclude each other, so that pairs, without strata, tell it, too."""
    out = LeftOut(tuple(Exclusion("request_type", value, 5) for value in sorted(types)))
    found = counted(out, events, 10, strata=strata)
    kept = [event for event in events if event[2] not in types]
    assert found.get(("all", ""), 0) == len(kept)
    assert not any(found.get(("request_type", value)) for value in types)
    assert found.get(("request_type", "chat"), 0) == sum(event[2] == "chat" for event in events)
    assert not any(scope[1].startswith(("code|",)) for scope in found if "code" in types)


@settings(max_examples=150, deadline=None)
@given(events_, st.lists(st.tuples(st.one_of(crossing, contexts_), st.sampled_from((5, 11))), max_size=5))
def test_strata_tell_what_every_scope_of_requests_loses(
    events: list[Event], out: list[tuple[Scope, int]]
) -> None:
    """Request types, hardware and contexts, in any combination: exact in every scope that can tell; a node,
    which no stratum names, keeps at least what is left of it."""
    left_out = LeftOut(tuple(Exclusion(*scope, since) for scope, since in out))
    active = [one for one in left_out.exclusions if one.since <= 10]
    found = counted(left_out, events, 10, strata=True)
    for scope in {scope for event in events for scope in scopes_of(event)}:
        here = [event for event in events if scope in scopes_of(event)]
        kept = sum(not any(is_out(event, one) for one in active) for event in here)
        if scope[0] == "region":
            continue
        if scope[0] in ("node", "node_context"):
            contexts = [one for one in active if one.dimension == "context"]
            assert found.get(scope, 0) == sum(
                not any(is_out(event, one) for one in contexts) for event in here
            )
        else:
            assert found.get(scope, 0) == kept, scope
    assert min(found.values(), default=0) >= 0


@settings(max_examples=150, deadline=None)
@given(
    events_,
    st.lists(st.tuples(st.one_of(crossing, contexts_, regions), st.sampled_from((5, 11))), max_size=4),
)
def test_what_is_told_of_all_arms_holds_nothing_that_is_left_out(
    events: list[Event], out: list[tuple[Scope, int]]
) -> None:
    """Nobody keeps the baseline's traffic away: what stays in once stays in for good."""
    left_out = LeftOut(tuple(Exclusion(*scope, since) for scope, since in out))
    active = [one for one in left_out.exclusions if one.since <= 10]
    found = counted(left_out, events, 10, strata=True)
    for scope in {scope for event in events for scope in scopes_of(event)}:
        if scope[0] in ("node", "node_context"):
            continue  # compared with the whole, and with the contexts
        kept = sum(
            not any(is_out(event, one) for one in active) for event in events if scope in scopes_of(event)
        )
        if left_out.tells_all_arms(scope[0], 10):
            assert found.get(scope, 0) == kept, scope
    if not any(one.dimension == "region" for one in active):
        assert all(left_out.tells_all_arms(one, 10) for one in ("all", "context", "request_type", "stratum"))
    assert left_out.tells_all_arms("region", 10) == all(one.dimension == "region" for one in active)


@settings(max_examples=150, deadline=None)
@given(events_, st.lists(st.one_of(crossing, nested), max_size=4), st.booleans())
def test_kinds_that_no_cell_tells_apart_leave_no_less_than_the_rest(
    events: list[Event], out: list[Scope], strata: bool
) -> None:
    """Nothing is taken out twice; with strata, the cells of request types and hardware lose each other's."""
    left_out = LeftOut(tuple(Exclusion(*scope, 5) for scope in out))
    found = counted(left_out, events, 10, strata=strata)
    told = [one for one in left_out.exclusions if one.dimension in ("request_type", "hardware", "context")]
    for scope in {scope for event in events for scope in scopes_of(event)}:
        if scope[0] == "stratum" and not strata:
            continue
        here = [event for event in events if scope in scopes_of(event)]
        assert found.get(scope, 0) >= sum(
            not any(is_out(event, one) for one in left_out.exclusions) for event in here
        )
        if strata and scope[0] in ("request_type", "hardware", "sampling"):
            assert found.get(scope, 0) == sum(not any(is_out(event, one) for one in told) for event in here)
    assert min(found.values(), default=0) >= 0


@pytest.mark.parametrize(
    ("scope", "one", "inside"),
    [
        (("stratum", "chat|<=4096|greedy|none|H100"), ("context", ">2048"), True),
        (("stratum", "chat|<=2048|greedy|none|H100"), ("context", ">2048"), False),
        (("stratum", "chat|>8192|greedy|none|H100"), ("context", ">8192"), True),
        (("stratum", "chat|<=512|greedy|none|H100"), ("hardware", "H100"), True),
        (("stratum", "chat|<=512|greedy|none|H100"), ("sampling", "sampled"), False),
        (("stratum", "chat|<=512|greedy|none|H100"), ("node", "c-0"), False),
        (("context", ">4096"), ("context", ">2048"), True),
        (("context", ">512"), ("context", ">2048"), False),
        (("node_context", "c|1|>4096"), ("node_context", "c|1|>2048"), True),
        (("node_context", "c|1|>4096"), ("node", "c|1"), True),
        (("node", "c|1"), ("node_context", "c|1|>512"), False),
        (("all", ""), ("node", "c|1"), False),
        (("region", "eu"), ("region", "eu"), True),
        # What no worker writes lies nowhere, and breaks nothing.
        (("stratum", "a|b"), ("context", ">2048"), False),
        (("node_context", "x"), ("node", "x"), False),
        (("context", ">lots"), ("context", ">2048"), False),
    ],
)
def test_what_lies_inside(scope: Scope, one: Scope, inside: bool) -> None:
    left_out = LeftOut((Exclusion(*one, 5),))
    assert left_out.covers(scope) == inside
    list(left_out.parts(Cell(*scope, {}, {}, []), 10))


# --- in the gate ---------------------------------------------------------------------------------------

EJECT = """
rules:
  - {id: ruler, capability: G2, metric: ttft_us, statistic: p99, relative_to: baseline, window: 5s,
     limit: 1.15, min_samples: 50, hold: 3s, scope: [node, node_context], action: eject_node}
  - {id: slow, metric: ttft_over_share, over: 500ms, window: 5s, limit: 15%, min_samples: 100,
     action: rollback_l1}
coverage: {window: 5s, min_samples: 10}
progression: {min_pairs: 20}
"""


def fleet(
    second: int, *, ill: dict[str, int], quick_us: int = 100_000, nodes: int = 10
) -> list[PopulationCells]:
    """20 requests a second and node; `ill`: node → its time to the first token."""
    names = [f"c-{number}" for number in range(nodes)]
    mine = {name: [ill.get(name, quick_us)] * 20 for name in names}
    return [
        PopulationCells(canary("baseline", "v1", differs=0), [request_cell([quick_us] * 200)]),
        PopulationCells(
            canary(differs=0),
            [
                request_cell([value for values in mine.values() for value in values]),
                *(request_cell(values, "node", name) for name, values in mine.items()),
            ],
        ),
    ]


def bench_state(bench: Bench) -> str:
    return bench.control[NAME].state


def ejected(bench: Bench) -> tuple[str, ...]:
    return bench.control[NAME].ejected_nodes


def test_a_slow_node_is_ejected_alone_after_its_hold() -> None:
    bench = Bench.started(EJECT)
    effects = bench.run(T0, T0 + 10, healthy_pairs(), lambda second: fleet(second, ill={"c-3": 200_000}))
    assert kinds(effects) == ["eject"]
    (decision,) = decisions(effects)
    directive = bench.control[NAME]
    # 50 samples of the node are there after three seconds; three evaluations over the limit make the hold.
    assert decision.inputs.complete_through == T0 + 2 + 2
    assert (directive.ejected_nodes, directive.state, directive.level) == (("c-3",), "observing", 0)
    assert directive.weights == {"v1": 99.0, "v2": 1.0}
    cause = directive.cause
    assert cause is not None
    assert (cause.rule, cause.capability, cause.scope) == ("ruler", "G2", "node=c-3")
    assert cause.located is not None
    assert (cause.located.dimension, cause.located.value) == ("node", "c-3")
    assert decision.reason == "eject_node: c-3 (ruler)"


@pytest.mark.parametrize(
    ("ill", "nodes", "kind"),
    [(2, 10, "eject"), (3, 10, "trip"), (1, 5, "eject"), (1, 4, "trip"), (10, 10, "trip")],
)
def test_more_than_a_fifth_of_the_nodes_is_the_versions_fault(ill: int, nodes: int, kind: str) -> None:
    """Compared with nodes seen in the window; the policy may say another share."""
    faults = {f"c-{number}": 200_000 for number in range(ill)}
    bench = Bench.started(EJECT)
    effects = bench.run(T0, T0 + 10, healthy_pairs(), lambda second: fleet(second, ill=faults, nodes=nodes))
    assert kinds(effects) == [kind]
    assert (bench.control[NAME].weights["v2"] == 0.0) == (kind == "trip")
    generous = Bench.started(EJECT + "ejection: {max_share: 100%}\n")
    generous.run(T0, T0 + 10, healthy_pairs(), lambda second: fleet(second, ill=faults, nodes=nodes))
    assert len(ejected(generous)) == (ill if ill < nodes else 0)
    assert (bench_state(generous) == "tripped") == (ill == nodes), "a canary without nodes is none"


def test_an_ejected_node_judges_nothing_any_more_and_the_step_begins_anew() -> None:
    """It goes on answering, at 900 ms: no router obeys here. The roll-out's own rule does not see it."""
    ill = {"c-3": 200_000}
    bench = Bench.started(EJECT, join_timeout_us=1_000_000)
    bench.run(T0, T0 + 4, healthy_pairs(), lambda second: fleet(second, ill=ill))
    assert ejected(bench) == ("c-3",)
    memory = bench.core._runs[NAME].memory
    assert (memory.step_start, memory.step_pairs) == (T0 + 5 + LATENESS_S, 0)
    very_ill = {"c-3": 900_000}
    effects = bench.run(T0 + 5, T0 + 24, healthy_pairs(), lambda second: fleet(second, ill=very_ill))
    assert effects == []
    last = bench.core._runs[NAME].last
    assert last is not None
    ruler, slow = last.verdicts
    assert "node=c-3" not in {one.scope for one in ruler.evaluations}
    assert (slow.verdict, slow.evaluations[0].samples, slow.evaluations[0].value) == ("pass", 900, 0.0)
    # The step lasts join timeout and longest window from there, and passes without it.
    assert kinds(
        bench.run(T0 + 25, T0 + 26, healthy_pairs(), lambda second: fleet(second, ill=very_ill))
    ) == ["step"]
    assert ejected(bench) == ("c-3",), "a further step keeps it out"


def test_known_bad_without_leaving_it_out_the_node_would_trip_the_roll_out() -> None:
    """The control of the test before: the same requests under the same rule, nobody ejected."""
    bench = Bench.started(
        EJECT.replace("action: eject_node", "action: eject_node, mode: observe").replace("15%", "8%")
    )
    effects = bench.run(T0, T0 + 10, healthy_pairs(), lambda second: fleet(second, ill={"c-3": 900_000}))
    assert kinds(effects)[-1] == "trip"


def test_an_ejection_survives_a_crash_and_a_new_generation_forgets_it() -> None:
    bench = Bench.started(EJECT)
    bench.run(T0, T0 + 8, healthy_pairs(), lambda second: fleet(second, ill={"c-3": 200_000}))
    heir = bench.crash()
    assert heir.core.renew(us(T0 + 60))[0].states[0].ejected == (Exclusion("node", "c-3", T0 + 5),)  # type: ignore[union-attr]
    effects = heir.run(T0 + 9, T0 + 12, healthy_pairs(), lambda second: fleet(second, ill={"c-3": 900_000}))
    assert effects == []
    assert heir.core._runs[NAME].memory.ejected != ()
    (begun,) = heir.command(command("new_generation", "g"), us(T0 + 30))
    assert begun.directive is not None
    assert (begun.directive.generation, begun.directive.ejected_nodes) == (2, ())


def test_open_seconds_are_taken_out_too() -> None:
    """Fresh cells that came before the ejection, of seconds after it, may not trip the roll-out."""
    bench = Bench.started(EJECT.replace("15%", "8%").replace("hold: 3s", "hold: 1s"))
    ill = {"c-3": 900_000}
    bench.run(T0, T0 + 1, healthy_pairs(), lambda second: fleet(second, ill={}))
    from tests.core.gate.build import REQUESTS

    for second in range(T0 + 5, T0 + 9):
        bench.core.on_fresh(fresh(REQUESTS, {second: fleet(second, ill=ill)}, second))
    effects = bench.run(T0 + 2, T0 + 4, healthy_pairs(), lambda second: fleet(second, ill={"c-3": 400_000}))
    assert kinds(effects) == ["eject"]
    assert bench.core.judge_fresh(us(T0 + 9)) == []
    control = Bench.started(EJECT.replace("15%", "8%").replace("eject_node", "eject_node, mode: observe"))
    control.run(T0, T0 + 1, healthy_pairs(), lambda second: fleet(second, ill={}))
    for second in range(T0 + 5, T0 + 9):
        control.core.on_fresh(fresh(REQUESTS, {second: fleet(second, ill=ill)}, second))
    assert kinds(control.core.judge_fresh(us(T0 + 9))) == ["trip"], "known bad: nobody ejected"


NARROW = """
rules:
  - {id: part, metric: kl_lower, window: 5s, limit: 0.05, min_samples: 20,
     scope: [rollout, context, node_context], action: narrow}
  - {id: all, metric: kl_lower, window: 5s, limit: 0.5, min_samples: 20, action: rollback_l1}
coverage: {window: 5s, min_samples: 10}
progression: {min_pairs: 20}
"""


def prompts(long: float, short: float = 0.01) -> object:
    """Ten pairs a second, three of them long; on two nodes."""
    return lambda _second: [
        PopulationCells(
            canary(),
            [
                pair_cell([short] * 7 + [long] * 3),
                pair_cell([long] * 3, "context", ">2048"),
                pair_cell([short] * 3 + [long], "node", "c-0"),
                pair_cell([short] * 4 + [long] * 2, "node", "c-1"),
                pair_cell([long], "node_context", "c-0|>2048"),
                pair_cell([long] * 2, "node_context", "c-1|>2048"),
            ],
        )
    ]


def test_a_segment_is_excluded_and_the_rest_waits_for_an_operator() -> None:
    bench = Bench.started(NARROW, join_timeout_us=1_000_000)
    effects = bench.run(T0, T0 + 8, prompts(0.3))
    assert kinds(effects) == ["narrow"]
    directive = bench.control[NAME]
    assert directive.state == "narrowed"
    assert [(one.dimension, one.value) for one in directive.excluded_segments] == [("context", ">2048")]
    assert directive.weights == {"v1": 99.0, "v2": 1.0}
    assert directive.cause is not None
    assert directive.cause.located is not None
    assert directive.cause.located.value == ">2048"
    assert directive.cause.located.share_of_excess == pytest.approx(1.0)
    assert directive.cause.located.share_of_traffic == pytest.approx(0.3)
    # Long prompts go on coming, far worse: they judge nothing, and the weight holds.
    assert bench.run(T0 + 9, T0 + 60, prompts(0.9)) == []
    (resumed,) = bench.command(command("resume", "r"), us(T0 + 61 + LATENESS_S))
    assert resumed.decision is not None
    assert resumed.decision.reason == "resume: resumed without context=>2048"
    assert resumed.directive is not None
    assert resumed.directive.state == "observing"
    assert len(resumed.directive.excluded_segments) == 1, "only a new generation brings it back"
    effects = bench.run(T0 + 61, T0 + 70, prompts(0.9))
    assert kinds(effects)[:1] == ["step"]
    heir = bench.crash()
    assert heir.run(T0 + 71, T0 + 72, prompts(0.9)) == []
    assert len(heir.core._runs[NAME].memory.excluded) == 1
    (begun,) = heir.command(command("new_generation", "g"), us(T0 + 90))
    assert begun.directive is not None
    assert begun.directive.excluded_segments == ()


BY_TYPE = """
rules:
  - {id: part, metric: ttft_over_share, over: 500ms, window: 5s, limit: 30%, min_samples: 20,
     scope: [rollout, request_type], action: narrow}
  - {id: around, metric: ttft_over_share, over: 500ms, window: 60s, limit: 30%, min_samples: 100,
     scope: [rollout, context, hardware, sampling], action: rollback_l1}
coverage: {window: 5s, min_samples: 10}
progression: {min_pairs: 20}
"""


def by_type(_second: int) -> list[PopulationCells]:
    """Long prompts, ten of chat and ten of code a second; code is slow. One kind of hardware."""
    slow, quick = [900_000] * 10, [100_000] * 10
    both = [*slow, *quick]
    strata = {f"{kind}|<=4096|greedy|none|H100": values for kind, values in (("code", slow), ("chat", quick))}
    return [
        PopulationCells(
            canary(differs=0),
            [
                request_cell(both),
                request_cell(both, "context", ">512"),
                request_cell(both, "context", ">2048"),
                request_cell(both, "hardware", "H100"),
                request_cell(both, "sampling", "greedy"),
                request_cell(slow, "request_type", "code"),
                request_cell(quick, "request_type", "chat"),
                *(request_cell(values, "stratum", value) for value, values in strata.items()),
            ],
        )
    ]


def test_an_excluded_request_type_judges_nothing_in_the_scopes_around_it() -> None:
    """It goes on answering slowly: contexts, hardware and sampling that it is half of see none of it."""
    bench = Bench.started(BY_TYPE)
    effects = bench.run(T0, T0 + 30, healthy_pairs(), by_type)
    assert kinds(effects) == ["narrow"]
    (segment,) = bench.control[NAME].excluded_segments
    assert (segment.dimension, segment.value) == ("request_type", "code")
    last = bench.core._runs[NAME].last
    assert last is not None
    around = {one.scope: one for one in last.verdicts[1].evaluations}
    assert around.keys() == {"rollout", "context=>512", "context=>2048", "hardware=H100", "sampling=greedy"}
    # Ten slow ones of the second before the exclusion, and chat since.
    assert {(one.samples, one.value) for one in around.values()} == {(320, 10 / 320)}


def test_known_bad_left_in_it_would_trip_them() -> None:
    bench = Bench.started(BY_TYPE.replace("action: narrow", "action: narrow, mode: observe"))
    assert kinds(bench.run(T0, T0 + 30, healthy_pairs(), by_type))[-1] == "trip"


RULED = """
rules:
  - {id: part, metric: kl_lower, window: 5s, limit: 0.05, min_samples: 20,
     scope: [rollout, context], action: narrow}
  - {id: ruler, metric: ttft_us, statistic: p99, relative_to: baseline, window: 5s, limit: 1.15,
     min_samples: 50, scope: [SCOPE], action: rollback_l1}
coverage: {window: 5s, min_samples: 10}
"""


def mixed(arm: str, node: str, short_us: int, long_us: int) -> PopulationCells:
    """A second's requests of an arm: half of the prompts are long, and those take a second and a half."""
    short, long = [short_us] * 30, [long_us] * 30
    version = "v2" if arm == "canary" else "v1"
    return PopulationCells(
        canary(arm, version, differs=0),
        [
            request_cell(short + long),
            request_cell(short + long, "node", node),
            request_cell(short + long, "context", ">512"),
            request_cell(long, "context", ">2048"),
            request_cell(short + long, "node_context", f"{node}|>512"),
            request_cell(long, "node_context", f"{node}|>2048"),
            request_cell(short, "stratum", "chat|<=2048|greedy|none|H100"),
            request_cell(long, "stratum", "chat|>8192|greedy|none|H100"),
        ],
    )


@pytest.mark.parametrize("scope", ["rollout", "context", "node", "stratum"])
@pytest.mark.parametrize(("short_us", "kind"), [(100_000, None), (150_000, "trip")])
def test_an_excluded_class_is_compared_of_no_arm(scope: str, short_us: int, kind: str | None) -> None:
    """G7. Known-bad: the canary's short prompts against the baseline's p99 of all, which nothing is over."""
    bench = Bench.started(RULED.replace("SCOPE", scope))
    alike = [mixed("baseline", "b-0", 100_000, 1_500_000), mixed("canary", "c-0", 100_000, 1_500_000)]
    assert kinds(bench.run(T0, T0 + 8, prompts(0.3), lambda _: alike)) == ["narrow"]
    now = [mixed("baseline", "b-0", 100_000, 1_500_000), mixed("canary", "c-0", short_us, 1_500_000)]
    bench.command(command("resume", "r"), us(T0 + 9 + LATENESS_S))
    effects = bench.run(T0 + 9, T0 + 30, prompts(0.3), lambda _: now)
    assert [one for one in kinds(effects) if one == "trip"] == ([] if kind is None else [kind])
    if kind is None:
        heir = bench.crash()
        assert "trip" not in kinds(heir.run(T0 + 31, T0 + 32, prompts(0.3), lambda _: now))


def test_the_control_goes_on_getting_what_is_left_out_of_the_canary() -> None:
    """Known-bad: its slow long prompts against the baseline's short ones trip a rule of the control."""
    bench = Bench.started(RULED.replace("scope: [SCOPE]", "scope: [rollout, stratum], arm: control"))
    alike = [mixed("baseline", "b-0", 100_000, 1_500_000), mixed("control", "k-0", 100_000, 1_500_000)]
    assert kinds(bench.run(T0, T0 + 30, prompts(0.3), lambda _: alike)) == ["narrow"]
    verdict = bench.core._runs[NAME].last.verdicts[1]  # type: ignore[union-attr]
    assert (verdict.verdict, verdict.evaluations[0].samples) == ("pass", 300)


def regional(_second: int) -> list[PopulationCells]:
    """Thirty requests of an arm in each of two regions; those from afar take a second and a half."""
    near, far = [100_000] * 30, [1_500_000] * 30
    return [
        PopulationCells(
            canary(arm, version, differs=0),
            [
                request_cell(near + far),
                request_cell(near + far, "traffic", "user"),
                request_cell(near + far, "node", node),
                request_cell(near + far, "stratum", "chat|<=512|greedy|none|H100"),
                request_cell(near, "region", "eu"),
                request_cell(far, "region", "us"),
            ],
        )
        for arm, version, node in (("baseline", "v1", "b-0"), ("canary", "v2", "c-0"))
    ]


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        ("[rollout]", "pass"),
        ("[region]", "pass"),
        ("[stratum]", "not compared: 0 of 50 samples of the baseline in stratum=chat|<=512|greedy|none|H100"),
        ("[rollout], traffic: user", "not compared: 0 of 50 samples of the baseline in traffic=user"),
    ],
)
def test_where_no_cell_says_what_the_baseline_loses_nothing_is_compared(scope: str, said: str) -> None:
    """Known-bad: a pass, though the canary gets nothing from afar any more and the baseline does."""
    policy = RULED.replace("scope: [SCOPE]", f"scope: {scope}").replace("[rollout, context]", "[region]")
    pairs = [pair_cell([0.01] * 6 + [0.3] * 4), pair_cell([0.01] * 6, "region", "eu")]
    afar = [PopulationCells(canary(), [*pairs, pair_cell([0.3] * 4, "region", "us")])]
    bench = Bench.started(policy)
    assert kinds(bench.run(T0, T0 + 30, lambda _: afar, regional)) == ["narrow"]
    assert [one.value for one in bench.control[NAME].excluded_segments] == ["us"]
    for each in (bench, bench.crash()):
        each.run(T0 + 31, T0 + 32, lambda _: afar, regional)
        ruler = each.core._runs[NAME].last.verdicts[1]  # type: ignore[union-attr]
        assert (ruler.reason or ruler.verdict) == said


def test_a_deviation_that_is_everywhere_is_the_versions_fault() -> None:
    bench = Bench.started(NARROW)
    effects = bench.run(T0, T0 + 8, prompts(0.2, 0.2))
    assert kinds(effects) == ["trip"]
    assert bench.control[NAME].weights["v2"] == 0.0
    assert "no class of traffic carries it" in decisions(effects)[0].reason


def test_neither_ejects_nor_narrows_on_fresh_evidence() -> None:
    bench = Bench.started(NARROW)
    bench.run(T0, T0)
    cells = prompts(0.3)(T0 + 1)  # type: ignore[operator]
    for second in range(T0 + 1, T0 + 6):
        bench.core.on_fresh(fresh(LOGITS, {second: cells}, second))
    assert bench.core.judge_fresh(us(T0 + 6)) == []


@pytest.mark.parametrize("action", ["advise", "pause", "fallback", "rollback_l1", "rollback_l2"])
def test_rules_of_other_actions_leave_nothing_out(action: str) -> None:
    """G3 and G5 set weight 0 and only report where it sits."""
    bench = Bench.started(NARROW.replace("action: narrow", f"action: {action}"))
    bench.run(T0, T0 + 8, prompts(0.3))
    directive = bench.control[NAME]
    assert (directive.ejected_nodes, directive.excluded_segments) == ((), ())
    assert directive.state != "narrowed"


def test_memory_of_before_this_version_reads_as_nothing_left_out() -> None:
    from pipeline.core.gate.machine import begin
    from pipeline.core.gate.state import decode_state, encode_state
    from schemas.control import RolloutSpec

    memory = begin(msgspec.convert(SPEC, RolloutSpec), None, start_us=0, evidence_from=0)
    assert b"ejected" not in encode_state(memory)
    assert decode_state(encode_state(memory)).left_out == LeftOut()  # type: ignore[union-attr]
