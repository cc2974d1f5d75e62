"""Alerts about one gate on real Kafka: it is frozen in a transaction, thrown out of its group, and fenced."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest

from pipeline.trust_file import read_trust_file, trust_text
from pipeline.workers.broker import bare_client
from schemas.signing import Use
from schemas.topics import GATING_PARTITIONS, Topic
from tests.faults.routing import tell
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.processes import Worker
from tests.kafka.records import Written, now_us, produce, producer
from tests.monitoring.firings import Moment, assert_fire, moment, seen, total
from tests.monitoring.installation import until_ready
from tests.monitoring.scraping import address_of
from tests.prometheus.promtool import promtool
from tests.workers.fleet import QUICK, SEAT, start_rollout

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

TEST = "test_a_gate_that_is_frozen_thrown_out_and_fenced"
FROZEN_S = 1.5
MOST_REFUSED = 10
WEEK_US = 7 * 86_400_000_000
SETTINGS = {**QUICK, "KLAXON_GATE_RENEW_S": "3600", "KLAXON_KAFKA_SESSION_TIMEOUT_MS": "25000"}
"""Without renewals the first transaction is the start, and the second one the pause. A gate asks every 5 s
whether it is still a member, as rarely as outside tests (3 s): it commits before that."""


async def members(broker: Broker, group: str) -> list[str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        (answer,) = await admin.describe_consumer_groups([group])
    finally:
        await admin.close()
    return [member[0] for described in answer.groups for member in described[5]]


async def throw_out(broker: Broker, group: str) -> None:
    """As a broker does with members it has not heard of for too long; they learn it by their next commit."""
    async with bare_client(broker.config) as client:
        node = client.get_random_node()
        for member in await members(broker, group):
            await client.send(node, LeaveGroupRequest(group, member))


def end_in_a_week(trust: Path) -> None:
    """The key that the gate signs with."""
    entries, name = read_trust_file(trust), keys.signer(Use.DIRECTIVES).key_id
    ending = replace(entries[name].key, valid_until_us=now_us() + WEEK_US)
    trust.write_text(trust_text({**entries, name: replace(entries[name], key=ending)}))


async def test_a_gate_that_is_frozen_thrown_out_and_fenced(
    kafka: Broker, log_folder: Path, tmp_path: Path
) -> None:
    promtool()
    trust = tmp_path / "trust.yaml"
    trust.write_text(trust_text(read_trust_file(Path(keys.settings()["KLAXON_SIGNATURES_TRUST_FILE"]))))
    environment = {**SETTINGS, "KLAXON_SIGNATURES_TRUST_FILE": str(trust)}
    fault = "gate_in_transaction:2:freeze"
    async with Worker("gate", kafka, log_folder, environment=environment, fault=fault) as gate:
        at = {"gate": await address_of(gate)}
        await until_ready(at["gate"])
        await start_rollout(kafka)

        def refused(now: Moment) -> float:
            return total(now, "gate", "klaxon_commits_refused_total") or 0

        def well(now: Moment) -> bool:
            decided = total(now, "gate", "klaxon_decision_seconds_count")
            return decided == 1 and total(now, "gate", "klaxon_seat_taken") == GATING_PARTITIONS

        good = await seen(at, well)
        assert refused(good) < MOST_REFUSED
        await tell(kafka, "pause")
        await gate.until_log("fault gate_in_transaction fired")
        await asyncio.sleep(FROZEN_S)
        gate.thaw()
        end_in_a_week(trust)
        slow = await seen(
            at,
            lambda now: (
                total(now, "gate", "klaxon_decision_seconds_count") == 2
                and total(now, "gate", "klaxon_signing_key_valid_seconds") is not None
            ),
        )
        now, thrown = slow, 0
        while refused(now) <= refused(good) + MOST_REFUSED + 1:
            assert thrown < 40, f"{refused(now):g} commits refused"
            # Something new to commit in every gating partition.
            junk = [Written(Topic.PARTIALS, b"-", partition=number) for number in range(GATING_PARTITIONS)]
            await produce(kafka, junk)
            await throw_out(kafka, "klaxon-gate")
            thrown += 1
            await asyncio.sleep(1)
            now = await moment(at)
        print(f"thrown out {thrown} times: {refused(now):g} commits refused")
        rebalancing = now
        await seen(at, lambda now: total(now, "gate", "klaxon_seat_taken") == GATING_PARTITIONS)
        async with producer(kafka, transactional_id=f"klaxon-gate-{SEAT}"):  # a successor
            await tell(kafka, "resume")
            fenced = await moment(at)
            while not total(fenced, "gate", "klaxon_writers_fenced_total"):
                assert gate.running, gate.log  # it ends only after it was scraped with that count
                fenced = await moment(at)
        assert await gate.until_ended() == 1
        assert "another gate process has taken over" in gate.log
        gone = await moment(at)
    films = {
        "KlaxonDecisionsSlow": [good, slow],
        "KlaxonSigningKeyEnds": [good, slow],
        "KlaxonCommitsRefused": [good, rebalancing],
        "KlaxonWriterFenced": [good, fenced],
        "KlaxonSeatEmpty": [good, gone],
        "KlaxonProcessDown": [good, gone],
    }
    assert_fire(TEST, films, tmp_path)
