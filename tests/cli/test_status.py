"""`klaxon status`: what decides, what does not, and why."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from msgspec.structs import replace

from pipeline.cli.standing import deciding, human, standings, step_due
from pipeline.cli.status import gates_content, read_sources, source_lines, source_standings, without_leader
from pipeline.config import Config
from pipeline.core.gate.settings import Effect
from pipeline.core.gate.state import PartitionMemory, encode_state
from pipeline.workers.gate_writer import GateWriter
from pipeline.workers.records import Partition, Record
from schemas.control import Segment
from schemas.topics import Topic
from tests.core.gate.build import (
    HASH,
    LOGITS,
    REQUESTS,
    SOURCES,
    T0,
    Bench,
    command,
    final,
    healthy_pairs,
    quick_requests,
    us,
)
from tests.core.gate.test_left_out import EJECT, NARROW, fleet, prompts
from tests.kafka.broker import Broker
from tests.kafka.records import Written, fresh_topics, produce


def record(topic: Topic, value: bytes, append_us: int = 0) -> Record:
    return Record(
        topic=topic,
        partition=0,
        offset=0,
        append_us=append_us,
        timestamp_type=1,
        headers={},
        key=b"",
        value=value,
    )


def bench_standings(bench: Bench, told_us: int) -> list:
    states = [record(Topic.STATE, value, told_us) for value in bench.states.values()]
    control = [record(Topic.CONTROL, msgspec.json.encode(one)) for one in bench.control.values()]
    return standings(
        [*states, record(Topic.STATE, b""), record(Topic.STATE, b"junk")],
        [*control, record(Topic.CONTROL, b"x")],
    )


def test_a_rollout_that_is_decided_about() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.write(bench.core.renew(us(T0 + 22)))
    (one,) = bench_standings(bench, us(T0 + 22))
    yes, why = deciding(one, us(T0 + 24))
    assert (yes, why) == (True, "complete through 19 s ago")
    text = human(one, us(T0 + 24))
    assert "chat: observing · generation 1 epoch 2 · v1 99 % · v2 1 %" in text
    assert "waits for: G3-divergence: 60 of 100 samples in 5 min, 40 missing; about 4 s at 10/s" in text


def test_when_the_next_step_is_due() -> None:
    """What lasts longest decides: here the step, 60 s of join timeout and 5 minutes of window."""
    bench = Bench.started()
    for last, due in ((T0 + 100, "in about 4 min 20 s"), (T0 + 350, "in about 10 s")):
        bench.run(T0 if last == T0 + 100 else T0 + 101, last, healthy_pairs(), quick_requests())
        bench.write(bench.core.renew(us(last + 22)))
        (one,) = bench_standings(bench, us(last + 22))
        assert f"next step: 1 % to 5 %, {due} if all goes on as now" in human(one, us(last + 24))
    assert one.progress is not None
    assert step_due(replace(one.progress, ready_in_s=0)) == "1 % to 5 %, at any moment if all goes on as now"
    assert step_due(replace(one.progress, ready_in_s=None)) == "1 % to 5 %, not by waiting alone"
    everything = replace(one.progress, percent=100.0, next_percent=None, ready_in_s=5)
    assert step_due(everything) == "promotion, in about 5 s if all goes on as now"
    assert step_due(replace(everything, percent=50.0)) == "", "that is an operator's"


def test_what_a_sequential_rule_has_won() -> None:
    rule = (
        "{id: G3-anytime, metric: kl_lower, evidence: anytime, window: 5m, limit: 0.05, action: rollback_l1}"
    )
    bench = Bench.started(f"rules: [{rule}]")
    bench.run(T0, T0 + 20, healthy_pairs())
    bench.write(bench.core.renew(us(T0 + 42)))
    (one,) = bench_standings(bench, us(T0 + 42))
    (line,) = (each for each in human(one, us(T0 + 43)).splitlines() if each.startswith("  G3-anytime: "))
    assert re.search(r"210 of 100 samples .* · evidence E \S+ of 20, K \S+ of 20$", line), line
    assert "more pairs" in human(one, us(T0 + 43))


def test_rules_that_share_a_window_are_told_by_their_own_names_and_modes() -> None:
    """A sequential rule shares the window of a point rule that measures the same."""
    both = "metric: kl_lower, statistic: mean, window: 5m, limit: 0.05, min_samples: 100, action: rollback_l1"
    rules = f"{{id: G3-divergence, {both}}}, {{id: G3-anytime, evidence: anytime, mode: observe, {both}}}"
    bench = Bench.started(f"rules: [{rules}]")
    bench.run(T0, T0 + 20, healthy_pairs())
    bench.write(bench.core.renew(us(T0 + 42)))
    (one,) = bench_standings(bench, us(T0 + 42))
    told = [
        line.split(":")[0].strip() for line in human(one, us(T0 + 43)).splitlines() if " samples " in line
    ]
    assert told == ["G3-divergence", "G3-anytime (observes)"]


def test_why_nothing_is_decided() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.write(bench.core.renew(us(T0 + 100)))
    (one,) = bench_standings(bench, us(T0 + 100))
    why = deciding(one, us(T0 + 101))[1]
    assert "the newest complete second is 94 s old; waiting for " in why
    assert all(f"{topic}/0" in why for topic in SOURCES), "every source that is silent is named"
    assert "is `klaxon worker gate` running?" in deciding(one, us(T0 + 140))[1]
    bench.run(T0 + 6, T0 + 20, healthy_pairs(score=0.3, count=50))
    (one,) = bench_standings(bench, us(T0 + 141))
    assert deciding(one, us(T0 + 141)) == (False, "tripped is final until a new generation")
    text = human(one, us(T0 + 141))
    assert "because of G3-divergence" in text
    assert "→ `klaxon explain chat`" in text


def test_the_lease_says_what_routers_do() -> None:
    bench = Bench.started()
    bench.run(T0, T0 + 5, healthy_pairs())
    bench.write(bench.core.renew(us(T0 + 22)))
    (one,) = bench_standings(bench, us(T0 + 22))
    assert "lease: renewed, valid for 13 s" in human(one, us(T0 + 24))
    for at, words in (
        (T0 + 47, "ran out 10 s ago, at "),
        (T0 + 47, "no weight rises, routers go back to v1 100 % · v2 0 % in 35 s"),
        (T0 + 90, "routers are back at the last promoted split, v1 100 % · v2 0 %"),
    ):
        assert words in human(one, us(at))
    bench.command(command("abort", "a"), us(T0 + 91))
    (one,) = bench_standings(bench, us(T0 + 91))
    assert "lease" not in human(one, us(T0 + 300)), "a trip does not depend on it"


def test_what_gets_no_canary_is_named() -> None:
    bench = Bench.started()
    (one,) = bench_standings(bench, us(T0 + 1))
    assert "without canary" not in human(one, us(T0 + 1))
    segment = Segment(dimension="context", value=">2048")
    bench.control["chat"] = replace(
        bench.control["chat"], ejected_nodes=("gpu-3", "gpu-4"), excluded_segments=(segment,)
    )
    (one,) = bench_standings(bench, us(T0 + 1))
    assert "  without canary: node gpu-3, node gpu-4, context >2048" in human(one, us(T0 + 1))
    assert msgspec.to_builtins(one)["ejected_nodes"] == ("gpu-3", "gpu-4")


@pytest.mark.parametrize("state", ["paused", "narrowed"])
def test_what_holds_is_not_laid_at_the_door_of_an_ejection_that_came_after(state: str) -> None:
    """Known-bad: `it is paused by ruler`, which ejects nodes and pauses nothing."""
    bench = Bench.started(EJECT)
    bench.command(command("pause", "p"), us(T0))
    bench.run(T0, T0 + 10, healthy_pairs(), lambda second: fleet(second, ill={"c-3": 200_000}))
    (one,) = bench_standings(bench, us(T0 + 26))
    assert (one.state, one.ejected_nodes) == ("paused", ("c-3",))
    assert one.cause is not None
    told = human(replace(one, state=state), us(T0 + 26))
    assert f"waits for: it is {state}: " in told
    by_rule = replace(one, state=state, cause=replace(one.cause, rule="G3", scope="node=c-4"))
    assert f"waits for: it is {state} by G3: " in human(by_rule, us(T0 + 26))


def test_what_an_operator_holds_is_not_laid_at_the_door_of_an_exclusion_that_came_after() -> None:
    """Known-bad: `it is paused by G3`, which narrows and pauses nothing."""
    bench = Bench.started(NARROW)
    bench.command(command("pause", "p"), us(T0))
    bench.run(T0, T0 + 8, prompts(0.3))
    (one,) = bench_standings(bench, us(T0 + 24))
    assert (one.state, len(one.excluded_segments)) == ("paused", 1)
    assert one.cause is not None
    assert "waits for: it is paused: " in human(one, us(T0 + 24))
    narrowed = human(replace(one, state="narrowed"), us(T0 + 24))
    assert f"waits for: it is narrowed by {one.cause.rule}: " in narrowed


def test_the_memory_tells_what_was_written() -> None:
    bench = Bench.started()
    state = bench.core._runs["chat"].memory
    (one,) = standings([record(Topic.STATE, encode_state(state), 7)], [])
    assert (one.told_us, one.lease_until_us, one.weights) == (7, None, {"v1": 99.0, "v2": 1.0})


def test_sources_that_stand_still_are_named() -> None:
    records = [
        record(Topic.BUCKETS, msgspec.msgpack.encode(one))
        for one in (
            final(REQUESTS, 0, T0),
            final(REQUESTS, T0 + 1, T0 + 1),
            final(LOGITS, 0, T0 - 100, partition=0),
            final(LOGITS, 0, T0, partition=1, settings_hash="other"),
        )
    ]
    found = source_standings(
        {**SOURCES, LOGITS: 2}, [*records, record(Topic.BUCKETS, b"junk")], HASH, us(T0 + 17), 45
    )
    told = {one.source: one.problem for one in found}
    assert told["klaxon.requests/0"] == ""
    assert "closes nothing for 117 s, since " in told["klaxon.logits/0"]
    assert "other content settings" in told["klaxon.logits/1"]
    assert "all of them the scoring kernel or none" in told["klaxon.logits/1"], (
        "a file and a release are not all"
    )
    assert "is `klaxon worker measure` running?" in told["klaxon.telemetry/0"]
    lines = source_lines(found)
    assert len(lines) == 4
    assert lines[-1] == "1 of 4 sources close their seconds, the slowest 16 s ago"


def test_sources_are_held_against_the_gate_s_settings_not_against_this_installation_s() -> None:
    bench = Bench.started()
    bench.write(bench.core.renew(us(T0 + 22)))
    states = [record(Topic.STATE, value, us(T0 + 22)) for value in bench.states.values()]
    junk = [record(Topic.STATE, b"", us(T0 + 22)), record(Topic.STATE, b"junk", us(T0 + 22))]
    assert gates_content([*states, *junk], us(T0 + 30), us(20)) == HASH != bench.settings.hash
    assert gates_content(states, us(T0 + 50), us(20)) == "", "said too long ago"
    older = encode_state(PartitionMemory(partition=0, command_offset=0, settings_hash="gate's"))
    assert gates_content([record(Topic.STATE, older or b"", us(T0))], us(T0), us(20)) == ""

    records = [
        record(Topic.BUCKETS, msgspec.msgpack.encode(one))
        for one in (final(REQUESTS, 0, T0), final(LOGITS, 0, T0, settings_hash="here"))
    ]
    found = source_standings({REQUESTS: 1, LOGITS: 1}, records, HASH, us(T0 + 5), 45, "the gate's")
    assert [one.problem.partition(":")[0] for one in found] == [
        "",
        "closed with other content settings than the gate's",
    ]


@pytest.mark.slow
async def test_whichever_gating_partition_the_gate_has_written(embedded: Broker) -> None:
    """Of a roll-out in the fourth, the memory says what sources are held against; here it is another."""
    await fresh_topics(embedded)
    now_s = time.time_ns() // 1_000_000_000
    made = [final(REQUESTS, 0, now_s, settings_hash=which, partition=n) for n, which in enumerate("gh")]
    values = [msgspec.msgpack.encode(one) for one in made]
    await produce(embedded, [Written(Topic.BUCKETS, value, partition=0) for value in values])
    config = Config(kafka=embedded.config)

    async def blamed() -> dict[str, str]:
        found = {one.source: one.problem for one in await read_sources(config)}
        return {f"{REQUESTS}/{n}": found[f"{REQUESTS}/{n}"].partition(":")[0] for n in range(2)}

    than = "closed with other content settings than"
    assert await blamed() == {f"{REQUESTS}/0": f"{than} here", f"{REQUESTS}/1": f"{than} here"}
    memory = PartitionMemory(partition=3, command_offset=0, settings_hash="s", content_hash="g")
    writer = GateWriter(embedded.config, 3)
    await writer.start()
    await writer.write([Effect("r", None, None, (memory,))])
    await writer.close()
    assert await blamed() == {f"{REQUESTS}/0": "", f"{REQUESTS}/1": f"{than} the gate's"}


def test_a_partition_without_a_leader_is_named() -> None:
    sources = source_standings({"klaxon.logits": 2}, [], HASH, us(T0), 45)
    first, second = without_leader(sources, {Partition("klaxon.logits", 1), Partition("klaxon.pairs", 0)})
    assert "is `klaxon worker pair` running?" in first.problem
    assert "no broker leads it" in second.problem
    assert source_lines([second]) == [f"klaxon.logits/1: {second.problem}"]
