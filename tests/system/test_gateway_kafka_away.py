"""A broker that is away, and back: users notice nothing, and what was not told is known to be missing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from schemas.codec import decode_logits, decode_requests
from schemas.topics import CONTENT_TYPE, TICK, Topic
from tests.agents.gateway.fake_engine import FakeEngine
from tests.kafka.broker import apache_kafka
from tests.system.gateway import ARMS, Gateway, Pool, direct, gateway, scores, until_obeyed
from tests.system.judge import decode_final
from tests.system.stack import Consumed, Stack, stack

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

ROLLOUT = "kafka-away"
AT_ONCE = 8
ANSWERING = ("baseline", "canary")


@dataclass
class Arrived:
    """What one input topic tells, of both arms."""

    events: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """As batches report it."""
    sequences: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """(producer, partition) → numbers of its batches, in order."""
    halves: Counter[bytes] = field(default_factory=Counter)
    """Logits: pair id → arms that arrived."""

    def missing_numbers(self) -> int:
        """Batches that were numbered and never came."""
        return sum(max(numbers) + 1 - len(set(numbers)) for numbers in self.sequences.values())


def arrived(topic: Topic, records: Sequence[Consumed]) -> Arrived:
    found = Arrived()
    for record in records:
        kind = dict(record.headers)[CONTENT_TYPE].decode()
        if kind == TICK:
            continue
        decoded = (decode_requests if topic == Topic.REQUESTS else decode_logits)(record.value, kind)
        assert decoded.header is not None
        place = (decoded.header.producer_id, record.partition)
        found.sequences.setdefault(place, []).append(decoded.header.sequence)
        found.dropped.update(decoded.header.dropped)
        columns = decoded.columns
        for row in range(columns.n):
            found.events[f"{ROLLOUT}/{ARMS[int(columns.arm[row])]}"] += 1
            found.halves[bytes(columns.pair_id[row])] += 1
    return found


def counters(records: Sequence[Consumed]) -> Counter[tuple[str, str]]:
    """(arm, counter) of the final buckets of `klaxon.logits`, over all seconds; as the gate reads them."""
    found: Counter[tuple[str, str]] = Counter()
    for record in records:
        final = decode_final(record.value)
        for second in final.seconds if final.topic == Topic.LOGITS else ():
            for content in second.contents:
                for cell in content.cells:
                    if content.population is not None and cell.dimension == "all":
                        for name, count in cell.counters.items():
                            found[content.population.arm, name] += count
    return found


async def ask(through: Gateway, count: int) -> None:
    """So many users, some at once; every one is answered whole."""
    numbers = iter(range(count))

    async def lane(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            messages = [{"role": "user", "content": f"Question {len(through.statuses)} {number}"}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": 8, "stream": True}
            said = await through.ask(session, body)
            assert said.endswith(b"data: [DONE]\n\n"), said

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(lane(session) for _ in range(AT_ONCE)))
    assert set(through.statuses) == {200}


async def away(folder: Path, through: Gateway, seconds: float, users: int) -> None:
    """The broker stands still for so long, while so many users ask."""
    pid = int((folder / "broker.pid").read_text())
    started_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        await ask(through, users)
        await asyncio.sleep(seconds - (time.monotonic() - started_s))
    finally:
        os.kill(pid, signal.SIGCONT)


async def drill(folder: Path, *, away_s: float, users: int, queue_events: int) -> tuple[Arrived, Arrived]:
    """Users before, meanwhile and afterwards, and all that must hold; what requests and logits tell."""
    with apache_kafka(folder / "broker") as broker:
        async with stack(broker, folder) as on, AsyncExitStack() as exits:
            urls = [(await exits.enter_async_context(FakeEngine("vllm").running())).url for _ in ANSWERING]
            pools = [Pool(arm, [url], "vllm") for arm, url in zip(ANSWERING, urls, strict=True)]
            await direct(broker, ROLLOUT)
            more = {"producer_queue_events": queue_events, "mirror": {"timeout_s": 3}}
            async with gateway(
                broker, folder, ROLLOUT, pools, more=more, environment=on.environment
            ) as through:
                await until_obeyed(broker, ROLLOUT)
                await ask(through, 20)
                # A pair whose halves are appended before and after is none: the join timeout is shorter.
                await on.follower.until(lambda: _told(on) == 20 * len(ANSWERING), "the first users' events")
                await away(folder / "broker", through, away_s, users)
                await ask(through, 20)
            # It has ended, so everything is told that ever will be.
            await on.follower.caught_up()
            asked = len(through.statuses)
            assert asked == users + 40
            found = [arrived(topic, on.follower.of(topic)) for topic in (Topic.REQUESTS, Topic.LOGITS)]
            for one in found:
                whole = Counter({f"{ROLLOUT}/{arm}": asked for arm in ANSWERING})
                assert one.events + one.dropped == whole
                assert one.dropped.total() > 0
            # Begun now: a broker silent for over 40 s would have ended it.
            await on.worker("pair").start()
            await _is_missed(on, found[1])
            return found[0], found[1]


def _told(on: Stack) -> int:
    """Events of logits that arrived so far."""
    return arrived(Topic.LOGITS, on.follower.of(Topic.LOGITS)).events.total()


async def _is_missed(on: Stack, logits: Arrived) -> None:
    """What was dropped lowers coverage: buckets of the seconds in which it was reported tell the gate."""
    newest_us = max(record.timestamp for record in on.follower.of(Topic.LOGITS)) * 1000
    # Waits for halves of which the other was dropped end with the join timeout.
    await on.until_closed(newest_us + 4_000_000, sources=[Topic.LOGITS])
    await on.follower.caught_up()
    told = counters(on.follower.of(Topic.BUCKETS))
    for arm in ANSWERING:
        assert told[arm, "dropped"] == logits.dropped[f"{ROLLOUT}/{arm}"]
    both = sum(count == len(ANSWERING) for count in logits.halves.values())

    def scored() -> int:
        return len(scores(on.follower.of(Topic.PAIRS), ROLLOUT)["canary"])

    # Nobody waits for scored pairs: they may come after the buckets that count them.
    await on.follower.until(lambda: scored() >= both, f"{both} scored pairs")
    assert scored() == both
    alone = sum(count == 1 for count in logits.halves.values())
    assert sum(told[arm, f"unmatched.no_{other}"] for arm in ANSWERING for other in ANSWERING) == alone


async def test_a_broker_away_costs_events_that_are_counted_and_no_user_anything(tmp_path: Path) -> None:
    requests, logits = await drill(tmp_path, away_s=8.0, users=200, queue_events=100)
    # The queue was full: nothing was numbered that did not come.
    assert requests.missing_numbers() == logits.missing_numbers() == 0


@pytest.mark.long
async def test_a_broker_away_for_a_minute_costs_no_user_anything_either(tmp_path: Path) -> None:
    await drill(tmp_path, away_s=60.0, users=200, queue_events=100)
