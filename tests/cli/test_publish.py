"""`klaxon publish` against the embedded broker: what arrives where, and what is said of the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents.publish import KafkaRecordProducer, Publisher, PublisherSettings
from pipeline.workers import topics
from schemas import codec
from schemas.events import RequestEvent
from schemas.examples import invalid_examples, valid_examples
from schemas.signing import SIGNATURE, Verdict
from schemas.topics import Topic, gating_partition, partition_of
from tests.kafka import keys
from tests.kafka.broker import Broker
from tests.kafka.records import dump, now_us

pytestmark = pytest.mark.slow


@pytest.fixture
async def broker(embedded: Broker) -> Broker:
    await topics.create(embedded.config)
    return embedded


def example(topic: Topic, name: str, **changes: Any) -> dict[str, Any]:
    values = {e.name: e.value for e in valid_examples(topic)}
    event: dict[str, Any] = json.loads(values[name])
    return {**event, **changes}


def klaxon(environment: Any, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.main import main; main()", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def jsonl(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


async def test_events_arrive_where_their_key_belongs(broker: Broker, tmp_path: Path) -> None:
    events = [example(Topic.REQUESTS, "one", signature=f"{i:032x}", input_tokens=i) for i in range(300)]
    file = tmp_path / "requests.jsonl"  # all there is at once: of a pipe is sent whatever came so far
    file.write_bytes(jsonl(events))
    done = klaxon(broker.environment, "publish", "requests", str(file), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["accepted"], result["rejected"], result["late"]) == (300, 0, 300)
    found = await dump(broker, Topic.REQUESTS)
    rows = []
    for record in found:
        decoded = codec.decode_requests(record.value, dict(record.headers)["content-type"].decode())
        assert decoded.rejected == ()
        for i in range(decoded.columns.n):
            signature = decoded.columns.signature[i].tobytes().hex()
            assert record.partition == partition_of(signature.encode(), broker.config.partitions)
            rows.append((signature, int(decoded.columns.input_tokens[i])))
    assert sorted(rows) == [(f"{i:032x}", i) for i in range(300)]
    assert len(found) == broker.config.partitions


async def test_bad_lines_are_named_and_the_others_sent(broker: Broker, tmp_path: Path) -> None:
    lines = [json.dumps(example(Topic.LOGITS, "one")).encode()]
    bad = [
        e for e in invalid_examples(Topic.LOGITS) if e.content_type == "application/json" and e.position == 0
    ]
    assert len(bad) > 10
    lines += [e.value for e in bad] + [b"", b"not json", b"[]", lines[0]]
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b"\n".join(lines))
    done = klaxon(broker.environment, "publish", "klaxon.logits", str(file))
    assert done.returncode == 2
    assert done.stdout.decode().splitlines()[0] == f"accepted 2  rejected {len(bad) + 2}"
    said = done.stderr.decode()
    for number, invalid in enumerate(bad[:18], start=2):
        assert f"{file}:{number}: {invalid.field}: " in said
    assert "Traceback" not in said
    records = await dump(broker, Topic.LOGITS)
    assert sum(codec.decode_logits(r.value, None).columns.n for r in records) == 2


async def test_times_move_so_that_the_last_event_is_now(broker: Broker) -> None:
    old = [example(Topic.TELEMETRY, "one", ts_us=1_000_000 * i) for i in range(5)]
    before = time.time_ns() // 1000
    done = klaxon(broker.environment, "publish", "telemetry", "--shift-to-now", "--json", stdin=jsonl(old))
    after = time.time_ns() // 1000
    assert json.loads(done.stdout)["late"] == 0
    times = [
        t
        for record in await dump(broker, Topic.TELEMETRY)
        for t in codec.decode_telemetry(record.value, None).columns.ts_us.tolist()
    ]
    assert before <= times[-1] <= after
    assert [t - times[0] for t in times] == [1_000_000 * i for i in range(5)]


async def test_paced_events_happen_when_they_are_sent(broker: Broker) -> None:
    old = [
        example(Topic.REQUESTS, "one", ts_us=1_000_000 * i, duration_us=400, input_tokens=i)
        for i in (3, 1, 0, 2)
    ]
    done = klaxon(
        broker.environment,
        "publish",
        "requests",
        "--shift-to-now",
        "--speed",
        "4",
        "--json",
        stdin=jsonl(old),
    )
    assert done.returncode == 0, done.stderr
    assert b"playing 4 events over 0.8 s" in done.stderr
    assert json.loads(done.stdout)["late"] == 0
    rows = [
        (record.timestamp, int(columns.input_tokens[i]), int(columns.ts_us[i] + columns.duration_us[i]))
        for record in await dump(broker, Topic.REQUESTS)
        for columns in [codec.decode_requests(record.value, None).columns]
        for i in range(columns.n)
    ]
    assert [tokens for _, tokens, _ in rows] == [0, 1, 2, 3]
    assert [event_us - rows[0][2] for _, _, event_us in rows] == [0, 250_000, 500_000, 750_000]
    assert all(sent_ms * 1000 + 1000 >= event_us for sent_ms, _, event_us in rows)


async def test_commands_go_to_their_gating_partition_one_a_record(broker: Broker) -> None:
    commands = [example(Topic.COMMANDS, "pause", rollout=f"r{i}", command_id=str(i)) for i in range(6)]
    bad = example(Topic.COMMANDS, "start")
    del bad["arguments"]["spec"]["fallback"]
    done = klaxon(broker.environment, "publish", "commands", stdin=jsonl([*commands, bad]))
    assert done.returncode == 2
    assert b"<stdin>:7: arguments.spec.fallback: required field is missing" in done.stderr
    records = await dump(broker, Topic.COMMANDS)
    assert len(records) == 6
    for record in records:
        command = msgspec.json.decode(record.value)
        assert record.key == command["rollout"].encode()
        assert record.partition == gating_partition(command["rollout"])
        header = dict(record.headers)[SIGNATURE]
        signed = keys.trusted().check(Topic.COMMANDS, record.key, record.value, header, now_us())
        assert signed is Verdict.TRUSTED


async def test_missing_topics_and_wrong_usage_exit_with_2(embedded: Broker) -> None:
    event = jsonl([example(Topic.REQUESTS, "one")])
    missing = klaxon(embedded.environment, "publish", "requests", stdin=event)
    assert missing.returncode == 2
    assert b"klaxon topics create" in missing.stderr
    for arguments in (
        ("publish", "nowhere"),
        ("publish", "control"),
        ("publish", "requests", "/no/such/file"),
        ("publish", "requests", "--speed", "0"),
        ("publish", "requests", "--speed", "nan"),
    ):
        done = klaxon(embedded.environment, *arguments, stdin=event)
        assert done.returncode == 2, arguments
        assert b"Traceback" not in done.stderr


def test_an_absent_broker_exits_with_3() -> None:
    absent = {"KLAXON_KAFKA_BOOTSTRAP": "127.0.0.1:1", "KLAXON_KAFKA_CONNECT_TIMEOUT_S": "1"}
    done = klaxon(absent, "publish", "requests", stdin=b"{}\n")
    assert done.returncode == 3
    assert b"127.0.0.1:1" in done.stderr
    assert b"Traceback" not in done.stderr


async def test_the_publisher_delivers_to_a_real_broker(broker: Broker) -> None:
    producer = KafkaRecordProducer(broker.bootstrap, idempotent=False)
    publisher = Publisher(producer, PublisherSettings(producer_id="p"))
    publisher.start()
    for i in range(250):
        event = example(Topic.REQUESTS, "one", signature=f"{i:032x}")
        assert publisher.publish(msgspec.convert(event, RequestEvent))
    stats = await publisher.close(30)
    assert (stats.acknowledged, stats.dropped) == (250, {})
    signatures = []
    for record in await dump(broker, Topic.REQUESTS):
        decoded = codec.decode_requests(record.value, dict(record.headers)["content-type"].decode())
        assert decoded.header is not None
        for row in decoded.columns.signature:
            signatures.append(row.tobytes().hex())
            assert record.partition == partition_of(signatures[-1].encode(), broker.config.partitions)
    assert sorted(signatures) == [f"{i:032x}" for i in range(250)]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"v": 1, "rollout": "r"}, indent=2),
        json.dumps([{"v": 1}, {"v": 1}], indent=2),
        '[\n{"v": 1},\n{"v": 1}\n]\n',
        '{ "v": 1,\n  "rollout": "r" }\n',
    ],
)
async def test_one_document_over_many_lines_is_one_mistake(broker: Broker, text: str) -> None:
    for more in ((), ("--shift-to-now",)):
        done = klaxon(broker.environment, "publish", "requests", *more, stdin=text.encode())
        assert done.returncode == 2
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith("klaxon: <stdin>: this is one JSON document over many lines; one event a line")


async def test_a_cut_first_line_is_only_itself(broker: Broker) -> None:
    good = json.dumps(example(Topic.REQUESTS, "one")).encode()
    for stdin, accepted in ((b'{"v": 1,\n' + good + b"\n", 1), (b"{\n", 0), (b"{", 0)):
        done = klaxon(broker.environment, "publish", "requests", "--json", stdin=stdin)
        assert done.returncode == 2
        result = json.loads(done.stdout)
        assert (result["accepted"], result["rejected"]) == (accepted, 1)
        assert [error["line"] for error in result["errors"]] == [1]


@pytest.mark.parametrize("arguments", [("publish", "requests"), ("topics", "create"), ("topics", "check")])
def test_an_absent_broker_is_told_in_words(arguments: tuple[str, ...]) -> None:
    environment = {"KLAXON_KAFKA_BOOTSTRAP": "127.0.0.1:1", "KLAXON_KAFKA_CONNECT_TIMEOUT_S": "4"}
    done = klaxon(environment, *arguments)
    assert done.returncode == 3
    assert done.stderr.decode().splitlines() == [
        "waiting for Kafka at 127.0.0.1:1",
        "klaxon: cannot reach Kafka at 127.0.0.1:1; check kafka.bootstrap",
    ]
