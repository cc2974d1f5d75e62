"""Alerts about evidence, roll-outs and routers: five processes are brought through fault after fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.workers import topics
from schemas.buckets import FinalBuckets, Second
from schemas.topics import BUCKETS, Topic, gating_partition
from tests.kafka.broker import Broker
from tests.kafka.processes import KLAXON, Worker
from tests.kafka.records import Written, dump, now_us, produce
from tests.kafka.waiting import eventually
from tests.monitoring.firings import Moment, assert_fire, seen, total
from tests.monitoring.installation import until_ready
from tests.monitoring.scraping import address_of
from tests.prometheus.promtool import promtool
from tests.schemas.test_header_names import log
from tests.system.judge import decode_final
from tests.workers.events import answer, encoded, request, start_command
from tests.workers.fleet import QUICK, SEAT
from tests.workers.test_notify import answers, receiver
from tests.workers.test_raw_batches import ZSTD, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEST = "test_a_stack_brought_through_faults"
CELLS = 64
BOMB_BYTES = 65 << 20
SETTINGS = {
    **QUICK,
    "KLAXON_CONTENT_CELLS_PER_BUCKET": str(CELLS),
    "KLAXON_GATE_LEASE_S": "3",
    "KLAXON_GATE_DEAD_MAN_S": "5",
    "KLAXON_GATE_BLIND_AFTER_S": "5",
}
OTHER_SETTINGS = {**SETTINGS, "KLAXON_CONTENT_JOIN_TIMEOUT_S": "4"}
PAUSED = "r2"
"""The roll-out that is paused and goes blind; r1 is cut."""


def command(rollout: str, name: str) -> Written:
    made: dict[str, Any] = {**start_command(f"{rollout}-{name}"), "rollout": rollout, "command": name}
    if name == "start":
        made["arguments"]["spec"]["rollout"] = rollout
    else:
        made["arguments"] = {}
    return Written(Topic.COMMANDS, encoded(made), rollout.encode(), gating_partition(rollout))


def requests(count: int, *, ago_s: int = -2, node: str = "n{}") -> Iterator[Written]:
    """One record of events, made when it is sent; ahead, if nothing else is said, so that none is late."""
    ts_us = now_us() - ago_s * 1_000_000
    events = [request(ts_us + at, node=node.format(at)) for at in range(count)]
    yield Written(Topic.REQUESTS, encoded(events), partition=0)


def pairs(
    count: int, first: str, *, bad: bool = False, arms: tuple[str, ...] = ("baseline", "canary")
) -> Iterator[Written]:
    """One record of halves, made when it is sent, two seconds ahead: evidence counts from the first whole
    second on."""
    ts_us = now_us() + 2_000_000
    halves = [
        answer(ts_us, arm, f"{first}{at}", bad=bad and arm == "canary") for at in range(count) for arm in arms
    ]
    yield Written(Topic.LOGITS, encoded(halves), partition=0)


def over(process: str, name: str, limit: float = 0, **labels: str) -> Any:
    """Whether a sum is over a limit."""
    return lambda now: (total(now, process, name, **labels) or 0) > limit


def healthy(now: Moment) -> bool:
    return (
        all(text is not None and total(now, process, "klaxon_ready") == 1 for process, text in now.items())
        and total(now, "gate", "klaxon_seat_taken") == 4
        and total(now, "gate", "klaxon_rollout_blind") == 0
        and (total(now, "gate", "klaxon_rollout_expected_pairs", rollout="r1") or 0) >= 100
        and total(now, "gate", "klaxon_rollout_coverage_ratio", rollout="r1") == 1
        and total(now, "router", "klaxon_router_rollouts") == 2
        and total(now, "router", "klaxon_router_expired_leases") == 0
        and total(now, "router", "klaxon_router_dead_man") == 0
    )


async def contradict(broker: Broker, since_us: int) -> None:
    """Say again, and otherwise, what a source stated of a second since then, which waits for others."""

    async def stated() -> FinalBuckets | None:
        finals = [decode_final(record.value) for record in await dump(broker, Topic.BUCKETS)]
        for final in finals:
            ours = final.topic == Topic.REQUESTS and final.gating_partition == SEAT
            if ours and final.seconds and final.seconds[-1].second >= since_us // 1_000_000:
                return final
        return None

    final = await eventually(stated)
    assert final is not None
    second = final.seconds[-1].second
    other = {
        "closed_from": second,
        "closed_through": second,
        "part": 0,
        "parts": 1,
        "offset": final.offset + 1,
    }
    value = msgspec.msgpack.encode(msgspec.structs.replace(final, seconds=[Second(second, [])], **other))
    await produce(broker, [Written(Topic.BUCKETS, value, partition=SEAT, content_type=BUCKETS)])


async def test_a_stack_brought_through_faults(embedded: Broker, log_folder: Path, tmp_path: Path) -> None:
    promtool()
    broker = embedded
    await topics.create(broker.config)
    films: dict[str, list[Moment]] = {}
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(receiver(answers(400)))
        told = {"KLAXON_NOTIFY_URL": there.url, "KLAXON_NOTIFY_SECRET": "whsec_" + "a2tr" * 8}

        async def started(kind: str, environment: dict[str, str] = SETTINGS) -> Worker:
            line = None if kind in ("measure", "pair", "gate") else (*KLAXON, kind)
            made = Worker(kind, broker, log_folder, environment={**environment, **told}, command=line)
            return await stack.enter_async_context(made)

        running = {kind: await started(kind) for kind in ("measure", "pair", "gate", "router", "notify")}
        at = {kind: await address_of(worker) for kind, worker in running.items()}
        for address in at.values():
            await until_ready(address)
        await produce(broker, [command("r1", "start"), command(PAUSED, "start")])
        await seen(at, over("gate", "klaxon_rollout_canary_ratio"))
        await produce(broker, chain(requests(100, node="n1"), pairs(120, "good")))
        good = await seen(at, healthy)

        async def fault(records: Iterable[Written], **alerts: Any) -> Moment:
            """Write these; the first moment at which all of it shows."""
            await produce(broker, records)
            bad = await seen(at, lambda now: all(condition(now) for condition in alerts.values()))
            for alert in alerts:
                films.setdefault(alert, [good]).append(bad)
            return bad

        broken = Written(Topic.REQUESTS, encoded([request(0, status="x")] * 30), partition=0)
        forged = Written(Topic.CONTROL, b"{", key=b"r1", partition=SEAT)
        await write(broker, Topic.REQUESTS, log([[b"a"]], ZSTD, zeros=BOMB_BYTES), partition=1)
        await fault(
            chain((broken, forged, command(PAUSED, "pause")), requests(2 * CELLS), requests(50, ago_s=60)),
            KlaxonBatchLeftOut=over("measure", "klaxon_batches_left_out_total"),
            KlaxonDeadLetters=over("measure", "klaxon_dead_letters_total", 10),
            KlaxonCellsCapped=over("measure", "klaxon_capped_cells_total"),
            KlaxonForeignDirectives=over("gate", "klaxon_foreign_directives_total"),
            KlaxonRefused=over("router", "klaxon_refused_total", reason="malformed"),
            KlaxonRolloutPaused=over("gate", "klaxon_rollout_paused"),
            KlaxonLateEvents=over("measure", "klaxon_counted_total", 49, outcome="late"),
        )
        for more in (2, 3):
            late = over("measure", "klaxon_counted_total", 50 * more - 1, outcome="late")
            await fault(requests(50, ago_s=60 + more), KlaxonLateEvents=late)

        def low(now: Moment) -> bool:
            ratio = total(now, "gate", "klaxon_rollout_coverage_ratio", rollout="r1")
            pairs_expected = total(now, "gate", "klaxon_rollout_expected_pairs", rollout="r1") or 0
            return ratio is not None and ratio < 0.9 and pairs_expected >= 100

        await fault(pairs(300, "alone", arms=("baseline",)), KlaxonCoverageLow=low)
        await fault(
            pairs(40, "bad", bad=True),
            KlaxonTripped=over("gate", "klaxon_rollout_tripped"),
            KlaxonNotificationLost=over("notify", "klaxon_notifications_refused_total"),
        )
        await running["pair"].kill()
        killed_us = now_us()
        await produce(broker, requests(10, node="n1"))
        await fault(
            [],
            KlaxonGateBlind=over("gate", "klaxon_rollout_blind"),
            KlaxonRouterWithoutLease=over("router", "klaxon_router_expired_leases"),
        )
        await contradict(broker, killed_us)
        await fault([], KlaxonFinalsConflict=over("gate", "klaxon_conflicting_finals_total"))
        await fault([], KlaxonRouterDeadMan=over("router", "klaxon_router_dead_man"))
        at["pair"] = await address_of(await started("pair", OTHER_SETTINGS))
        await fault(
            [],
            KlaxonSettingsDiffer=over("gate", "klaxon_foreign_settings_total"),
            KlaxonUnknownSeconds=over("gate", "klaxon_unknown_seconds"),
        )
    assert_fire(TEST, films, tmp_path)
