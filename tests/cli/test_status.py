"""`klaxon status`: what decides, what does not, and why."""

from __future__ import annotations

import msgspec

from pipeline.cli.standing import deciding, human, standings
from pipeline.cli.status import source_lines, source_standings, without_leader
from pipeline.core.gate.state import encode_state
from pipeline.workers.records import Partition, Record
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
    us,
)


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
    assert "because of G3-divergence" in human(one, us(T0 + 141))


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
    assert "is `klaxon worker measure` running?" in told["klaxon.telemetry/0"]
    lines = source_lines(found)
    assert len(lines) == 4
    assert lines[-1] == "1 of 4 sources close their seconds, the slowest 16 s ago"


def test_a_partition_without_a_leader_is_named() -> None:
    sources = source_standings({"klaxon.logits": 2}, [], HASH, us(T0), 45)
    first, second = without_leader(sources, {Partition("klaxon.logits", 1), Partition("klaxon.pairs", 0)})
    assert "is `klaxon worker pair` running?" in first.problem
    assert "no broker leads it" in second.problem
    assert source_lines([second]) == [f"klaxon.logits/1: {second.problem}"]
