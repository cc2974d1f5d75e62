"""What hostile or overwhelming traffic does to one worker: `python -m tests.faults.hostile [--only NAME]`.

Each scenario returns an `Outcome`; `problems` says what of it must not be. Bounds on memory are stated where
they are checked, from what the worker may hold: see `buffers`, `WAITING_BYTES` and `KEY_BYTES`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.core.source import WAITING_BYTES
from pipeline.workers.transport import BUFFERED_RUNS, FETCH_BYTES, POLLED_RECORDS, RUN_BYTES
from schemas import codec
from schemas.columns import BatchHeader
from schemas.topics import JSON, MAX_RECORD_BYTES, Topic
from tests.faults.load import JOIN_TIMEOUT_S, MIB, PARTITIONS, SETTINGS, Load, load
from tests.kafka.broker import Broker, apache_kafka
from tests.kafka.records import fresh_topics, now_us
from tests.kafka.waiting import eventually
from tests.workers.events import answer, request, soon_us

CELLS: Final = 2_048
CATCH_ALLS: Final = 3
"""`other` of each arm, for populations without room: besides the cap."""
ALLOCATOR: Final = 64 * MIB
"""What an allocator keeps of a burst, and the modules that work loads."""
KEY_BYTES: Final = 400
"""Per event of open seconds: its key, so that it counts once."""
NORMAL_PER_S: Final = 1_000
"""Requests a second, of all arms."""
LARGE_T: Final = 8_000
"""Positions of an answer of which two fill a record."""


def buffers(record_bytes: int) -> int:
    """Records on their way: runs in Faust's queue, what is polled for it, two fetches of every partition."""
    runs = BUFFERED_RUNS * max(RUN_BYTES, record_bytes)
    return runs + POLLED_RECORDS * record_bytes + 2 * PARTITIONS * FETCH_BYTES


@dataclass(frozen=True)
class Outcome:
    """What was sent, what of it is accounted for, and what it took."""

    name: str
    sent: int
    """Events, refused ones included."""
    accounted: int
    """Events in finals, waiting, or in dead letters."""
    base_bytes: int
    peak_bytes: int
    bound_bytes: int
    notes: str
    wrong: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """What must not be; empty: the promise holds."""
        found = list(self.wrong)
        if self.accounted != self.sent:
            found.append(f"{self.sent} events were sent, {self.accounted} are accounted for")
        if self.peak_bytes > self.bound_bytes:
            found.append(f"took {self.peak_bytes // MIB} MiB, more than the {self.bound_bytes // MIB} it may")
        return found

    def __str__(self) -> str:
        return (
            f"{self.name:28} sent {self.sent:8} accounted {self.accounted:8}  memory idle "
            f"{self.base_bytes // MIB} peak {self.peak_bytes // MIB} bound {self.bound_bytes // MIB} MiB  "
            f"{self.notes}{''.join(f'  WRONG: {each}' for each in self.problems)}"
        )


class Batches:
    """Columnar records of alike events that differ in signature, pair id and time: cheap to make."""

    def __init__(self, topic: Topic, event: dict[str, Any], size: int) -> None:
        """`size` events a record, each as `event` says."""
        text = json.dumps([event] * size).encode()
        header = BatchHeader("flood", 0, {})
        if topic is Topic.REQUESTS:
            value = codec.encode_requests(codec.decode_requests(text, JSON).columns, header)
        else:
            value = codec.encode_logits(codec.decode_logits(text, JSON).columns, header)
        self._fields: list[Any] = msgspec.msgpack.decode(value)
        self._size = size
        self._rng = random.Random(7)

    def take(self, ts_us: int, *, signature: bytes | None = None) -> bytes:
        """The next record, its events at this time; signatures and pair ids are new unless given."""
        fields = self._fields
        fields[4] += 1
        fields[6] = self._rng.randbytes(16 * self._size) if signature is None else signature * self._size
        if fields[7]:
            fields[7] = self._rng.randbytes(16 * self._size)
        fields[8][0] = struct.pack("<q", ts_us)
        return msgspec.msgpack.encode(fields)


def _outcome(
    on: Load, name: str, sent: int, accounted: int, bound_bytes: int, notes: str, *wrong: str
) -> Outcome:
    return Outcome(
        name, sent, accounted, on.base_bytes, on.peak_bytes, on.base_bytes + bound_bytes, notes,
        tuple(each for each in wrong if each),
    )  # fmt: skip


def _letters(on: Load) -> int:
    return len(on.said.letters)


async def ten_times_the_rate(on: Load, seconds: int) -> Outcome:
    """Requests at ten times the normal rate, in real time, one signature per event."""
    on.begin()
    before = on.said.counted(Topic.REQUESTS)
    batches = Batches(Topic.REQUESTS, request(now_us(), pair_id="p"), 500)
    began_s, sent = time.monotonic(), 0
    while sent < seconds * 10 * NORMAL_PER_S:
        for partition in range(PARTITIONS):
            await on.send(Topic.REQUESTS, partition, batches.take(now_us()))
            sent += 500
        await asyncio.sleep(began_s + sent / (10 * NORMAL_PER_S) - time.monotonic())
    took_s = time.monotonic() - began_s
    await on.until_counted()
    counted = on.said.counted(Topic.REQUESTS) - before
    bound = buffers(128_000) + ALLOCATOR + KEY_BYTES * sent
    # Late: appended more than the lateness after they were made, by a machine that is too busy for this rate.
    late = counted["late"]
    notes = f"{sent / took_s:.0f} a second, {late} late"
    return _outcome(on, "10 times the rate", sent, counted["requests"] + late, bound, notes)


async def one_hot_signature(on: Load, pairs: int) -> Outcome:
    """All halves of one signature: with pair ids each finds its own, without them none can."""
    on.begin()
    signature = bytes(range(16))
    before = on.said.counted(Topic.LOGITS)
    per_record = 250
    arms = {
        arm: Batches(Topic.LOGITS, answer(now_us(), arm, "p"), per_record) for arm in ("baseline", "canary")
    }
    alike = {arm: random.Random(11) for arm in arms}  # the same pair ids on both arms
    for _ in range(pairs // per_record):
        ts_us = soon_us()
        for arm, batches in arms.items():
            batches._rng = alike[arm]
            await on.send(Topic.LOGITS, 0, batches.take(ts_us, signature=signature))
    nameless = {
        arm: Batches(Topic.LOGITS, answer(now_us(), arm, "p") | {"pair_id": None}, 1)
        for arm in ("baseline", "canary")
    }
    ambiguous, first_us = 0, 0
    for number in range(20):
        for batches in nameless.values():
            await on.send(Topic.LOGITS, 0, batches.take(soon_us() + number, signature=signature))
            first_us = first_us or on.last_us[Topic.LOGITS.value, 0]
    in_time = on.last_us[Topic.LOGITS.value, 0] - first_us < JOIN_TIMEOUT_S * 1_000_000
    await on.until_counted(JOIN_TIMEOUT_S + 1)
    counted = on.said.counted(Topic.LOGITS) - before
    ambiguous = counted["unmatched.ambiguous"]
    notes = f"pairs {counted['pairs']} ambiguous {ambiguous}"
    sent = 2 * pairs + 40
    # Twenty of each arm are one group without an answer: counted once per comparison while it is open.
    accounted = 2 * counted["pairs"] + (2 * ambiguous if in_time else 40)
    bound = buffers(64 * 1024) + ALLOCATOR + (8_192 + 1_536) * 2 * pairs
    return _outcome(on, "one hot signature", sent, accounted, bound, notes)


async def endless_unmatched(on: Load, records: int, *, large: bool, by_time: bool | None = None) -> Outcome:
    """Canary halves whose baselines never come. `large`: so large that bytes end the wait, not time."""
    on.begin()
    name = f"unmatched {'large' if large else 'small'} halves"
    event = answer(now_us(), "canary", "p")
    if large:
        event |= {"tokens": [1] * LARGE_T, "top_ids": [[1, 2, 3, 4, 5]] * LARGE_T}
        event |= {"top_logprobs": [[-0.1, -3.0, -4.0, -5.0, -6.0]] * LARGE_T}
    per_record = 2 if large else 500
    batches = Batches(Topic.LOGITS, event, per_record)
    before = on.said.counted(Topic.LOGITS)["unmatched.no_baseline"]
    began_s, size = time.monotonic(), 0
    for _ in range(records):
        value = batches.take(soon_us())
        size = max(size, len(value))
        await on.send(Topic.LOGITS, 1, value, squeezed=large)
    took_s = time.monotonic() - began_s
    sent = per_record * records
    by_time = not large if by_time is None else by_time
    await on.until_counted(JOIN_TIMEOUT_S + 1 if by_time else 0)
    last = on.worker.log.count(": gauges ")

    async def two_more_gauges() -> bool:
        return on.worker.log.count(": gauges ") >= last + 2

    await eventually(two_more_gauges)
    gauges = on.gauges(Topic.LOGITS, 1)
    ended = on.said.counted(Topic.LOGITS)["unmatched.no_baseline"] - before
    waiting = gauges["open_groups"]
    held = gauges["waiting_bytes"] // MIB
    notes = f"{sent / took_s:.0f} a second, ended {ended} waiting {waiting} ({held} MiB)"
    over = "" if gauges["waiting_bytes"] <= WAITING_BYTES + 2 * MIB else "more waits than may wait"
    early = "" if by_time or ended else "nothing was ended by its bytes"
    # What ended is remembered as long again, at less than half of what a waiting half of this size takes.
    remembered = 0 if large else WAITING_BYTES // 2
    bound = buffers(size) + ALLOCATOR + WAITING_BYTES + remembered
    return _outcome(on, name, sent, ended + waiting, bound, notes, over, early)


async def more_cells_than_fit(on: Load, rollouts: int, nodes: int) -> Outcome:
    """One request of every node of every roll-out, all in one second of one source."""
    on.begin()
    topic, ts_us = Topic.REQUESTS, soon_us()
    before = on.said.counted(topic)
    events = [
        request(
            ts_us, pair_id=f"{r}/{n}", rollout=f"rollout-{r}", node=f"node-{r}-{n}", region=f"region-{n % 9}"
        )
        for r in range(rollouts)
        for n in range(nodes)
    ]
    for first in range(0, len(events), 500):
        await on.send(topic, 0, json.dumps(events[first : first + 500]).encode(), JSON)
    await on.until_counted()
    counted = on.said.counted(topic) - before
    cells, lost = on.said.most_cells(topic), on.said.overflow(topic)
    over = (
        "" if cells <= CELLS else f"{cells} cells in one second of one source, over the {CELLS} there may be"
    )
    silent = "" if lost else "nothing is said to have found no room"
    bound = buffers(300_000) + ALLOCATOR + KEY_BYTES * len(events) + 10 * MIB
    notes = f"cells {cells}, {lost} memberships in `other`"
    return _outcome(
        on,
        f"{rollouts} roll-outs x {nodes} nodes",
        len(events),
        counted["requests"],
        bound,
        notes,
        over,
        silent,
    )


def million_positions(positions: int) -> bytes:
    """A logit event of so many positions that each take eight bytes."""
    head = json.dumps(answer(now_us(), "canary", "million") | {"tokens": 0, "top_ids": 0, "top_logprobs": 0})
    text = head.encode()
    for name, part in ((b"tokens", b"1,"), (b"top_ids", b"[],"), (b"top_logprobs", b"[],")):
        text = text.replace(b'"' + name + b'": 0', b'"' + name + b'": [' + (part * positions)[:-1] + b"]")
    return text


BROKER_LIMIT: Final = 1_048_588
"""`message.max.bytes` as Kafka ships it, for a batch with its head."""
_BAD: Final[tuple[dict[str, Any], ...]] = (
    {"top_ids": [[1, 2]] * 3},
    {"top_logprobs": [[float("nan"), float("nan")]] * 4},
    {"top_logprobs": [[-9999.0, -9999.0]] * 4},
    {"top_logprobs": [[None, None]] * 4},
    {"top_logprobs": [[float("-inf"), -1.0]] * 4},
    {"ts_us": -1},
    {"duration_us": -5},
    {"input_tokens": 2**31},
    {"top_ids": [[1] * 21] * 4, "top_logprobs": [[-1.0] * 21] * 4},
)


async def impossible_events(on: Load, times: int) -> Outcome:
    """Impossible answers, each among valid neighbours, and answers of a million positions."""
    on.begin()
    before = on.said.counted(Topic.LOGITS)
    pairs = refused = 0
    for round_ in range(times):
        for at, bad in enumerate(_BAD):
            name = f"{round_}-{at}"
            halves = [answer(soon_us(), arm, name) for arm in ("baseline", "canary")]
            spoilt = answer(soon_us(), "canary", f"bad-{name}") | bad
            await on.send(Topic.LOGITS, 0, json.dumps([halves[0], spoilt, halves[1]]).encode(), JSON)
            pairs, refused = pairs + 1, refused + 1
    largest = million_positions((BROKER_LIMIT - 1_500) // 8)
    whole = million_positions(1_000_000)
    await on.send(Topic.LOGITS, 0, largest, JSON)
    await on.send(Topic.LOGITS, 0, whole, JSON, squeezed=True)
    after = [answer(soon_us(), arm, "after") for arm in ("baseline", "canary")]
    await on.send(Topic.LOGITS, 0, json.dumps(after).encode(), JSON)
    pairs, refused = pairs + 1, refused + 2
    await on.until_counted()

    async def all_letters() -> bool:
        return _letters(on) >= refused

    await eventually(all_letters)
    counted = on.said.counted(Topic.LOGITS) - before
    others = {name: n for name, n in counted.items() if name != "pairs" and n}
    wrong = f"neighbours count otherwise: {others}" if others else ""
    tooth = "" if len(whole) > 8 * MAX_RECORD_BYTES else "no large event was sent"
    positions = [each["position"] for each in on.said.letters]
    place = "" if positions.count(1) == refused - 2 else f"positions of the refused are {positions}"
    # A record is held as bytes, and once more while it is taken apart.
    bound = buffers(64 * 1024) + ALLOCATOR + 12 * len(whole)
    notes = f"pairs {counted['pairs']} refused {_letters(on)}, largest {len(whole) / 1e6:.1f} MB"
    accounted = 2 * counted["pairs"] + _letters(on)
    return _outcome(
        on, "impossible events", 2 * pairs + refused, accounted, bound, notes, wrong, tooth, place
    )


Scenario = Callable[[Load], Coroutine[Any, Any, Outcome]]
LONG_JOIN: Final = {"KLAXON_CONTENT_JOIN_TIMEOUT_S": "3600"}
"""Only bytes end a wait."""


@dataclass(frozen=True)
class Play:
    """A scenario with a worker and topics of its own."""

    worker: str
    scenario: Scenario
    settings: Mapping[str, str] = field(default_factory=dict)


LONG: Final[Mapping[str, Play]] = {
    "rate": Play("measure", lambda on: ten_times_the_rate(on, 30)),
    "cells": Play("measure", lambda on: more_cells_than_fit(on, 20, 200)),
    "impossible": Play("pair", lambda on: impossible_events(on, 50)),
    "hot": Play("pair", lambda on: one_hot_signature(on, 20_000)),
    "unmatched": Play("pair", lambda on: endless_unmatched(on, 400, large=False)),
    "large": Play("pair", lambda on: endless_unmatched(on, 1_500, large=True), LONG_JOIN),
    "waiting": Play("pair", lambda on: endless_unmatched(on, 800, large=False, by_time=False), LONG_JOIN),
}


async def play(
    broker: Broker,
    folder: Path,
    kind: str,
    settings: Mapping[str, str],
    scenario: Scenario,
    command: tuple[str, ...] | None = None,
) -> Outcome:
    """One scenario with everything fresh."""
    await fresh_topics(broker)
    environment = {**SETTINGS, **settings}
    async with load(broker, folder, kind, settings=environment, command=command) as on:
        outcome = await scenario(on)
        assert await on.worker.stop() == 0, on.worker.log[-3000:]
    return outcome


def main() -> int:
    """Play the scenarios in their long form; returns the exit code."""
    # As Ctrl-C: whoever ends this ends the broker and the worker, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hostile", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(LONG), default=[])
    names = parser.parse_args().only or list(LONG)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="klaxon-hostile-") as made:
        folder = Path(made)
        with apache_kafka(folder / "broker") as broker:
            for name in names:
                failed += not _passed(name, broker, folder)
    print(f"hostile scenarios {len(names)} failed {failed}")
    return 1 if failed else 0


def _passed(name: str, broker: Broker, folder: Path) -> bool:
    """Play it and print what came of it."""
    it = LONG[name]
    try:
        outcome = asyncio.run(play(broker, folder, it.worker, it.settings, it.scenario))
    except AssertionError as error:  # something never came: the others are played all the same
        print(f"{name}: FAILED: {str(error)[-3000:]}", flush=True)
        return False
    print(f"{name}: {outcome}", flush=True)
    return not outcome.problems


if __name__ == "__main__":
    sys.exit(main())
