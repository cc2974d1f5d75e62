"""The topic plan, and creating and checking topics on real Kafka."""

from __future__ import annotations

import json

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from click.testing import CliRunner

from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.topics import topics
from pipeline.config import KafkaConfig
from pipeline.workers import topics as topic_plan
from pipeline.workers.broker import BrokerAwayError, BrokerError
from schemas.topics import GATING, GATING_PARTITIONS, INPUTS, Topic
from tests.kafka.broker import Broker
from tests.kafka.records import Written, dump, keep_producer_times, produce
from tests.kafka.waiting import eventually


def test_the_plan_covers_every_topic_once_with_its_partitions() -> None:
    plans = {item.topic: item for item in topic_plan.plan(KafkaConfig(partitions=7, replication=3))}
    assert set(plans) == set(Topic)
    assert {plans[topic].partitions for topic in INPUTS} == {7}
    assert plans[Topic.PAIRS].partitions == 7
    assert {plans[topic].partitions for topic in GATING} == {GATING_PARTITIONS}
    assert {item.settings.get("min.insync.replicas") for item in plans.values()} == {"2"}


def test_only_inputs_carry_append_times_and_only_where_the_broker_can() -> None:
    def with_append_time(kafka: KafkaConfig) -> set[Topic]:
        return {
            item.topic
            for item in topic_plan.plan(kafka)
            if item.settings.get("message.timestamp.type") == "LogAppendTime"
        }

    assert with_append_time(KafkaConfig()) == set(INPUTS)
    assert with_append_time(KafkaConfig(append_time=False)) == set()


def test_every_topic_is_compacted_or_has_a_retention() -> None:
    for item in topic_plan.plan(KafkaConfig()):
        compacted = item.settings["cleanup.policy"] == "compact"
        assert compacted != ("retention.ms" in item.settings)


@pytest.mark.kafka
@pytest.mark.slow
async def test_created_topics_check_out_and_creating_again_changes_nothing(kafka: Broker) -> None:
    assert await topic_plan.create(kafka.config) == ()
    assert await topic_plan.check(kafka.config) == ()


@pytest.mark.kafka
@pytest.mark.slow
async def test_more_copies_than_brokers_are_refused_with_the_setting(kafka: Broker) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([Topic.APPLIED])
    finally:
        await admin.close()
    greedy = msgspec.structs.replace(kafka.config, replication=3)

    async def refused() -> str:  # the broker answers before it has applied
        try:
            await topic_plan.create(greedy)
        except BrokerError as error:
            return str(error)
        return ""

    told = await eventually(refused)
    assert "; kafka.replication (KLAXON_KAFKA_REPLICATION) is 3: set at most as many as there " in told


@pytest.mark.kafka
@pytest.mark.slow
async def test_inputs_get_the_brokers_time_whatever_the_producer_says(kafka: Broker) -> None:
    for topic in INPUTS:
        await produce(kafka, [Written(topic, b"{}", timestamp_ms=1000, partition=0)])
        (record,) = await dump(kafka, topic)
        assert (record.timestamp_type, record.timestamp > 1_000_000_000_000) == (1, True)


@pytest.mark.kafka
@pytest.mark.slow
async def test_check_names_what_is_wrong(kafka: Broker) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_topics([Topic.APPLIED, Topic.PAIRS])
        await admin.create_topics([NewTopic(Topic.PAIRS, 3, 1)])
    finally:
        await admin.close()
    await keep_producer_times(kafka, Topic.LOGITS)

    async def three_problems() -> list[str]:  # the broker answers before it has applied
        found = sorted(await topic_plan.check(kafka.config))
        return found if len(found) == 3 else []

    problems = await eventually(three_problems)
    assert "klaxon.applied: does not exist; run `klaxon topics create`" in problems[0]
    assert "klaxon.logits: message.timestamp.type is CreateTime, must be LogAppendTime" in problems[1]
    assert "klaxon.pairs: 3 partitions, the configuration says 2" in problems[2]


@pytest.mark.kafka
@pytest.mark.slow
async def test_the_probe_alone_finds_producer_times(kafka: Broker) -> None:
    await keep_producer_times(kafka, Topic.LOGITS)
    assert await topic_plan._probe_problems(kafka.config, Topic.REQUESTS) == []
    problems = await eventually(lambda: topic_plan._probe_problems(kafka.config, Topic.LOGITS))
    assert problems == [
        "klaxon.logits: records carry their producer's time; set message.timestamp.type=LogAppendTime"
    ]


async def test_an_absent_broker_is_named(nowhere: str) -> None:
    with pytest.raises(BrokerAwayError, match=f"cannot reach Kafka at {nowhere}"):
        await topic_plan.create(KafkaConfig(bootstrap=nowhere))


@pytest.mark.parametrize("command", ["create", "check"])
def test_commands_give_up_on_an_absent_broker_with_exit_code_3(
    command: str, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KLAXON_KAFKA_BOOTSTRAP", nowhere)
    monkeypatch.setenv("KLAXON_KAFKA_CONNECT_TIMEOUT_S", "1")
    result = CliRunner().invoke(topics, [command, "--json"])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code is Exit.UNREACHABLE
    assert result.stdout == ""


@pytest.mark.kafka
@pytest.mark.slow
def test_the_commands_say_what_they_did(kafka_session: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in kafka_session.environment.items():
        monkeypatch.setenv(name, value)
    first = CliRunner().invoke(topics, ["create", "--json"], standalone_mode=False)
    assert set(json.loads(first.stdout)) == {"created"}
    again = CliRunner().invoke(topics, ["create"], standalone_mode=False)
    assert "all topics exist" in again.stdout
    checked = CliRunner().invoke(topics, ["check", "--json"], standalone_mode=False)
    assert set(json.loads(checked.stdout)) == {"ok", "problems"}
